"""Streams of named weights, as engines of samplers take them, and adapters merged on the way.

An adapter is merged into a bucket, one base weight at a time: base + scaling * B @ A, in fp32,
rounded once to the dtype of the base. The model is not merged, and nothing of it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemini.checkpoint.adapters import is_adapted
from gemini.chunk.layout import distinct
from gemini.ddp import GeminiDDP
from gemini.transfer.outgoing import WeightBucket, WeightVersion, leaving
from gemini.units import ParamId, parse_bytes

Change = Callable[[Tensor], Tensor]
Spec = tuple[str, str, list[int]]  # name, dtype as vLLM has it, shape


class _Adapters:
    """Which parameters of a model of peft leave, by which names, and what is added to each."""

    def __init__(self, model: GeminiDDP) -> None:
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper

        layout = model.engine.layout
        self._number = {name: ParamId(i) for i, s in enumerate(layout.params) for name in s.names}
        self.changes: dict[ParamId, Change] = {}
        self._feeds: dict[ParamId, ParamId] = {}  # of an adapter: the base weight that follows it
        inner: Any = model.module
        of = {id(param): names for param, names in distinct(inner.named_parameters(
            remove_duplicate=False))}  # fmt: skip
        self.names: dict[ParamId, str] = {
            self._number[names[0]]: names[0].removeprefix("base_model.model.")
            for names in of.values()
        }
        for prefix, layer in inner.named_modules():
            if isinstance(layer, ModulesToSaveWrapper):
                self._replaced(layer, of)
            elif isinstance(layer, LoraLayer):
                self._added(prefix, layer, of)
            elif isinstance(layer, BaseTunerLayer):
                raise ValueError(
                    f"{prefix} is a {type(layer).__name__}, whose weights are not merged on their "
                    "way; expected LoRA"
                )

    def _added(self, prefix: str, layer: Any, of: dict[int, tuple[str, ...]]) -> None:
        base = layer.get_base_layer()
        number = self._number[of[id(base.weight)][0]]
        active = [name for name in layer.active_adapters if name in layer.scaling]
        special = [n for n in active if n in layer.lora_variant or layer.lora_bias.get(n)]
        if special or not base.weight.is_floating_point():
            raise ValueError(
                f"{prefix} has a quantised base, or an adapter with a bias or of a variant "
                f"({', '.join(special) or type(base).__name__}); expected plain LoRA over 16 or 32 "
                "bits"
            )
        for param in layer.parameters():
            own = self._number[of[id(param)][0]]
            if not any(param is kept for kept in base.parameters()):
                self.names.pop(own, None)
                self._feeds[own] = number
        for kept in base.parameters():
            one = self._number[of[id(kept)][0]]
            self.names[one] = self.names[one].replace(".base_layer", "")
        if not layer.merged:
            self.changes[number] = lambda value: _sum(value, layer, active)

    def _replaced(self, wrapper: Any, of: dict[int, tuple[str, ...]]) -> None:
        for param in wrapper.original_module.parameters():
            self.names.pop(self._number[of[id(param)][0]], None)
        for name, part in wrapper.modules_to_save.items():
            for param in part.parameters():
                number = self._number[of[id(param)][0]]
                if name in wrapper.active_adapters:
                    plain = self.names[number].replace(f".modules_to_save.{name}", "")
                    self.names[number] = plain
                else:
                    self.names.pop(number, None)

    def affected_by(self, changed: set[ParamId]) -> set[ParamId]:
        """Parameters that leave if these have changed."""
        return {self._feeds.get(param, param) for param in changed} & self.names.keys()

    @torch.no_grad()
    def merged(self, bucket: WeightBucket) -> WeightBucket:
        found: dict[str, Tensor] = {}
        for name, tensor in bucket.tensors.items():
            number = self._number[name]
            change = self.changes.get(number)
            if change is not None:
                tensor.copy_(change(tensor))  # in the bucket, whose memory is ours until the next
            found[self.names[number]] = tensor
        return replace(bucket, tensors=found)


def _sum(value: Tensor, layer: Any, adapters: list[str]) -> Tensor:
    found = value.float()
    for name in adapters:
        found += layer.get_delta_weight(name).to(found)
    return found


def merged_weights(
    model: GeminiDDP, *, bytes: int | str = "256MiB", since: WeightVersion | None = None
) -> Iterator[WeightBucket]:
    """Go through the weights of a model of peft as `GeminiDDP.weights` does, by the names of the
    model without adapters, LoRA added to each base weight. Collective.

    A base weight leaves if its adapter has changed `since`. Beside the bucket there are one base
    weight in fp32, and the gathered chunk of its adapter. Of any other model these are its weights.

    Raises ValueError for adapters that are no plain LoRA, and as `GeminiDDP.weights`.
    """
    if not is_adapted(model.module):
        yield from model.weights(bytes=bytes, since=since)
        return
    adapters = _Adapters(model)
    model.engine.call("merged_weights()")
    engine = model.engine
    for bucket in leaving(
        engine.weights, engine.passes, engine.planning, engine.storage, parse_bytes(bytes), since,
        also=adapters.affected_by,
    ):  # fmt: skip
        yield adapters.merged(bucket)


def named_weights(
    model: GeminiDDP, *, bytes: int | str = "256MiB", since: WeightVersion | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of `merged_weights`, whose memory the next bucket has: what
    `load_weights` of vLLM's models and `send_weights` of verl's checkpoint engines take.

    Every rank goes through all of them, also those that give them to nobody.
    """
    for bucket in merged_weights(model, bytes=bytes, since=since):
        yield from bucket.tensors.items()


def tensor_specs(model: GeminiDDP) -> list[Spec]:
    """(name, dtype, shape) of all that `named_weights` yields, in its order; gathers nothing.

    A server that is told before, as vLLM's `update_weights`, takes them as `names`, `dtype_names`
    and `shapes`. Raises ValueError as `merged_weights`, and for quantised parameters.
    """
    engine = model.engine
    names: dict[ParamId, str] = {ParamId(i): s.name for i, s in enumerate(engine.layout.params)}
    if is_adapted(model.module):
        names = _Adapters(model).names
    found: list[Spec] = []
    for chunk in engine.layout.chunks:
        for slot in chunk.slots:
            if slot.param not in names:
                continue
            if slot.param in engine.sharding.opaque:
                raise ValueError(
                    f"{names[slot.param]} is quantised, and has several tensors; expected weights "
                    "of 16 or 32 bits"
                )
            shape = [*engine.params[slot.param].shape]
            dtype = str(engine.chunks[chunk.id].dtype).removeprefix("torch.")
            found.append((names[slot.param], dtype, shape))
    return found
