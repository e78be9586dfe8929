"""View of an engine's shards for one optimizer step: runs of a block that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gemini.chunk.gradient import ChunkGradient
from gemini.chunk.storage import Chunk
from gemini.optim.rules.state_layout import MASTER, REMAINDER, WEIGHT
from gemini.optim.state.memory import Memory, copy_alone
from gemini.optim.state.pieces import Piece, Planes
from gemini.optim.state.space import Block
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.tickets import CopyTicket
from gemini.units import BlockId, ChunkId, align_up

if TYPE_CHECKING:
    from gemini.optim.update.staging import DeviceStaging
    from gemini.runtime.memory.files.blocks import FileBlocks, Staged
    from gemini.runtime.memory.gradient_homes import GradientBlock, GradientHome
    from gemini.runtime.step.update_files import UpdateFiles


_NO_STATE = (MASTER, REMAINDER, WEIGHT)  # of the rule


@dataclass(frozen=True, slots=True)
class _PieceRange:
    """Elements [start, end) of a block, of one group and one step count."""

    start: int
    end: int
    hyper: Any
    step: int
    counter: int  # the parameter; the first where neighbours are one run
    first: int  # element of that parameter at `start`

    def is_like(self, other: _PieceRange) -> bool:
        return (self.hyper, self.step) == (other.hyper, other.step)


@dataclass(slots=True)
class _Loan:
    """Copies that a block's update works on, until `ShardViews.put`."""

    grad: GradientBlock | None = None
    param: Tensor | None = None  # [n] where the update runs
    staged: Staged | None = None  # of the file to which `param` goes
    coming: CopyTicket | None = None  # of `param` from there, where the update runs elsewhere
    weight: Tensor | None = None  # [n] in host memory, which goes to disk with the state


@dataclass(slots=True)
class _Shard:
    """What a step reads of a shard, also where the loop drops its gradient meanwhile."""

    memory: Tensor | None  # [S] where it lives, if that is memory
    grad: Tensor | None  # [S] on the device
    offloaded: torch.dtype | None  # of the gradient, if it waits elsewhere
    has_gradient: bool


class ShardViews:
    """View of shards and gradients for one step; see `optim.state.pieces.BlockViews`.

    Gradients and parameters in another tier are brought to the update, a block at a time; gradients
    are read ahead. Parameters that have a whole master are written, and not read.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        hyper: Sequence[Any],
        steps: Sequence[int],
        storage: ShardStorage,
        memory: Memory,
        *,
        staging: DeviceStaging | None,
        merges: bool,
        files: UpdateFiles | None = None,
    ) -> None:
        """`hyper[param]` is None where the step leaves a parameter alone; `steps` count from 1.

        staging: of the device whose kernels update, as they reach no host memory; None: the host
        updates. files: of the thread that updates, if it is not the one that trains; the step goes
        on there when `step()` has returned, and the loop may drop gradients.
        """
        self._chunks = chunks
        self._hyper = hyper
        self._step = steps
        self._storage = storage
        self._memory = memory
        self._staging = staging
        self._merges = merges
        self.files = files
        self._shards = [
            _Shard(
                None if chunk.files is not None else chunk.shard_memory,
                chunk.gradient.shard,
                chunk.gradient.offloaded_dtype,
                chunk.gradient.exists,
            )
            for chunk in chunks
        ]
        self._coming: list[Block] = []  # whose gradients are to be read, the next one last
        self._read: set[BlockId] = set()  # of these, blocks that did not wait for their turn
        self._ahead: dict[BlockId, GradientBlock] = {}
        self._loans: dict[BlockId, _Loan] = {}
        self._signature: object | None = None
        self._left: set[BlockId] = set()  # whose new weights have left with their state
        self._saving: tuple[CopyTicket, Tensor, Tensor] | None = None  # to here, by way of there
        self._borrowing = {  # whose shard or gradient is not on the device
            shard
            for shard, chunk in enumerate(chunks)
            if staging is not None
            and (chunk.files or chunk.shard_on_host or self._shards[shard].offloaded)
        }

    def let_go(self, shard: int) -> None:
        """Drop the gradient of this shard: all of its blocks are updated."""
        self._shards[shard].grad = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of gradients that the loop has dropped and updates still read."""
        pairs = zip(self._shards, self._chunks, strict=True)
        dropped = (kept.grad for kept, chunk in pairs if kept.grad is not chunk.grad)
        return sum(grad.nbytes for grad in dropped if grad is not None)

    def expect(self, blocks: Sequence[Block]) -> None:
        self._coming = [  # what no gradient updates never has a turn, and its shard may be let go
            block
            for block in reversed(blocks)
            if self._shards[block.shard].offloaded is not None and self.touches(block)
        ]
        self._read.clear()
        self._read_ahead()

    def touches(self, block: Block) -> bool:
        if self._shards[block.shard].has_gradient:
            for part in block.segments:
                if self._hyper[part.param] is not None:
                    return True
        return False

    def borrowed(self, blocks: Sequence[Block]) -> Sequence[Block]:
        borrowing = self._borrowing
        return [block for block in blocks if block.shard in borrowing] if borrowing else ()

    def signature(self) -> object:
        """Addresses of shards and gradients, and which parameters are updated."""
        if self._signature is None:
            places = []
            for kept in self._shards:
                grad = None if kept.grad is None else (kept.grad.data_ptr(), kept.grad.dtype)
                places.append((grad, None if kept.memory is None else kept.memory.data_ptr()))
            self._signature = places, [hyper is None for hyper in self._hyper]
        return self._signature

    def pieces(
        self,
        block: Block,
        planes: Planes,
        *,
        param: Tensor | None = None,
        grad: Tensor | None = None,
    ) -> list[Piece]:
        runs = self._runs(block) if self._shards[block.shard].has_gradient else []
        if not runs:
            return []
        state = tuple([plane for name, plane in planes.items() if name not in _NO_STATE])
        master = None if param is not None else planes.get(MASTER, planes.get(REMAINDER))
        param = self._param_of(block, planes) if param is None else param
        grad = self._grad_of(block) if grad is None else grad
        first = runs[0]
        whole = Piece(
            param, grad, master, state, first.hyper, first.step, first.counter, first.first
        )
        if len(runs) == 1 and first.end - first.start == block.numel:
            return [whole]
        return [
            whole.cut(run.start, run.end).belonging_to(run.hyper, run.step, run.counter, run.first)
            for run in runs
        ]

    def _runs(self, block: Block) -> list[_PieceRange]:
        """Runs of a block: neighbours of one group and one step count are one, gaps included.

        Gaps hold zeros and stay zero. Runs end at multiples of 64, so an element is never in a
        vector's tail, whatever the world size and the block.
        """
        runs: list[_PieceRange] = []
        for part in block.segments:
            hyper, step = self._hyper[part.param], self._step[part.param]
            if hyper is None:
                continue
            start, end = part.offset, part.offset + part.numel
            if end < block.numel:
                end = min(align_up(end, 64), block.numel)
            run = _PieceRange(start, end, hyper, step, part.param, part.param_offset)
            if self._merges and runs and runs[-1].end == start and runs[-1].is_like(run):
                run = replace(runs.pop(), end=end)
            runs.append(run)
        return runs

    def took_gradient(self, block: Block) -> None:
        loan = self._loans.get(block.id)
        if loan is not None and loan.grad is not None:
            loan.grad.give()
            loan.grad = None

    def left(self, block: Block, copies: CopyTicket) -> None:
        loan = self._loans.get(block.id)
        if loan is not None and loan.param is not None and loan.staged is None:
            self._chunks[block.shard].is_copied(copies)

    def put(self, block: Block, copies: CopyTicket | None = None) -> None:
        self._end_save()
        loan = self._loans.pop(block.id, None)
        ahead = self._ahead.pop(block.id, None)
        if ahead is not None:  # no parameter of it was updated
            ahead.give()
        if loan is None:
            return
        if loan.grad is not None:
            loan.grad.give()
        if loan.staged is not None:
            if copies is not None:
                copies.settle()
            if loan.weight is not None:
                copy_alone(loan.weight, loan.staged.values)
            self._param_files.write_block(*self._place(block), loan.staged)

    @property
    def _param_files(self) -> FileBlocks:
        files = self._storage.params if self.files is None else self.files.params
        assert files is not None
        return files

    def abandon(self) -> None:
        """Return all loans of a step that failed."""
        for ahead in self._ahead.values():
            ahead.give()
        for loan in self._loans.values():
            if loan.grad is not None:
                loan.grad.give()
            if loan.coming is not None:
                loan.coming.settle()
            if loan.staged is not None:
                self._param_files.give(loan.staged)
        self._ahead.clear()
        self._loans.clear()
        self._coming.clear()

    def save(self, block: Block, undo: Callable[[], Tensor]) -> bool:
        chunk = self._chunks[block.shard]
        if chunk.files is not None:  # files keep their last version
            return False
        if block.id in self._left:
            return True
        into = undo()
        if self._staging is None or chunk.shard_on_host:
            copy_alone(into, self._shard_of(block))
            return True
        self._end_save()  # of the block before, which may be on its way still
        through = into if into.is_pinned() else self._staging.host(block.numel, chunk.dtype)
        ticket = self._memory.copy(through, self._part_of(block))
        self._staging.arrive(ticket)
        self._saving = ticket, into, through
        return True

    def _end_save(self) -> None:
        """Wait for the copy of weights for the undo plane, before its block is updated."""
        if self._saving is None:
            return
        (ticket, into, through), self._saving = self._saving, None
        if not ticket.ready():
            ticket.settle()
        if through is not into:
            copy_alone(into, through)

    def leaving(self, block: Block, weight: Tensor | None) -> Sequence[tuple[Tensor, Tensor]]:
        loan = self._loans.get(block.id)
        if loan is None or loan.param is None:
            if weight is None or self._chunks[block.shard].shard_on_host:
                return ()
            self._left.add(block.id)
            return [(weight, self._part_of(block))]
        if loan.staged is None:
            return [(self._part_of(block), loan.param)]
        if weight is not None:
            loan.weight = weight
        return [(loan.staged.values, loan.param)]

    def restore(self, block: Block, planes: Planes) -> None:
        self._end_save()
        if self._chunks[block.shard].files is None:
            before = planes["param_undo"] if MASTER not in planes else planes[MASTER]
            self._shard_of(block).copy_(before)

    # -- inside --

    def _param_of(self, block: Block, planes: Planes) -> Tensor:
        """Parameters [n] of the block where the update runs, or memory for their new values."""
        chunk, staging = self._chunks[block.shard], self._staging
        if chunk.files is None and not (staging is not None and chunk.shard_on_host):
            return self._part_of(block)
        loan, master = self._loan(block), planes.get(MASTER)
        if chunk.files is None:
            there = self._part_of(block)
        else:
            files, loan.weight = self._param_files, planes.get(WEIGHT)
            begin = files.read_block if master is None else files.block_to_fill
            loan.staged = begin(*self._place(block))
            there = loan.staged.wait()
        if staging is None:
            loan.param = there
        elif master is not None:
            loan.param = staging.param(block.numel, chunk.dtype)
        else:
            loan.param, loan.coming = self._bring(there)
            chunk.is_copied(loan.coming)
        if master is not None:
            loan.param.copy_(master)  # gaps, and what this step leaves alone
        return loan.param

    def _grad_of(self, block: Block) -> Tensor:
        here = self._shards[block.shard].grad
        if here is not None:
            return here[block.shard_offset : block.shard_offset + block.numel]
        loan = self._loan(block)
        loan.grad = self._ahead.pop(block.id, None) or self._begin_grad(block)
        self._read.add(block.id)
        staging = self._staging
        values = loan.grad.bring(staging) if staging is not None else loan.grad.wait()
        self._read_ahead()
        return values

    def _bring(self, values: Tensor) -> tuple[Tensor, CopyTicket]:
        """Copy values to the device, for what is launched next."""
        assert self._staging is not None
        there = self._staging.param(values.numel(), values.dtype)
        return there, self._staging.bring([(there, values)])

    def _read_ahead(self) -> None:
        while self._coming:
            if self._coming[-1].id in self._read:
                self._coming.pop()
                continue
            shard = self._coming[-1].shard
            if len(self._ahead) >= self._storage.config.depth:
                return
            dtype = self._shards[shard].offloaded
            assert dtype is not None
            if not self._can_read_ahead(self._coming[-1], dtype):
                return
            block = self._coming.pop()
            self._ahead[block.id] = self._begin_grad(block)

    def _can_read_ahead(self, block: Block, dtype: torch.dtype) -> bool:
        home = self._home_of(self._chunks[block.shard].gradient)
        if self.files is not None and home is self._storage.gradient_files:
            return self.files.can_read_grad(self._place(block), dtype)
        return home.can_read_ahead(dtype)

    def _begin_grad(self, block: Block) -> GradientBlock:
        dtype = self._shards[block.shard].offloaded
        assert dtype is not None
        home = self._home_of(self._chunks[block.shard].gradient)
        if self.files is not None and home is self._storage.gradient_files:
            return self.files.read_grad(self._place(block), dtype)
        return home.read_block(*self._place(block), dtype)

    def _home_of(self, gradient: ChunkGradient) -> GradientHome:
        assert gradient.offload is not None
        return cast("GradientHome", gradient.offload)

    def _loan(self, block: Block) -> _Loan:
        return self._loans.setdefault(block.id, _Loan())

    def _place(self, block: Block) -> tuple[ChunkId, int]:
        """Chunk of a block, and the block's index in it."""
        index = block.shard_offset // self._storage.config.block_numel
        return self._chunks[block.shard].spec.id, index

    def _part_of(self, block: Block) -> Tensor:
        """[n] of a shard that lives in memory."""
        memory = self._shards[block.shard].memory
        assert memory is not None
        return memory[block.shard_offset : block.shard_offset + block.numel]

    def _shard_of(self, block: Block) -> Tensor:
        """[n] of it, for the host to read and write."""
        self._chunks[block.shard].settle_copies()
        return self._part_of(block)
