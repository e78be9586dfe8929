"""`sim`: a simulated device for tests without a GPU, as hostile as a real one may be.

* Host and device are different memory, although both are the CPU's: `place_of` knows which is
  which, and a kernel is given no address of host memory. Copies are of pinned memory.
* A copy to the device happens when it is ordered, or by chance before; one to the host when the
  host waits for it, or for one that comes behind it. Until then what it fills is NaN.
* Copies of one stream end in their order, and each behind what it waits for on the device. The host
  learns of an end when it waits, or asks: a copy that others come behind has not ended for it.
* What a copy reads may be neither written nor freed before its ticket says so, and a ticket that is
  dropped before that is an error. Errors that nobody could raise in time come with the next call.
* Memory is NaN when it is fresh, staging too, and when it was freed: then it is another's at once,
  so nothing may write it. Its bytes count until the device comes behind what reads it.
* Inside `running`, all that operators make counts as a card's allocator counts it: of forward, loss
  and backward, with their temporaries. `limit_bytes` makes them run out of memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from bench.shared.interpreter import one_kernel_at_a_time
from gemini.optim.state.memory import Mover, copy_alone
from gemini.tickets import CopyTicket

from .copies import SeveralTickets, SimCopy, SimTicket, addresses, copies_of, overlap
from .operators import Operators, SimMonitor
from .pages import Place, SimPages, poison


class SimBackend:
    """A device in host memory; see the file. `updates_by_triton`: kernels in the interpreter.

    Without them the host updates what is on the device, which no real device lets it do: then
    only copies are watched.
    """

    device = torch.device("cpu")
    has_host_tier = True
    shards_start_on_host = True  # what it is for: shards that must be brought to the device

    def __init__(
        self, seed: int = 0, updates_by_triton: bool = False, reaches: float = 0.0
    ) -> None:
        """reaches: how likely a copy has ended that the host asks for, in an order drawn from the
        seed; 0: each ends when the host waits for it, or for one that comes behind it."""
        self.updates_by_triton = updates_by_triton
        if updates_by_triton:
            one_kernel_at_a_time()
        self._random = random.Random(seed)
        self._reaches = reaches
        self.pages = SimPages()
        self._copies: list[SimCopy] = []  # of which the host does not know that they have ended
        self._last: dict[str, SimCopy] = {}  # by stream, whose copies end in their order
        self._lock = threading.RLock()  # copies may be waited for by several threads
        self._num_lost = 0
        self.work = 0  # that the device was given
        self._copier: int | None = None  # thread that simulates a copy
        self.counts_operators = False
        self.host_waits = 0
        self.stalls = 0  # the device waited for a copy to the host, and had nothing to do meanwhile
        self.starved = 0  # the same, for one to the device
        self.to_host_bytes = self.to_device_bytes = 0  # copied so far
        self.moved = 0  # copies that were done when they returned

    # -- memory --

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._check_tickets()
        with self.copying():
            return self.pages.made(torch.full((numel,), poison(dtype), dtype=dtype), "device")

    def zeros(self, numel: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        with self.copying():
            zeros = torch.zeros(numel, dtype=dtype)
            return self.pages.made(zeros, "host" if on_host else "device")

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self.copying():
            return self.pages.made(torch.full((numel,), poison(dtype), dtype=dtype), "host")

    def free(self, tensor: Tensor) -> None:
        self._check_tickets()
        if any(not copy.ordered for copy in self._touching(tensor)):
            raise AssertionError("memory was freed under a copy")
        self.pages.free(tensor)

    def refill(self, tensor: Tensor) -> None:
        self._check_tickets()
        self.pages.refill(tensor)

    def pin(self, address: int, nbytes: int) -> Callable[[], object]:
        """These addresses are host memory, until the answer is called."""
        self.pages.pin(address, nbytes)
        return lambda: self.pages.unpin(address, nbytes)

    def place_of(self, tensor: Tensor) -> Place | None:
        """Whose memory it is; None for what was not made here."""
        return self.pages.place_of(tensor)

    def put(self, tensor: Tensor, place: Place) -> None:
        """From now on its memory is known to be there."""
        self.pages.put(tensor, place)

    @property
    def device_bytes(self) -> int:
        """Bytes in use on the device; of what operators made, what was made inside `running`."""
        return self.pages.device_bytes

    @property
    def peak_device_bytes(self) -> int:
        return self.pages.peak_device_bytes

    def monitor(self) -> SimMonitor:
        return SimMonitor(self)

    def bytes_in_use(self) -> int | None:
        return self.pages.device_bytes if self.counts_operators else None

    def running(self) -> Operators:
        """Context of a program that runs on the device: what its operators make is there."""
        return Operators(self)

    # -- what the device does --

    def address(self, tensor: Tensor) -> int:
        self._check_tickets()
        self.computes()
        if self.updates_by_triton and self.place_of(tensor) == "host":
            raise AssertionError("a kernel is given the address of host memory")
        if self.pages.is_freed(tensor):
            raise AssertionError("a kernel is given the address of freed memory")
        if any(not copy.ordered for copy in self._touching(tensor)):
            raise AssertionError("a kernel is given memory under a copy that nothing orders")
        return tensor.data_ptr()

    def computes(self) -> None:
        """It is given an operator; those that the simulation makes of copies are none."""
        self.work += not self.is_copying

    @property
    def is_copying(self) -> bool:
        """Whether what this thread computes is how copies are simulated."""
        return self._copier == threading.get_ident()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is computed inside is how copies are simulated."""
        with self._lock:
            before, self._copier = self._copier, threading.get_ident()
            try:
                yield
            finally:
                self._copier = before

    def copy_all(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[CopyTicket] = ()
    ) -> CopyTicket:
        with self.copying():
            before = [copy for ticket in after for copy in copies_of(ticket)]
            for copy in before:
                copy.order_copies()
            behind = before if after else self._ordered()
            return SeveralTickets(
                [SimTicket(self, self._begun(dst, src, "in", behind)) for dst, src in pairs]
            )

    def copy(self, dst: Tensor, src: Tensor, behind: Sequence[CopyTicket] = ()) -> CopyTicket:
        with self.copying():
            before = [copy for ticket in behind for copy in copies_of(ticket)]
            for copy in before:
                copy.order_copies()
            return SimTicket(self, self._begun(dst, src, "gathers", [*self._ordered(), *before]))

    def _ordered(self) -> list[SimCopy]:
        """Copies that the device's work so far comes behind."""
        return [copy for copy in self._copies if copy.ordered]

    def mover(self) -> Mover:
        """See `optim.state.memory.Memory`: copies that are done when they return, and so are not
        late; what they fill and read is under no other that nothing orders."""

        def move(dst: Tensor, src: Tensor) -> None:
            with self.copying():
                for end in (dst, src):
                    if self.pages.is_freed(end):
                        raise AssertionError("a copy is given freed memory")
                    if any(not copy.ordered for copy in self._touching(end)):
                        raise AssertionError("a copy begins before another of its ends was ordered")
                self.moved += 1
                copy_alone(dst, src)

        return move

    def _begun(self, dst: Tensor, src: Tensor, stream: str, behind: Sequence[SimCopy]) -> SimCopy:
        self._check_tickets()
        self._check_ends(dst, src)
        places = self.place_of(dst), self.place_of(src)
        to_host = self.updates_by_triton and places[0] == "host"
        on_host = self.updates_by_triton and "host" in places
        stream = "out" if to_host else stream
        last = self._last.get(stream)
        behind = behind if last is None or last.has_ended else [*behind, last]
        for other in list(self._copies):
            if _in_the_way(other, dst, src):
                if not other.ordered:
                    raise AssertionError("a copy begins before another of its ends was ordered")
                other.precede()
        copy = SimCopy(self, dst, src, behind, to_host=to_host, ends_on_host=on_host)
        if on_host:
            self._last[stream] = copy
        self._copies.append(copy)
        if to_host:
            self.to_host_bytes += dst.nbytes
        elif places[1] == "host":
            self.to_device_bytes += dst.nbytes
        for late in list(self._copies):
            if not late.to_host and self._random.random() < 0.3:
                late.deliver() if self.updates_by_triton else late.end()
        return copy

    def beside(self) -> AbstractContextManager[None]:
        """See `optim.state.memory.Memory`: what any thread launches comes in order of time."""
        return nullcontext()

    def join(self) -> None:
        """See `optim.state.memory.Memory`."""

    @contextmanager
    def after_copies(self, and_work: bool = False) -> Iterator[None]:
        """See `optim.state.memory.Memory`."""
        with self.copying():
            for copy in self._copies:
                if not copy.to_host:
                    copy.deliver()
        yield

    def check(self) -> None:
        """Raises what the next call would: a ticket was dropped, or freed memory was written."""
        self._check_tickets()
        self.pages.check_freed()

    # -- what copies tell it --

    def ended(self, copy: SimCopy) -> None:
        self._copies = [other for other in self._copies if other is not copy]

    def device_waits(self, copy: SimCopy) -> None:
        at_once = copy.begun_at == self.work
        self.stalls += at_once and copy.to_host
        self.starved += at_once and not copy.to_host

    def host_waited(self) -> None:
        self.host_waits += 1

    def synchronize(self) -> None:
        """The host waits for all that the device was given."""
        with self.copying():
            for copy in self._ordered():
                copy.end()

    def has_reached(self, copy: SimCopy) -> bool:
        """Whether it has ended by chance, now that the host asks."""
        return self._random.random() < self._reaches

    def lost(self, copy: SimCopy) -> None:
        self._num_lost += 1

    # -- inside --

    def _check_tickets(self) -> None:
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            raise AssertionError(f"nobody waits for {lost} copies: their tickets were dropped")

    def _check_ends(self, dst: Tensor, src: Tensor) -> None:
        for end in (dst, src):
            if self.pages.is_freed(end):
                raise AssertionError("a copy is given freed memory")
            if self.updates_by_triton and self.place_of(end) is None:
                raise AssertionError("a copy is given host memory that is not pinned")

    def _touching(self, tensor: Tensor) -> list[SimCopy]:
        """Copies with an end in this memory that is not free."""
        here = addresses(tensor)
        return [c for c in self._copies if overlap(c.writes, here) or overlap(c.reads, here)]


def _in_the_way(other: SimCopy, dst: Tensor, src: Tensor) -> bool:
    """Whether both are not reading the same, or apart."""
    to, of = addresses(dst), addresses(src)
    return overlap(other.writes, to) or overlap(other.writes, of) or overlap(other.reads, to)
