"""A step as a machine by block, and what drives it; the same for plain modules and for shards.

    submit     blocks on disk begin to come, in their order
    prepare    one after the other is updated beside its last version
    agree      with who else has a say: all of it counts, or nothing
    confirm    what is on disk counts, and what is in memory is updated; or `undo`

A block may be prepared before its step is submitted, with what the step is expected to agree on
(`optim.step.speculation`); where that is held, only its parameters are left to do.

Up to `confirm` nothing that counts has changed (ADR 0002). Who drives is free to do something else
between any two blocks: `TargetStep` waits for nothing but the block it is asked to prepare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from gemini.optim.rules.report import StepReport, Traffic
from gemini.optim.rules.state_layout import MASTER, WEIGHT
from gemini.optim.state.held_signals import HeldSignals
from gemini.optim.state.pieces import Planes, Updater
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import BlockViews, TieredState
from gemini.units import BlockId


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


@dataclass(frozen=True, slots=True)
class Early:
    """What was done before the step: blocks that are held, and what went wrong there.

    done: of these, those whose parameters are written with their state; nothing is left to do.
    follow: makes the parameters of one of the others this [n], its new weights or masters.
    """

    held: frozenset[BlockId] = frozenset()
    done: frozenset[BlockId] = frozenset()
    follow: Callable[[Block, Tensor], None] | None = None
    error: BaseException | None = None


# what updates blocks in memory: each is when it is taken, and all are to be
InMemory = Callable[[Iterator[Block]], None]


def at_once(blocks: Iterator[Block]) -> None:
    """Before the step returns."""
    deque(blocks, maxlen=0)


class TargetStep:
    """One step of one target's state. `number` counts from 1; `files` count before the state does:
    `nvme.recover` finds the step before in either file. `in_order`: so is the next one, that it
    may go on behind its caller (`optim.step.tail`)."""

    def __init__(
        self,
        tiered_state: TieredState,
        updater: Updater,
        views: BlockViews,
        number: int,
        files: Versions | None = None,
        *,
        in_order: bool = False,
        early: Early | None = None,
    ) -> None:
        self._tiered_state = tiered_state
        self._updater = updater
        self._views = views
        self._number = number
        self._files = files
        self._in_order = in_order
        self._early = early or Early()
        self._stages: dict[BlockId, Stage] = {}

    @property
    def stages(self) -> Mapping[BlockId, Stage]:
        """Of every block on disk, since `submit`, in the order of their update."""
        return self._stages

    @property
    def updater(self) -> Updater:
        return self._updater

    def submit(self) -> None:
        """Begin. Raises where the disk's budget has no room for the step, and what went wrong
        before it; then call `undo`."""
        if self._early.error is not None:
            raise self._early.error
        nvme = self._tiered_state.nvme
        if self._files is not None:
            self._files.check_step(0 if nvme is None else nvme.written_bytes_per_step)
        if nvme is not None:
            done = self._early.done
            self._stages = {
                block.id: Stage.PREPARED if block.id in done else Stage.SUBMITTED
                for block in nvme.order
            }
            held = self._early.held
            self._views.expect([block for block in nvme.order if block.id not in held])
            nvme.begin_step(held, done)

    @property
    def num_held(self) -> int:
        """Blocks on disk that were prepared before the step."""
        return len(self._early.held)

    @property
    def num_done(self) -> int:
        """Of these, such as nothing is left to do for."""
        return len(self._early.done)

    @property
    def has_more(self) -> bool:
        """Whether a block is to be prepared."""
        nvme = self._tiered_state.nvme
        return nvme is not None and nvme.has_more

    def prepare_next(self) -> bool:
        """Update the next block on disk beside its last version; False where there is none.

        On an error call `undo`.
        """
        nvme = self._tiered_state.nvme
        brought = None if nvme is None else nvme.bring(self._views.save)
        if nvme is None or brought is None:
            return False
        block, planes = brought
        self._stages[block.id] = Stage.PREPARED
        if block.id in self._early.held:
            self._follow_written(block, planes)
            nvme.take_back(changed=False, save=self._views.save)
        else:
            changed = self._updater.update_staged(block, planes, self._views)
            nvme.take_back(changed, self._views.save)
        return True

    def _follow_written(self, block: Block, planes: Planes) -> None:
        """Parameters are the weights that were written, or the masters, rounded."""
        assert self._early.follow is not None
        self._early.follow(block, planes[WEIGHT] if WEIGHT in planes else planes[MASTER])

    def settle(self) -> None:
        """Wait until all that was prepared is on disk, and order what comes next behind the copies
        of its parameters: what is in memory may be updated much later. On an error call `undo`."""
        self._views.end()
        if self._tiered_state.nvme is not None:
            self._tiered_state.nvme.flush()
        if self._files is not None:
            self._files.flush()

    def confirm(self, in_memory: InMemory = at_once) -> None:
        """Make it count, and let `in_memory` update what is there; behind `settle`."""
        if self._files is not None:
            self._files.commit(self._number)
        self._tiered_state.confirm(self._number, in_order=self._in_order)
        self._set(Stage.CONFIRMED)
        in_memory(self._tiered_state.update_in_memory(self._updater, self._views))

    def undo(self) -> None:
        """Put parameters and state back to the last step, however far this one came."""
        self._views.abandon()
        if self._files is not None:
            self._files.rollback()
        self._tiered_state.rollback(self._views)
        self._set(Stage.UNDONE)

    def _set(self, stage: Stage) -> None:
        self._stages = dict.fromkeys(self._stages, stage)

    def moved(self) -> tuple[Traffic, float]:
        """Bytes and seconds of waiting since the state was made."""
        return (
            self._tiered_state.traffic() + self._updater.traffic(),
            self._tiered_state.stalled_seconds,
        )

    @property
    def written_total(self) -> int:
        """Bytes to disk since the state was made."""
        return self._tiered_state.nvme_written_total


def alone(error: BaseException | None) -> None:
    """Nobody else has a say."""
    if error is not None:
        raise error


@torch.no_grad()
def take(
    steps: Sequence[TargetStep],
    held: HeldSignals,
    agree: Callable[[BaseException | None], None] = alone,
    in_memory: InMemory = at_once,
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
        step.confirm(in_memory)
    after = [step.moved() for step in steps]
    return StepReport(
        traffic=sum((b[0] - a[0] for a, b in zip(before, after, strict=True)), Traffic()),
        stalled_seconds=sum(b[1] - a[1] for a, b in zip(before, after, strict=True)),
        nvme_written_total=sum(step.written_total for step in steps),
        update_path=steps[0].updater.name,
    )
