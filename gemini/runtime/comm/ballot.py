"""The agreement vector: what all ranks must know before they change a weight, in one all-reduce.

fp64 [5 * W + P], summed over ranks. Everything that is not a plain count has a slot for each rank,
so the sum adds only zeros to it: the result does not depend on the order of the reduction, and the
total is combined in the order of ranks, as the kernels do (`kernels_triton.norm.tally_votes`).

    [0, W)      sum of |g|^p of this rank's gradient shards (the largest |g| for p = inf)
    [W, 2W)     1 + id of the first parameter that is not finite, 0 where all are
    [2W, 3W)    1 where this rank left its trace
    [3W, 4W)    1 where this rank's disk failed
    [4W, 5W)    digest of the collectives that this rank issued
    [5W, 5W+P)  how many ranks have a gradient for each parameter
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from gemini.units import ParamId


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank says."""

    power_sum: float
    present: tuple[bool, ...]  # per parameter: a gradient arrived here
    first_nonfinite: ParamId | None = None
    deviated: bool = False
    io_failed: bool = False
    sequence: int = 0  # 32 bits

    def encode(self, rank: int, world_size: int) -> list[float]:
        vector = [0.0] * (5 * world_size)
        if math.isfinite(self.power_sum):  # NaN would spread to the other ranks' slots
            vector[rank] = self.power_sum
        if self.first_nonfinite is not None:
            vector[world_size + rank] = 1.0 + self.first_nonfinite
        vector[2 * world_size + rank] = float(self.deviated)
        vector[3 * world_size + rank] = float(self.io_failed)
        vector[4 * world_size + rank] = float(self.sequence)
        return vector + [float(p) for p in self.present]

    def to_text(self) -> str:
        """The same for ranks that say the same."""
        return json.dumps(astuple(self))

    @staticmethod
    def from_text(text: str) -> Ballot:
        total, present, *rest = json.loads(text)
        return Ballot(total, tuple(present), *rest)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know, the same on each."""

    power_sum: float
    present: tuple[bool, ...]  # per parameter: some rank has a gradient
    nonfinite: tuple[ParamId, int] | None  # first such parameter, and the lowest rank that saw it
    deviated: tuple[int, ...]  # ranks
    io_failed: tuple[int, ...]  # ranks
    sequences_differ: bool

    @classmethod
    def of(cls, ballots: Sequence[Ballot], norm_type: float = 2.0) -> Agreement:
        """Of what every rank says, by rank."""
        vectors = [ballot.encode(rank, len(ballots)) for rank, ballot in enumerate(ballots)]
        return cls.decode([sum(slot) for slot in zip(*vectors, strict=True)],
                          len(ballots), norm_type)  # fmt: skip

    @classmethod
    def decode(cls, vector: Sequence[float], world_size: int, norm_type: float = 2.0) -> Agreement:
        w = world_size
        found = [
            (ParamId(int(vector[w + rank]) - 1), rank) for rank in range(w) if vector[w + rank]
        ]
        return cls(
            power_sum=math.nan if found else _in_order(vector[:w], norm_type),
            present=tuple(count > 0 for count in vector[5 * w :]),
            nonfinite=min(found, default=None),
            deviated=tuple(rank for rank in range(w) if vector[2 * w + rank]),
            io_failed=tuple(rank for rank in range(w) if vector[3 * w + rank]),
            sequences_differ=len(set(vector[4 * w : 5 * w])) > 1,
        )


def _in_order(parts: Sequence[float], norm_type: float) -> float:
    """Of all ranks together. Not `sum`, which rounds otherwise in some versions of Python."""
    if norm_type == math.inf:
        return max(parts)
    total = 0.0
    for part in parts:
        total += part
    return total
