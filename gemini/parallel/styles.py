"""Styles of splitting that torch lacks: fused matrices, stacked experts, GPT-2's Conv1D.

N matrices side by side · T ranks

A fused weight is split matrix by matrix: this rank's parts are next to each other in its local
tensor, because the module cuts its output into N. Such a layer computes with local tensors; its
parameters are DTensors of the whole (`_StridedShard`), so checkpoints have the unsplit layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard

from gemini.chunk.local import is_dtensor, local_of
from gemini.comm.connect import announce
from gemini.mesh.head_loss import in_multiples


def output_dim(layer: nn.Module) -> int:
    """Output dimension of a layer's weight: 1 for GPT-2's Conv1D [in, out], else 0."""
    return 1 if type(layer).__name__ == "Conv1D" else 0


def put_in_place(
    optimizer: torch.optim.Optimizer | None, instead: Mapping[int, torch.Tensor]
) -> None:
    """Replace parameters in an optimizer's groups; `instead` is by the id of the old one."""
    for group in () if optimizer is None else optimizer.param_groups:
        group["params"] = [instead.get(id(param), param) for param in group["params"]]


@torch.no_grad()
def take_first_ranks(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give all ranks of a group the first rank's parameters and buffers. Collective.

    Raises SequenceError on all of them for models that are unlike.
    """
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    announce(group, "boost()", tensors)
    for _, tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


class FusedColwise(ParallelStyle):
    """Style that gives each rank 1/T of the columns of N matrices: whole input, split output.

    For a Linear or a Conv1D, with a bias or without. gathers: the output is gathered.
    """

    def __init__(self, matrices: int = 1, *, gathers: bool = False) -> None:
        super().__init__()
        self.matrices, self._gathers = matrices, gathers

    def check(self, name: str, module: nn.Module, ranks: int) -> None:
        """Raise ValueError for matrices that the ranks do not divide."""
        weight: Any = module.weight
        size = weight.shape[output_dim(module)]
        if size % (self.matrices * ranks):
            raise ValueError(
                f"{name} has {size} columns of {self.matrices} matrices, which {ranks} ranks do "
                "not divide; expected another tp_size"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = output_dim(module)
        replace(module, "weight", device_mesh, dim, self.matrices)
        if getattr(module, "bias", None) is not None:
            replace(module, "bias", device_mesh, 0, self.matrices)
        for name in ("out_features", "nf"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // device_mesh.size())
        module.forward = partial(
            _columns, module, device_mesh, transposed=bool(dim), gathers=self._gathers
        )
        return module


class ClonedRowwise(RowwiseParallel):
    """torch's, for an output that the module changes in place: torch refuses that of a view."""

    @staticmethod
    def _prepare_output_fn(layouts: Any, local: Any, module: Any, out: Any, mesh: Any) -> Any:
        return RowwiseParallel._prepare_output_fn(layouts, local, module, out, mesh).clone()


class Divided(ParallelStyle):
    """Style that divides attributes of a module by T: counts of split things, such as heads.

    attributes: their names, separated by spaces. After a comma: arguments of the forward with rows
    of all heads, such as `alibi`; the module gets the rows of this rank's heads.
    """

    def __init__(self, attributes: str) -> None:
        super().__init__()
        names, _, rows = attributes.partition(", ")
        self._names, self._rows = names.split(), rows.split()

    def check(self, name: str, module: nn.Module, ranks: int) -> None:
        """Raise ValueError for an attribute that cannot be divided."""
        for attribute in self._names:
            value = getattr(module, attribute, None)
            if type(value) is not int or value % ranks:
                raise ValueError(
                    f"{name}.{attribute} is {value!r}; expected a whole number that {ranks} ranks "
                    "divide: another tp_size, or another attribute"
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for attribute in self._names:
            setattr(module, attribute, getattr(module, attribute) // device_mesh.size())
        if self._rows:
            module.register_forward_pre_hook(
                partial(_own_heads, self._rows, device_mesh), with_kwargs=True
            )
        return module


def _own_heads(names: Sequence[str], mesh: DeviceMesh, module: Any, args: Any, kwargs: Any) -> Any:
    """Pre-hook: arguments [batch * heads, ...] or [batch, heads, .., ..] keep the rows of this
    rank's heads; those with one row for all heads stay."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    place, ranks = mesh.get_local_rank(), mesh.size()
    for name in names:
        x = bound.arguments.get(name)
        if x is None:
            continue
        if x.dim() < 4:
            rows = x.view(-1, ranks, module.num_heads, *x.shape[1:])[:, place]
            bound.arguments[name] = rows.reshape(-1, *x.shape[1:])
        elif x.shape[1] == ranks * module.num_heads:
            bound.arguments[name] = x.chunk(ranks, 1)[place]
    return bound.args[1:], bound.kwargs


class SplitExperts(ParallelStyle):
    """Style that splits each stacked expert in its width. All ranks have the same tokens.

    gate_up_proj [experts, 2 * width, in], gate and up one after the other; down_proj
    [experts, out, width].
    """

    def check(self, name: str, module: Any, ranks: int) -> None:
        """Raise ValueError for experts of another form, and a width that ranks do not divide."""
        shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
        if set(shapes) != {"gate_up_proj", "down_proj"} or shapes["down_proj"][2] % ranks:
            raise ValueError(
                f"{name} has {shapes}; expected gate_up_proj and down_proj, whose width {ranks} "
                "ranks divide: another tp_size, or a plan without it"
            )

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        replace(module, "gate_up_proj", device_mesh, 1, 2)
        replace(module, "down_proj", device_mesh, 2)
        module.forward = partial(_experts, module, device_mesh, module.forward)
        return cast(nn.Module, module)


def _experts(module: Any, mesh: DeviceMesh, plain: Any, x: Tensor, index: Any, weights: Any) -> Any:
    """Forward of split experts. Outputs are summed over ranks, and so are the gradients of tokens
    and of router weights."""
    with of_parts(module):
        return summed(plain(entering(x, mesh), index, entering(weights, mesh)), mesh)


@contextmanager
def of_parts(module: Any) -> Iterator[None]:
    """Context in which a module's parameters are this rank's local tensors."""
    local = {name: param.to_local() for name, param in module.named_parameters()}
    vars(module).update(local)  # comes before what is registered
    try:
        yield
    finally:
        for name in local:
            del vars(module)[name]


class Conv1DRowwise(ParallelStyle):
    """Style that gives each rank 1/T of a Conv1D's rows: split input, summed output.

    gives_part: each rank gets its part of the summed rows [..., rows, out], and not all of them.
    """

    def __init__(self, *, gives_part: bool = False) -> None:
        super().__init__()
        self._gives_part = gives_part

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replace(module, "weight", device_mesh, 0)
        replicate(module, "bias", device_mesh)
        module.forward = partial(_rows, module, device_mesh, gives_part=self._gives_part)
        return module


class PaddedHead:
    """Head split by words that computes a multiple of `multiple` words on every rank.

    N tokens · V words of a rank. Kernels for [N, V] are slow where its rows are not aligned. Each
    call pads the weight with rows of zeros and cuts their logits off: parameters, gradients and
    checkpoints have no padding.
    """

    def __init__(self, head: Any, multiple: int) -> None:
        """Replace the head's forward, unless the head is whole or needs no padding."""
        self._multiple = multiple
        weight = head.weight
        is_split = is_dtensor(weight) and weight.placements[0] == Shard(0)
        if is_split and "forward" not in vars(head) and local_of(weight).shape[0] % multiple:
            head.forward = partial(self._forward, head)

    def _forward(self, head: Any, x: Any) -> DTensor:
        """Forward as ColwiseParallel's: x [B, T, H] whole -> DTensor, [B, T, V] on each rank."""
        words = head.weight.shape[0]
        weight, bias = head.weight.to_local(), head.bias
        y = nn.functional.linear(
            x.to_local(grad_placements=[Partial()]),
            in_multiples(weight, self._multiple),
            None if bias is None else in_multiples(bias.to_local(), self._multiple),
        )[..., : weight.shape[0]]
        shape = torch.Size((*x.shape[:-1], words))
        return DTensor.from_local(
            y, x.device_mesh, [Shard(-1)], run_check=False, shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip


def draw_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Set the generators of all ranks to the first rank's state, if the model has dropout.

    Ranks then drop the same elements of unsplit tensors, which stay equal on all of them.
    Collective.
    """
    if has_dropout(model):
        _draw_as_first(mesh, torch.get_rng_state, torch.set_rng_state)
        if mesh.device_type == "cuda":
            _draw_as_first(mesh, torch.cuda.get_rng_state, torch.cuda.set_rng_state)


def has_dropout(model: nn.Module) -> bool:
    """Whether the model's config or layers drop some elements."""
    config = getattr(model, "config", None)
    named = vars(config) if hasattr(config, "__dict__") else {}
    rates = [value for name, value in named.items() if "drop" in name]
    rates += [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _draw_as_first(
    mesh: DeviceMesh, get: Callable[[], Tensor], set_: Callable[[Tensor], None]
) -> None:
    # a generator's state is a CPU tensor, and NCCL sends none of those
    state = get().to(mesh.device_type)
    dist.broadcast(state, group=mesh.get_group(), group_src=0)
    set_(state.cpu())


def replicate(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Make a parameter a replicated DTensor with the values of the first rank. Collective."""
    param: Any = getattr(module, name)
    whole = distribute_tensor(param.detach(), mesh, [Replicate()])
    module.register_parameter(name, nn.Parameter(whole, param.requires_grad))


def replace(module: nn.Module, name: str, mesh: DeviceMesh, dim: int, matrices: int = 1) -> None:
    """Split a parameter in `dim`, with the values of the mesh's first rank. Collective."""
    param: Any = getattr(module, name)
    whole = distribute_tensor(param.detach(), mesh, [Replicate()]).to_local()
    place, ranks = mesh.get_local_rank(), mesh.size()
    parts = [part.chunk(ranks, dim)[place] for part in whole.chunk(matrices, dim)]
    placed = Shard(dim) if matrices == 1 else _StridedShard(dim, split_factor=matrices)
    made = DTensor.from_local(
        torch.cat(parts, dim).contiguous(), mesh, [placed], run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip
    module.register_parameter(name, nn.Parameter(made, param.requires_grad))


def entering(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Local tensor of a value that all ranks have alike; its gradients are summed over ranks."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    whole: Tensor = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum of a local result over ranks, on all of them."""
    found: Tensor = full_tensor(DTensor.from_local(x, mesh, [Partial()], run_check=False))
    return found


def full_tensor(x: DTensor) -> Tensor:
    whole: Tensor = x.redistribute(placements=[Replicate()]).to_local()
    return whole


def _columns(
    module: Any, mesh: DeviceMesh, x: Tensor, *, transposed: bool, gathers: bool
) -> Tensor:
    weight, bias = module.weight.to_local(), module.bias
    y = nn.functional.linear(
        entering(x, mesh),
        weight.T if transposed else weight,
        None if bias is None else bias.to_local(),
    )
    return DTensor.from_local(y, mesh, [Shard(-1)], run_check=False).full_tensor() if gathers else y


def _rows(module: Any, mesh: DeviceMesh, x: Tensor, *, gives_part: bool) -> Tensor:
    y = x @ module.weight.to_local()
    if not gives_part:
        whole: Tensor = summed(y, mesh) + module.bias.to_local()
        return whole
    placed = DTensor.from_local(y, mesh, [Partial()], run_check=False)
    # a rank adds the bias to its own rows, so the bias's gradients are summed over ranks
    part: Tensor = placed.redistribute(placements=[Shard(y.dim() - 2)]).to_local()
    return part + entering(module.bias, mesh)
