"""Collectives over one process group, as tickets. The only file that calls torch.distributed."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.tickets import Done, Ticket

from .collective_log import (
    FAILS,
    PROPOSAL,
    SENDS,
    Deadline,
    Entry,
    SequenceError,
    SequenceLog,
    Wish,
    explain_difference,
    first_difference,
)

if TYPE_CHECKING:
    from .meeting import MeetingPoint

# torch 2.13 renames both; keep one shim
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PrefixStore = dist.distributed_c10d.PrefixStore

DEADLINE_SECONDS = 30.0  # of a wait, before ranks compare their logs
POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0  # for the logs of other ranks, once a collective has failed
PATIENCE_SECONDS = 1800.0  # in a meeting to which other ranks do not come


@dataclass(frozen=True, slots=True)
class WorkTicket:
    """Ticket of a collective. It keeps the tensors alive."""

    comm: Communicator
    work: Any
    tensors: tuple[Tensor, ...]

    def ready(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.comm.wait(self.work)


@dataclass(frozen=True, slots=True)
class ReduceTicket:
    """Ticket of a payload [S * W] that is summed in place; `wait()` copies this rank's part [S]."""

    comm: Communicator
    work: Any
    payload: Tensor
    shard: Tensor

    def ready(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.comm.wait(self.work)
        numel, rank = self.shard.numel(), self.comm.rank
        self.shard.copy_(self.payload[rank * numel : (rank + 1) * numel])


class Communicator:
    """Collectives of one process group; at world size 1 they send nothing.

    All ranks must call the same collectives in the same order. Those of chunks are logged, and a
    difference raises a `SequenceError` on every rank that waits.

    describe: chunk id -> words, for that error.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, whole: Communicator | None = None
    ) -> None:
        """Take a group, the default group, or this rank alone if torch.distributed is not set up.

        whole: the communicator of which these ranks are a part. Its log, watch and meetings are
            used for both.
        Raises ValueError if this process is not in `group`.
        """
        self._whole = whole
        self.describe: Callable[[int], str] = lambda chunk: f"chunk {chunk}"
        self._deadline = Deadline(DEADLINE_SECONDS)
        self.log: SequenceLog = SequenceLog() if whole is None else whole.log
        self.chunk_bytes = 0  # given to chunk collectives so far, as payloads
        self._group = None
        self.rank, self.world_size, self._pid = 0, 1, os.getpid()
        self._watches = False
        self.reaches_host = True  # its collectives take tensors of the host
        if not dist.is_available() or not dist.is_initialized():
            return
        # The ends of both are called in the reverse order: this one's after that of `leaving`.
        from . import user_calls  # noqa: F401

        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the process group that was given")
        self.reaches_host = self.device.type == "cpu"
        # a wait on nccl holds the stream and not the host: its own watchdog ends a hang
        self._watches = dist.get_backend(self._group) == "gloo" and self.world_size > 1
        if self._watches:
            from . import leaving

            leaving.watch(self)
        if self.world_size > 1 and whole is None:
            self._open_store()

    def global_rank(self, rank: int) -> int:
        """Number, in the default group, of a rank of this group."""
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    @classmethod
    def alone(cls, whole: Communicator) -> Communicator:
        """Communicator of this rank alone, with the log of `whole`."""
        comm = cls(None, whole)
        comm._group, comm.rank, comm.world_size, comm._watches = None, 0, 1, False
        return comm

    def for_thread(self) -> Communicator:
        """Communicator of the same ranks over host memory, for one other thread. Collective.

        It has a group of its own: its collectives have one order among themselves, and none
        relative to those of this communicator.
        """
        if self.world_size == 1:
            return Communicator.alone(self)
        ranks = dist.get_process_group_ranks(self._group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return Communicator(group, self)

    def leave_group(self) -> None:
        """Drop the reference to a destroyed group, at the end of the interpreter."""
        self._group = None

    def _open_store(self) -> None:
        """Open a part of the store for this group alone, and its meetings. Collective."""
        from .meeting import MeetingPoint
        from .user_calls import UserCalls

        # A random name of rank 0: groups of the same ranks, one after the other, share a store, and
        # must not read each other's rounds.
        name = f"gemini/{self.gather_objects(uuid.uuid4().hex)[0]}"
        whole = dist.distributed_c10d._get_default_store()
        self._store = _PrefixStore(name, whole)
        self._meeting = MeetingPoint(
            _PrefixStore(f"{name}/meeting", whole), self.rank, self.world_size
        )
        self._told = MeetingPoint(_PrefixStore(f"{name}/told", whole), self.rank, self.world_size)
        weakref.finalize(self, _leave, self._meeting)
        ranks = dist.get_process_group_ranks(self._group)
        self._user_calls = UserCalls(self._meeting, self.rank, ranks, self._deadline)

    @property
    def deadline_seconds(self) -> float:
        """Seconds of a wait before ranks compare their logs."""
        return self._deadline.seconds

    @deadline_seconds.setter
    def deadline_seconds(self, seconds: float) -> None:
        self._deadline.seconds = seconds

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Process group; None if torch.distributed was not set up."""
        return self._group

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the number of ranks has changed: chunks are cut for that number."""
        self._check_process()
        there = dist.is_available() and dist.is_initialized()
        try:
            now = dist.get_world_size(self._group) if there else 1
        except (ValueError, RuntimeError):
            now = 0  # another group was set up since, and this one is gone
        if now != self.world_size:
            raise RuntimeError(
                f"the module was wrapped with a world size of {self.world_size}, and now it is "
                f"{now if now > 0 else 'without its process group'}; wrap it after "
                "init_process_group, and again (from a checkpoint) when the ranks change"
            )

    def _check_process(self) -> None:
        if self.world_size > 1 and os.getpid() != self._pid:
            raise RuntimeError(
                f"process {os.getpid()} was forked from rank {self.rank}, process {self._pid}: the "
                "connections to the other ranks stayed there; wrap the module in the process that "
                "trains"
            )

    # -- chunks --

    def all_gather(self, payload: Tensor, shard: Tensor, label: int) -> Ticket[None]:
        """Gather every rank's `shard` [S] into `payload` [S * W]."""
        self._record("gathers", label, payload)
        work = all_gather_tensor(payload, shard, group=self._group, async_op=True)
        return WorkTicket(self, work, (payload, shard))

    def reduce_scatter(self, shard: Tensor, payload: Tensor, label: int) -> Ticket[None]:
        """Sum this rank's [S] of every rank's `payload` [S * W] into `shard` [S].

        `payload` may be overwritten.
        """
        self._record("reduces", label, payload)
        # gloo's own reduce-scatter sums a copy, in a wait that no deadline ends: an all-reduce in
        # place can be watched.
        if self._watches:
            work = dist.all_reduce(payload, group=self._group, async_op=True)
            return ReduceTicket(self, work, payload, shard)
        work = reduce_scatter_tensor(shard, payload, group=self._group, async_op=True)
        return WorkTicket(self, work, (payload, shard))

    def exchange(self, received: Tensor, payload: Tensor, label: int) -> Ticket[None]:
        """Send each rank its part of `payload` [S * W]; receive this rank's [S] of every rank's."""
        self._record("reduces", label, payload)
        # as bytes, which every backend sends
        there, here = received.view(torch.uint8), payload.view(torch.uint8)
        work = dist.all_to_all_single(there, here, group=self._group, async_op=True)
        return WorkTicket(self, work, (received, payload))

    def all_reduce_chunk(self, payload: Tensor, label: int) -> Ticket[None]:
        """Sum `payload` over ranks, in place."""
        self._record("reduces", label, payload)
        return self.all_reduce(payload)

    def _record(self, kind: str, label: int, payload: Tensor) -> None:
        self.log.record(kind, label)
        self.chunk_bytes += payload.nbytes

    # -- the rest --

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> Ticket[None]:
        """Replace `tensor` by its sum over ranks, or with `largest` by the elementwise maximum."""
        if self.world_size == 1:
            return Done(None)
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, op=op, group=self._group, async_op=True)
        return WorkTicket(self, work, (tensor,))

    def largest(self, number: int, what: str) -> int:
        """The largest `number` of all ranks; `what` it is in the log of collectives."""
        self.check_unchanged()
        self.log.record("compares", what)
        most = self.numbers([number], torch.int64)
        self.all_reduce(most, largest=True).wait()
        return int(most.item())

    def all_to_all(
        self, there: Tensor, numels: Sequence[int], here: Tensor, sent: Sequence[int]
    ) -> None:
        """Send `here` [sum of sent], `sent[rank]` elements to each rank, and receive `there`
        [sum of numels], `numels[rank]` from each. Waits for it."""
        if self.world_size == 1:
            there.copy_(here)
            return
        work = dist.all_to_all_single(
            there, here, list(numels), list(sent), group=self._group, async_op=True
        )
        self.wait(work)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy the values of rank `source` to every rank."""
        if self.world_size > 1:
            dist.broadcast(tensor, group=self._group, group_src=source)

    def gather(self, shard: Tensor) -> Tensor | None:
        """Gather every rank's shard [S] into [S * W] on rank 0; None on the others."""
        if self.world_size == 1:
            return shard
        here = shard.to(self.device).contiguous()
        parts = [torch.empty_like(here) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(here, parts, group=self._group, group_dst=0)
        return None if parts is None else torch.cat(parts)

    def scatter(self, payload: Tensor | None, shard: Tensor) -> None:
        """Scatter rank 0's `payload` [S * W] into every rank's `shard` [S]."""
        if self.world_size == 1:
            assert payload is not None
            shard.copy_(payload)
            return
        here = torch.empty_like(shard, device=self.device)
        parts = None
        if payload is not None:
            parts = [part.contiguous() for part in payload.to(self.device).chunk(self.world_size)]
        dist.scatter(here, parts, group=self._group, group_src=0)
        shard.copy_(here)

    def gather_objects(self, value: Any) -> list[Any]:
        """Values of all ranks, by rank. For set-up, not for a step: values are pickled."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    @property
    def device(self) -> torch.device:
        """Device on which the group's backend takes small control tensors."""
        if self._group is None:
            return torch.device("cpu")
        if dist.get_backend(self._group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def numbers(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Tensor [len(values)] on the backend's device; the host does not wait for the copy."""
        on_gpu = self.device.type == "cuda"
        here = torch.tensor(values, dtype=dtype, pin_memory=on_gpu)
        return here.to(self.device, non_blocking=on_gpu)

    # -- meetings: what is not part of a pass, whose order all ranks know --

    def call(self, name: str) -> None:
        """Meet all ranks before a collective method.

        Raises SequenceError on every rank if one does something else, or has ended.
        """
        self._check_process()
        self._meet(Wish("calls", {name: name}))

    def announce(self, name: str, tensors: Sequence[str]) -> None:
        """Meet all ranks before a method in which torch's own calls send tensors, in this order.

        Raises SequenceError on every rank, before anything is sent, as `call`, and if two ranks
        are about to send other tensors, or these in another order.
        """
        self.call(name)
        if self.world_size == 1:
            return
        said = map(json.loads, self.tell(name, json.dumps([*tensors, "nothing more"])))
        logs = [[Entry(i, SENDS, words) for i, words in enumerate(each)] for each in said]
        difference = first_difference(logs)
        if difference is not None:
            raise explain_difference(difference, self.describe)
        for words in tensors:
            self.log.record(SENDS, words)

    def unite(self, subjects: Mapping[str, str]) -> list[str]:
        """Names that any rank reads now, in one order for all: so each may read in its own order.

        subjects: name -> words; empty if this rank has read all it wants, and helps the others.
        Raises SequenceError as `call`.
        """
        said = self._meet(Wish("reads", subjects))
        return sorted({name for wish in said for name in wish.subjects})

    def propose(self, subjects: Mapping[str, str]) -> set[str]:
        """Names that all ranks may reduce now; empty if one is about to do something else.

        subjects: name -> words, of this rank. Raises SequenceError as `call`.
        """
        said = self._meet(Wish(PROPOSAL, subjects))
        return set.intersection(*(other.proposed for other in said))

    def end_pass(self, found: str) -> list[str]:
        """Meet all ranks at the end of a pass; return each rank's `found`, by rank.

        Raises SequenceError as `call`.
        """
        said = self._meet(Wish("ends", {found: "a pass"}))
        return [text for other in said for text in other.subjects]

    def agree(self, kind: str, subjects: Mapping[str, str]) -> None:
        """Raise SequenceError on every rank if two name different subjects."""
        for rank, said in enumerate(self._meet(Wish(kind, subjects))):
            if said.subjects.keys() != subjects.keys():
                mine = Entry(self.log.count - 1, kind, Wish(kind, subjects).words)
                theirs = Entry(self.log.count - 1, kind, said.words)
                raise explain_difference((self.rank, mine, rank, theirs), self.describe)

    def tell(self, does: str, text: str) -> list[str]:
        """Exchange texts through the store, by rank: no device is waited for. Collective.

        It costs least if all texts are equal.
        """
        self._told.arrive(text)
        self._await_others(self._told, Wish(does, {does: text}))
        return self._told.said()

    def _meet(self, wish: Wish) -> list[Wish]:
        """Wishes of all ranks, by rank. Raises SequenceError if no one action fulfils them."""
        if self.world_size == 1:
            return [wish]
        said = self._round(wish)
        # A proposal yields: the ranks that made it continue with their pass, and come to a later
        # round with the wish that this rank has now.
        while wish.kind != PROPOSAL and any(other.kind == PROPOSAL for other in said):
            said = self._round(wish)
        return said

    def _round(self, wish: Wish) -> list[Wish]:
        self._meeting.arrive(wish.encode())
        self.log.wait(wish.kind, wish.words)
        self._await_others(self._meeting, wish)
        said = [Wish.decode(text) for text in self._meeting.said()]
        proposals = [other for other in said if other.kind == PROPOSAL]
        for rank, other in enumerate(said):
            if other.differs_from(said[0]) and not proposals:
                first = Entry(self.log.count, said[0].kind, said[0].words)
                there = Entry(self.log.count, other.kind, other.words)
                raise explain_difference((0, first, rank, there), self.describe)
        found = proposals or said
        said_words = " and ".join(sorted({other.words for other in found}))
        self.log.record(found[0].kind, said_words, met=True)
        return said

    def _await_others(self, meeting: MeetingPoint, wish: Wish) -> None:
        seconds, started = self.deadline_seconds, time.monotonic()
        while not meeting.is_complete(seconds):
            difference = first_difference(self.published_logs())
            if difference is not None:
                raise explain_difference(difference, self.describe)
            if meeting is self._meeting:
                meeting.say_waiting(f"{wish.kind} {wish.words}")
                call = meeting.user_call()
                if call is not None:
                    from .user_calls import text_of

                    raise SequenceError(text_of(self.rank, f"{wish.kind} {wish.words}", *call))
            gone = self._meeting.gone()
            if gone and meeting.is_complete(POLL_SECONDS):
                return  # they arrived, and left after that
            if gone or time.monotonic() - started > PATIENCE_SECONDS:
                who = f"rank {gone[0]} has ended" if gone else "others do not come"
                raise SequenceError(
                    f"rank {self.rank} {wish.kind} {wish.words}, and {who}. All ranks must do so; "
                    "take it out of what one rank runs alone"
                )
            seconds = POLL_SECONDS

    # -- the watch --

    def say_failed(self, error: Exception) -> None:
        """Tell the other ranks of an error that is about to be raised on this one: whoever waits
        for it raises a SequenceError that names the rank and the error."""
        if self.world_size > 1:
            self.log.record(FAILS, str(error))
            self.published_logs()

    def compare_logs(self) -> None:
        """Raise the SequenceError of logs whose digests differ, on every rank. Collective."""
        logs = [SequenceLog.decode(text) for text in self.gather_objects(self.log.encode())]
        difference = first_difference(logs)
        assert difference is not None, "the digests of two equal logs differ"
        raise explain_difference(difference, self.describe)

    def wait(self, work: Any) -> None:
        """Wait for a collective; past the deadline, or if it failed, compare logs with the others.

        Raises SequenceError for a difference, else the error of the collective.
        """
        if not self._watches:
            work.wait()
            return
        if self._whole is not None:
            self._whole.wait(work)
            return
        failure, patience = None, math.inf
        try:
            if _ends(work, self._deadline.seconds):
                return
        except RuntimeError as error:
            failure, patience = error, time.monotonic() + GRACE_SECONDS
        while time.monotonic() < patience:
            difference = first_difference(self.published_logs())
            if difference is not None:
                raise explain_difference(difference, self.describe) from failure
            if failure is not None:
                time.sleep(POLL_SECONDS)
                continue
            try:
                if _ends(work, POLL_SECONDS):
                    return
            except RuntimeError as error:
                failure, patience = error, time.monotonic() + GRACE_SECONDS
        assert failure is not None
        raise failure

    def published_logs(self) -> list[list[Entry]]:
        """Publish this rank's log; return the published logs by rank, empty for the others."""
        store = self._store
        store.set(str(self.rank), self.log.encode())
        return [
            SequenceLog.decode(store.get(str(rank)).decode()) if store.check([str(rank)]) else []
            for rank in range(self.world_size)
        ]


def _ends(work: Any, seconds: float) -> bool:
    """Wait at most this time; return whether a collective has ended. Raises RuntimeError if it
    failed."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it may have ended between the two
    return True


def _leave(meeting: MeetingPoint) -> None:
    with suppress(RuntimeError):  # the store's host may have ended before
        meeting.leave()
