"""View of an engine's shards for one optimizer step: runs of a block that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.optim.rules.state_layout import MASTER, REMAINDER, WEIGHT
from gemini.optim.state.memory import Memory, copy_alone
from gemini.optim.state.pieces import Piece, Planes
from gemini.optim.state.space import Block
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.tickets import CopyTicket
from gemini.units import BUFFERS_AHEAD, BlockId, align_up

if TYPE_CHECKING:
    from gemini.nvme import Buffer
    from gemini.optim.update.staging import DeviceStaging
    from gemini.runtime.memory.changed_weights import ChangedWeights
    from gemini.runtime.memory.files.tensor_files import TensorFiles

    from .beside_state import BesideState, Buffers


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
class Shard:
    """What a step reads of a shard, also where the loop drops its gradient meanwhile."""

    memory: Tensor | None  # [S] where it lives, if that is memory
    param: Tensor | None  # the same, if what updates reaches it
    grad: Tensor | None  # [S] on the device
    offloaded: torch.dtype | None  # of the gradient, if it waits elsewhere
    has_gradient: bool

    @classmethod
    def of(cls, chunk: Chunk, *, reaches_host: bool) -> Shard:
        memory, gradient = None if chunk.files is not None else chunk.shard_memory, chunk.gradient
        param = memory if reaches_host or not chunk.shard_on_host else None
        return cls(memory, param, gradient.shard, gradient.offloaded_dtype, gradient.exists)


class ShardViews:
    """View of shards and gradients for one step; see `optim.state.pieces.BlockViews`.

    Gradients and parameters in another memory are brought to the update, a block at a time; those
    in files come with the block's state (`BesideState`).
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
        goes_on: bool = False,
        num_waiting: int = 0,
    ) -> None:
        """`hyper[param]` is None where the step leaves a parameter alone; `steps` count from 1.

        staging: of the device whose kernels update, as they reach no host memory; None: the host
        updates. goes_on: the step goes on when `step()` has returned, in a thread of its own, and
        the loop may drop gradients. num_waiting: blocks that wait for others of the step.
        """
        self._chunks = chunks
        self._hyper = hyper
        self._step = steps
        self._storage = storage
        self._memory = memory
        self._staging = staging
        self._merges = merges
        self.goes_on, self._num_waiting = goes_on, num_waiting
        self.watch: Callable[[BlockId], None] | None = None  # told of every block that is updated
        self._shards = [Shard.of(chunk, reaches_host=staging is None) for chunk in chunks]
        self._beside: dict[BlockId, BesideState] = {}
        self._acquired_from: list[TensorFiles] = []  # files whose buffers these are in
        self._brought: dict[BlockId, Tensor] = {}  # parameters [n] on the device that updates
        self._coming: CopyTicket | None = None  # the last one to there from a buffer of files
        self._signature: object | None = None
        self._left: set[BlockId] = set()  # whose new weights have left with their state
        self._saving: dict[BlockId, CopyTicket] = {}  # weights on their way to the host
        self._borrowing = {  # whose shard or gradient is not on the device
            shard
            for shard, chunk in enumerate(chunks)
            if staging is not None
            and (chunk.files or chunk.shard_on_host or self._shards[shard].offloaded)
        }

    def let_go(self, shard: int) -> None:
        """Let readers of this shard come behind its update, and drop its gradient."""
        self._memory.join()
        self._shards[shard].grad = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of gradients that the loop has dropped and updates still read."""
        pairs = zip(self._shards, self._chunks, strict=True)
        dropped = (kept.grad for kept, chunk in pairs if kept.grad is not chunk.grad)
        return sum(grad.nbytes for grad in dropped if grad is not None)

    def beside(
        self, blocks: Iterable[tuple[Block, bool]]
    ) -> tuple[Mapping[BlockId, BesideState], Sequence[Buffers]]:
        storage, found = self._storage, self._beside
        if not storage.files:
            return found, ()
        from .beside_state import BesideState

        acquired: dict[TensorFiles, list[Buffer]] = {}
        for block, has_master in blocks:
            chunk, grads = self._chunks[block.shard], None
            if not self.touches(block):
                continue
            params = None if chunk.files is None else storage.params
            dtype, home = self._shards[block.shard].offloaded, storage.gradient_files
            if dtype is not None and home is not None and chunk.gradient.offload is home:
                grads = home.files_of(chunk.spec.id, dtype)
            if params is None and grads is None:
                continue
            index = block.shard_offset // storage.config.block_numel
            found[block.id] = BesideState(
                block.id, chunk.spec.id, index, params, not has_master, grads
            )
            for files in (params, grads):
                if files is not None and files not in acquired:
                    self._acquired_from.append(files)
                    acquired[files] = self._acquire(files)
        sets = zip(*acquired.values(), strict=False)
        return found, [dict(zip(acquired, one, strict=True)) for one in sets]

    def _acquire(self, files: TensorFiles) -> list[Buffer]:
        # With those of the thread that trains, a tail would wait for reads that wait for the tail.
        count = self._num_waiting + (BUFFERS_AHEAD if self.goes_on else 0)
        return files.acquire_buffers(count, to_thread=self.goes_on)

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
            marks = self._storage.changed
            bits = [] if marks is None else [bits.data_ptr() for bits in marks.bits.values()]
            self._signature = places, [hyper is None for hyper in self._hyper], bits
        return self._signature

    def pieces(
        self,
        block: Block,
        planes: Planes,
        *,
        param: Tensor | None = None,
        grad: Tensor | None = None,
    ) -> list[Piece]:
        shard = self._shards[block.shard]
        kept = self._storage.changed if param is None else None
        runs = self._runs(block) if shard.has_gradient else []
        if not runs:
            return []
        state: tuple[Tensor, ...] = ()
        for name, plane in planes.items():
            if name not in _NO_STATE:
                state += (plane,)
        master = None if param is not None else planes.get(MASTER, planes.get(REMAINDER))
        part = slice(block.shard_offset, block.shard_offset + block.numel)
        if param is None:
            here = shard.param
            param = self._bring_param(block, planes) if here is None else here[part]
        if grad is None:
            grad = self._bring_grad(block, part) if shard.grad is None else shard.grad[part]
        first = runs[0]
        whole = Piece(
            param, grad, master, state, first.hyper, first.step, first.counter, first.first,
            None if kept is None else self._bits(kept, block),
        )  # fmt: skip
        if len(runs) == 1 and first.end - first.start == block.numel:
            return [whole]
        return [
            whole.cut(run.start, run.end).belonging_to(run.hyper, run.step, run.counter, run.first)
            for run in runs
        ]

    def _bits(self, marks: ChangedWeights, block: Block) -> Tensor | None:
        """Bits of what the step changes of a block."""
        start = block.shard_offset
        return marks.of(self._chunks[block.shard].spec.id, start, start + block.numel)

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

    def left(self, block: Block, copies: CopyTicket) -> None:
        chunk = self._chunks[block.shard]
        if self._brought.pop(block.id, None) is not None and chunk.files is None:
            chunk.is_copied(copies)

    def updated(self, block: Block) -> None:
        if self._saving:
            self._end_save(block)
        if self.watch is not None:
            self.watch(block.id)

    def end(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None and not coming.ready():  # those before it too: they are of one stream
            coming.settle()
        for files in self._acquired_from:
            files.release_buffers()
        for kept in (self._acquired_from, self._beside, self._brought):
            kept.clear()

    def save(self, block: Block, undo: Callable[..., Tensor]) -> bool:
        chunk = self._chunks[block.shard]
        if chunk.files is not None:  # files keep their last version
            return False
        self._copy(block, undo(chunk.dtype))
        return True

    def show(self, block: Block, into: Tensor) -> None:
        if self._chunks[block.shard].files is not None:
            copy_alone(into, self._in_file(block))
        elif block.id not in self._left:
            self._copy(block, into)

    def _copy(self, block: Block, into: Tensor) -> None:
        """Copy parameters in memory to the host's, and go on before they are there."""
        chunk = self._chunks[block.shard]
        if self._staging is None or chunk.shard_on_host:
            copy_alone(into, self._shard_of(block))
            return
        # `_out` has it before the block's new state, so it is there if that has left
        ticket = self._saving[block.id] = self._memory.copy_all([(into, self._part_of(block))])
        self._staging.arrive(ticket)

    def _end_save(self, block: Block) -> None:
        """Wait for the copy of a block's weights, before they are written or read."""
        ticket = self._saving.pop(block.id, None)
        if ticket is not None and not ticket.ready():
            ticket.settle()

    def leaving(self, block: Block, weight: Tensor | None) -> Sequence[tuple[Tensor, Tensor]]:
        brought, chunk = self._brought.get(block.id), self._chunks[block.shard]
        if brought is not None:
            there = self._part_of(block) if chunk.files is None else self._in_file(block)
            return [(there, brought)]
        if weight is None or chunk.shard_on_host:
            return ()
        self._left.add(block.id)
        return [(weight, self._part_of(block))]

    def take_over(self, block: Block, weight: Tensor) -> CopyTicket | None:
        """Begin to bring new weights [n] of a block, which are in host memory, to its shard.

        Returns the copies that the host waits for before it reads the shard; None: none.
        """
        chunk, staging, there = self._chunks[block.shard], self._staging, self._part_of(block)
        assert staging is not None
        staging.use(block.id, in_window=True)
        if not chunk.shard_on_host:
            staging.pass_by([(there, weight)])
            return None
        # By way of the device: its links copy, and the host waits for nothing.
        brought = staging.param(block.numel, chunk.dtype)
        staging.bring([(brought, weight)])
        copies = staging.take_back([(there, brought)])
        chunk.is_copied(copies)
        return copies

    def restore(self, block: Block, planes: Planes) -> None:
        self._end_save(block)
        if self._chunks[block.shard].files is None:
            before = planes["param_undo"] if MASTER not in planes else planes[MASTER]
            self._shard_of(block).copy_(before)

    # -- inside --

    def _bring_param(self, block: Block, planes: Planes) -> Tensor:
        """Parameters [n] of the block where the update runs, or memory for their new values."""
        chunk, staging = self._chunks[block.shard], self._staging
        there = self._part_of(block) if chunk.files is None else self._in_file(block)
        master, param = planes.get(MASTER), there
        if staging is not None:
            param = self._brought[block.id] = staging.param(block.numel, chunk.dtype)
            if master is None:
                coming = staging.bring([(param, there)])
                if chunk.files is None:
                    chunk.is_copied(coming)
                else:
                    self._coming = coming
        if master is not None:
            param.copy_(master)  # gaps, and what this step leaves alone
        return param

    def _in_file(self, block: Block) -> Tensor:
        """Parameters [n] in the buffer that goes to their file."""
        param = self._beside[block.id].param
        assert param is not None
        return param

    def _bring_grad(self, block: Block, part: slice) -> Tensor:
        """Gradient [n] of the block where the update runs. part: of the shard."""
        beside, arrival = self._beside.get(block.id), None
        there = None if beside is None else beside.grad
        if there is None:
            home = self._storage.host_gradients
            assert home is not None
            shard, arrival = home.arrived(self._chunks[block.shard].spec.id)
            there = shard[part]
        if self._staging is None:
            if arrival is not None:
                arrival.settle()
            return there
        grad = self._staging.grad(block.numel, there.dtype)
        coming = self._staging.bring([(grad, there)], arrival)
        if arrival is None:
            self._coming = coming
        return grad

    def _part_of(self, block: Block) -> Tensor:
        """[n] of a shard that lives in memory."""
        memory = self._shards[block.shard].memory
        assert memory is not None
        return memory[block.shard_offset : block.shard_offset + block.numel]

    def _shard_of(self, block: Block) -> Tensor:
        """[n] of it, for the host to read and write."""
        self._chunks[block.shard].settle_copies()
        return self._part_of(block)
