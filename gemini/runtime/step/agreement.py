"""Agreement of all ranks on a step, and its execution by all targets or by none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gemini.optim.rules.report import Outcome, StepReport, Traffic
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.optim.step.driver import Step, take
from gemini.optim.step.executor import Executor
from gemini.runtime.comm.ballot import Agreement, Ballot
from gemini.runtime.comm.communicator import Communicator
from gemini.runtime.parts import Parts
from gemini.tickets import Done
from gemini.units import ParamId

from .views import ShardViews
from .weights import after_step


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """Step of one target that all ranks have agreed on.

    count: called when the step is taken, with the parameters it has updated.
    gathered_since: bytes of parameters and gradients since the last step, of forward and backward.
    taken: the parameters it updates.
    """

    parts: Parts
    executor: Executor
    count: Callable[[Sequence[ParamId]], None]
    gathered_since: Callable[[], Traffic]
    step: Step
    views: ShardViews
    taken: Sequence[ParamId]
    outcome: Outcome


def exchange(parts: Parts, ballot: Ballot, norm_type: float = 2.0) -> Agreement:
    """Exchange ballots: through the host where the group reaches it, else through its store.

    No device is waited for. Collective.
    """
    comm, scope = parts.comm, parts.scope
    if comm.reaches_host:
        vector = torch.tensor(ballot.encode(scope), dtype=torch.float64)
        comm.all_reduce(vector).wait()
        return Agreement.decode(vector.tolist(), scope, norm_type)
    said = comm.tell("votes", ballot.to_text())
    return Agreement.of(list(map(Ballot.from_text, said)), scope, norm_type)


def heard(comm: Communicator, agreement: Agreement) -> None:
    """Check the outcome of a vote, and begin a new log of collectives.

    Raises SequenceError where ranks did not do the same before, and ReplicaError where replicas
    have different gradients.
    """
    if agreement.sequences_differ:
        comm.compare_logs()
    agreement.check_replicas()
    comm.log.clear()


def raise_what_any_rank_raised(
    parts: Parts, error: BaseException | None, *, uses_disk: bool
) -> None:
    """Raise this rank's own error, or one with the texts of the failing ranks' errors.

    uses_disk: whether any rank does; else nothing can fail, and ranks exchange nothing.
    """
    comm = parts.comm
    if comm.world_size > 1 and uses_disk:
        ballot = Ballot(power_sum=0.0, present=(), io_failed=error is not None)
        if exchange(parts, ballot).io_failed:
            said = comm.gather_objects(None if error is None else str(error))
            raise_failures(said, error)
    if error is not None:
        raise error


def raise_failures(said: Sequence[str | None], error: BaseException | None) -> None:
    """Raise this rank's own error, or one with the texts of the failing ranks' errors."""
    failed = _told_by_others(said, error)
    if failed:
        raise RuntimeError(
            f"the disks of ranks {list(failed)} failed; weights and state are those of "
            "the last step on every rank. " + "; ".join(failed.values())
        )


def raise_what_tore(said: Sequence[str | None], error: BaseException | None) -> None:
    """Raise as `raise_failures` does, for updates in memory that ended in their middle."""
    torn = _told_by_others(said, error)
    if torn:
        raise RuntimeError(
            f"updates on ranks {list(torn)} ended in their middle, so weights and state are of two "
            "steps; load a checkpoint. " + "; ".join(torn.values())
        )


def _told_by_others(said: Sequence[str | None], error: BaseException | None) -> dict[int, str]:
    """Texts of errors by rank; raises this rank's own, if it has one."""
    if error is not None:
        raise error
    return {rank: f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None}


def carry_out(
    steps: Sequence[AgreedStep],
    agree: Callable[[BaseException | None], None],
) -> StepReport:
    """Carry out the steps of all these targets, or none of them; see `optim.step.driver.take`."""
    for step in steps:
        step.parts.manager.release_for_step()
    try:
        # Counts of steps and weights change together: a signal between them would tear the two.
        with DeferredSignals() as signals:
            for step in steps:
                step.parts.ledger.note()
            try:
                report = take([step.step for step in steps], signals, agree)
            except BaseException:
                for step in steps:
                    step.executor.undo()
                raise
            for step in steps:
                step.count(step.taken)
    finally:
        for step in steps:
            after_step(step.parts)
    for step in steps:
        if step.executor.counts_on_host:  # else the prologue did
            step.parts.control_vector.stepped(overflow=False)
    return replace(
        report,
        outcome=Done(steps[0].outcome),
        traffic=sum((step.gathered_since() for step in steps), report.traffic),
    )
