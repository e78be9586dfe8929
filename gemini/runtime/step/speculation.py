"""Speculation of an engine's steps: blocks are updated while the backward before the step runs.

    begin     a backward begins that is expected to be the last before the step
    is_final  a chunk's gradient is reduced: update its blocks as new versions
    judge     the step has agreed: hold the blocks that were updated with the same inputs
    drop      drop all early updates: the state is about to be read, or gradients to be added to

Weights do not change before the step, so readers of weights need not ask. A changed gradient shows
by its version (ADR 0002).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemini.chunk.storage import Chunk
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.report import Speculated, Traffic
from gemini.optim.rules.speculation import BlockInputs, Learned, held
from gemini.optim.state.pieces import Updater
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import TieredState
from gemini.optim.step.speculation import Bound, Speculation
from gemini.optim.update.updaters import CpuUpdater
from gemini.placement.timetable.updates import IN_BACKWARD
from gemini.runtime.parts import Parts, update_of
from gemini.runtime.step.tail import StepTail
from gemini.runtime.step.views import ShardViews
from gemini.units import BlockId, ChunkId, ParamId

from .early_views import EarlyShardViews


@dataclass(frozen=True, slots=True)
class _Stops:
    """Ticket of a gradient that a speculation reads: `wait` stops the speculation."""

    _run: Speculation

    def ready(self) -> bool:
        return self._run.is_idle

    def wait(self) -> None:
        self._run.stop()


@dataclass(frozen=True, slots=True)
class Assumed:
    """Expected step: its updater and its view."""

    updater: CpuUpdater
    views: EarlyShardViews


class StepSpeculation:
    """Speculations of one engine's steps, of which at most one is under way.

    All methods run in the thread that trains. assume: given the parameters of the coming step,
    returns its predicted inputs; None: unknown, or not computed on the host.
    """

    def __init__(
        self,
        parts: Parts,
        tail: StepTail,
        tiered_state: TieredState,
        chunks: Sequence[Chunk],
        assume: Callable[[Sequence[ParamId]], Assumed | None],
    ) -> None:
        self.learned = Learned()
        self.num_held: int | None = None  # by the last step
        self._parts = parts
        self._tail = tail
        self._tiered_state = tiered_state
        self._chunks = chunks
        self._assume = assume
        self._taken: Sequence[ParamId] = ()  # by the last step
        self._was_clipped = False  # by the last step
        self._backwards = 0  # since then
        self._num_speculated = 0
        self._num_held = 0
        self._moved = Traffic()
        self._under_way: Speculation | None = None
        self._views: EarlyShardViews | None = None
        self._blocks: Mapping[ChunkId, tuple[int, list[Block]]] = {}
        self._before = Traffic()
        self._pid = os.getpid()
        events = parts.events
        events.backward.listen(self.begin)
        events.final.listen(self.is_final)
        events.dropped.listen(self.forget)
        events.changing.listen(self.drop)

    def close(self) -> None:
        """Stop, and listen to no event any more."""
        self.drop()
        events = self._parts.events
        events.backward.leave(self.begin)
        events.final.leave(self.is_final)
        events.dropped.leave(self.forget)
        events.changing.leave(self.drop)

    @property
    def applies(self) -> bool:
        """Whether blocks may be updated in backward."""
        return self._tiered_state.nvme is not None and update_of(self._parts) in IN_BACKWARD

    # -- in a backward --

    def begin(self) -> None:
        """Begin to speculate, if this backward is expected to be the last before the step."""
        # This backward adds to gradients that an earlier one of this step was thought to finish.
        self.drop()
        self._drop_what_is_left()
        parts = self._parts
        self._backwards += 1
        if not parts.reducer.reduces or not self.applies:
            return
        times = self._tail.times if self._tail.applies else None
        known = parts.reducer.follows_no_sync
        if not self.learned.begins(self._backwards, is_known_last=known, times=times):
            return
        nvme = self._tiered_state.nvme
        assert nvme is not None
        room = nvme.has_room_for_early(parts.storage.early_write_bytes)
        assumed = self._assume(self._taken) if room else None
        if assumed is None:
            return
        scale = parts.control_vector.read().scale
        bound = Bound(assumed.updater, scale, self.learned.max_norm)
        self._views, self._before = assumed.views, self._tiered_state.traffic()
        parts.storage.update_staging = assumed.views.files
        self._blocks = self._blocks_by_chunk()
        self._under_way = Speculation(nvme, assumed.updater, assumed.views, bound.is_passed_by)

    def _drop_what_is_left(self) -> None:
        """Drop early updates that a step judged, where Ctrl-C came before that step began."""
        if os.getpid() != self._pid:  # a forked child has nothing of it
            return
        nvme, params = self._tiered_state.nvme, self._parts.storage.params
        if nvme is not None:
            nvme.drop_early()
        if params is not None:
            params.rollback()

    def _blocks_by_chunk(self) -> Mapping[ChunkId, tuple[int, list[Block]]]:
        """(shard, blocks on disk) of every chunk."""
        nvme = self._tiered_state.nvme
        assert nvme is not None
        found: dict[ChunkId, tuple[int, list[Block]]] = {
            chunk.spec.id: (shard, []) for shard, chunk in enumerate(self._chunks)
        }
        for block in nvme.blocks:
            found[self._chunks[block.shard].spec.id][1].append(block)
        return found

    def is_final(self, chunk: Chunk) -> None:
        """Update the chunk's blocks: its reduced gradient is expected to stay until the step."""
        run, gradient = self._under_way, chunk.gradient
        if run is None or not gradient.is_reduced or chunk.spec.id not in self._blocks:
            return
        assert self._views is not None
        shard, blocks = self._blocks[chunk.spec.id]
        mark = gradient.mark
        if mark is not None and self._views.see(shard):
            if gradient.shard is None:  # in a file: a change of it would overwrite what is read
                gradient.updating = _Stops(run)
            run.add(blocks, gradient.shard, mark)

    # -- at the step --

    def judge(
        self, updater: Updater, views: ShardViews, taken: Sequence[ParamId]
    ) -> frozenset[BlockId]:
        """Blocks that were updated early with the very inputs that the step has agreed on.

        taken: the parameters that the step updates.
        """
        early = self._views
        # Stop before rows are compared: the speculation's thread would move them meanwhile.
        run = self._stopped()
        self._num_held, self._taken = 0, taken
        if not isinstance(updater, CpuUpdater):
            return frozenset()
        self._was_clipped = updater.inputs.factor != 1.0 / self._parts.control_vector.read().scale
        if run is None or early is None:
            return frozenset()
        blocks = {block.id: block for block in self._tiered_state.space.blocks}
        nvme = self._tiered_state.nvme
        assert nvme is not None
        assumed = nvme.state.assumed
        agreed = {
            block: BlockInputs(
                updater.inputs,
                views.inputs_of(blocks[block]),
                self._chunks[blocks[block].shard].gradient.mark,
            )
            for block in assumed
        }
        right = held(assumed, agreed)
        # New parameters of redone blocks come from other inputs: only held ones may be committed.
        early.files.drop(but=right)
        self._num_held = len(right)
        return right

    def forget(self) -> None:
        """Drop early updates: all gradients were dropped."""
        self.drop()
        if not self._tail.goes_on:
            self._drop_what_is_left()
        self._backwards = 0

    def drop(self) -> None:
        """Drop early updates. May be called any number of times."""
        views = self._views
        if self._stopped() is not None:
            assert self._tiered_state.nvme is not None and views is not None
            self._tiered_state.nvme.drop_early()
            views.files.drop()

    def _stopped(self) -> Speculation | None:
        """Stop the run under way and return it; None where there is none, or in a forked child."""
        run = self._under_way if os.getpid() == self._pid else None
        if run is not None:
            run.stop()
            assert self._views is not None
            self._views.files.end()
            self._under_way, self._views, self._blocks = None, None, {}  # and with them gradients
            self._parts.storage.update_staging = None
            nvme = self._tiered_state.nvme
            assert nvme is not None
            self._num_speculated += len(nvme.state.assumed)
            self._moved += self._tiered_state.traffic() - self._before
        return run

    def learn(self, clip: Clip, *, was_skipped: bool) -> tuple[Speculated, Traffic]:
        """Learn from a step: returns counts of its early updates, and the bytes they moved."""
        self.drop()  # a skipped step has not judged them
        found = Speculated(
            self._num_speculated, self._num_held, self._num_speculated - self._num_held
        )
        max_norm = clip.max_norm if clip.norm_type == 2 and clip.fixed_factor is None else 0.0
        disturbed = was_skipped or self._was_clipped
        self.learned = self.learned.after(
            self._backwards, found, was_disturbed=disturbed, max_norm=max_norm
        )
        self.num_held = found.held
        moved, self._moved = self._moved, Traffic()
        self._backwards = self._num_speculated = self._num_held = 0
        return replace(
            found,
            quiet_steps=self.learned.quiet_steps,
            needed_quiet_steps=self.learned.habit.quiet_steps,
        ), moved
