"""Adapters merged into their base, one weight at a time: a folder that `from_pretrained` reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.checkpoint.converted import converted
from gemini.checkpoint.export import WeightsWriter
from gemini.checkpoint.pretrained import places_of, replace_weights
from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors, TensorSpec
from gemini.chunk.layout import distinct
from gemini.saved_config import save_config, written_dtype
from gemini.units import parse_bytes

ADAPTER = "adapter"  # folder in a run's `out`, of the adapters by themselves
_WEIGHTS = "adapter_model.safetensors"
_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "modules_to_save")
_MAX_FILE = parse_bytes("5GB")


def check_merge(module: nn.Module, adapters: Any) -> None:
    """Raise ValueError for adapters of a weight that has two names, such as that of a tied head: it
    would get what one of them adds.

    module: on the meta device, and of no other use.
    """
    tied = [names for _, names in distinct(module.named_parameters(remove_duplicate=False))
            if len(names) > 1]  # fmt: skip
    changed = {name for name, _ in _changes(module, adapters, None)}
    for names in tied:
        if changed & {*names}:
            raise ValueError(
                f"--merge with adapters of {names[0]}, which is {names[1]} too; expected "
                "--lora-targets without it, or no --merge"
            )


def write_merged(module: nn.Module, base: Path, adapter: Path, out: Path) -> None:
    """Write the weights of `base` with those of an adapter added, rounded once, in the dtype of
    each, and the model's config. Weights and adapters that `out` had go when the new ones are
    there.

    module: the base without adapters on the meta device, and of no other use.
    adapter: a folder of peft's.
    """
    from peft import PeftConfig

    prefix = getattr(module, "base_model_prefix", "")
    fresh = out / ".weights"
    if fresh.exists():  # of a merge that did not end
        shutil.rmtree(fresh)
    with ExitStack() as stack:
        files = converted(module, LazyTensors(base, stack))
        added = LazyTensors(adapter / _WEIGHTS, stack)
        places = {}
        for param, names in distinct(module.named_parameters(remove_duplicate=False)):
            found = [place for name in names for place in places_of(name, prefix)]
            places[names[0]] = (param, next((one for one in found if one in files), None))
        buffers = {name: name for name, _ in module.named_buffers() if name in files}
        changes = dict(_changes(module, PeftConfig.from_pretrained(str(adapter)), added))
        specs = [_spec(name, place, files, param) for name, (param, place) in places.items()]
        specs += [files.spec_of(name) for name in buffers]

        def values() -> Iterator[tuple[str, Tensor]]:
            for spec in specs:
                place = places[spec.name][1] if spec.name in places else spec.name
                value = None if place is None else files[place]
                if spec.name in changes:
                    value = changes[spec.name](value)
                assert value is not None
                yield spec.name, value

        writer = WeightsWriter(fresh, specs, _MAX_FILE)
        dtype = written_dtype(module, {spec.name: spec.dtype for spec in specs})
        writer.write(values(), lambda folder: save_config(module, dtype, folder))
    replace_weights(out, fresh)
    for old in sorted(out.glob("adapter_*")):  # which from_pretrained would add again
        old.unlink()


def _spec(name: str, place: str | None, files: LazyTensors, param: Tensor) -> TensorSpec:
    if place is None:  # a head that the base does not have
        return TensorSpec(name, param.dtype, tuple(param.shape))
    found = files.spec_of(place)
    return TensorSpec(name, found.dtype, found.shape)


def _changes(
    module: nn.Module, adapters: Any, values: LazyTensors | None
) -> Iterator[tuple[str, Callable[[Tensor | None], Tensor]]]:
    """(name, its merged value from that of the base), of the parameters that adapters change.

    values: of the adapters, as peft saves them. None: names alone are asked for.
    """
    from peft import get_peft_model, set_peft_model_state_dict
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    names = {id(param): name for name, param in module.named_parameters()}
    model = get_peft_model(module, adapters)  # type: ignore[arg-type]
    if values is not None:
        for name, part in model.named_modules():
            if name.rpartition(".")[2] in _ADAPTERS:
                part.to_empty(device="cpu")
        set_peft_model_state_dict(model, {name: values[name] for name in values})
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            base: Any = layer.get_base_layer()
            yield names[id(base.weight)], _adds(layer)
        elif isinstance(layer, ModulesToSaveWrapper):
            trained: Any = layer.modules_to_save["default"]
            for key, param in layer.original_module.named_parameters():
                yield names[id(param)], _replaces(trained.get_parameter(key))


def _adds(layer: Any) -> Callable[[Tensor | None], Tensor]:
    def merged(value: Tensor | None) -> Tensor:
        assert value is not None
        with torch.no_grad():
            added: Tensor = layer.get_delta_weight("default")
        return value.float() + added.float()

    return merged


def _replaces(trained: Tensor) -> Callable[[Tensor | None], Tensor]:
    return lambda _: trained.detach()
