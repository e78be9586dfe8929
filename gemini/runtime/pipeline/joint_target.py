"""JointStep: one step of all parts of a pipeline, on all ranks, or of none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.report import StepReport
from gemini.optim.step.driver import take_step
from gemini.optim.target import AmpInputs, Group
from gemini.runtime.gradients.cycle import PendingClip
from gemini.runtime.step.agreement import check_agreement
from gemini.runtime.step.target import ShardTarget

from .seats import Agreed, Seats
from .ties import add_up

if TYPE_CHECKING:
    from .together import PipelineOwner


class JointStep:
    """Steps and clips of this process's parts of a pipeline, collective over all stages.

    Every part has a target and a state of its own.
    """

    def __init__(self, members: Sequence[ShardTarget], together: PipelineOwner) -> None:
        self.members = list(members)
        self._together = together
        self._known_seats: Seats | None = None
        self._clipped: Agreed | None = None  # what a clip has measured for the coming step
        for member in self.members:
            member.joint = self

    # -- the step --

    def step(self, groups: Sequence[Group], amp: AmpInputs | None) -> StepReport:
        for member in self.members:
            member.check_step(amp)
        hypers = [member.hypers(groups) for member in self.members]
        chunks = self._reduced()
        report = self._step(hypers, chunks)
        self._clipped = None
        for member in self.members:
            member.gradients.used()
        return self.members[0].reported(report)

    def _step(
        self, hypers: Sequence[Sequence[Any]], chunks: Sequence[Sequence[Chunk]]
    ) -> StepReport:
        clips = [member.gradients.pending_clip for member in self.members]
        agreed = self._measured(clips) or self._agree(chunks, clips[0].clip.norm_type)
        for member in self.members:
            member.agree_on_trace()
        _check_any(agreed)
        if agreed.nonfinite is not None:
            skipped = [member.skipped(agreed.nonfinite, member.scale) for member in self.members]
            return skipped[0]
        steps = [
            member.agreed_step(hyper, pending.clip, agreement)
            for member, hyper, pending, agreement in zip(
                self.members, hypers, clips, agreed.parts, strict=True
            )
        ]
        return take_step(steps, partial(self._together.raise_what_any_raised, self.seats))

    def clip(self, clip: Clip) -> Tensor | None:
        """Clip the gradients of the coming step; the norm is over all stages.

        Returns the norm, or None if no norm was asked for.
        """
        chunks = self._reduced()
        for member in self.members:
            member.gradients.begin_clip()
        agreed = self._agree(chunks, clip.norm_type)
        _check_any(agreed)
        norm = None
        if clip.max_norm > 0:
            scale = self.members[0].cycle.control_vector.scale
            norm = clip.norm(agreed.parts[0].power_sum) / scale
        for member, agreement in zip(self.members, agreed.parts, strict=True):
            member.cycle.clip_with(clip, norm, agreement)
        self._clipped = agreed
        return norm

    def _reduced(self) -> list[list[Chunk]]:
        """Chunks with a gradient, by part. Collective over stages that tie weights."""
        for member in self.members:
            member.gradients.reduced()
        add_up((member.sharding, member.cycle) for member in self.members)
        return [member.gradients.present() for member in self.members]

    def _measured(self, clips: Sequence[PendingClip]) -> Agreed | None:
        """Agreement of the last clip; None if any stage has changed its gradients since.

        Collective if there was a clip.
        """
        # All stages had the clip, or none: so all of them are in the collective below, or none.
        if self._clipped is None:
            return None
        same = zip(clips, self._clipped.parts, strict=True)
        changed = any(pending.agreement is not agreement for pending, agreement in same)
        return None if self._together.any(changed) else self._clipped

    def _agree(self, chunks: Sequence[Sequence[Chunk]], norm_type: float) -> Agreed:
        agreed = self._vote(chunks, norm_type)
        if agreed.deviated:  # a gradient came late somewhere: reduce once more, everywhere
            for member in self.members:
                member.cycle.reducer.reduce_leftovers()
            agreed = self._vote([member.gradients.reduced() for member in self.members], norm_type)
        return agreed

    def _vote(self, chunks: Sequence[Sequence[Chunk]], norm_type: float) -> Agreed:
        seats = self.seats
        ballots = [
            member.gradients.ballot(mine, norm_type)
            for member, mine in zip(self.members, chunks, strict=True)
        ]
        agreed = self._together.vote(seats, ballots, norm_type)
        for member, agreement in zip(self.members, agreed.parts, strict=True):
            check_agreement(member.sharding.comm, agreement)
        if agreed.strayed:
            raise RuntimeError(
                f"the ranks of {', '.join(sorted(set(agreed.strayed)))} issued different "
                "collectives, and say so; weights and state of all stages are those of the last "
                "step"
            )
        return agreed

    @property
    def seats(self) -> Seats:
        """Seats of all parts that step together. Collective the first time.

        Raises ValueError on all ranks if the parts are not one whole model.
        """
        if self._known_seats is None:
            mine = [(member.sharding, member.stage) for member in self.members]
            self._known_seats = self._together.seated(mine)
        return self._known_seats


def _check_any(agreed: Agreed) -> None:
    if not agreed.any_present:
        raise RuntimeError("step() without a gradient; call schedule.step(...) first")
