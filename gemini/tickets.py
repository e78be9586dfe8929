"""Tickets of transfers, collectives and updates that were begun.

Pure: no torch. CUDA events, gloo works, disk transfers and simulated copies have one interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Ticket(Protocol[T_co]):
    """Work that was begun. Every call of `wait()` returns, or raises, the same."""

    def ready(self) -> bool:
        """Whether `wait()` would return, or raise, at once. Never blocks."""
        ...

    def wait(self) -> T_co:
        """Wait for the end and return the result. Raises the error of the work."""
        ...


class CopyTicket(Ticket[None], Protocol):
    """Copy of bytes between two tiers.

    After `wait()` the copied values may be used at their destination: the host waits for a copy
    into host memory; for a copy to the device only later work of the device waits.
    """

    def order(self) -> None:
        """Let later device work wait for the copy; the host does not wait."""
        ...

    def settle(self) -> None:
        """Let the host wait for the copy; then both ends may be used, written and freed."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """Ticket of work that is done already."""

    value: T

    def ready(self) -> bool:
        return True

    def wait(self) -> T:
        return self.value


class Copied:
    """Ticket of a copy that is done already."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def order(self) -> None:
        return

    def settle(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class TicketGroup(Generic[T]):
    """Several tickets as one. `wait()` waits for all of them and then raises the first error."""

    parts: Sequence[Ticket[T]]

    def ready(self) -> bool:
        return False not in [part.ready() for part in self.parts]

    def wait(self) -> tuple[T, ...]:
        results: list[T] = []
        first_error: BaseException | None = None
        for part in self.parts:
            try:
                results.append(part.wait())
            except Exception as error:  # every part must have ended before its buffer is reused
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return tuple(results)
