"""Agreement vector: all facts that ranks must share before they change a weight, in one all-reduce.

W world size · P parameters

fp64 [6 * W + P], summed over ranks. Every value but a plain count has a slot for each rank, so the
sum adds only zeros to it: the result does not depend on the order of the reduction. The total norm
is then combined in the order of ranks, as in the kernels (`kernels_triton.norm.tally_votes`).

    [0, W)      sum of |g|^p over the gradient shards that this rank counts (the largest |g| for
                p = inf)
    [W, 2W)     1 + id of the first parameter that is not finite, 0 if all are
    [2W, 3W)    1 if this rank left its trace
    [3W, 4W)    1 if this rank's disk failed
    [4W, 5W)    digest of the collectives that this rank issued
    [5W, 6W)    checksum of gradient shards, which this rank's replicas must have too
    [6W, 6W+P)  number of ranks with a gradient, for each parameter
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from gemini.units import ParamId

NUM_KINDS = 6  # of slots


class ReplicaError(RuntimeError):
    """Different gradients on two ranks that have the same shard."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Voters: ranks, or the parts of a pipeline on each rank; every voter has a slot.

    replicas: sets of voters that must have the same gradients; empty if no two have one shard.
    """

    rank: int
    world_size: int
    replicas: tuple[tuple[int, ...], ...] = ()

    @property
    def num_slots(self) -> int:
        """Length of the vector without the counts of parameters: 6 * W."""
        return NUM_KINDS * self.world_size


@dataclass(frozen=True, slots=True)
class Ballot:
    """Values of one rank for the vector."""

    power_sum: float
    present: tuple[bool, ...]  # per parameter: a gradient arrived here
    first_nonfinite: ParamId | None = None
    deviated: bool = False
    io_failed: bool = False
    sequence: int = 0  # 32 bits
    checksum: int = 0  # 32 bits

    def encode(self, scope: Scope) -> list[float]:
        rank, world_size = scope.rank, scope.world_size
        vector = [0.0] * scope.num_slots
        if math.isfinite(self.power_sum):  # NaN would spread to the other ranks' slots
            vector[rank] = self.power_sum
        if self.first_nonfinite is not None:
            vector[world_size + rank] = 1.0 + self.first_nonfinite
        vector[2 * world_size + rank] = float(self.deviated)
        vector[3 * world_size + rank] = float(self.io_failed)
        vector[4 * world_size + rank] = float(self.sequence)
        vector[5 * world_size + rank] = float(self.checksum)
        return vector + [float(p) for p in self.present]

    def to_text(self) -> str:
        """Text of this ballot; equal ballots have equal texts."""
        return json.dumps(astuple(self))

    @staticmethod
    def from_text(text: str) -> Ballot:
        total, present, *rest = json.loads(text)
        return Ballot(total, tuple(present), *rest)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of a vote, the same on all ranks."""

    power_sum: float
    present: tuple[bool, ...]  # per parameter: some rank has a gradient
    nonfinite: tuple[ParamId, int] | None  # first such parameter, and the lowest rank that saw it
    deviated: tuple[int, ...]  # ranks
    io_failed: tuple[int, ...]  # ranks
    sequences_differ: bool
    # ranks that came to other gradients than most of their replicas, and those replicas
    strayed: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, ballots: Sequence[Ballot], scope: Scope, norm_type: float = 2.0) -> Agreement:
        """Agreement of the ballots of all ranks, in the order of ranks."""
        vectors = [ballot.encode(replace(scope, rank=rank)) for rank, ballot in enumerate(ballots)]
        return cls.decode([sum(slot) for slot in zip(*vectors, strict=True)], scope, norm_type)

    @classmethod
    def decode(cls, vector: Sequence[float], scope: Scope, norm_type: float = 2.0) -> Agreement:
        w = scope.world_size
        found = [
            (ParamId(int(vector[w + rank]) - 1), rank) for rank in range(w) if vector[w + rank]
        ]
        return cls(
            power_sum=math.nan if found else _in_order(vector[:w], norm_type),
            present=tuple([count > 0 for count in vector[scope.num_slots :]]),
            nonfinite=min(found, default=None),
            deviated=tuple(rank for rank in range(w) if vector[2 * w + rank]),
            io_failed=tuple(rank for rank in range(w) if vector[3 * w + rank]),
            sequences_differ=len(set(vector[4 * w : 5 * w])) > 1,
            strayed=_strayed(vector[5 * w : 6 * w], scope.replicas),
        )

    def check_replicas(self) -> None:
        """Raise ReplicaError, the same on all ranks, if any rank has strayed."""
        if self.strayed:
            said = "; ".join(
                f"rank {rank} beside {', '.join(map(str, others))}" for rank, others in self.strayed
            )
            raise ReplicaError(
                f"replicas of one shard have different gradients: {said}. Weights and state are "
                "those of the last step; what is done to gradients must be the same on replicas, "
                "else look for a fault in the memory or the links of that rank"
            )


def _strayed(
    checksums: Sequence[float], replicas: Sequence[Sequence[int]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Ranks whose checksum is not the most frequent one of their replicas, with those replicas.

    Without one most frequent checksum, as with two ranks, all of the replicas are named.
    """
    found = []
    for ranks in replicas:
        said = Counter(checksums[rank] for rank in ranks)
        (usual, votes), *others = said.most_common()
        tied = bool(others) and others[0][1] == votes
        for rank in ranks:
            if others and (tied or checksums[rank] != usual):
                found.append((rank, tuple(other for other in ranks if other != rank)))
    return tuple(found)


def _in_order(parts: Sequence[float], norm_type: float) -> float:
    """Total over ranks, added one by one: `sum` compensates rounding in some versions of Python."""
    if norm_type == math.inf:
        return max(parts)
    total = 0.0
    for part in parts:
        total += part
    return total
