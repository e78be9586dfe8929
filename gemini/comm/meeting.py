"""Meetings of ranks before a collective that has no fixed order: rounds in the group's store.

A collective that one rank issues alone, or that ranks issue for different purposes, hangs, swaps
data or ends the process. A round in the store does none of that: every rank writes its wish, and
reads those of the others, before any of them issues a collective. If all wish the same, a round
costs each rank four small requests to the store, at any number of ranks.
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch.distributed as dist


class MeetingPoint:
    """Rounds of one group, in a store of their own."""

    def __init__(self, store: dist.distributed_c10d.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._round = 0

    def arrive(self, wants: str) -> None:
        """Begin the next round with this rank's wish; call `is_complete` and then `said`."""
        self._round += 1
        store = self._store
        # The first rank's wish stands for all that wish the same; only a different one is written
        # in addition. It is written before `arrived` is counted: a complete round has all wishes.
        if store.compare_set(self._key("first"), "", wants).decode() != wants:
            store.set(self._key(f"rank {self._rank}"), wants)
            store.add(self._key("different"), 1)
        if store.add(self._key("arrived"), 1) == self._world_size:
            store.set(self._key("complete"), "1")
            self._forget(self._round - 1)  # every rank is in this round, so none reads that one

    def is_complete(self, seconds: float) -> bool:
        """Wait for all ranks, at most this time; return whether all have arrived."""
        try:
            self._store.wait([self._key("complete")], timedelta(seconds=seconds))
        except RuntimeError:
            if not self._store.check([self._key("complete")]):
                return False
        return True

    def said(self) -> list[str]:
        """Wishes of all ranks, by rank. The round must be complete."""
        first = self._store.get(self._key("first")).decode()
        said = [first] * self._world_size
        if self._store.check([self._key("different")]):
            for rank in range(self._world_size):
                key = self._key(f"rank {rank}")
                if self._store.check([key]):
                    said[rank] = self._store.get(key).decode()
        return said

    def say_waiting(self, does: str) -> None:
        """Publish that this rank waits for others in its present round."""
        self._store.set("waiting", json.dumps([self._round, self._rank, does]))

    def waiting(self) -> tuple[int, str] | None:
        """(rank, its wish in words) of a rank that waits in the round after this rank's; None if
        no rank does."""
        if not self._store.check(["waiting"]):
            return None
        number, rank, does = json.loads(self._store.get("waiting"))
        return (rank, does) if number == self._round + 1 else None

    def answer(self, call: str) -> None:
        """Publish that this rank is in `call` and does not come to the next round."""
        self._store.set(f"in_call/{self._round + 1}", json.dumps([self._rank, call]))

    def user_call(self) -> tuple[int, str] | None:
        """(rank, its call) of a rank that does not come to this round; None if none said so."""
        key = f"in_call/{self._round}"
        if not self._store.check([key]):
            return None
        rank, call = json.loads(self._store.get(key))
        return rank, call

    def leave(self) -> None:
        """Publish that this rank comes to no further round, so that the others do not wait."""
        self._store.set(f"gone/{self._rank}", "1")

    def gone(self) -> list[int]:
        """Ranks that have called `leave`."""
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
