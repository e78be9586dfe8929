"""Copies of the simulated device: they happen as late as they may, and watch their ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from gemini.tickets import CopyTicket

from .pages import poison

_NOTHING = range(0)


class Device(Protocol):
    """What a copy tells the device that it runs on."""

    work: int  # that it was given so far

    def copying(self) -> AbstractContextManager[None]:
        """What is computed inside is how copies are simulated."""
        ...

    def ended(self, copy: SimCopy) -> None:
        """Both its ends are free."""
        ...

    def device_waits(self, copy: SimCopy) -> None:
        """What the device is given next comes behind this copy."""
        ...

    def host_waited(self) -> None:
        """The host waited for the device."""
        ...

    def has_reached(self, copy: SimCopy) -> bool:
        """Whether the device has ended it when the host asks, for which it waits for nothing."""
        ...

    def lost(self, copy: SimCopy) -> None:
        """Nobody can wait for it any more, and nobody has."""
        ...


class SimCopy:
    """One copy between device and host.

    `writes` and `reads` are addresses that are not free yet.
    """

    def __init__(
        self,
        device: Device,
        dst: Tensor,
        src: Tensor,
        behind: Sequence[SimCopy],
        *,
        to_host: bool,
        ends_on_host: bool,
    ) -> None:
        """`behind`: those that the device ends before it. `ends_on_host`: one end is the host's,
        which sees what has ended when it waits."""
        self._device = device
        self._behind = behind
        self._dst: Tensor | None = dst.detach()
        self._src: Tensor | None = src.detach()
        self.writes, self.reads = addresses(dst), addresses(src)
        self.nbytes = dst.nbytes
        self.to_host = to_host
        self._ends_on_host = ends_on_host
        self.begun_at = device.work
        self.ordered = self.has_ended = False
        self._values: Tensor | None = src.detach().clone()
        self._before = _bits(src).clone()
        with torch.no_grad():
            dst.detach().fill_(poison(dst.dtype))

    def deliver(self) -> None:
        """What was copied is in place."""
        self._check_source()
        if self._values is not None and self._dst is not None:
            with torch.no_grad():
                self._dst.copy_(self._values)
            self._values = None

    def end(self) -> None:
        """Both ends are free, as are those of all copies that it came behind."""
        ending = [self]
        while ending:
            copy = ending.pop()
            if not copy.has_ended:
                ending += copy._behind
                copy._end_alone()

    def _end_alone(self) -> None:
        self.ordered = True
        self.precede()
        self.has_ended, self._behind = True, ()
        self._device.ended(self)

    def precede(self) -> None:
        """Another copy with the same ends comes behind it on the device; the host knows nothing of
        that."""
        self.deliver()
        self._dst = self._src = None
        self.writes = self.reads = _NOTHING

    def order(self) -> None:
        """The device comes behind the copy, so its end may be used, written and freed there."""
        if not self.ordered:
            self._device.device_waits(self)
            self.order_copies()

    def order_copies(self) -> None:
        """Other copies come behind it, of which the device's work may wait."""
        if self.ordered:
            return
        self._check_source()
        self.ordered = True
        if self.to_host:
            self._src, self.reads = None, _NOTHING
            return
        self.deliver()
        self._dst, self.writes = None, _NOTHING
        if not self._ends_on_host:
            self._end_alone()

    def settle(self) -> None:
        """The host waits."""
        if not self.has_ended:
            self.end()
            self._device.host_waited()

    def _check_source(self) -> None:
        if self._src is not None and not torch.equal(_bits(self._src), self._before):
            raise AssertionError("the source of a copy was written while the copy reads it")


class SimTicket:
    """Of one copy, which is lost where nobody waits before this is dropped."""

    def __init__(self, device: Device, copy: SimCopy) -> None:
        self._device, self.copy = device, copy

    def ready(self) -> bool:
        with self._device.copying():
            if not self.copy.has_ended and self._device.has_reached(self.copy):
                self.copy.end()
        return self.copy.has_ended

    def order(self) -> None:
        with self._device.copying():
            self.copy.order()

    def wait(self) -> None:
        self.order()
        if self.copy.to_host:
            self.settle()

    def settle(self) -> None:
        with self._device.copying():
            self.copy.settle()

    def __del__(self) -> None:
        if not self.copy.ordered:
            self._device.lost(self.copy)


class SeveralTickets:
    """Several copies that are waited for as one."""

    def __init__(self, parts: Sequence[CopyTicket]) -> None:
        self.parts = parts

    def ready(self) -> bool:
        return all(copy.ready() for copy in self.parts)

    def order(self) -> None:
        for copy in self.parts:
            copy.order()

    # the last one first: those of a stream end in their order, so the host waits once

    def wait(self) -> None:
        for copy in reversed(self.parts):
            copy.wait()

    def settle(self) -> None:
        for copy in reversed(self.parts):
            copy.settle()


def copies_of(ticket: CopyTicket) -> list[SimCopy]:
    """Copies of a ticket that have not ended."""
    if isinstance(ticket, SeveralTickets):
        return [copy for part in ticket.parts for copy in copies_of(part)]
    return [ticket.copy] if isinstance(ticket, SimTicket) and not ticket.copy.has_ended else []


def addresses(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
