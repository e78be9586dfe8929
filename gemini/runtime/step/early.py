"""Spans of a step that are updated while backward runs, as soon as their gradients are final.

    final     a chunk's gradient is reduced, in the backward that is expected to be the step's last:
              its blocks are updated to second versions (`Slab.begin`), with the inputs that the
              step is expected to agree on: those of now, and neither a clip that bites nor a skip
    agreed    the step has its inputs: if they are the expected ones, to the bit, second versions of
              what has not changed since count as they are; all others are dropped
    (step)    updates what does not count, from its old version, as any step

With a tail (`update="both"`) its thread lets them count, when all ranks have voted. A step that
fails on a disk before is undone, and its second versions are dropped.

A rank does this alone: whatever it finds final, bits are those of a serial step. Until `agreed`
nothing that anybody reads is written. New weights wait in host memory with their state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gemini.chunk.gradient import ChunkGradient
from gemini.chunk.storage import Chunk
from gemini.optim.rules.report import Traffic
from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import BlockViews, Planes, Resident, Updater
from gemini.optim.state.slabs import Slab
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.target import Group
from gemini.placement.timetable.updates import EARLY_WINDOW, is_early
from gemini.runtime.events import EngineEvents
from gemini.runtime.memory.backend import Backend
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.runtime.overlap import UpdateOverlap
from gemini.runtime.schedule.reducer import Reducer
from gemini.tickets import CopyTicket
from gemini.units import BlockId, ParamId

from .views import Shard, ShardViews

if TYPE_CHECKING:
    from gemini.optim.step.triton_step import TritonStep
    from gemini.optim.update.triton_update import TritonUpdater
    from gemini.runtime.memory.changed_weights import ChangedWeights


class EarlyViews(ShardViews):
    """Views of spans whose new weights go to memory of their own, and not to the shard."""

    def __init__(self, weights: Mapping[int, Tensor], *args: Any, **options: Any) -> None:
        """weights: memory of new ones, [S] on the host, by shard."""
        super().__init__(*args, **options)
        self._weights = weights
        for shard in self._shards:  # of these no gradient is final
            shard.grad, shard.has_gradient = None, False
        self._borrowing = set(range(len(self._shards)))

    def is_final(self, shard: int) -> None:
        """Read the gradient that this shard has now."""
        found = self._shards[shard] = Shard.of(self._chunks[shard], reaches_host=False)
        found.param = None

    def leaving(self, block: Block, weight: Tensor | None) -> Sequence[tuple[Tensor, Tensor]]:
        return [(self.weight_of(block), self._brought.pop(block.id))]

    def left(self, block: Block, copies: CopyTicket) -> None:
        return

    def _bits(self, marks: ChangedWeights, block: Block) -> Tensor | None:
        marks.is_open = True  # what these bits are of is not changed before the step
        return super()._bits(marks, block)

    def weight_of(self, block: Block) -> Tensor:
        """[n]: new weights of a block."""
        weights = self._weights[block.shard]
        return weights[block.shard_offset : block.shard_offset + block.numel]

    def _bring_grad(self, block: Block, part: slice) -> Tensor:
        home = self._storage.host_gradients
        assert home is not None and self._staging is not None
        # its memory on the device is given back in the order of the stream that computes
        shard, arrival = home.copied(self._chunks[block.shard].spec.id)
        grad = self._staging.grad(block.numel, shard.dtype)
        self._staging.bring([(grad, shard[part])], arrival)
        return grad


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the next step is expected to be, as the last one was."""

    groups: Sequence[Group]  # of the optimizer, which a schedule changes in place
    taken: Sequence[ParamId]
    num_backwards: int


@dataclass(frozen=True, slots=True)
class _Early:
    """A span that was updated early."""

    block: Block
    slab: Slab
    gradient: ChunkGradient
    changes: int  # of the gradient, when it was read
    copies: CopyTicket  # that bring state and weights
    nbytes: int  # of its state

    @property
    def is_as_it_was(self) -> bool:
        """Whether neither its state nor its gradient has changed since."""
        return self.slab.has_begun(self.block) and self.gradient.changes == self.changes


class _Behind:
    """Ticket of what reads gradients early: whoever changes one comes behind it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def ready(self) -> bool:
        return False

    def wait(self) -> None:
        self._memory.beside()  # of the stream that asks now
        self._memory.join()


class EarlySpans:
    """Spans of one engine that are updated before their step. `chunks`, by shard, may grow.

    hypers_of: of the optimizer's groups; raises ValueError. by_param: of these, and of the
    parameters that a step takes.
    """

    def __init__(
        self,
        reducer: Reducer,
        storage: ShardStorage,
        backend: Backend,
        events: EngineEvents,
        overlap: UpdateOverlap,
        state: TieredState,
        chunks: Sequence[Chunk],
        executor: TritonStep,
        hypers_of: Callable[[Sequence[Group]], list[Any]],
        by_param: Callable[[Sequence[Any], Sequence[int]], list[Any]],
    ) -> None:
        self._state, self._chunks, self._events, self._overlap = state, chunks, events, overlap
        self._reducer, self._storage, self._backend = reducer, storage, backend
        self._executor, self._hypers_of, self._by_param = executor, hypers_of, by_param
        self._expected: _Expected | None = None
        self._taken: Sequence[ParamId] = ()  # by the last step
        self._num_before = 0  # backwards before the first of the coming step
        self._backward = -1  # in which spans were begun
        self._arrivals: Counter[int] = Counter()  # in the backward under way, by chunk
        self._usual: Counter[int] = Counter()  # in the last one
        self._final_at: dict[int, int] = {}  # by shard, the changes of a gradient that is final
        self._weights: dict[int, Tensor] = {}  # new ones [S] in host memory, by shard
        self._views: EarlyViews | None = None
        self._updater: TritonUpdater | None = None
        self._behind = _Behind(backend)
        self._waiting: deque[tuple[Block, ChunkGradient, int]] = deque()  # final, and not begun
        self._under_way: deque[CopyTicket] = deque()
        self._early: dict[BlockId, _Early] = {}
        self._counting: dict[BlockId, _Early] = {}  # of the last step, those that do not count yet
        events.final.listen(self._final)
        events.arrived.listen(self._arrived)
        events.dropped.listen(self.forget)
        events.keeping.listen(self._keeping)

    def close(self) -> None:
        """End what is under way, and listen no more."""
        self.settle()
        events = self._events
        events.final.leave(self._final)
        events.arrived.leave(self._arrived)
        events.dropped.leave(self.forget)
        events.keeping.leave(self._keeping)

    # -- in a backward --

    def _arrived(self, chunk: Chunk) -> None:
        """A gradient of a chunk has come. Where it is added to what is reduced already, the last
        one is known by their number."""
        if not self._reducer.reduces:
            return
        if self._backward != self._reducer.num_backwards:
            self._begin()
        number = chunk.spec.id
        self._arrivals[number] += 1
        is_sum = chunk.gradient.exists and not chunk.gradient.num_arrived
        if is_sum and self._arrivals[number] == self._usual[number]:
            self._final(chunk)
        self._feed()

    @torch.no_grad()
    def _final(self, chunk: Chunk) -> None:
        """Begin to update the blocks of a chunk whose gradient is reduced."""
        views, gradient = self._views, chunk.gradient
        shard = next((i for i, one in enumerate(self._chunks) if one is chunk), -1)
        home = self._storage.host_gradients
        if views is None or shard not in self._weights or not gradient.exists:
            return
        if gradient.offload is not None and gradient.offload is not home:
            return
        if self._final_at.get(shard) == gradient.changes:
            return
        self._final_at[shard] = gradient.changes
        views.is_final(shard)
        gradient.updating = self._behind
        self._waiting += [(block, gradient, gradient.changes) for block in self._blocks_of[shard]]
        self._feed()

    def _begin(self) -> None:
        """Begin the step as it is expected, if this backward is its last."""
        self.forget()  # what was begun in an earlier one, which was not
        expected, executor = self._expected, self._executor
        self._backward = self._reducer.num_backwards
        self._usual, self._arrivals = self._arrivals, Counter()
        if expected is None or self._backward - self._num_before != expected.num_backwards:
            return
        if not is_early(self._overlap.in_use()):
            return
        try:
            hypers = self._hypers_of(expected.groups)
        except ValueError:  # the step will say so
            return
        self._blocks_of: dict[int, list[Block]] = {shard: [] for shard in self._weights}
        for block in self._state.host:
            if block.shard in self._blocks_of:
                self._blocks_of[block.shard].append(block)
        executor.staging.begin(waits=False)
        # on the stream that trains, which is to measure the step's gradients into what this reads
        self._updater = executor.expecting(hypers, expected.taken)
        self._views = EarlyViews(
            self._weights, self._chunks, self._by_param(hypers, expected.taken),
            executor.next_steps(), self._storage, self._backend, staging=executor.staging,
            merges=executor.merges_parameters,
        )  # fmt: skip

    @torch.no_grad()
    def _feed(self) -> None:
        """Give streams what is final, as far as the window reaches. The host waits for nothing."""
        if not self._waiting:
            return
        under_way = self._under_way
        while under_way and under_way[0].ready():
            under_way.popleft()
        if len(under_way) >= EARLY_WINDOW:
            return
        with self._backend.beside():
            while self._waiting and len(under_way) < EARLY_WINDOW:
                self.update(*self._waiting.popleft())

    def update(self, block: Block, gradient: ChunkGradient, changes: int) -> None:
        """Begin to update a block to a second version, if its gradient has not changed since it was
        final."""
        slab, views, updater = self._state.host_slab(block), self._views, self._updater
        assert views is not None and updater is not None
        second, before = None, self._early.pop(block.id, None)
        if before is not None:  # a gradient came late
            before.copies.order()
        if slab is not None and gradient.changes == changes and views.touches(block):
            second = slab.begin(block)
        if slab is None or second is None:
            return
        copies = updater.update_block(block, slab.planes(block), views, second)
        nbytes = sum([plane.nbytes for plane in second.values()])
        self._early[block.id] = _Early(block, slab, gradient, changes, copies, nbytes)
        self._under_way.append(copies)
        self._state.put(copies)  # whoever writes to the first version waits until it was read

    # -- in a step --

    def agreed(self, updater: Updater, taken: Sequence[ParamId]) -> Updater:
        """Updater of a step that has begun with another: it commits early spans that count."""
        self._taken = taken
        early, expected, views = self._early, self._updater, self._views
        if not early:
            self.forget()
            return updater
        assert expected is not None and views is not None
        self.make_device_wait()
        is_expected = self._executor.decided_as(expected)
        kept = {i: one for i, one in early.items() if is_expected and one.is_as_it_was}
        self._early = {i: one for i, one in early.items() if i not in kept}
        self.forget()
        self._counting = kept
        return Committing(updater, kept, views)

    def undone(self) -> None:
        """Drop second versions of a step that is undone: none of them counts."""
        for one in self._counting.values():
            one.slab.drop(one.block)
        self._counting.clear()

    def stepped(self, groups: Sequence[Group]) -> None:
        """Expect the next step to be like this one."""
        now = self._reducer.num_backwards
        self._expected = _Expected(groups, self._taken, now - self._num_before)
        self._num_before = now
        self.forget()
        # here, and not in a backward: to pin memory waits for the device
        if is_early(self._overlap.in_use()):
            for shard in dict.fromkeys(block.shard for block in self._state.host):
                chunk = self._chunks[shard]
                if shard not in self._weights and chunk.files is None:
                    self._weights[shard] = self._backend.allocate_host(
                        chunk.spec.shard_numel, chunk.dtype
                    )

    def forget(self) -> None:
        """Drop second versions, and let what the device does next come behind what reads
        gradients."""
        if self._early:
            self.make_device_wait()
        for one in self._early.values():
            one.slab.drop(one.block)
        self._early.clear()
        self._waiting.clear()
        self._under_way.clear()
        self._final_at.clear()
        self._views = self._updater = None

    def _keeping(self, chunk: Chunk) -> None:
        """A shard is about to be written: that comes behind what reads it."""
        if self._early:
            self.make_device_wait()

    def settle(self) -> None:
        """Drop second versions, whose memory is about to move: the host waits for copies."""
        copies = [one.copies for one in self._early.values()]
        self.forget()
        for one in reversed(copies):  # they end in order
            one.settle()

    def make_device_wait(self) -> None:
        """Let what the device is given from now on come behind early updates and their copies."""
        self._behind.wait()
        for one in self._early.values():
            one.copies.order()


class Committing:
    """Updater of a step some of whose spans were updated early: these are committed.

    A span that is committed cannot be undone, as any that is updated in memory.
    """

    keeps_blocks = False

    def __init__(self, updater: Updater, early: dict[BlockId, _Early], made: EarlyViews) -> None:
        """early: spans that count, of which those that are committed are taken out. made: by which
        they were updated. updater: of the others."""
        self._updater, self._early, self._made = updater, early, made
        self._moved = Traffic()

    @property
    def name(self) -> str:
        return self._updater.name

    def traffic(self) -> Traffic:
        return self._updater.traffic() + self._moved

    def update_resident(self, slab: Resident, views: BlockViews) -> None:
        self._updater.update_resident(slab, views)

    def update_block(self, block: Block, planes: Planes, views: BlockViews) -> CopyTicket | None:
        early = self._early.get(block.id)
        if early is None:
            return self._updater.update_block(block, planes, views)
        early.slab.take_over(block)
        del self._early[block.id]
        weight = self._made.weight_of(block)
        nbytes = early.nbytes + weight.nbytes
        self._moved += Traffic(host_to_device=nbytes, device_to_host=nbytes)
        return cast("ShardViews", views).take_over(block, weight)
