"""A model is cut into the stages of a pipeline: layers in order, under the names they have."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

PARTS = "nn.Sequential, or a model of transformers with embed_tokens, layers and norm"
REMEDY = (
    f"expected {PARTS}. Others are cut by hand: each rank wraps its layers in GeminiDDP(mesh=) and "
    "gemini.pipeline.GeminiStage"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """bounds[i] to bounds[i + 1] are the layers of stage i."""

    bounds: tuple[int, ...]

    @staticmethod
    def of(layers: int, stages: int, given: Sequence[int] | None = None) -> Cut:
        """As even as it goes, more in the last stages; or as many as were given.

        Raises ValueError for fewer layers than stages, and for numbers that are not theirs.
        """
        counts = [(layers + i) // stages for i in range(stages)] if given is None else list(given)
        if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
            asked = "" if given is None else f"num_layers_per_stage={list(given)} for "
            raise ValueError(
                f"{asked}{layers} layers in {stages} stages; expected one layer or more in each, "
                "and all of them together: another pp_size, num_model_chunks or "
                "num_layers_per_stage"
            )
        return Cut((0, *accumulate(counts)))

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])


class MissingLayer(nn.Module):
    """Stands where a layer of another stage is: what enters leaves."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def stages_of(model: nn.Module, stages: int, given: Sequence[int] | None = None) -> list[nn.Module]:
    """Stages of the model, which keep the names, and the parameters, that it has.

    A stage's forward takes what the model takes, or the one before has given. The last one gives
    what the model gives; of transformers' models others give hidden states.
    Raises ValueError for a model that cannot be cut, or has a weight that two stages would share.
    """
    if isinstance(model, nn.Sequential):
        cut = Cut.of(len(model), stages, given)
        parts: list[nn.Module] = [_of_sequence(model, cut.layers(i)) for i in range(stages)]
    else:
        base = _base_of(model)
        cut = Cut.of(len(base.layers), stages, given)
        _check_probe(model, base)
        parts = [_of_transformer(model, base, cut, i) for i in range(stages)]
    _check_shared(model, parts)
    return parts


def _of_sequence(model: nn.Sequential, layers: range) -> nn.Sequential:
    named = list(model._modules.items())  # a layer that is there twice, too
    return nn.Sequential(OrderedDict(named[layers.start : layers.stop]))  # type: ignore[arg-type]


# -- models of transformers --


def _base_of(model: nn.Module) -> Any:
    """What has the layers. Raises ValueError."""
    base: Any = getattr(model, "base_model", None)
    layers = getattr(base, "layers", None)
    ends = (getattr(base, "embed_tokens", None), getattr(base, "norm", None))
    if not isinstance(layers, nn.ModuleList) or not all(isinstance(e, nn.Module) for e in ends):
        raise ValueError(f"a {type(model).__name__} cannot be cut into stages; {REMEDY}")
    known = {"embed_tokens", "layers", "norm"}
    for name, child in base.named_children():
        if name not in known and any(True for _ in child.parameters()):
            raise ValueError(
                f"{type(base).__name__} has parameters in {name}, beside its layers, of which "
                f"every stage would have a copy; {REMEDY}"
            )
    if any(True for _ in base.parameters(recurse=False)):
        raise ValueError(f"{type(base).__name__} has parameters of its own; {REMEDY}")
    return base


def _of_transformer(model: nn.Module, base: Any, cut: Cut, stage: int) -> nn.Module:
    first, last = stage == 0, stage == cut.stages - 1
    inner = _without(base, cut.layers(stage), first=first, last=last)
    if base is model:
        part: Any = inner
    else:
        part = _copied(model)
        for name, child in model.named_children():
            if child is base:
                part._modules[name] = inner
            elif not last:
                part._modules[name] = MissingLayer()
    kind = type(model)
    part.__class__ = type(kind.__name__, (TransformerStage, kind), {"__module__": kind.__module__})
    part._is_first, part._is_last, part._has_head = first, last, base is not model
    made: nn.Module = part
    return made


def _without(base: Any, layers: range, *, first: bool, last: bool) -> Any:
    """The base model with these layers alone, at the places that they have."""
    part = _copied(base)
    own_layers = [layer if i in layers else MissingLayer() for i, layer in enumerate(base.layers)]
    part._modules["layers"] = nn.ModuleList(own_layers)
    if not first:
        part._modules["embed_tokens"] = MissingLayer()
    if not last:
        part._modules["norm"] = MissingLayer()
    return part


def _copied(module: Any) -> Any:
    """Another module, with hooks of its own, and the same parameters.

    Children that have some are the same; the others are copies, as each stage has hooks in them.
    """
    made = copy.copy(module)
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, (dict, set)):
            made.__dict__[name] = copy.copy(value)
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            made._modules[name] = copy.deepcopy(child)
    return made


class TransformerStage(nn.Module):
    """Comes before the class of the model, whose own forward does what each stage does.

    The last stage gives the tensors of what the model gives, as a stage has to.
    """

    _is_first: bool
    _is_last: bool
    _has_head: bool
    _form: tuple[list[Any], Any] = ([], None)  # of what the model gave: leaves and their tree

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        given = {"input_ids" if self._is_first else "inputs_embeds": x, "use_cache": False}
        if not self._is_last:
            kwargs = {name: value for name, value in kwargs.items() if name != "labels"}
            base: Any = self.base_model
            run = base if self._has_head else super().forward
            return run(**given, **kwargs).last_hidden_state
        leaves, tree = tree_flatten(super().forward(**given, **kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._form = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], tree
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def rebuilt(self, outputs: Any) -> Any:
        """What the model gives, of the tensors that the last stage gave."""
        tensors = iter([outputs] if isinstance(outputs, Tensor) else outputs)
        leaves, tree = self._form
        return tree_unflatten([next(tensors) if n is None else n[0] for n in leaves], tree)


@torch.no_grad()
def _check_probe(model: nn.Module, base: Any) -> None:
    """Raise ValueError where the model does more to hidden states than its layers and norm do."""
    empty = _without(base, range(0), first=False, last=False)
    weight = base.embed_tokens.weight
    if weight.is_meta:
        raise ValueError(
            f"{type(model).__name__} is on the meta device; expected one with values, which is cut "
            "into stages"
        )
    probe = torch.arange(1, 1 + 2 * weight.shape[1], device=weight.device, dtype=weight.dtype)
    probe = probe.view(1, 2, -1) / probe.numel()
    found = type(base).forward(empty, inputs_embeds=probe, use_cache=False).last_hidden_state
    if not torch.equal(found, probe):
        raise ValueError(
            f"{type(base).__name__} changes hidden states beside its layers, which every stage "
            f"would do again; {REMEDY}"
        )


def _check_shared(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Raise ValueError for a weight of two stages, and for one of none."""
    stage_of: dict[int, int] = {}
    names: Mapping[int, str] = {id(param): name for name, param in model.named_parameters()}
    for stage, part in enumerate(parts):
        for param in part.parameters():
            other = stage_of.setdefault(id(param), stage)
            if other != stage:
                raise ValueError(
                    f"{names[id(param)]} is used by stages {other} and {stage}, and would not be "
                    "reduced over them; expected weights that are not tied "
                    "(tie_word_embeddings=False)"
                )
        if not any(True for _ in part.parameters()):
            raise ValueError(
                f"stage {stage} has no parameter; expected some in each: give "
                "num_layers_per_stage, or a smaller pp_size"
            )
    missing = [name for number, name in names.items() if number not in stage_of]
    assert not missing, missing
