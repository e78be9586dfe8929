"""Homes of bytes that autograd saves for backward: how many stay on the device. Pure.

What was saved first is read last, so over what may stay the oldest leaves, and that is the best
choice whatever comes. One number by tier is all that a plan decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from gemini.memtracer.trace import LEAST_SAVED_BYTES, TraceMoment
from gemini.units import KIB, MIB, Bytes, Moment

from .plan import Move, MoveKind, SavedHomes
from .tiers import Tier

NUM_PIECES = 8  # that may be on their way out
_COARSE = 3  # levels below all that is saved, at the same distance
_FEW = 8  # layers, of which every number is tried
_ROUNDS = 6  # of halving the distance to the levels beside the best


@dataclass(frozen=True, slots=True)
class Spilling:
    """Memory that it takes to let saved bytes leave the device, whatever their number.

    staging_bytes: of RAM, through which they pass. in_flight_bytes: of the device, that are on
    their way out. ahead_bytes: of the device, read before backward asks for them. has_files: what
    the host has no room for goes to a file. least_bytes: of a storage that may leave: a transfer
    has its price.
    """

    staging_bytes: int = 32 * MIB
    in_flight_bytes: int = 32 * MIB
    ahead_bytes: int = 64 * MIB
    has_files: bool = True
    least_bytes: int = LEAST_SAVED_BYTES

    @classmethod
    def within(cls, budget: int, *, has_files: bool) -> Spilling:
        """Buffers that are small beside a budget of the device."""
        in_flight = NUM_PIECES * _part(budget, 256, 64 * KIB, 4 * MIB)
        return cls(
            in_flight * has_files, in_flight, _part(budget, 16, 64 * KIB, 64 * MIB), has_files,
            _part(budget, 4096, 4 * KIB, LEAST_SAVED_BYTES),
        )  # fmt: skip

    @property
    def piece_bytes(self) -> int:
        """Bytes of one transfer."""
        return self.in_flight_bytes // NUM_PIECES

    @property
    def least_room(self) -> int:
        """Bytes on the device with which some may leave."""
        return max(self.in_flight_bytes, self.ahead_bytes)

    def homes(self, room: int, most: int, host_left: int) -> SavedHomes:
        """Homes of at most `most` saved bytes that get `room` on the device; the host has
        `host_left` for the others, and files have the rest."""
        stays = room - self.in_flight_bytes
        away = max(0, most - stays)
        on_host = max(0, min(away, host_left))
        on_disk = (away - on_host) * self.has_files
        return SavedHomes(
            Bytes(stays), Bytes(room), Bytes(on_host), Bytes(on_disk), self.staging_bytes,
            max(stays, self.ahead_bytes),
        )  # fmt: skip


def _part(budget: int, part: int, least: int, most: int) -> int:
    """A part of the budget, within bounds."""
    return max(least, min(most, budget // part))


def most_room(left: Sequence[int], stays: Sequence[int], saved: Sequence[int]) -> int | None:
    """Room on the device for saved bytes, at most; None: all may stay.

    left: bytes that are free at every moment beside those that stay; below 0 it lacks some.
    """
    rooms = [
        there + free
        for free, there, all_of_it in zip(left, stays, saved, strict=True)
        if there + free < all_of_it
    ]
    return min(rooms, default=None)


def moves_of_saved(homes: SavedHomes, moments: Sequence[TraceMoment]) -> Iterator[Move]:
    """Moves of saved bytes, by begin: out while forward saves more, and back in the order in which
    backward reads.

    One that leaves has left when the room for saved bytes is full. One that comes back has
    come before the period that takes what is saved below it.
    """
    backward = next((i for i, m in enumerate(moments) if m.phase == "backward"), len(moments))
    saved = [moment.saved_bytes for moment in moments]
    away = 0
    for i, there in enumerate(saved[:backward]):
        more = there - homes.kept_bytes - away
        if more > 0:
            full = (j for j in range(i, backward) if saved[j] > away + homes.room_bytes)
            begin = max(0, i - 1)  # it is saved before moment `i`
            end = max(begin + 1, next(full, backward))
            yield from _both(homes, away, away + more, begin, end, out=True)
        away = max(0, away + more)
    for i in range(backward, len(saved)):
        less = away - max(0, saved[i] - homes.returns_within)
        if less > 0:
            taken = (j for j in range(i, len(saved)) if saved[j] < away)
            yield from _both(homes, away - less, away, i, next(taken, len(saved)), out=False)
            away -= less


def search_number(most: int, price: Callable[[int], float]) -> None:
    """Ask for the price of numbers of layers from 0 to `most`, which are computed again: of all of
    few; else of some, and of those beside the best.

    price: infinite where nothing fits; 0 where nothing is better.
    """
    if price(0) == 0:
        return
    if most <= _FEW:
        for number in range(1, most + 1):
            price(number)
        return
    found: dict[int, float] = {}

    def asked(number: int) -> None:
        if 0 < number <= most and number not in found:
            found[number] = price(number)

    step = -(-most // _COARSE)
    for number in range(most, 0, -step):
        asked(number)
    while step > 1:
        step = -(-step // 2)
        # the last that has a price at all may be beside one that has none
        best = min(found, key=lambda number: (found[number], -number))
        for number in (best - step, best + step):
            asked(number)
        if step == 1 and min(found, key=lambda number: (found[number], -number)) != best:
            step = 2


def _both(
    homes: SavedHomes, low: int, high: int, begin: int, end: int, *, out: bool
) -> Iterator[Move]:
    """Moves of the bytes away from `low` to `high`: the first of all are on the host."""
    on_host = max(0, min(high, homes.host_bytes) - low)
    for tier, nbytes in ((Tier.HOST, on_host), (Tier.NVME, high - low - on_host)):
        if nbytes:
            src, dst = (Tier.DEVICE, tier) if out else (tier, Tier.DEVICE)
            yield Move(
                MoveKind.SAVED, None, None, src, dst, Moment(begin), Moment(end), Bytes(nbytes)
            )


def search_room(least: int, most: int, price: Callable[[int, bool], float]) -> None:
    """Ask for the price of rooms from `most` down to `least`, first far apart, then beside the
    best one.

    price: of a room, with whether it is one of the first; infinite where nothing fits. Seconds of a
    pass and of a step are each convex in the bytes that leave, and so is their sum.
    """
    rooms = [most - (most - least) * i // _COARSE for i in range(1, _COARSE + 1)]
    found = [(price(room, True), -room) for room in rooms]
    if min(found)[0] == inf:
        return
    step = (most - least) // _COARSE
    for _ in range(_ROUNDS):
        step //= 2
        room = -min(found)[1]
        near = [n for n in (room + step, room - step) if least <= n <= most]
        found += [(price(n, False), -n) for n in near]
