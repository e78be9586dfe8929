"""Log of the collectives of a rank, and the search for a difference between two logs.

Ranks that issue collectives in different orders hang, or swap data of equal size without an error.
So every rank keeps a log since the last agreement. The digests of the logs travel in the agreement
vector, and are compared before an evaluation returns: swapped data is found before it is used. A
rank that waits past its deadline publishes its log in the group's store and reads the others': a
hang ends in an error that names the actions of both ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SENDS = "sends"  # what a call of torch is about to send
FAILS = "fails"  # its next collective does not come
PROPOSAL = "asks to reduce"  # this wish yields if another rank wishes something else
MAX_ENTRIES = 4096  # an evaluation may go on for long without an agreement


class SequenceError(RuntimeError):
    """Different collectives on two ranks, or a collective that one rank called alone."""


@dataclass(slots=True)
class Deadline:
    """Seconds of a wait before ranks compare their logs.

    An object of its own, so that the thread refers to nothing else of its communicator.
    """

    seconds: float


class Wish(NamedTuple):
    """Wish of one rank in a meeting: to call a method, or to do `kind` with some subjects."""

    kind: str
    subjects: Mapping[str, str]  # name -> words for an error

    @property
    def words(self) -> str:
        return " and ".join(self.subjects[n] for n in sorted(self.subjects)) or "nothing more"

    def differs_from(self, other: Wish) -> bool:
        """Whether no one action fulfils both wishes."""
        return self.kind != other.kind or (self.kind == "calls" and self.words != other.words)

    @property
    def proposed(self) -> set[str]:
        """Names of the subjects that this rank may reduce now."""
        return set(self.subjects) if self.kind == PROPOSAL else set()

    def encode(self) -> str:
        return json.dumps([self.kind, list(self.subjects.items())])

    @staticmethod
    def decode(text: str) -> Wish:
        kind, subjects = json.loads(text)
        return Wish(kind, dict(subjects))


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective in a log.

    number: counted since the engine was made.
    kind: `"gathers"` or `"reduces"` for a chunk; `"calls"` for a method; `"sends"` for a tensor
        of torch's own collectives; `"fails"` for an error; else a wish of a meeting.
    subject: a chunk's id, or words.
    waits: this rank still waits in a meeting; its wish may differ from those of other ranks.
    met: all ranks have met, and know each other's wishes.
    """

    number: int
    kind: str
    subject: int | str
    waits: bool = False
    met: bool = False

    def differs_from(self, other: Entry) -> bool:
        """Whether two ranks with these entries under one number did different things."""
        may_meet = self.kind == other.kind != "calls" or PROPOSAL in (self.kind, other.kind)
        if self.kind == other.kind == FAILS:
            return False
        if self.waits and other.waits and may_meet:
            return False
        if self.waits != other.waits and (self.met or other.met):
            return False  # the log that a rank published while it waited is still in the store
        return (self.kind, self.subject) != (other.kind, other.subject)


class SequenceLog:
    """Collectives of this rank since the last agreement."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._count = 0
        self._waiting: Entry | None = None
        self.digest = 0

    @property
    def count(self) -> int:
        """Number of the next entry."""
        return self._count

    def record(self, kind: str, subject: int | str, *, met: bool = False) -> None:
        entry = Entry(self._count, kind, subject, met=met)
        self._count += 1
        self._waiting = None
        self._entries.append(entry)
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[: MAX_ENTRIES // 2]
        said = "" if kind == FAILS else subject  # each rank has its own words for it
        self.digest = zlib.crc32(f"{kind}{said};".encode(), self.digest)

    def wait(self, kind: str, subject: str) -> None:
        """Note a wish; it is recorded as the next entry once all ranks have met."""
        self._waiting = Entry(self._count, kind, subject, waits=True)

    def clear(self) -> None:
        """Forget all entries: the ranks have agreed that they were the same."""
        self._entries.clear()
        self.digest = 0

    def encode(self) -> str:
        entries = self._entries if self._waiting is None else [*self._entries, self._waiting]
        return json.dumps([[e.number, e.kind, e.subject, e.waits, e.met] for e in entries])

    @staticmethod
    def decode(text: str) -> list[Entry]:
        return [Entry(*item) for item in json.loads(text)]


def first_difference(logs: Sequence[Sequence[Entry]]) -> tuple[int, Entry, int, Entry] | None:
    """First difference: (rank, its entry, another rank, its entry of the same number), or None.

    A log that is only shorter does not differ.
    """
    done: dict[int, tuple[int, Entry]] = {}
    for rank, log in enumerate(logs):
        for entry in log:
            done.setdefault(entry.number, (rank, entry))
    differences = [
        (*done[entry.number], rank, entry)
        for rank, log in enumerate(logs)
        for entry in log
        if entry.differs_from(done[entry.number][1])
    ]
    return min(differences, key=lambda found: found[1].number, default=None)


def explain_difference(
    difference: tuple[int, Entry, int, Entry], describe: Callable[[int], str]
) -> SequenceError:
    """Error that names the actions of both ranks; `describe` turns a chunk's id into words."""
    rank, entry, other_rank, other = difference
    if FAILS in (entry.kind, other.kind):
        failed, error = (rank, entry) if entry.kind == FAILS else (other_rank, other)
        return SequenceError(f"rank {failed} failed, and others wait for it: {error.subject}")
    return SequenceError(
        f"ranks issue different collectives: as number {entry.number}, rank {rank} "
        f"{_words(entry, describe)}, and rank {other_rank} {_words(other, describe)}. "
        + _remedy(entry, other)
    )


def _words(entry: Entry, describe: Callable[[int], str]) -> str:
    subject = describe(entry.subject) if isinstance(entry.subject, int) else entry.subject
    return f"{entry.kind} {subject}"


def _remedy(entry: Entry, other: Entry) -> str:
    alone = next((e for e in (entry, other) if e.kind == "calls"), None)
    if alone is not None:
        return f"All ranks must call {alone.subject}; take it out of what one rank runs alone"
    if SENDS in (entry.kind, other.kind):
        return (
            "All ranks must be given the same model, with its layers in one order; sort names that "
            "come from a set, which each process puts in its own order"
        )
    return (
        "All ranks must call the same modules in the same order; put what differs by its input "
        "below a module that is gathered whole (gather_whole=; of GeminiTrainer, "
        'gemini=dict(gather_whole=...)), or release nothing (placement_policy="zero2")'
    )
