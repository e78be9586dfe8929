"""A step as a machine by block, and what drives it; the same for plain modules and for shards.

    submit     blocks on disk begin to come, in their order
    prepare    one after the other is updated beside its last version
    agree      with who else has a say: all of it counts, or nothing
    confirm    what is on disk counts, and what is in memory is updated; or `undo`

Up to `confirm` nothing that counts has changed (ADR 0002). Who drives is free to do something else
between any two blocks: `TargetStep` waits for nothing but the block it is asked to prepare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

import torch

from gemini.units import BlockId
from optim.rules.report import StepReport, Traffic
from optim.state.held_signals import HeldSignals
from optim.state.pieces import Updater
from optim.state.tiered_state import BlockViews, TieredState


class Stage(Enum):
    """Of one block on disk, in one step."""

    SUBMITTED = "submitted"  # it is as the last step left it
    PREPARED = "prepared"  # updated beside its last version; its parameters may have changed
    CONFIRMED = "confirmed"  # the new version counts
    UNDONE = "undone"  # the last version counts, and parameters are those of the last step


class Versions(Protocol):
    """Files that a step writes beside those of the state, and that count with them."""

    def check_step(self, also_bytes: int) -> None:
        """Raise if a step must not begin that writes them, and so many bytes more."""
        ...

    def flush(self) -> None:
        """Wait for all writes. Raises what went wrong."""
        ...

    def commit(self, step: int) -> None:
        """What was written counts. Does not raise after a `flush`."""
        ...

    def rollback(self) -> None:
        """Forget what was written."""
        ...


class TargetStep:
    """One step of one target's state. `number` counts from 1; `files` count before the state does:
    `nvme.recover` finds the step before in either file."""

    def __init__(
        self,
        tiers: TieredState,
        updater: Updater,
        views: BlockViews,
        number: int,
        files: Versions | None = None,
    ) -> None:
        self._tiers = tiers
        self._updater = updater
        self._views = views
        self._number = number
        self._files = files
        self._stages: dict[BlockId, Stage] = {}

    @property
    def stages(self) -> Mapping[BlockId, Stage]:
        """Of every block on disk, since `submit`."""
        return self._stages

    @property
    def updater(self) -> Updater:
        return self._updater

    def submit(self) -> None:
        """Begin. Raises where the disk's budget has no room for the step; then call `undo`."""
        nvme = self._tiers.nvme
        if self._files is not None:
            self._files.check_step(0 if nvme is None else nvme.written_bytes_per_step)
        if nvme is not None:
            self._stages = {block.id: Stage.SUBMITTED for block in nvme.order}
            self._views.expect(nvme.order)
            nvme.begin_step()

    @property
    def has_more(self) -> bool:
        """Whether a block is to be prepared."""
        nvme = self._tiers.nvme
        return nvme is not None and nvme.has_more

    def prepare_next(self) -> bool:
        """Update the next block on disk beside its last version; False where there is none.

        On an error call `undo`.
        """
        nvme = self._tiers.nvme
        brought = None if nvme is None else nvme.bring(self._views.save)
        if nvme is None or brought is None:
            return False
        block, planes = brought
        self._stages[block.id] = Stage.PREPARED
        nvme.take_back(self._updater.update_staged(block, planes, self._views))
        return True

    def settle(self) -> None:
        """Wait until all that was prepared is on disk. On an error call `undo`."""
        if self._tiers.nvme is not None:
            self._tiers.nvme.flush()
        if self._files is not None:
            self._files.flush()

    def confirm(self) -> None:
        """Make it count, and update what is in memory. Does not fail behind `settle`."""
        if self._files is not None:
            self._files.commit(self._number)
        self._tiers.confirm(self._number)
        self._set(Stage.CONFIRMED)
        self._tiers.update_in_memory(self._updater, self._views)

    def undo(self) -> None:
        """Put parameters and state back to the last step, however far this one came."""
        self._views.abandon()
        if self._files is not None:
            self._files.rollback()
        self._tiers.rollback(self._views)
        self._set(Stage.UNDONE)

    def _set(self, stage: Stage) -> None:
        self._stages = dict.fromkeys(self._stages, stage)

    def moved(self) -> tuple[Traffic, float]:
        """Bytes and seconds of waiting since the state was made."""
        return self._tiers.traffic() + self._updater.traffic(), self._tiers.stalled_seconds

    @property
    def written_total(self) -> int:
        """Bytes to disk since the state was made."""
        return self._tiers.nvme_written_total


def alone(error: BaseException | None) -> None:
    """Nobody else has a say."""
    if error is not None:
        raise error


@torch.no_grad()
def take(
    steps: Sequence[TargetStep],
    held: HeldSignals,
    agree: Callable[[BaseException | None], None] = alone,
) -> StepReport:
    """Take the step of all targets: it counts on all of them, or on none.

    agree: is told what went wrong here, None for nothing, and raises where something did anywhere.
    """
    before = [step.moved() for step in steps]
    error: BaseException | None = None
    try:
        for step in steps:
            step.submit()
            more = True
            while more:
                if held.pending and step.has_more:
                    raise InterruptedError("the step was interrupted and undone")
                more = step.prepare_next()
            step.settle()
    except BaseException as raised:
        error = raised
    try:
        agree(error)
    except BaseException:
        for step in steps:
            step.undo()
        raise
    for step in steps:
        step.confirm()
    after = [step.moved() for step in steps]
    return StepReport(
        traffic=sum((b[0] - a[0] for a, b in zip(before, after, strict=True)), Traffic()),
        stalled_seconds=sum(b[1] - a[1] for a, b in zip(before, after, strict=True)),
        nvme_written_total=sum(step.written_total for step in steps),
        update_path=steps[0].updater.name,
    )
