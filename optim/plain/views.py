"""Views of a plain module's parameters for a step: flat runs in the order of their state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemini.optim.state.pieces import Piece, Planes, plane_part
from gemini.optim.state.space import Block, BlockSegment
from gemini.optim.step.measuring import ParamAndGrad, to_host
from gemini.tickets import CopyTicket
from gemini.units import BlockId

if TYPE_CHECKING:
    from gemini.optim.state.flow import Record


@dataclass(frozen=True, slots=True)
class Order:
    """Order of one parameter's elements in its state, as long as the state lives.

    It is the order of the parameter's memory, or of a dense copy where that memory has gaps.
    """

    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor, *, by_rows: bool = False) -> Order:
        """Order of a parameter as it is now; by_rows: rows one after the other in any case."""
        if by_rows:
            return cls(param.size(), torch.empty(param.size(), device="meta").stride())
        dense = torch.ops.aten.is_non_overlapping_and_dense(param)
        like = param if dense else torch.empty_like(param, device="meta")
        return cls(param.size(), like.stride())

    def flat(self, tensor: Tensor) -> Tensor:
        """Flatten a tensor of the parameter's shape to [numel]: a view if in order, else a copy."""
        if tensor.size() != self.size:
            raise ValueError(
                f"a parameter, its gradient or its state has shape {tuple(tensor.shape)}; expected "
                f"{tuple(self.size)}, as when the optimizer's state was made"
            )
        if not self.fits(tensor):
            tensor = self.empty(tensor).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this order; strides of dimensions of one element are ignored."""
        if tensor.stride() == self.stride:
            return True
        strides = zip(tensor.stride(), self.stride, self.size, strict=True)
        return all(a == b for a, b, size in strides if size > 1)

    def shaped(self, flat: Tensor) -> Tensor:
        """View of flat elements [numel] in the parameter's shape."""
        return flat.as_strided(self.size, self.stride)

    def empty(self, like: Tensor) -> Tensor:
        """Memory in this order and the parameter's shape, uninitialised."""
        return torch.empty_strided(self.size, self.stride, dtype=like.dtype, device=like.device)


def check_plain(param: Tensor) -> None:
    """Raise ValueError for a parameter that cannot be updated in place, or not on its device."""
    sizes = zip(param.stride(), param.size(), strict=True)
    if any(stride == 0 and size > 1 for stride, size in sizes):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has strides {param.stride()}: elements "
            "share memory; clone it before you pass it to the optimizer"
        )
    if param.dtype == torch.float64 and param.device.type != "cpu":
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is float64 on {param.device}, whose "
            "kernels compute in fp32; expected float32, or float64 on the CPU"
        )


def dense_grad(param: Tensor, order: Order) -> Tensor:
    """Gradient [numel] of a parameter that has one."""
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has a sparse gradient; "
            "use sparse=False, or torch.optim.SparseAdam for it"
        )
    return order.flat(grad.detach())


class PlainViews(ParamAndGrad):
    """View of the parameters that have a gradient, for one step.

    A parameter that does not lie in the order of its state is updated as a copy, which `write_back`
    copies back when the step counts.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        orders: Sequence[Order],
        steps: Sequence[int],
    ) -> None:
        """steps: by parameter; as `hyper`, which is to be set before an update."""
        self.active = [i for i, param in enumerate(params) if param.grad is not None]
        self._params = params
        self._orders = orders
        self._flat = {i: orders[i].flat(params[i].detach()) for i in self.active}
        self._grad = {i: dense_grad(params[i], orders[i]) for i in self.active}
        self._largest: dict[int, float] = {}
        self.hyper: Sequence[Any] = ()
        self._step = {i: steps[i] for i in self.active}

    def write_back(self) -> None:
        """Copy parameters back that were updated as copies."""
        for i, flat in self._flat.items():
            if not self._orders[i].fits(self._params[i]):
                self._params[i].detach().copy_(self._orders[i].shaped(flat))

    # -- as a `ParamAndGrad` of measuring passes --

    def param(self, block: Block, part: BlockSegment) -> Tensor:
        return _part(self._flat, part)

    def grad(self, block: Block, part: BlockSegment) -> Tensor | None:
        return _part(self._grad, part)

    def largest(self, param: int) -> float:
        if not self._largest:  # of all, for which a device is waited for once
            norms = {i: _magnitude(grad) for i, grad in self._grad.items() if grad.numel()}
            self._largest = dict(
                zip(norms, to_host([torch.stack([*norms.values()])])[0].tolist(), strict=True)
            )
        return self._largest[param]

    # -- for an update --

    def pieces(
        self,
        block: Block,
        planes: Planes,
        *,
        param: Tensor | None = None,
        grad: Tensor | None = None,
    ) -> list[Piece]:
        return [
            Piece(
                param=_part(self._flat, part) if param is None else param[_in_block(part)],
                grad=_part(self._grad, part) if grad is None else grad[_in_block(part)],
                master=None,
                planes=tuple(
                    [
                        plane_part(p, part.offset, part.offset + part.numel, block.numel)
                        for p in planes.values()
                    ]
                ),
                hyper=self.hyper[part.param],
                step=self._step[part.param],
                counter=part.param,
                first=part.param_offset,
            )
            for part in block.segments
            if part.param in self._flat
        ]

    def save(self, block: Block, undo: Callable[..., Tensor]) -> bool:
        saved = undo()
        for part in block.segments:
            if part.param in self._flat:
                saved[_in_block(part)] = self._flat[part.param][_inside(part)]
        return True

    def restore(self, block: Block, planes: Planes) -> None:
        for part in block.segments:
            if part.param in self._flat:
                self._flat[part.param][_inside(part)] = planes["param_undo"][_in_block(part)]

    def touches(self, block: Block) -> bool:
        return any(part.param in self._flat for part in block.segments)

    def borrowed(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """No blocks: parameters and gradients are where their state is updated."""
        return ()

    def signature(self) -> None:
        """None: gradients have new memory in every iteration, so no table is reused."""

    def leaving(self, block: Block, weight: Tensor | None) -> Sequence[tuple[Tensor, Tensor]]:
        return ()

    def left(self, block: Block, copies: CopyTicket) -> None:
        """Nothing was borrowed."""

    def beside(
        self, blocks: Iterable[tuple[Block, bool]]
    ) -> tuple[Mapping[BlockId, Record], Sequence[Any]]:
        """Nothing: parameters and gradients are in memory."""
        return {}, ()

    def show(self, block: Block, into: Tensor) -> None:
        raise AssertionError("parameters of plain modules are their masters")

    def updated(self, block: Block) -> None:
        """Nobody waits for it."""

    def end(self) -> None:
        """Nothing is kept."""


def _magnitude(grad: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(grad, math.inf)
    return largest.double()


def _part(flat: Mapping[int, Tensor], part: BlockSegment) -> Tensor:
    return flat[part.param][_inside(part)]


def _inside(part: BlockSegment) -> slice:
    return slice(part.param_offset, part.param_offset + part.numel)


def _in_block(part: BlockSegment) -> slice:
    return slice(part.offset, part.offset + part.numel)
