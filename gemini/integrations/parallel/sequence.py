"""Sequence parallelism beside tensor parallelism: between split layers each rank has a part.

As torch's styles do it: what a rank has of [batch, time, width] is [batch, time / T, width]. The
first of the repeated layers is given its part, what the last one gives is gathered. Inside, norms
work on parts; what a plan splits takes the whole, and gives a part that is summed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

from .styles import Divided

TIME = 1  # the dimension of the sequence
_PART, _WHOLE = Shard(TIME), Replicate()


def in_sequence(
    model: nn.Module,
    styles: dict[str, ParallelStyle],
    mesh: DeviceMesh,
    stages: Sequence[nn.Module] = (),
) -> list[tuple[str, ParallelStyle]]:
    """Change styles inside of the repeated layers; returns those around and beside them.

    stages: a sequence is split from the first of the layers of each to its last.
    Raises ValueError for a model whose layers are not norms and what its plan splits.
    """
    layers = _repeated(model, styles)
    around: list[tuple[str, ParallelStyle]] = []
    for layer in layers:
        children = dict(model.get_submodule(layer).named_children())
        # what a layer itself reads the shape of is a DTensor, which has that of the whole
        local = not any(f"{layer}.{name}" in styles for name in children)
        for name, child in children.items():
            where = f"{layer}.{name}"
            inside = [key for key in styles if key == where or key.startswith(f"{where}.")]
            if inside and inside != [where]:
                around.append((where, _GatheredInput()))
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
            around.append((where, SequenceParallel(sequence_dim=TIME, use_local_output=local)))
    for stage in stages or [model]:
        here = {id(module) for module in stage.modules()}
        mine = [layer for layer in layers if id(model.get_submodule(layer)) in here]
        around += [(mine[0], _Parts(mesh.size())), (mine[-1], _Whole())]
    return around


def _repeated(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> list[str]:
    """Names of the layers of the one list that has split layers."""
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
    """The style of a split layer inside. `alone`: nothing around it gathers its input."""
    if isinstance(style, RowwiseParallel):
        (layout,) = style.input_layouts
        return RowwiseParallel(input_layouts=layout, output_layouts=_PART)
    if isinstance(style, ColwiseParallel):
        (layout,) = style.output_layouts
        return ColwiseParallel(input_layouts=_PART if alone else _WHOLE, output_layouts=layout)
    if isinstance(style, (SequenceParallel, Divided)):
        return style
    raise ValueError(
        f"the plan splits {name} by a {type(style).__name__}, in a layer whose sequence is split; "
        "expected ColwiseParallel, RowwiseParallel or SequenceParallel"
    )


class _Hooked(ParallelStyle):
    """Changes the tensor that a module takes or gives."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise NotImplementedError


class _Parts(_Hooked):
    """A module takes its part of what is whole."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._take, device_mesh), with_kwargs=True)
        return module

    def _take(self, mesh: DeviceMesh, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return _replaced(args, kwargs, partial(self._part, mesh))

    def _part(self, mesh: DeviceMesh, x: Tensor) -> Tensor:
        if x.shape[TIME] % self._ranks:
            raise ValueError(
                f"a sequence of {x.shape[TIME]} is split over {self._ranks} ranks; expected a "
                "length that they divide: pad it"
            )
        return _placed(x, mesh, _WHOLE, _PART).to_local()


class _GatheredInput(_Hooked):
    """A module takes the whole of parts, as a DTensor: so gradients are scattered as they sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_gather_input, device_mesh), with_kwargs=True)
        return module


def _gather_input(mesh: DeviceMesh, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return _replaced(args, kwargs, lambda x: _placed(x, mesh, _PART, _WHOLE))


class _Whole(_Hooked):
    """What a module gives is gathered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_gather_output, device_mesh))
        return module


def _gather_output(mesh: DeviceMesh, _: nn.Module, args: Any, output: Any) -> Any:
    first = output[0] if isinstance(output, tuple) else output
    whole = _placed(first, mesh, _PART, _WHOLE).to_local()
    return (whole, *output[1:]) if isinstance(output, tuple) else whole


def _placed(x: Tensor, mesh: DeviceMesh, now: Any, then: Any) -> DTensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [now], run_check=False)
    return x.redistribute(placements=[then])


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Any:
    """(args, kwargs) with the first tensor that floats changed."""
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
