"""What an optimizer step sees of an engine's shards: the runs of a block that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.gradient import ChunkGradient
from gemini.chunk.storage import Chunk
from gemini.units import BlockId, ChunkId, align_up
from optim.cpu_path import Piece
from optim.space import Block
from optim.state_layout import MASTER
from optim.updaters import Planes

from .elsewhere import GradientBlock, GradientFiles, GradientHome, HostGradients
from .shard_storage import ShardStorage
from .tensor_files import Staged


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements [start, end) of a block, of one group and one step count."""

    start: int
    end: int
    hyper: Any
    step: int
    counter: int  # the parameter; the first where neighbours are one run
    first: int  # element of that parameter at `start`

    def is_like(self, other: _Run) -> bool:
        return (self.hyper, self.step) == (other.hyper, other.step)


@dataclass(slots=True)
class _Loan:
    """What a block's update works on and does not live there; see `ShardViews.updated`."""

    grad: GradientBlock | None = None
    param: Tensor | None = None  # [n] where the update runs
    staged: Staged | None = None  # of the file to which `param` goes
    shard: Tensor | None = None  # [n] in memory, to which it goes


class ShardViews:
    """One step's view of shards and gradients; see `optim.tiered_state.BlockViews`.

    What is not on `device` is brought there block by block, gradients ahead of their turn. Where a
    master holds the weights, the 16-bit copy is only written.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        hyper: Sequence[Any],
        steps: Sequence[int],
        storage: ShardStorage,
        device: torch.device,
        *,
        merges: bool,
    ) -> None:
        """`hyper[param]` is None where the step leaves a parameter alone; `steps` count from 1."""
        self._chunks = chunks
        self._hyper = hyper
        self._step = steps
        self._storage = storage
        self._device = device
        self._merges = merges
        self._coming: list[Block] = []  # whose gradients are to be read, the next one last
        self._read: set[BlockId] = set()  # of these, blocks that did not wait for their turn
        self._ahead: dict[BlockId, GradientBlock] = {}
        self._loans: dict[BlockId, _Loan] = {}

    def expect(self, blocks: Sequence[Block]) -> None:
        self._coming = [block for block in reversed(blocks) if self._grad_is_elsewhere(block)]
        self._read.clear()
        self._read_ahead()

    def pieces(self, block: Block, planes: Planes) -> list[Piece]:
        chunk = self._chunks[block.shard]
        runs = self._runs(block) if chunk.gradient.exists else []
        if not runs:
            return []
        state = tuple(plane for name, plane in planes.items() if name != MASTER)
        whole = Piece(
            param=self._param_of(block, planes),
            grad=self._grad_of(block),
            master=planes.get(MASTER),
            planes=state,
            hyper=None,
            step=0,
            counter=0,
        )
        return [
            whole.cut(run.start, run.end).belonging_to(run.hyper, run.step, run.counter, run.first)
            for run in runs
        ]

    def _runs(self, block: Block) -> list[_Run]:
        """Neighbours of one group and one step count as one run, the gaps between them included.

        Gaps hold zeros and stay zero. Runs end at multiples of 64, so an element is never in a
        vector's tail, whatever the world size and the block.
        """
        runs: list[_Run] = []
        for part in block.parts:
            hyper, step = self._hyper[part.param], self._step[part.param]
            if hyper is None:
                continue
            start, end = part.offset, min(align_up(part.offset + part.numel, 64), block.numel)
            run = _Run(start, end, hyper, step, part.param, part.param_offset)
            if self._merges and runs and runs[-1].end == start and runs[-1].is_like(run):
                run = replace(runs.pop(), end=end)
            runs.append(run)
        return runs

    def updated(self, block: Block) -> None:
        """Take back what the update of a block worked on; its parameters go where they live."""
        loan = self._loans.pop(block.id, None)
        ahead = self._ahead.pop(block.id, None)
        if ahead is not None:  # no parameter of it was updated
            ahead.give()
        if loan is None:
            return
        if loan.grad is not None:
            loan.grad.give()
        if loan.param is None:
            return
        if loan.shard is not None:
            loan.shard.copy_(loan.param)
        if loan.staged is not None:
            if loan.param is not loan.staged.values:
                loan.staged.values.copy_(loan.param)
            assert self._storage.params is not None
            self._storage.params.write_block(*self._place(block), loan.staged)

    def abandon(self) -> None:
        """The step failed: take everything back, and keep nothing of it."""
        for ahead in self._ahead.values():
            ahead.give()
        for loan in self._loans.values():
            if loan.grad is not None:
                loan.grad.give()
            if loan.staged is not None:
                assert self._storage.params is not None
                self._storage.params.give(loan.staged)
        self._ahead.clear()
        self._loans.clear()
        self._coming.clear()

    def save(self, block: Block, undo: Callable[[], Tensor]) -> bool:
        if self._chunks[block.shard].files is not None:  # files keep their last version
            return False
        undo().copy_(self._shard_of(block))
        return True

    def restore(self, block: Block, planes: Planes) -> None:
        if self._chunks[block.shard].files is None:
            before = planes["param_undo"] if MASTER not in planes else planes[MASTER]
            self._shard_of(block).copy_(before)

    # -- inside --

    def _param_of(self, block: Block, planes: Planes) -> Tensor:
        """[n] on the device that holds, or will hold, the block's parameters."""
        chunk = self._chunks[block.shard]
        if chunk.files is None:
            shard = self._shard_of(block)
            if shard.device == self._device:
                return shard
            loan = self._loan(block)
            loan.shard, loan.param = shard, shard.to(self._device)
            return loan.param
        files = self._storage.params
        assert files is not None
        loan = self._loan(block)
        place = self._place(block)
        if MASTER in planes:
            loan.staged = files.block_to_fill(*place)
            loan.staged.values.copy_(planes[MASTER])  # gaps, and what this step leaves alone
        else:
            loan.staged = files.read_block(*place)
            loan.staged.wait()
        loan.param = loan.staged.values.to(self._device)
        return loan.param

    def _grad_of(self, block: Block) -> Tensor:
        gradient = self._chunks[block.shard].gradient
        if gradient.shard is not None:
            return gradient.shard[block.shard_offset : block.shard_offset + block.numel]
        loan = self._loan(block)
        loan.grad = self._ahead.pop(block.id, None) or self._begin_grad(block)
        self._read.add(block.id)
        values = loan.grad.wait()
        self._read_ahead()
        return values.to(self._device)

    def _read_ahead(self) -> None:
        while self._coming:
            if self._coming[-1].id in self._read:
                self._coming.pop()
                continue
            gradient = self._chunks[self._coming[-1].shard].gradient
            if len(self._ahead) >= self._storage.config.depth:
                return
            assert gradient.dtype_elsewhere is not None
            if not self._home_of(gradient).can_read_ahead(gradient.dtype_elsewhere):
                return
            block = self._coming.pop()
            self._ahead[block.id] = self._begin_grad(block)

    def _begin_grad(self, block: Block) -> GradientBlock:
        gradient = self._chunks[block.shard].gradient
        assert gradient.dtype_elsewhere is not None
        home = self._home_of(gradient)
        return home.read_block(*self._place(block), gradient.dtype_elsewhere)

    def _home_of(self, gradient: ChunkGradient) -> GradientHome:
        home = gradient.elsewhere
        assert isinstance(home, GradientFiles | HostGradients)
        return home

    def _grad_is_elsewhere(self, block: Block) -> bool:
        return self._chunks[block.shard].gradient.dtype_elsewhere is not None

    def _loan(self, block: Block) -> _Loan:
        return self._loans.setdefault(block.id, _Loan())

    def _place(self, block: Block) -> tuple[ChunkId, int]:
        """The chunk, and which block of it."""
        index = block.shard_offset // self._storage.config.block_numel
        return self._chunks[block.shard].spec.id, index

    def _shard_of(self, block: Block) -> Tensor:
        shard = self._chunks[block.shard].shard
        return shard[block.shard_offset : block.shard_offset + block.numel]
