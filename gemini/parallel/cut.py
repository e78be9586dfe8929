"""Cut of a model into stages of a pipeline: layers in order, under their own names."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from gemini.chunk.layout import distinct
from gemini.runtime.pipeline.together import together_of

PARTS = (
    "nn.Sequential, a model of transformers with embed_tokens, layers and norm, or its GPT-2, "
    "GPT-J, Falcon, BERT, OPT, BLOOM or ViT"
)
REMEDY = (
    f"expected {PARTS}. Others are cut by hand: each rank wraps its layers in GeminiDDP(mesh=) and "
    "gemini.pipeline.GeminiStage"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Bounds of stages: layers bounds[i] to bounds[i + 1] are those of stage i."""

    bounds: tuple[int, ...]

    @staticmethod
    def of(layers: int, stages: int, given: Sequence[int] | None = None) -> Cut:
        """Divide layers evenly, the rest to the last stages; or by the numbers `given`.

        Raises ValueError for fewer layers than stages, and for numbers with another sum.
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
    """Stand-in for a layer of another stage: returns its input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def stages_of(model: nn.Module, stages: int, given: Sequence[int] | None = None) -> list[nn.Module]:
    """Cut a model into stages that keep its names and parameters.

    The first stage's forward takes the model's input, each other the output of the stage before
    it. The last stage returns the model's output; stages of transformers' models before it return
    hidden states. A weight that stages tie is one parameter of them, see `shared_by`.
    Raises ValueError for a model that cannot be cut.
    """
    if isinstance(model, nn.Sequential):
        cut = Cut.of(len(model), stages, given)
        parts: list[nn.Module] = [_of_sequence(model, cut.layers(i)) for i in range(stages)]
    else:
        base, ends = ends_of(model)
        _check_values(model, base)
        cut = Cut.of(len(base.get_submodule(ends.layers)), stages, given)
        _check_probe(base, ends)
        parts = [_of_transformer(model, base, ends, cut, i) for i in range(stages)]
    _check_parts(model, parts)
    return parts


def _of_sequence(model: nn.Sequential, layers: range) -> nn.Sequential:
    named = list(model._modules.items())  # a layer that is there twice, too
    return nn.Sequential(OrderedDict(named[layers.start : layers.stop]))  # type: ignore[arg-type]


# -- models of transformers --


class _Nothing(nn.Module):
    """Stand-in for position embeddings, which the first stage alone adds."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


class _Tupled(nn.Module):
    """Stand-in for a layer that returns a tuple."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        return (x,)


class _Embedded(nn.Module):
    """Stand-in for all embeddings: returns hidden states, given as such or in place of pixels.

    ViT reads its compute dtype from the weight of its patches; an empty buffer has that name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch_embeddings = nn.Module()
        self.patch_embeddings.projection = nn.Module()
        self.patch_embeddings.projection.register_buffer("weight", torch.empty(0), persistent=False)

    def forward(self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Tensor:
        given: Tensor = args[0] if inputs_embeds is None else inputs_embeds
        return given


@dataclass(frozen=True)
class Ends:
    """Paths in a base model of the modules that one stage alone has.

    first: modules of the first stage, by path, with the kind of their stand-in in later stages.
    last: modules of the last stage. layers: the list that is cut. skipped: kind of stand-in for a
    layer of another stage. later: argument of the base model that takes hidden states.
    """

    first: Mapping[str, type[nn.Module]]
    layers: str = "layers"
    last: tuple[str, ...] = ("norm",)
    skipped: type[nn.Module] = MissingLayer
    later: str = "inputs_embeds"


LLAMA = Ends({"embed_tokens": MissingLayer})
ENDS = {  # by the kind of their config; others are made as Llama is, or refused
    "gpt2": Ends({"wte": MissingLayer, "wpe": _Nothing, "drop": MissingLayer}, "h", ("ln_f",)),
    "bloom": Ends(
        dict.fromkeys(("word_embeddings", "word_embeddings_layernorm"), MissingLayer),
        "h", ("ln_f",), _Tupled,
    ),
    "gptj": Ends(dict.fromkeys(("wte", "drop"), MissingLayer), "h", ("ln_f",), _Tupled),
    "falcon": Ends({"word_embeddings": MissingLayer}, "h", ("ln_f",), _Tupled),
    "opt": Ends(
        {
            "decoder.embed_tokens": MissingLayer, "decoder.embed_positions": _Nothing,
            "decoder.project_in": MissingLayer,
        },
        "decoder.layers", ("decoder.final_layer_norm", "decoder.project_out"),
    ),
    "bert": Ends({"embeddings": _Embedded}, "encoder.layer", ("pooler",)),
    "vit": Ends({"embeddings": _Embedded}, last=("layernorm", "pooler"), later="pixel_values"),
}  # fmt: skip


def ends_of(model: nn.Module) -> tuple[Any, Ends]:
    """Base model and its `Ends`. Raises ValueError for a model that cannot be cut."""
    base: Any = getattr(model, "base_model", None)
    ends = ENDS.get(getattr(getattr(model, "config", None), "model_type", ""), LLAMA)
    there = {} if base is None else dict(base.named_modules())
    first, *_ = ends.first
    if not isinstance(there.get(ends.layers), nn.ModuleList) or first not in there:
        raise ValueError(f"a {type(model).__name__} cannot be cut into stages; {REMEDY}")
    known = tuple(f"{path}." for path in (*ends.first, ends.layers, *ends.last))
    for name, _ in base.named_parameters():
        if not name.startswith(known):
            where = name.rpartition(".")[0] or "itself"
            raise ValueError(
                f"{type(base).__name__} has parameters in {where}, beside its layers, of which "
                f"every stage would have a copy; {REMEDY}"
            )
    return base, ends


def _check_values(model: nn.Module, base: nn.Module) -> None:
    """Raise ValueError for a model without values."""
    if any(param.is_meta for param in base.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device; expected one with values, which is "
            "cut into stages"
        )


def _of_transformer(model: nn.Module, base: Any, ends: Ends, cut: Cut, stage: int) -> nn.Module:
    first, last = stage == 0, stage == cut.stages - 1
    instead = _instead(base, ends, cut.layers(stage), first=first, last=last)
    if base is not model:
        (where,) = (name for name, child in model.named_children() if child is base)
        instead = {f"{where}.{path}": module for path, module in instead.items()}
        heads = [name for name, child in model.named_children() if child is not base]
        instead |= {} if last else {name: MissingLayer() for name in heads}
    part = _with(model, instead)
    kind = type(model)
    part.__class__ = type(kind.__name__, (TransformerStage, kind), {"__module__": kind.__module__})
    part.is_first, part._is_last, part._has_head = first, last, base is not model
    part.depth = len(cut.layers(stage))
    part._takes = input_name(model) if first else ends.later
    part._always = _always(base)
    made: nn.Module = part
    return made


def _instead(
    base: Any, ends: Ends, layers: range, *, first: bool, last: bool
) -> dict[str, nn.Module]:
    """Stand-ins for the modules that a stage lacks, by path in the base model."""
    found: dict[str, nn.Module] = {
        f"{ends.layers}.{i}": ends.skipped()
        for i in range(len(base.get_submodule(ends.layers)))
        if i not in layers
    }
    found |= {} if first else {path: kind() for path, kind in ends.first.items()}
    found |= {} if last else {path: MissingLayer() for path in ends.last}
    there = dict(base.named_modules())  # of some a config says that there are none
    return {path: module for path, module in found.items() if path in there}


def _with(module: Any, instead: Mapping[str, nn.Module]) -> Any:
    """Copy a module, with `instead` in place of its modules at those paths.

    Modules on such a path are shallow copies with the same parameters and hooks of their own. Other
    children with parameters are shared. Children without are deep copies, because each stage
    registers hooks in them.
    """
    made = copy.copy(module)
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, (dict, set)):
            made.__dict__[name] = copy.copy(value)
    for name, child in module.named_children():
        inside = {
            path.removeprefix(f"{name}."): new
            for path, new in instead.items()
            if path.startswith(f"{name}.")
        }
        if name in instead:
            made._modules[name] = instead[name]
        elif inside:
            made._modules[name] = _with(child, inside)
        elif not any(True for _ in child.parameters()):
            made._modules[name] = copy.deepcopy(child)
    return made


_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")


class TransformerStage(nn.Module):
    """Base class put before a model's own, so that the model's forward runs one stage.

    The last stage returns the tensors of the model's output alone, as torch's schedules require.
    """

    is_first: bool
    depth: int  # layers
    _is_last: bool
    _has_head: bool
    _takes: str
    _always: Mapping[str, Any]
    gives_itself = True  # calls `gives` itself, see `HeadLoss`
    _form: tuple[list[Any], Any] = ([], None)  # of what the model gave: leaves and their tree

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        given = {self._takes: x, **self._always}
        if not self._is_last:
            kwargs = {name: value for name, value in kwargs.items() if name not in _OF_LOSS}
            base: Any = self.base_model
            run = base if self._has_head else super().forward
            return run(**given, **kwargs).last_hidden_state
        gives = vars(self).get("gives", lambda output: output)
        leaves, tree = tree_flatten(gives(super().forward(**given, **kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._form = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], tree
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def rebuilt(self, outputs: Any) -> Any:
        """Put the tensors of the last stage back into the model's output."""
        tensors = iter([outputs] if isinstance(outputs, Tensor) else outputs)
        leaves, tree = self._form
        return tree_unflatten([next(tensors) if n is None else n[0] for n in leaves], tree)


def input_name(model: nn.Module) -> str:
    """Name of a model's first input."""
    name: str = getattr(model, "main_input_name", "input_ids")
    return name


def _always(base: Any) -> dict[str, Any]:
    """Arguments of every call of a base model: no cache, if it has one."""
    caches = "use_cache" in inspect.signature(type(base).forward).parameters
    return {"use_cache": False} if caches else {}


@torch.no_grad()
def _check_probe(base: Any, ends: Ends) -> None:
    """Raise ValueError if a base model changes hidden states outside of its layers and norm.

    A base model without layers must return a probe unchanged.
    """
    empty = _with(base, _instead(base, ends, range(0), first=False, last=False))
    first = base.get_submodule(ends.layers)[0]
    weight = max(first.parameters(), key=Tensor.dim)
    width = getattr(getattr(base, "config", None), "hidden_size", weight.shape[-1])
    probe = torch.arange(1, 1 + 2 * width, device=weight.device, dtype=weight.dtype)
    probe = probe.view(1, 2, -1) / probe.numel()
    found = type(base).forward(empty, **{ends.later: probe}, **_always(base)).last_hidden_state
    if not torch.equal(found, probe):
        raise ValueError(
            f"{type(base).__name__} changes hidden states beside its layers, which every stage "
            f"would do again; {REMEDY}"
        )


def shared_by(
    model: nn.Module, parts: Sequence[nn.Module]
) -> list[tuple[tuple[str, ...], list[int]]]:
    """Parameters that several stages have: all names in the model, and the stages' numbers."""
    stages: dict[int, list[int]] = {}
    for stage, part in enumerate(parts):
        for param in part.parameters():
            stages.setdefault(id(param), []).append(stage)
    named = distinct(model.named_parameters(remove_duplicate=False))
    return [(names, stages[id(p)]) for p, names in named if len(stages[id(p)]) > 1]


def copies_of(
    names: Sequence[str], stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None
) -> list[nn.Parameter]:
    """One parameter per stage for a weight with these names.

    The first of `stages` keeps the parameter; the others get copies, which the optimizer gets too.
    """
    found: list[nn.Parameter] = []
    for stage in stages:
        there = dict(stage.named_parameters(remove_duplicate=False))
        mine = [name for name in names if name in there]
        param = there[mine[0]]
        if found:
            copied = nn.Parameter(param.detach().clone(), param.requires_grad)
            for name in mine:
                layer, _, attribute = name.rpartition(".")
                setattr(stage.get_submodule(layer), attribute, copied)
            for group in optimizer.param_groups if optimizer is not None else ():
                if any(other is param for other in group["params"]):
                    group["params"].append(copied)
            param = copied
        found.append(param)
    return found


@contextmanager
def copies_tied(
    tied: Sequence[tuple[tuple[str, ...], Sequence[int]]],
    stages: Sequence[nn.Module],
    places: Sequence[Sequence[int]],
    mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None,
) -> Iterator[None]:
    """Context in which this rank's stages are wrapped, with one gradient for all copies of a weight
    that stages share. Collective.

    tied: as `shared_by` returns it. places: stages of each place of the pipeline.
    """
    mine = places[mesh.get_local_rank("pp")]
    place_of = {stage: place for place, theirs in enumerate(places) for stage in theirs}
    # noted before wrapping, which makes chunks of them; their groups in one order on all ranks
    ties = together_of(mesh).ties
    for names, theirs in tied:
        copies = copies_of(names, [stages[i] for i in mine if i in theirs], optimizer)
        if copies:
            ties.add(copies, names, [*dict.fromkeys(place_of[stage] for stage in theirs)])
    try:
        yield
    finally:
        # also after an error: copies that were not wrapped are of no later model
        ties.forget()


def _check_parts(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Raise ValueError for a stage without parameters, and for a parameter that no stage has."""
    for stage, part in enumerate(parts):
        if not any(True for _ in part.parameters()):
            raise ValueError(
                f"stage {stage} has no parameter; expected some in each: give "
                "num_layers_per_stage, or a smaller pp_size"
            )
    there = {id(param) for part in parts for param in part.parameters()}
    missing = [name for name, param in model.named_parameters() if id(param) not in there]
    if missing:
        raise ValueError(
            f"{missing[0]} and {len(missing) - 1} more parameters are in no stage; expected those "
            "of the architecture alone: add others behind the cut, to the stages"
        )
