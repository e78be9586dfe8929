"""Speculation of an engine's steps: blocks are updated while the backward before them runs.

    begin     a backward has begun that is expected to be the last before the step
    is_final  the gradient of a chunk is reduced: its blocks are updated beside their last version
    judge     the step has agreed: the blocks that were updated with just that are held
    drop      somebody is about to look at the state, or gradients are added to: nothing was done

Weights do not change before the step, so who looks at them need not ask. A gradient that is changed
shows by its version (ADR 0002).
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
    """A ticket: nothing is read for a speculation any more."""

    _run: Speculation

    def ready(self) -> bool:
        return self._run.is_idle

    def wait(self) -> None:
        self._run.stop()


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a step is expected to be: who updates, and what it sees."""

    updater: CpuUpdater
    views: EarlyShardViews


class StepSpeculation:
    """Of one engine's steps, in the thread that trains: at most one is under way.

    assume: what the coming step will agree on, if it updates these parameters; None: it is not
    known, or not done on the host.
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
        """Nothing is under way, and nobody tells it any more."""
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
        """A backward begins, behind the end of the last step."""
        # A backward that is not the last one before the step changes gradients that blocks were
        # updated with.
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
        """Ctrl-C may come when a step has judged what was done early, and before it begins."""
        if os.getpid() != self._pid:  # a forked child has nothing of it
            return
        nvme, params = self._tiered_state.nvme, self._parts.storage.params
        if nvme is not None:
            nvme.drop_early()
        if params is not None:
            params.rollback()

    def _blocks_by_chunk(self) -> Mapping[ChunkId, tuple[int, list[Block]]]:
        """The shard of each, and its blocks on disk."""
        nvme = self._tiered_state.nvme
        assert nvme is not None
        found: dict[ChunkId, tuple[int, list[Block]]] = {
            chunk.spec.id: (shard, []) for shard, chunk in enumerate(self._chunks)
        }
        for block in nvme.blocks:
            found[self._chunks[block.shard].spec.id][1].append(block)
        return found

    def is_final(self, chunk: Chunk) -> None:
        """Its gradient, if it is reduced by now, is expected to stay as it is until the step."""
        run, gradient = self._under_way, chunk.gradient
        if run is None or not gradient.is_reduced or chunk.spec.id not in self._blocks:
            return
        assert self._views is not None
        shard, blocks = self._blocks[chunk.spec.id]
        mark = gradient.mark
        if mark is not None and self._views.see(shard):
            if gradient.shard is None:  # who changes it writes over what is read
                gradient.updating = _Stops(run)
            run.add(blocks, gradient.shard, mark)

    # -- behind it --

    def judge(
        self, updater: Updater, views: ShardViews, taken: Sequence[ParamId]
    ) -> frozenset[BlockId]:
        """The step has agreed on these inputs: the blocks that were updated with just those.

        taken: the parameters that it updates.
        """
        early = self._views
        # Stopped before anything is asked: from here on no row moves but by the step.
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
        # Parameters in files were written with their state; those of blocks that the step does
        # again are written again.
        early.files.drop(but=right)
        self._num_held = len(right)
        return right

    def forget(self) -> None:
        """All gradients were dropped."""
        self.drop()
        if not self._tail.goes_on:
            self._drop_what_is_left()
        self._backwards = 0

    def drop(self) -> None:
        """Nothing was done before the step. Any number of times."""
        views = self._views
        if self._stopped() is not None:
            assert self._tiered_state.nvme is not None and views is not None
            self._tiered_state.nvme.drop_early()
            views.files.drop()

    def _stopped(self) -> Speculation | None:
        """What was under way, and is not any more. In a forked child there is nothing."""
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
        """Behind a step: what was done before it, and what that has moved."""
        self.drop()  # what a step that is skipped has not judged
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
