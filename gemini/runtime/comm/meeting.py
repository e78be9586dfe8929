"""Where ranks meet before they do what nothing else puts in order: rounds in the group's store.

A collective that one rank issues alone, or that ranks issue for different things, hangs, swaps
data or ends the process. A round in the store does none of that: every rank says what it wants,
and learns what the others want, before any of them issues a collective. It costs four small
requests to the store, whatever the number of ranks, where all want the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from .collective_log import PROPOSAL


class Wish(NamedTuple):
    """What one rank wants of a meeting: to call a method, or something of some subjects."""

    kind: str
    subjects: Mapping[str, str]  # in words, by name

    @property
    def words(self) -> str:
        return " and ".join(self.subjects[n] for n in sorted(self.subjects)) or "nothing more"

    def differs_from(self, other: Wish) -> bool:
        """Whether the two cannot be met by doing one thing on both ranks."""
        return self.kind != other.kind or (self.kind == "calls" and self.words != other.words)

    @property
    def proposed(self) -> set[str]:
        """What may be reduced now."""
        return set(self.subjects) if self.kind == PROPOSAL else set()

    def encode(self) -> str:
        return json.dumps([self.kind, list(self.subjects.items())])

    @staticmethod
    def decode(text: str) -> Wish:
        kind, subjects = json.loads(text)
        return Wish(kind, dict(subjects))


class MeetingPoint:
    """The rounds of one group; its store is shared with nobody else."""

    def __init__(self, store: dist.distributed_c10d.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._round = 0

    def arrive(self, wants: str) -> None:
        """Say what this rank wants of the next round; `is_complete` and `said` follow."""
        self._round += 1
        store = self._store
        if store.compare_set(self._key("first"), "", wants).decode() != wants:
            store.set(self._key(f"rank {self._rank}"), wants)
            store.add(self._key("different"), 1)
        if store.add(self._key("arrived"), 1) == self._world_size:
            store.set(self._key("complete"), "1")
            self._forget(self._round - 1)  # all have left it

    def is_complete(self, seconds: float) -> bool:
        """Whether all ranks arrive within this time."""
        try:
            self._store.wait([self._key("complete")], timedelta(seconds=seconds))
        except RuntimeError:
            if not self._store.check([self._key("complete")]):
                return False
        return True

    def said(self) -> list[str]:
        """What every rank wants, by rank. The round is complete."""
        first = self._store.get(self._key("first")).decode()
        said = [first] * self._world_size
        if self._store.check([self._key("different")]):
            for rank in range(self._world_size):
                key = self._key(f"rank {rank}")
                if self._store.check([key]):
                    said[rank] = self._store.get(key).decode()
        return said

    def say_waiting(self, does: str) -> None:
        """This rank waits for others in the round that it has come to."""
        self._store.set("waiting", json.dumps([self._round, self._rank, does]))

    def waiting(self) -> tuple[int, str] | None:
        """(rank, what it does) of one that waits in a round to which this one has not come."""
        if not self._store.check(["waiting"]):
            return None
        number, rank, does = json.loads(self._store.get("waiting"))
        return (rank, does) if number == self._round + 1 else None

    def answer(self, call: str) -> None:
        """This rank comes not to the next round: it is in `call`."""
        self._store.set(f"in_call/{self._round + 1}", json.dumps([self._rank, call]))

    def user_call(self) -> tuple[int, str] | None:
        """(rank, its call) of one that said so of this round."""
        key = f"in_call/{self._round}"
        if not self._store.check([key]):
            return None
        rank, call = json.loads(self._store.get(key))
        return rank, call

    def leave(self) -> None:
        """This rank comes to no round any more: the others need not wait for it."""
        self._store.set(f"gone/{self._rank}", "1")

    def gone(self) -> list[int]:
        """Ranks that left."""
        return [r for r in range(self._world_size) if self._store.check([f"gone/{r}"])]

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _forget(self, number: int) -> None:
        names = ["first", "different", "arrived", "complete"]
        if self._store.check([f"{number}/different"]):
            names += [f"rank {rank}" for rank in range(self._world_size)]
        for name in names:
            if self._store.check([f"{number}/{name}"]):
                self._store.delete_key(f"{number}/{name}")
