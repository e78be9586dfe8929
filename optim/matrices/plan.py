"""Plan of matrices: which rank makes which one orthogonal, and in which order. Pure.

A rank has runs of elements of a parameter, and an update needs all of it. So parameters are dealt
with in buckets, one after the other in the order of their chunks: every rank sends its runs to each
parameter's owner and gets its runs of the direction back. A bucket has about as many elements as
the largest parameter times the number of ranks: every rank owns a share of its work, and has no
more of it waiting than one such parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from gemini.optim.state.space import Block
from gemini.units import BlockId

ITERATIONS = 5  # for which work is counted


@dataclass(frozen=True, slots=True)
class WholeParam:
    """Parameter whose update needs all of it.

    shape, stride: of its elements, flat in the order of its state. runs: (first element, number of
    elements) of each rank of its group; (0, 0) where a rank has none.
    """

    param: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    group: str = ""

    @property
    def numel(self) -> int:
        return sum(numel for _, numel in self.runs)

    @property
    def work(self) -> int:
        """Operations: 20 r^2 c + 10 r^3 of each matrix of r rows and c columns, r <= c."""
        rows, columns = sorted(self.shape[-2:])
        stack = self.numel // max(1, rows * columns)
        return stack * ITERATIONS * (4 * rows * rows * columns + 2 * rows**3)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are exchanged together, each with the rank that owns it."""

    whole_params: tuple[WholeParam, ...]
    owners: tuple[int, ...]

    @property
    def group(self) -> str:
        return self.whole_params[0].group

    def only(self, wanted: Callable[[WholeParam], bool]) -> Bucket:
        """Bucket of only these parameters; owners stay."""
        pairs = [p for p in zip(self.whole_params, self.owners, strict=True) if wanted(p[0])]
        return Bucket(tuple(whole for whole, _ in pairs), tuple(owner for _, owner in pairs))

    def owned_by(self, rank: int) -> list[WholeParam]:
        """Parameters of one owner, in the order in which they are sent."""
        pairs = zip(self.whole_params, self.owners, strict=True)
        return [whole for whole, owner in pairs if owner == rank]


def buckets_of(whole_params: Sequence[WholeParam]) -> list[Bucket]:
    """Deal parameters to buckets: neighbours of one group, in order.

    Owners are balanced by work, the largest parameter first.
    """
    found: list[Bucket] = []
    for _, members in groupby(whole_params, key=lambda whole: whole.group):
        of_group = list(members)
        num_ranks = len(of_group[0].runs)
        limit = num_ranks * max(whole.numel for whole in of_group)
        taken: list[WholeParam] = []
        for whole in of_group:
            if sum(one.numel for one in taken) + whole.numel > limit:
                found.append(_owned(taken, num_ranks))
                taken = []
            taken.append(whole)
        found.append(_owned(taken, num_ranks))
    return found


def _owned(whole_params: Sequence[WholeParam], num_ranks: int) -> Bucket:
    load, owners = [0] * num_ranks, [0] * len(whole_params)
    for i in sorted(range(len(whole_params)), key=lambda i: (-whole_params[i].work, i)):
        owners[i] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        load[owners[i]] += whole_params[i].work
    return Bucket(tuple(whole_params), tuple(owners))


def blocks_waiting(buckets: Sequence[Bucket], blocks: Sequence[Block]) -> int:
    """Most blocks of these that wait at once, however few of a bucket's parameters are updated.

    They are the blocks of one bucket, and of neighbours that share blocks with it.
    """
    of_param = {whole.param: i for i, bucket in enumerate(buckets) for whole in bucket.whole_params}
    places: list[set[BlockId]] = [set() for _ in buckets]
    for block in blocks:
        for part in block.segments:
            if part.param in of_param:
                places[of_param[part.param]].add(block.id)
    return max(map(len, places), default=0)
