"""Sequence parallelism with tensor parallelism: between split layers each rank has a part.

T ranks

A rank has [batch, time / T, width] of [batch, time, width], as in torch's styles. The input of the
first repeated layer is split, and the output of the last one is gathered. Between them norms work
on parts; a split layer gathers its input, and sums and scatters its output in one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from .styles import ClonedRowwise, Conv1DRowwise, Divided, FusedColwise

TIME = 1  # the dimension of the sequence
_PART, _WHOLE = Shard(TIME), Replicate()


def in_sequence(
    model: nn.Module, styles: dict[str, ParallelStyle], stages: Sequence[nn.Module] = ()
) -> list[tuple[str, ParallelStyle]]:
    """Change styles inside of the repeated layers in place; returns further (name, style) pairs.

    stages: the sequence is split from the first layer of each stage to its last.
    Raises ValueError for layers with parameters that are neither norms nor split by the plan.
    """
    layers = _repeated(model, styles)
    around: list[tuple[str, ParallelStyle]] = []
    for layer in layers:
        # what a layer itself reads the shape of is a DTensor, which has that of the whole
        around += _between(model, styles, layer, local=not _splits_children(model, styles, layer))
    for stage in stages or [model]:
        here = {id(module) for module in stage.modules()}
        mine = [layer for layer in layers if id(model.get_submodule(layer)) in here]
        around += [(mine[0], _Hooked(_part)), (mine[-1], _Hooked(_whole, gives=True))]
    return around


def _splits_children(model: nn.Module, styles: Mapping[str, ParallelStyle], layer: str) -> bool:
    """Whether a layer calls split layers itself, not modules that have some."""
    names = [f"{layer}.{name}" for name, _ in model.get_submodule(layer).named_children()]
    return any(name in styles and not isinstance(styles[name], Divided) for name in names)


def _between(
    model: nn.Module, styles: dict[str, ParallelStyle], layer: str, *, local: bool
) -> Iterator[tuple[str, ParallelStyle]]:
    """Styles around the children of a layer whose input is a part; changes those of split ones.

    local: its norms give local tensors.
    """
    for name, child in model.get_submodule(layer).named_children():
        where = f"{layer}.{name}"
        inside = [key for key in styles if key == where or key.startswith(f"{where}.")]
        if any(_adds(module, at, styles) for at, module in child.named_modules(prefix=where)):
            yield from _between(model, styles, where, local=True)
            continue
        if inside and inside != [where]:
            yield where, _Hooked(_gathered)
        for key in inside:
            styles[key] = _of_parts(key, styles[key], alone=key == where)
        if inside or not any(True for _ in child.parameters()):
            continue
        if not type(child).__name__.endswith("Norm"):
            raise ValueError(
                f"{where} is a {type(child).__name__} that the plan does not split, in a layer "
                "whose sequence is split; expected norms beside split layers. Leave "
                "enable_sequence_parallelism away, or give custom_policy= with SequenceParallel"
            )
        yield where, _Norm(sequence_dim=TIME, use_local_output=local)


def _adds(module: nn.Module, where: str, styles: Mapping[str, ParallelStyle]) -> bool:
    """Whether a module adds its layer's input, a part, to the output of a layer split by rows, and
    normalises the sum, as in BERT. Norms between split layers, as of heads, are none of these."""
    names = [name for name, _ in module.named_children()]
    split = [styles[key] for name in names if (key := f"{where}.{name}") in styles]
    has_norm = any(type(child).__name__.endswith("Norm") for child in module.children())
    return has_norm and [type(style) for style in split] == [RowwiseParallel]


def _repeated(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> list[str]:
    """Names of the layers of the one list with split layers. Raises ValueError."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = [name for name in lists if any(key.startswith(f"{name}.") for key in styles)]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has split layers in {len(found)} nn.ModuleLists; expected "
            "one, whose layers follow each other. Leave enable_sequence_parallelism away, or give "
            "custom_policy= with SequenceParallel"
        )
    (name,) = found
    layers: Any = model.get_submodule(name)
    return [f"{name}.{i}" for i in range(len(layers))]


def _of_parts(name: str, style: ParallelStyle, *, alone: bool) -> ParallelStyle:
    """Style of a split layer between parts. `alone`: no module around it gathers its input."""
    if isinstance(style, RowwiseParallel):
        (layout,) = style.input_layouts
        rows = _ClonedRows if isinstance(style, ClonedRowwise) else _Rows
        return rows(input_layouts=layout, output_layouts=_PART)
    if isinstance(style, ColwiseParallel):
        (layout,) = style.output_layouts
        kind = _Columns if alone else ColwiseParallel
        return kind(input_layouts=_PART if alone else _WHOLE, output_layouts=layout)
    if isinstance(style, Conv1DRowwise):
        return Conv1DRowwise(gives_part=True)
    is_fused = isinstance(style, FusedColwise) and not alone  # which gathers nothing itself
    if is_fused or isinstance(style, (SequenceParallel, Divided)):
        return style
    raise ValueError(
        f"the plan splits {name} by a {type(style).__name__}, in a layer whose sequence is split; "
        "expected ColwiseParallel, RowwiseParallel or SequenceParallel"
    )


# A layer may flatten [batch, time, width] to [batch * time, width], as OPT's do: a rank's rows are
# then a part of all rows. These styles find the dimension of the part in what comes.


def _part_of(x: Tensor) -> Shard:
    return Shard(x.dim() - 2)


class _Rows(RowwiseParallel):
    @staticmethod
    def _prepare_output_fn(layouts: Any, local: Any, mod: Any, x: Any, mesh: Any) -> Any:
        return RowwiseParallel._prepare_output_fn((_part_of(x),), local, mod, x, mesh)


class _ClonedRows(_Rows):
    @staticmethod
    def _prepare_output_fn(layouts: Any, local: Any, mod: Any, x: Any, mesh: Any) -> Any:
        return _Rows._prepare_output_fn(layouts, local, mod, x, mesh).clone()


class _Columns(ColwiseParallel):
    @staticmethod
    def _prepare_input_fn(layouts: Any, wanted: Any, mod: Any, inputs: Any, mesh: Any) -> Any:
        own = (_part_of(inputs[0]),)
        return ColwiseParallel._prepare_input_fn(own, wanted, mod, inputs, mesh)


class _Norm(SequenceParallel):
    @staticmethod
    def _prepare_input_fn(layout: Any, mod: Any, inputs: Any, mesh: Any) -> Any:
        return SequenceParallel._prepare_input_fn((_part_of(inputs[0]),), mod, inputs, mesh)


class _Hooked(ParallelStyle):
    """Style that changes a module's first floating-point input, or (`gives`) its first output."""

    def __init__(self, change: Callable[..., Tensor], gives: bool = False) -> None:
        super().__init__()
        self._change, self._gives = change, gives

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        change = partial(self._change, mesh=device_mesh)
        if self._gives:
            module.register_forward_hook(partial(_given, change))
        else:
            module.register_forward_pre_hook(partial(_taken, change), with_kwargs=True)
        return module


def _part(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Part of a whole sequence for this rank. Raises ValueError if T does not divide its length."""
    if x.shape[TIME] % mesh.size():
        raise ValueError(
            f"a sequence of {x.shape[TIME]} is split over {mesh.size()} ranks; expected a "
            "length that they divide: pad it"
        )
    return _placed(x, mesh, _WHOLE, _PART).to_local()


def _gathered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Whole sequence as a DTensor, so that its gradients are summed and scattered at once."""
    return _placed(x, mesh, _PART, _WHOLE)


def _whole(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return _placed(x, mesh, _PART, _WHOLE).to_local()


def _placed(x: Tensor, mesh: DeviceMesh, now: Any, then: Any) -> DTensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [now], run_check=False)
    return x.redistribute(placements=[then])


def _given(change: Any, _: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)


def _taken(change: Any, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for i, value in _tensors(enumerate(args)):
        return (*args[:i], change(value), *args[i + 1 :]), kwargs
    name, value = next(_tensors(kwargs.items()))
    return args, {**kwargs, name: change(value)}


def _tensors(items: Any) -> Iterator[tuple[Any, Tensor]]:
    return (
        (key, value)
        for key, value in items
        if isinstance(value, Tensor) and value.is_floating_point()
    )
