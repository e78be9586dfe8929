"""Agreement of all ranks on a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini.comm.ballot import Agreement, Ballot
from gemini.comm.communicator import Communicator
from gemini.runtime.sharding import Sharding


def exchange(sharding: Sharding, ballot: Ballot, norm_type: float = 2.0) -> Agreement:
    """Exchange ballots: through the host where the group reaches it, else through its store.

    No device is waited for. Collective.
    """
    comm, scope = sharding.comm, sharding.scope
    if comm.reaches_host:
        vector = torch.tensor(ballot.encode(scope), dtype=torch.float64)
        comm.all_reduce(vector).wait()
        return Agreement.decode(vector.tolist(), scope, norm_type)
    said = comm.tell("votes", ballot.to_text())
    return Agreement.of(list(map(Ballot.from_text, said)), scope, norm_type)


def check_agreement(comm: Communicator, agreement: Agreement) -> None:
    """Check the outcome of a vote, and begin a new log of collectives.

    Raises SequenceError where ranks did not do the same before, and ReplicaError where replicas
    have different gradients.
    """
    if agreement.sequences_differ:
        comm.compare_logs()
    agreement.check_replicas()
    comm.log.clear()


def raise_what_any_rank_raised(
    sharding: Sharding, error: BaseException | None, *, uses_disk: bool
) -> None:
    """Raise this rank's own error, or one with the texts of the failing ranks' errors.

    uses_disk: whether any rank does; else nothing can fail, and ranks exchange nothing.
    """
    comm = sharding.comm
    if comm.world_size > 1 and uses_disk:
        ballot = Ballot(power_sum=0.0, present=(), io_failed=error is not None)
        if exchange(sharding, ballot).io_failed:
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


def raise_first(said: Sequence[str | None], error: BaseException | None) -> None:
    """Raise this rank's own error, or one with the text of the first that failed."""
    for text in _told_by_others(said, error).values():
        raise RuntimeError(text)


def _told_by_others(said: Sequence[str | None], error: BaseException | None) -> dict[int, str]:
    """Texts of errors by rank; raises this rank's own, if it has one."""
    if error is not None:
        raise error
    return {rank: f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None}
