"""Random numbers of micro-batches that run layer by layer: those of one after the other.

There each micro-batch begins with the state of torch's generators in which the one before it has
ended. Layer by layer all of them begin before one has ended; so how far a forward moves the
generators is measured once for a kind and its shapes, and states follow from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .chain import refuse

MOST_NUMBERS = 1 << 30  # that one forward draws on the host: a few seconds to count
# [5056] uint8, as ATen writes its mt19937: numbers left before the next block of 624, the index of
# the next one, and the block
_LEFT, _NEXT, _BLOCK = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * 624)
_PIECE = 1 << 20

# Of the host's generator, and of the device's if that is a GPU
State = tuple[Tensor, Tensor | None]


def generators(device: torch.device | None) -> State:
    """States of torch's generators."""
    if device is None or device.type != "cuda":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.cuda.get_rng_state(device)


def same(one: State, other: State) -> bool:
    """Whether two states give the same numbers."""
    pairs = zip(one, other, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Draws:
    """What a forward draws: 32-bit numbers of the host's generator, and the offset that it adds to
    the device's."""

    numbers: int
    offset: int = 0

    @staticmethod
    def between(before: State, after: State) -> Draws:
        """Draws that lead from one state to another. Raises NoChainError if none do."""
        (host, device), (host_after, device_after) = before, after
        offset = 0
        if device is not None and device_after is not None:
            seed, begun = device.view(torch.int64).tolist()
            seed_after, ended = device_after.view(torch.int64).tolist()
            offset = ended - begun
            if seed != seed_after or offset < 0:
                _refuse_seeding()
        return Draws(_numbers_between(host, host_after), offset)

    def behind(self, state: State) -> State:
        """State behind these draws."""
        host, device = state
        if self.numbers:
            engine = torch.Generator().set_state(host)
            _draw(engine, self.numbers)
            host = engine.get_state()
        if device is not None and self.offset:
            device = device.clone()
            device.view(torch.int64)[1] += self.offset
        return host, device


NONE = Draws(0)


def _numbers_between(before: Tensor, after: Tensor) -> int:
    engine = torch.Generator().set_state(before)
    now, numbers = before, 0
    while not torch.equal(now[_BLOCK], after[_BLOCK]):
        if numbers > MOST_NUMBERS:
            _refuse_seeding()
        left = int(now[_LEFT].view(torch.int32))  # so many draws later the next block has begun
        _draw(engine, left)
        numbers += left
        now = engine.get_state()
    numbers += int(after[_NEXT].view(torch.int64)) - int(now[_NEXT].view(torch.int64))
    if numbers < 0:
        _refuse_seeding()
    return numbers


def _draw(engine: torch.Generator, numbers: int) -> None:
    """Draw 32-bit numbers: one for each byte, as ATen fills integers of up to 32 bits."""
    while numbers:
        piece = min(numbers, _PIECE)
        torch.empty(piece, dtype=torch.uint8, device="cpu").random_(generator=engine)
        numbers -= piece


def _refuse_seeding() -> None:
    refuse("a forward seeds torch's generator, so nobody can say where the next one's random "
           "numbers begin")  # fmt: skip


class Streams:
    """States of the generators with which micro-batches begin: `starts`, and behind the last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.starts = [self.now()]

    def expect_draws(self, draws: Sequence[Draws]) -> None:
        """Expect micro-batches to draw this, one after the other."""
        del self.starts[1:]
        for one in draws:
            self.starts.append(one.behind(self.starts[-1]))

    def begin(self, batch: int) -> None:
        self.go_on(self.starts[batch])

    def check_end(self, batch: int) -> None:
        """Raise NoChainError if a micro-batch has not drawn what one of its shapes drew before."""
        if not same(self.now(), self.starts[batch + 1]):
            refuse(f"micro-batch {batch} drew other random numbers than one of its shapes before")

    def now(self) -> State:
        return generators(self._device)

    def go_on(self, state: State) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Context behind which generators are as behind the last micro-batch; or, if it ends in an
        error, as before it."""
        end = 0
        try:
            yield
            end = -1
        finally:
            self.go_on(self.starts[end])
