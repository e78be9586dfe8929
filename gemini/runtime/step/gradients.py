"""Gradients of a step: reduced, measured, clipped and agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.comm.ballot import Agreement, Ballot
from gemini.optim.rules.clipping import Clip
from gemini.optim.step.executor import Executor
from gemini.optim.step.gradients import GradientRun, Measured
from gemini.runtime.gradients.cycle import GradientCycle, PendingClip
from gemini.runtime.sharding import Sharding

from .agreement import check_agreement, exchange
from .executors import run_of
from .state.shard_state import StepCalls

if TYPE_CHECKING:
    from gemini.optim.step.triton_step import TritonStep


class StepGradients:
    """Gradients of all trainable chunks of one engine; `chunks` may grow."""

    def __init__(
        self,
        sharding: Sharding,
        cycle: GradientCycle,
        calls: StepCalls,
        executor: Executor,
        chunks: Sequence[Chunk],
    ) -> None:
        self._sharding, self._cycle = sharding, cycle
        self._calls = calls
        self._executor = executor
        self._chunks = chunks
        self.measure_leaving()

    def measure_leaving(self) -> None:
        """Measure gradients that leave the device as they leave."""
        self._runs = {chunk.spec.id: run_of(self._sharding.layout, chunk) for chunk in self._chunks}
        for chunk in self._chunks:
            run = self._runs[chunk.spec.id]
            chunk.gradient.measure = partial(self._executor.measure_leaving, run)

    def reduced(self) -> list[Chunk]:
        """Chunks that have a gradient, when all backwards have ended.

        Raises RuntimeError inside `no_sync` for gradients that no rank has reduced.
        """
        self._calls.begin()
        if not self._cycle.reducer.synchronise and self._cycle.reducer.leftover:
            raise RuntimeError(
                "gradients are not reduced inside no_sync(); leave it before you step or clip"
            )
        self._cycle.reducer.reduce_put_off()
        if self._sharding.comm.world_size == 1 and self._cycle.reducer.leftover:
            self._cycle.reducer.reduce_leftovers()  # several ranks agree on it first
        if self._cycle.hook is not None:  # behind backwards that reduced nothing
            self._cycle.reduce_what_is_left()
        return self.present()

    def present(self) -> list[Chunk]:
        """Chunks that have a gradient."""
        return [chunk for chunk in self._chunks if chunk.gradient.exists]

    def used(self) -> None:
        """Note that a step has used the gradients."""
        self._calls.gradients.after_step()

    # -- agreement of all ranks --

    def agree(self, chunks: Sequence[Chunk], norm_type: float | None) -> Agreement:
        """Agree with all ranks on norm, overflow and which parameters have a gradient.

        norm_type: None where measures go from device to device. Collective.
        """
        agreement = self._vote(chunks, norm_type)
        if agreement.deviated:  # a gradient came late on some rank: reduce once more, everywhere
            self._cycle.reducer.reduce_leftovers()
            self._cycle.reducer.forget_places()
            agreement = self._vote(self.present(), norm_type)
        return agreement

    def _vote(self, chunks: Sequence[Chunk], norm_type: float | None) -> Agreement:
        agreement = exchange(self._sharding, self.ballot(chunks, norm_type), norm_type or 2.0)
        check_agreement(self._sharding.comm, agreement)
        return agreement

    def ballot(self, chunks: Sequence[Chunk], norm_type: float | None) -> Ballot:
        """Ballot of this rank on these gradients."""
        log = self._sharding.comm.log
        found = Measured()
        if norm_type is not None:
            found = self._executor.measure(self._runs_of(chunks), norm_type)
        self._calls.gradients.tell_changes()
        here = [chunk.spec.id for chunk in chunks]
        log.record("votes", f"with gradients of chunks {here}")
        return Ballot(
            power_sum=found.power_sum,
            present=tuple(self._cycle.reducer.present),
            first_nonfinite=found.first_nonfinite,
            checksum=found.checksum,
            deviated=self._sharding.comm.world_size > 1 and self._cycle.reducer.leftover,
            sequence=log.digest,
        )

    def submit_measure(
        self, executor: TritonStep, chunks: Sequence[Chunk], clip: Clip
    ) -> tuple[bool, ...]:
        """Submit measures and vote to the device; returns which parameters have a gradient."""
        present = tuple(self._cycle.reducer.present)
        if self._sharding.comm.world_size > 1:
            present = self.agree(chunks, None).present
            chunks = self.present()
        check_any(present)
        comm = self._sharding.comm
        executor.submit_measure(self._runs_of(chunks), clip)
        executor.submit_vote(
            comm.rank, comm.world_size, lambda votes: comm.all_reduce(votes).wait()
        )
        return present

    def _runs_of(self, chunks: Sequence[Chunk]) -> list[GradientRun]:
        return [self._runs[chunk.spec.id] for chunk in chunks]

    # -- clipping --

    @property
    def pending_clip(self) -> PendingClip:
        """Clip of the coming step."""
        return self._cycle.pending_clip or PendingClip(self._sharding.precision_settings.clip)

    def clip(self, clip: Clip, device: TritonStep | None) -> Tensor | None:
        """Set the clip of the coming step; returns the norm before, fp64 0-d, where one is asked.

        The norm is that of gradients after earlier clips. device: its executor, which measures
        where the host need not know. Raises RuntimeError where there are no gradients.
        """
        chunks = self.reduced()
        self.begin_clip()
        if clip.max_norm == 0 and self._sharding.comm.world_size == 1:
            check_any(self._cycle.reducer.present)
            self._cycle.clip_with(clip)
            return None
        if device is not None:
            present = self.submit_measure(device, chunks, clip)
            found = device.unread_norm(clip)
            self._cycle.clip_with(clip, found, present=present)
            return found if clip.max_norm > 0 else None
        agreement = self.agree(chunks, clip.norm_type)
        check_any(agreement.present)
        if clip.max_norm == 0:
            self._cycle.clip_with(clip, agreement=agreement)
            return None
        norm = clip.norm(agreement.power_sum) / self._cycle.control_vector.scale
        self._cycle.clip_with(clip, norm, agreement)
        return norm

    def begin_clip(self) -> None:
        """Carry out the last clip. Raises RuntimeError where every step clips."""
        max_norm = self._sharding.precision_settings.max_norm
        if max_norm > 0:
            raise RuntimeError(
                f"GeminiDDP(max_norm={max_norm:g}) clips in every step; "
                "leave that away, or this call"
            )
        if self._cycle.pending_clip is not None:
            self._calls.gradients.carry_out_clip()


def check_any(present: Sequence[bool]) -> None:
    """Raise RuntimeError where no rank has a gradient of any parameter."""
    if not any(present):
        raise RuntimeError(
            "step() without a gradient; call loss.backward() first, on a loss of parameters that "
            "require one"
        )
