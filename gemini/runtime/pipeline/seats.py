"""Seats in the vote of a pipeline: one for each part on each rank, over all stages. Pure.

The vector is that of `gemini.comm.ballot`, with a slot for each seat in place of each rank.
The counts of gradients follow the slots. Each part of the model has an offset of its own, which the
ranks that shard the part share.

    [0, 6S)     slots of S seats
    [6S, 6S+P)  number of ranks with a gradient, for each of the P parameters of all parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemini.comm.ballot import Agreement, Ballot, Scope


@dataclass(frozen=True, slots=True)
class Part:
    """Description of one wrapped module on one rank.

    place: of the part in the model: equal on the ranks that shard the part.
    stage: (index, number of stages) of its `GeminiStage`, if it has one.
    options: (name, value) of options that must be equal on all parts.
    replicas: sets of ranks with the same shard of this part.
    copies: names of tied weights that another stage counts and saves.
    """

    place: tuple[int, int]  # coordinate in "pp", number of the part in its process
    names: tuple[str, ...]
    stage: tuple[int, int] | None = None
    options: tuple[tuple[str, str], ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return (
            f"stage {self.stage[0]}" if self.stage else f"part {self.place[1]} of {self.place[0]}"
        )


@dataclass(frozen=True, slots=True)
class Seat:
    """Place of one part on one rank in the vote of all stages."""

    rank: int
    part: Part
    offset: int  # of its counts, from the end of the slots


@dataclass(frozen=True, slots=True)
class Agreed:
    """Result of a vote: an agreement for each of this rank's parts, and facts of all parts."""

    parts: tuple[Agreement, ...]
    nonfinite: str | None  # the first parameter that is not finite, and its rank
    any_present: bool  # some part has a gradient
    deviated: bool
    strayed: tuple[str, ...]  # parts whose ranks did not issue the same collectives


@dataclass(frozen=True, slots=True)
class Seats:
    """Seats of all parts on all ranks, in the order of ranks."""

    seats: tuple[Seat, ...]
    rank: int
    num_present: int
    replicas: tuple[tuple[int, ...], ...] = ()  # seats of the same shard of the same part

    @staticmethod
    def of(said: Sequence[Sequence[Part]], rank: int) -> Seats:
        """Seats of the parts of all ranks. said: the parts of each rank.

        Raises ValueError if the parts are not one whole model.
        """
        first: dict[tuple[int, int], Part] = {}
        offsets: dict[tuple[int, int], int] = {}
        total = 0
        for parts in said:
            for part in parts:
                if part.place not in first:
                    first[part.place], offsets[part.place] = part, total
                    total += len(part.names)
        _check_stages(list(first.values()), said)
        _check_names(list(first.values()))
        _check_options(said)
        seats = [
            Seat(there, part, offsets[part.place])
            for there, parts in enumerate(said)
            for part in parts
        ]
        at = {(seat.rank, seat.part.place): i for i, seat in enumerate(seats)}
        replicas = [
            tuple(at[there, place] for there in ranks)
            for place, part in first.items()
            for ranks in part.replicas
        ]
        return Seats(tuple(seats), rank, total, tuple(replicas))

    def encode(self, ballots: Sequence[Ballot]) -> list[float]:
        """Vector of the ballots of this rank's parts, in their order."""
        slots = self._scope().num_slots
        vector = [0.0] * (slots + self.num_present)
        for place, ballot in zip(self._own(), ballots, strict=True):
            said = ballot.encode(self._scope(place))
            for i in range(slots):
                vector[i] += said[i]
            start = slots + self.seats[place].offset
            vector[start : start + len(ballot.present)] = said[slots:]
        return vector

    def decode(self, vector: Sequence[float], norm_type: float = 2.0) -> Agreed:
        """Result of a vote, from the sum of the vectors over ranks."""
        scope, count = self._scope(), len(self.seats)
        slots, there = list(vector[: scope.num_slots]), list(vector[scope.num_slots :])
        common = Agreement.decode(slots, scope, norm_type)
        strays = tuple(
            (self.seats[i].rank, tuple(self.seats[other].rank for other in others))
            for i, others in common.strayed
        )
        sequences: dict[tuple[int, int], set[float]] = {}
        for seat, digest in zip(self.seats, slots[4 * count : 5 * count], strict=True):
            sequences.setdefault(seat.part.place, set()).add(digest)
        strayed = [place for place, found in sequences.items() if len(found) > 1]
        parts = []
        for place in self._own():
            seat = self.seats[place]
            present = there[seat.offset : seat.offset + len(seat.part.names)]
            parts.append(
                replace(
                    common,
                    present=tuple(n > 0 for n in present),
                    sequences_differ=seat.part.place in strayed,
                    strayed=strays,
                )
            )
        nonfinite = None
        if common.nonfinite is not None:
            param, place = common.nonfinite
            seat = self.seats[place]
            nonfinite = f"{seat.part.names[param]} on rank {seat.rank}"
        return Agreed(
            tuple(parts),
            nonfinite,
            any(n > 0 for n in there),
            bool(common.deviated),
            tuple(s.part.words for s in self.seats if s.part.place in strayed),
        )

    def failed(self, vector: Sequence[float]) -> tuple[int, ...]:
        """Ranks whose disk failed, from the sum of the vectors."""
        scope = self._scope()
        common = Agreement.decode(list(vector[: scope.num_slots]), scope)
        return tuple(sorted({self.seats[place].rank for place in common.io_failed}))

    @property
    def num_own(self) -> int:
        """Number of this rank's parts."""
        return len(self._own())

    def _scope(self, place: int = 0) -> Scope:
        """Scope of the vote for the part at seat `place`."""
        return Scope(place, len(self.seats), self.replicas)

    def _own(self) -> list[int]:
        return [i for i, seat in enumerate(self.seats) if seat.rank == self.rank]


def _check_stages(parts: Sequence[Part], said: Sequence[Sequence[Part]]) -> None:
    """Raise ValueError unless every stage of the pipeline has one part."""
    stages = [part.stage for part in parts if part.stage is not None]
    if not stages:
        return
    count = stages[0][1]
    found = sorted(index for index, _ in stages)
    if found != list(range(count)) or any(n != count for _, n in stages):
        here = [sorted(part.stage[0] for part in own if part.stage) for own in said]
        raise ValueError(
            f"the optimizers of ranks {list(range(len(said)))} have the stages {here} of {count}; "
            "expected every stage once. A process with several stages has one optimizer for all "
            "of them: HybridAdam([*part.parameters(), *other_part.parameters()])"
        )


def _check_names(parts: Sequence[Part]) -> None:
    """Raise ValueError for a parameter in two parts that is no copy of a tied weight."""
    known: dict[str, Part] = {}
    for part in parts:
        for name in part.names:
            if name in part.copies:
                continue
            other = known.setdefault(name, part)
            if other is not part:
                raise ValueError(
                    f"{name} of {other.words} and {name} of {part.words} have one name, as a "
                    "weight has that two stages tie, which is not reduced over stages; give each "
                    "its own weight. Where they are two weights, keep the names that they have in "
                    'the whole model (nn.ModuleDict({"4": layer, "5": layer}))'
                )


def _check_options(said: Sequence[Sequence[Part]]) -> None:
    parts = [(rank, part) for rank, own in enumerate(said) for part in own]
    for rank, part in parts:
        for (name, mine), (_, first) in zip(part.options, parts[0][1].options, strict=True):
            if mine != first:
                raise ValueError(
                    f"{part.words} on rank {rank} has {name}={mine} and {parts[0][1].words} on "
                    f"rank {parts[0][0]} has {name}={first}; all stages step together, so give "
                    "them the same"
                )
