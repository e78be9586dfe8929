"""Plans of tensor parallelism, in words or styles: which layers are split, and how."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gemini.chunk.local import is_dtensor, local_of
from gemini.comm.connect import announce
from gemini.mesh.head_loss import HeadLoss, has_causal_loss
from gemini.parallel.styles import put_in_place

from .models import is_ours, plan_of
from .probe import Probe
from .sequence import in_sequence
from .styles import (
    ClonedRowwise,
    Conv1DRowwise,
    Divided,
    FusedColwise,
    PaddedHead,
    SplitExperts,
    draw_alike,
    has_dropout,
)

Styles = dict[str, ParallelStyle]  # by the full name of a module
EXPERTS = "moe_tp_experts"

# Words of transformers' plans. A norm between split layers sees some rows alone, as in a split
# sequence, so its weight's gradients must be summed: torch's SequenceParallel does that.
_WORDS: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_cloned": ClonedRowwise,
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_colwise": partial(ColwiseParallel, output_layouts=Replicate()),
    "sequence_parallel": partial(SequenceParallel, use_local_output=True),
    "replicated_with_grad_allreduce": partial(SequenceParallel, use_local_output=True),
    "packed_colwise": partial(FusedColwise, 2),
    "qkv_colwise": partial(FusedColwise, 3),
    EXPERTS: SplitExperts,
}
_CONV1D: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": FusedColwise,
    "colwise_gather_output": partial(FusedColwise, gathers=True),
    "packed_colwise": partial(FusedColwise, 2),
    "qkv_colwise": partial(FusedColwise, 3),
    "rowwise": Conv1DRowwise,
}
DIVIDE = "divide "  # and attributes of a module, which count what is split


@dataclass(frozen=True)
class TensorParallel:
    """Options of tensor parallelism.

    plan: styles or words by names of modules, `*` for one part of a name; None is the module's
    own. sequence: between split layers each rank has a part of the sequence. parallel_output: the
    loss of a causal language model is computed from logits split by words, which stay split.
    words_multiple: a rank computes logits of a multiple of so many words, with padding.
    """

    plan: Mapping[str, Any] | None = None
    sequence: bool = False
    parallel_output: bool = False
    words_multiple: int = 1


def split(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    mesh: DeviceMesh,
    asked: TensorParallel,
    stages: Sequence[nn.Module] = (),
) -> None:
    """Split `model` in place over a 1-D mesh; the optimizer gets the split parameters.

    stages: this rank's stages of a cut model; only their layers are split then. All ranks get the
    values of the mesh's first rank. Collective.
    Raises ValueError, before anything is changed, for a module without a plan, a plan that is not
    the module's, and layers that the ranks do not divide. Raises it after the split where a user's
    plan changes the module's outputs.
    """
    styles = styles_of(model, asked.plan)
    _check_sizes(model, styles, mesh.size())
    tied = [names for names in _names(model) if len(names) > 1]
    for names in tied:
        split_alike(model, styles, names)
    entering = in_sequence(model, styles, stages) if asked.sequence else []
    before = dict(model.named_parameters(remove_duplicate=False))
    here = {id(module) for stage in stages or [model] for module in stage.modules()}
    is_empty = any(param.is_meta for param in before.values())  # refused where it is wrapped
    announce(mesh.get_group(), f"split() of {type(model).__name__}", _sent(model, here, styles))
    # a probe runs the whole module, so it is made before the first layer is split
    probes = [] if is_empty or not styles or is_ours(model, asked.plan) else [
        Probe(stage, list(styles), mesh) for stage in stages or [model]
    ]  # fmt: skip
    for name, style in [*styles.items(), *entering]:
        module = model.get_submodule(name)
        if id(module) in here:
            _apply(module, style, mesh)
    # splitting made a parameter for each name: tie them again, to one that a style has placed
    for names in tied:
        layers = {name: name.rpartition(".")[0] for name in names}
        of_here = [n for n in names if id(model.get_submodule(layers[n])) in here]
        first = next((n for n in of_here if layers[n] in styles), names[0])
        for name, layer in layers.items():
            attribute = name.removeprefix(f"{layer}.")
            setattr(model.get_submodule(layer), attribute, model.get_parameter(first))
    after = dict(model.named_parameters(remove_duplicate=False))
    put_in_place(optimizer, {id(param): after[name] for name, param in before.items()})
    for probe in probes:
        probe.check()
    draw_alike(model, mesh)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear) and id(head) in here:
        PaddedHead(head, asked.words_multiple)
        whole = stages or not (asked.parallel_output and is_dtensor(head.weight))
        if not whole and has_causal_loss(model):
            HeadLoss(model, multiple=asked.words_multiple)


def _sent(
    model: nn.Module, here: Collection[int], styles: Mapping[str, ParallelStyle]
) -> Iterator[tuple[str, Tensor]]:
    """What a split sends, in order: layers as they are split, then all that a probe sends, and a
    generator's state. `here`: this rank's modules."""
    split = [(name, model.get_submodule(name)) for name in styles]
    for i, (name, module) in enumerate([*split, *model.named_modules()]):
        how = f", {type(styles[name]).__name__}," if i < len(split) else ""
        if id(module) in here:
            for own, x in (*module.named_parameters("", False), *module.named_buffers("", False)):
                yield f"{name}.{own}{how}".removeprefix("."), x
    if has_dropout(model):
        yield "the state of a generator", torch.empty(0)


def split_layer(layer: nn.Module, how: str, mesh: DeviceMesh) -> None:
    """Split one layer by a word of plans over a 1-D mesh, before it is in a model. Collective.

    Raises ValueError, before anything is changed, for sizes that the ranks do not divide.
    """
    style = _style(type(layer).__name__, how, layer)
    _check_sizes(layer, {"": style}, mesh.size())
    announce(mesh.get_group(), f"split() of {type(layer).__name__}", layer.named_parameters())
    _apply(layer, style, mesh)


def _apply(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    parallelize_module(module, mesh, style)
    buffers = dict(module.named_buffers(recurse=False))  # DTensors, if torch split it
    for attribute, buffer in buffers.items():
        setattr(module, attribute, local_of(buffer))


def styles_of(model: nn.Module, given: Mapping[str, Any] | None) -> Styles:
    """Styles by module name for a plan; None is the model's own. Raises ValueError."""
    plan = plan_of(model) if given is None else given
    if not plan and any(map(is_dtensor, model.parameters())):
        return {}  # its layers were split as they were made
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no plan by which layers are split; expected a model of "
            "transformers that has one, model.tp_plan = {'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise'} before boost, or custom_policy= of HybridParallelPlugin"
        )
    modules = [name for name, _ in model.named_modules()]
    experts = [pattern for pattern, how in plan.items() if how == EXPERTS]
    params = [
        name for name, _ in model.named_parameters()
        if not any(_matches(name.rpartition(".")[0], pattern) for pattern in experts)
    ]  # fmt: skip
    styles: Styles = {}
    for pattern, how in plan.items():
        if pattern.rpartition(".")[0] in experts:
            continue  # a weight of stacked experts, which are split together
        found = [name for name in modules if _matches(name, pattern)]
        of_params = [name for name in params if _matches(name, pattern)]
        # a model's own plan names layers that only some of its kind have
        if of_params or (not found and given is not None):
            what = f"the parameter {of_params[0]}" if of_params else "nothing that is there"
            raise ValueError(
                f"the plan of {type(model).__name__} has {pattern!r}, which is {what}; expected "
                "names of modules, as named_modules() has them, with * for one part"
            )
        styles |= {name: _style(name, how, model.get_submodule(name)) for name in found}
    if not styles:
        raise ValueError(
            f"the plan of {type(model).__name__} names no module that it has; expected some of "
            f"{modules[1:4]}"
        )
    return styles


def _matches(name: str, pattern: str) -> bool:
    ours, theirs = name.split("."), pattern.split(".")
    same = len(ours) == len(theirs) and name != ""
    return same and all(map(fnmatchcase, ours, theirs))


def _style(name: str, how: Any, layer: nn.Module) -> ParallelStyle:
    if isinstance(how, ParallelStyle):
        return how
    if isinstance(how, str) and how.startswith(DIVIDE):
        return Divided(how.removeprefix(DIVIDE))
    words = _CONV1D if type(layer).__name__ == "Conv1D" else _WORDS
    if not isinstance(how, str) or how not in words:
        raise ValueError(
            f"the plan splits {name} as {how!r}, for which torch has no style; expected a "
            "torch.distributed.tensor.parallel.ParallelStyle, 'divide' and names of attributes, or "
            f"one of {sorted(words)}. custom_policy= of HybridParallelPlugin takes another plan"
        )
    return words[how]()


def _check_sizes(model: nn.Module, styles: Styles, ranks: int) -> None:
    """Raise ValueError for sizes, or numbers of heads, that the ranks do not divide."""
    for name, style in styles.items():
        layer: Any = model.get_submodule(name)
        if isinstance(style, (FusedColwise, Divided, SplitExperts)):
            style.check(name, layer, ranks)
        for kind, placed, attribute in (
            (ColwiseParallel, "output_layouts", "out_features"),
            (RowwiseParallel, "input_layouts", "in_features"),
        ):
            size = getattr(layer, attribute, None)
            is_split = isinstance(style, kind) and getattr(style, placed) == (Shard(-1),)
            if is_split and size is not None and size % ranks:
                raise ValueError(
                    f"{name or type(layer).__name__} has {attribute}={size}, which {ranks} ranks "
                    "do not divide; expected another tp_size"
                )
    config: Any = getattr(model, "config", None)
    for attribute in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, attribute, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(
                f"the model has {attribute}={heads}, which tp_size={ranks} does not divide; "
                "expected another tp_size"
            )


def _names(model: nn.Module) -> Iterator[list[str]]:
    """Names of each parameter, all of a tied one together."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    yield from found.values()


def split_alike(model: nn.Module, styles: Styles, names: list[str]) -> None:
    """Plan layers that share a weight alike: an embedding by rows, a head by columns.

    Adds to `styles`. Raises ValueError for a plan that splits the weight in two ways.
    """
    layers = [name.rpartition(".")[0] for name in names]
    planned = [name for name in layers if name in styles]
    for name in layers if planned else ():
        layer = model.get_submodule(name)  # one that is neither has a name of the weight alone
        if name not in styles and isinstance(layer, (nn.Embedding, nn.Linear)):
            is_embedding = isinstance(layer, nn.Embedding)
            styles[name] = _WORDS[
                "embedding_rowwise" if is_embedding else "colwise_gather_output"
            ]()
    rows = {_splits_rows(model.get_submodule(n), styles[n]) for n in layers if n in styles}
    if len(rows) > 1:
        raise ValueError(
            f"{' and '.join(names)} are one parameter, and the plan splits it in two ways; "
            "expected the rows of an embedding where a linear layer is split by columns, or "
            "weights that are not tied"
        )


def _splits_rows(layer: nn.Module, style: ParallelStyle) -> bool:
    """Whether the weight is split in its first dimension."""
    return isinstance(style, RowwiseParallel) == isinstance(layer, nn.Embedding)
