"""The sequence of collectives on every rank, and how a difference between ranks is found.

Ranks that issue collectives in different orders hang, or swap data of equal size without an error.
So every rank keeps a log since the last agreement. The digests of the logs travel in the agreement
vector: swapped data is found before it changes a weight. A wait that passes its deadline publishes
its log in the group's store and reads the others': a hang ends with what both ranks were doing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_ENTRIES = 4096  # an evaluation may go on for long without an agreement


class SequenceError(RuntimeError):
    """Ranks issued different collectives."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective: its number since the engine was made, what it does, to which chunk."""

    number: int
    kind: str  # "gathers", "reduces"
    chunk: int


class SequenceLog:
    """The collectives of this rank since the last agreement."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._count = 0
        self.digest = 0

    def record(self, kind: str, chunk: int) -> None:
        entry = Entry(self._count, kind, chunk)
        self._count += 1
        self._entries.append(entry)
        if len(self._entries) > MAX_ENTRIES:
            del self._entries[: MAX_ENTRIES // 2]
        self.digest = zlib.crc32(f"{kind}{chunk};".encode(), self.digest)

    def clear(self) -> None:
        """All ranks agreed: what was done so far was the same."""
        self._entries.clear()
        self.digest = 0

    def encode(self) -> str:
        return json.dumps([[e.number, e.kind, e.chunk] for e in self._entries])

    @staticmethod
    def decode(text: str) -> list[Entry]:
        return [Entry(*item) for item in json.loads(text)]


def first_difference(logs: Sequence[Sequence[Entry]]) -> tuple[int, Entry, int, Entry] | None:
    """(rank, what it did, another rank, what that did under the same number), or None.

    A rank that is merely behind does not differ.
    """
    done: dict[int, tuple[int, Entry]] = {}
    for rank, log in enumerate(logs):
        for entry in log:
            done.setdefault(entry.number, (rank, entry))
    differences = [
        (*done[entry.number], rank, entry)
        for rank, log in enumerate(logs)
        for entry in log
        if done[entry.number][1] != entry
    ]
    return min(differences, key=lambda found: found[1].number, default=None)


def explain(
    difference: tuple[int, Entry, int, Entry], describe: Callable[[int], str]
) -> SequenceError:
    """The error that names both ranks' chunks; `describe` turns a chunk's id into words."""
    rank, entry, other_rank, other = difference
    return SequenceError(
        f"ranks issue different collectives: as number {entry.number}, rank {rank} {entry.kind} "
        f"{describe(entry.chunk)}, and rank {other_rank} {other.kind} {describe(other.chunk)}. "
        "All ranks must call the same modules in the same order; put what differs by its input "
        "below a module that is gathered whole (gather_whole=)"
    )
