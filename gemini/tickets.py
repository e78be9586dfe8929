"""Ticket: the one word for a transfer, a collective or an update that was begun.

Pure: no torch. CUDA events, gloo works, disk transfers and simulated copies all hand out one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Ticket(Protocol[T_co]):
    """Something begun. `wait()` may be called any number of times and always answers the same."""

    def ready(self) -> bool:
        """Whether `wait()` would return, or raise, at once. Never blocks."""
        ...

    def wait(self) -> T_co:
        """The result; raises what went wrong."""
        ...


class CopyTicket(Ticket[None], Protocol):
    """A copy between the tiers. `wait()`: what was copied may be used where it now lies, so the
    host waits where that is host memory, and else only what the device does next.
    """

    def order(self) -> None:
        """What the device does next comes behind the copy; the host does not wait."""
        ...

    def settle(self) -> None:
        """The host waits: both ends may be used, written and freed by anybody."""
        ...


class SideStreamTicket(CopyTicket, Protocol):
    """Work on a side stream of the device. `wait()` is `order()`."""

    def times(self) -> tuple[float, float]:
        """Seconds from the begin of all that was queued with it to its end; and seconds that the
        computing stream waited at its first `order`. The host waits for both."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A ticket for work that needed no waiting."""

    value: T

    def ready(self) -> bool:
        return True

    def wait(self) -> T:
        return self.value


class Copied:
    """A copy that was done when it returned."""

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
    """Several tickets as one. `wait()` waits for all of them, then raises the first error."""

    parts: Sequence[Ticket[T]]

    def ready(self) -> bool:
        return all(part.ready() for part in self.parts)

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
