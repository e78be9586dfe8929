"""Pieces: blocks of state with their parameters and gradients, as an update sees them; and
updaters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gemini.optim.rules.report import Traffic
from gemini.tickets import CopyTicket
from gemini.units import BlockId

from .space import Block

if TYPE_CHECKING:
    from .flow import Record

Planes = dict[str, Tensor]  # plane name -> [n], or one for every group of elements


def plane_part(plane: Tensor, start: int, end: int, numel: int) -> Tensor:
    """Elements [start, end) of a plane of `numel`; of what groups share that of their groups, of
    which `start` begins one."""
    if plane.numel() == numel:
        return plane[start:end]
    group = _group_of(plane, numel)
    return plane[start // group : -(-end // group)]


def _group_of(plane: Tensor, numel: int) -> int:
    """Elements that share one value of a plane of `numel`: a power of two."""
    group = 1
    while -(-numel // group) > plane.numel():
        group *= 2
    return group


@dataclass(frozen=True, slots=True)
class Piece:
    """Run of elements of one group and one step count, all planes of it. All tensors are [n]."""

    param: Tensor  # what the model sees: fp32 or fp64, or the 16-bit copy that is written
    grad: Tensor  # of any float type; not changed
    master: Tensor | None  # fp32, or int16: what bf16 lacks; None where `param` is updated itself
    planes: tuple[Tensor, ...]  # in the order of `StateLayout.stored`; some have one for a group
    hyper: Any
    step: int  # counts from 1
    counter: int  # index of the parameter; of the first where neighbours are one piece
    first: int = 0  # its first element, in its parameter
    # uint8 [ceil(n / 8)]: bits that the update sets of what it changes (`update.changed_bits`)
    changed: Tensor | None = None

    @property
    def is_split(self) -> bool:
        """Whether the master's upper half is `param`; see `optim.rules.split_master`."""
        return self.master is not None and self.master.dtype == torch.int16

    def cut(self, start: int, end: int) -> Piece:
        """Elements [start, end) of every tensor."""
        tile, numel = slice(start, end), self.param.numel()
        return Piece(
            self.param[tile],
            self.grad[tile],
            None if self.master is None else self.master[tile],
            tuple(
                [
                    plane[tile] if plane.numel() == numel else plane_part(plane, start, end, numel)
                    for plane in self.planes
                ]
            ),
            self.hyper,
            self.step,
            self.counter,
            self.first + start,
            None if self.changed is None else self.changed[start // 8 : -(-end // 8)],
        )

    def tiles(self, numel: int) -> Iterator[Piece]:
        """The piece in runs of `numel`, a multiple of 64."""
        if self.param.numel() <= numel:
            yield self
            return
        all_of = self.param.numel()
        columns = [
            tensor.split(numel // _group_of(tensor, all_of))
            for tensor in (self.param, self.grad, *self.planes)
        ]
        masters: Sequence[Tensor | None] = [None] * len(columns[0])
        if self.master is not None:
            masters = self.master.split(numel)
        changed: Sequence[Tensor | None] = [None] * len(columns[0])
        if self.changed is not None:
            changed = self.changed.split(numel // 8)
        first = self.first
        for bits, master, param, grad, *planes in zip(changed, masters, *columns, strict=True):
            yield Piece(
                param, grad, master, tuple(planes), self.hyper, self.step, self.counter, first,
                bits,
            )  # fmt: skip
            first += numel

    def belonging_to(self, hyper: Any, step: int, counter: int, first: int) -> Piece:
        """Piece with the same tensors, of another parameter."""
        return replace(self, hyper=hyper, step=step, counter=counter, first=first)


class GradSegment(NamedTuple):
    """Elements of a run that belong to one parameter."""

    offset: int  # in the run
    numel: int
    counter: int  # index of the parameter


class BlockViews(Protocol):
    """Views that a step needs of the parameters and gradients of blocks."""

    def touches(self, block: Block) -> bool:
        """Whether a parameter of this block has a gradient."""
        ...

    def pieces(
        self,
        block: Block,
        planes: Planes,
        *,
        param: Tensor | None = None,
        grad: Tensor | None = None,
    ) -> Sequence[Piece]:
        """Pieces of this block that have a gradient; empty where none has.

        param, grad: [n] in place of its own. With a `param` there is no master.
        """
        ...

    def borrowed(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Blocks whose `pieces` are copies, on the device, of memory elsewhere."""
        ...

    def signature(self) -> object | None:
        """Signature: equal where `pieces` of blocks that borrow nothing are the same memory; None:
        unknown."""
        ...

    def leaving(self, block: Block, weight: Tensor | None) -> Sequence[tuple[Tensor, Tensor]]:
        """Copies of its updated parameters to where they live, from the device that updated it, to
        be made with those of its state. weight: [n] with its state, if masters are split."""
        ...

    def left(self, block: Block, copies: CopyTicket) -> None:
        """Note the copies that `leaving` was part of."""
        ...

    # -- around updates --

    def beside(
        self, blocks: Iterable[tuple[Block, bool]]
    ) -> tuple[Mapping[BlockId, Record], Sequence[Any]]:
        """What a step reads and writes in other files with blocks whose state is in a file, and
        buffers for that until `end`. With a block: whether it has a whole master."""
        ...

    def save(self, block: Block, undo: Callable[..., Tensor]) -> bool:
        """Copy the block's parameters, at least those with a gradient, into `undo()`: [n] of a
        dtype that holds their values; or into `undo(dtype)`, of theirs where there is a choice.

        False where they need none, since they do not change before the step counts.
        """
        ...

    def show(self, block: Block, into: Tensor) -> None:
        """Copy the block's new parameters to `into` [n], which goes to disk with its state."""
        ...

    def updated(self, block: Block) -> None:
        """Note that the parameters of this block are those of the step, or are left alone."""
        ...

    def restore(self, block: Block, planes: Planes) -> None:
        """Set the block's parameters from its master, or from `param_undo`."""
        ...

    def end(self) -> None:
        """End a step, however it went: nothing of it is under way, and nothing is kept of it."""
        ...


class Resident(Protocol):
    """Blocks whose state lies on the compute device; see `optim.state.slabs`."""

    tensors: Planes

    @property
    def blocks(self) -> Sequence[Block]: ...

    def planes(self, block: Block) -> Planes: ...


class Updater(Protocol):
    """Updater of blocks of state, wherever they lie."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether a block waits for others: see `optim.matrices.updater`."""
        ...

    @property
    def name(self) -> str: ...

    def update_block(self, block: Block, planes: Planes, views: BlockViews) -> CopyTicket | None:
        """Update one block with a gradient, whose state is in host memory.

        The ticket brings its state back, and borrowed parameters; None: it is done.
        """
        ...

    def update_resident(self, slab: Resident, views: BlockViews) -> None:
        """Update blocks that lie on the compute device."""
        ...

    def traffic(self) -> Traffic:
        """Bytes moved between host and device so far."""
        ...
