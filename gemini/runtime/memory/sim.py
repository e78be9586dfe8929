"""`sim`: a simulated device for tests without a GPU, as hostile as a real one may be.

* Host and device are different memory, although both are the CPU's: `memory_of` knows which is
  which, and a kernel is given no address of host memory.
* A copy to the device happens when it is ordered, or by chance before; one to the host when the
  host waits for it, and never before. Until then what it fills is NaN.
* What a copy reads may be neither written nor freed before its ticket says so.
* Memory is NaN when it is fresh, staging too, and when it was freed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gemini.tickets import CopyTicket

Place = Literal["device", "host"]


class SimBackend:
    """A device in host memory; see the file. `updates_by_triton`: kernels in the interpreter.

    Without them the host updates what is on the device, which no real device lets it do: then
    only copies are watched.
    """

    device = torch.device("cpu")
    has_host_tier = True
    shards_start_on_host = True  # what it is for: shards that must be brought to the device

    def __init__(self, seed: int = 0, updates_by_triton: bool = False) -> None:
        self.updates_by_triton = updates_by_triton
        self._random = random.Random(seed)
        self._copies: list[SimCopy] = []  # that have an end which is not free yet
        self._places: dict[int, tuple[StorageWeakRef, Place]] = {}  # by storage
        self._pinned: list[range] = []  # addresses of staging
        self._begun_last: SimCopy | None = None  # and nothing was asked for since
        self._freed: set[int] = set()
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self.host_waits = 0
        self.stalls = 0  # the device waited for a copy to the host, and had nothing to do meanwhile
        self.to_host_bytes = self.to_device_bytes = 0  # copied so far

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._begun_last = None
        tensor = self._made(torch.full((numel,), float("nan"), dtype=dtype), "device")
        self._count(tensor.nbytes)
        return tensor

    def zeros(self, numel: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        return self._made(torch.zeros(numel, dtype=dtype), "host" if on_host else "device")

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._made(torch.full((numel,), float("nan"), dtype=dtype), "host")

    def free(self, tensor: Tensor) -> None:
        if tensor.data_ptr() in self._freed:
            raise AssertionError("freed twice")
        for copy in self._touching(tensor):
            if not copy.ordered:
                raise AssertionError("memory was freed under a copy")
        self._freed.add(tensor.data_ptr())
        tensor.fill_(float("nan"))
        self._count(-tensor.nbytes)

    def refill(self, tensor: Tensor) -> None:
        self._begun_last = None
        self._freed.remove(tensor.data_ptr())
        self._count(tensor.nbytes)

    def address(self, tensor: Tensor) -> int:
        self._begun_last = None
        if self.updates_by_triton and self.place_of(tensor) == "host":
            raise AssertionError("a kernel is given the address of host memory")
        if tensor.untyped_storage().data_ptr() in self._freed:
            raise AssertionError("a kernel is given the address of freed memory")
        for copy in self._touching(tensor):
            if not copy.ordered:
                raise AssertionError("a kernel is given memory under a copy that nothing orders")
        return tensor.data_ptr()

    def copy_all(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyTicket:
        return _Several([self.copy(dst, src) for dst, src in pairs])

    def copy(self, dst: Tensor, src: Tensor) -> CopyTicket:
        for other in [*self._touching(src), *self._touching(dst)]:
            reads_only = not _overlap(other.dst, src) and not _overlap(other.dst, dst)
            if reads_only and not _overlap(other.src, dst):
                continue  # both read the same
            if not other.ordered:
                raise AssertionError("a copy begins before another of its ends was ordered")
            other.end()  # it comes before this one on the device
        copy = SimCopy(self, dst, src)
        self._copies.append(copy)
        self._begun_last = copy
        if copy.to_host:
            self.to_host_bytes += dst.nbytes
        elif self.place_of(src) == "host":
            self.to_device_bytes += dst.nbytes
        for late in list(self._copies):
            if not late.to_host and self._random.random() < 0.3:
                late.deliver() if self.updates_by_triton else late.end()
        return copy

    def pin(self, address: int, nbytes: int) -> Callable[[], object]:
        """These addresses are host memory, until the answer is called."""
        self._pinned.append(range(address, address + nbytes))
        return lambda: self._pinned.remove(range(address, address + nbytes))

    def place_of(self, tensor: Tensor) -> Place | None:
        """Whose memory it is; None for what was not made here."""
        storage = tensor.untyped_storage()
        found = self._places.get(storage._cdata)
        if found is not None and not found[0].expired():
            return found[1]
        return "host" if any(tensor.data_ptr() in pages for pages in self._pinned) else None

    def put(self, tensor: Tensor, place: Place) -> None:
        """From now on its memory is known to be there."""
        storage = tensor.untyped_storage()
        self._places[storage._cdata] = StorageWeakRef(storage), place

    def _made(self, tensor: Tensor, place: Place) -> Tensor:
        self.put(tensor, place)
        return tensor

    def _touching(self, tensor: Tensor) -> list[SimCopy]:
        """Copies that have not ended, with an end in this memory."""
        return [c for c in self._copies if _overlap(c.dst, tensor) or _overlap(c.src, tensor)]

    def ended(self, copy: SimCopy) -> None:
        """Both its ends are free."""
        self._copies = [other for other in self._copies if other is not copy]

    def device_waits(self, copy: SimCopy) -> None:
        """What the device is given next waits for this copy to the host."""
        self.stalls += copy is self._begun_last

    def host_waited(self) -> None:
        """The host waited for the device: what was ordered before has ended too."""
        self.host_waits += 1
        for copy in list(self._copies):
            if copy.ordered and not copy.to_host:
                copy.end()

    def _count(self, nbytes: int) -> None:
        self.device_bytes += nbytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)


class SimCopy:
    """A copy that happens as late as it may; see `gemini.tickets.CopyTicket`."""

    def __init__(self, backend: SimBackend, dst: Tensor, src: Tensor) -> None:
        self._backend = backend
        self.dst, self.src = dst.detach(), src.detach()
        self.to_host = backend.updates_by_triton and backend.place_of(dst) == "host"
        self._values: Tensor | None = self.src.clone()
        self._before = _bits(self.src).clone()
        self._watched = True  # the source must stay as it was
        self.ordered = self._has_ended = False
        with torch.no_grad():
            self.dst.fill_(float("nan"))

    def ready(self) -> bool:
        return self._has_ended

    def deliver(self) -> None:
        """What was copied is in place."""
        self._check_source()
        if self._values is not None:
            values, self._values = self._values, None
            with torch.no_grad():
                self.dst.copy_(values)

    def end(self) -> None:
        """Both ends are free."""
        self.ordered = True
        self.deliver()
        self._has_ended = True
        self._backend.ended(self)

    def order(self) -> None:
        if self._has_ended or (self.to_host and self.ordered):
            return
        self._check_source()
        self.ordered = True
        if self.to_host:
            self._backend.device_waits(self)
            self._watched = False  # the device comes behind the copy, so it may write the source
            return
        self.deliver()
        if not self._backend.updates_by_triton or self._backend.place_of(self.src) != "host":
            self.end()

    def wait(self) -> None:
        self.order()
        if self.to_host and not self._has_ended:
            self._end_for_the_host()

    def settle(self) -> None:
        if not self._has_ended:
            self._end_for_the_host()

    def _end_for_the_host(self) -> None:
        self.end()
        self._backend.host_waited()

    def _check_source(self) -> None:
        if self._watched and not torch.equal(_bits(self.src), self._before):
            raise AssertionError("the source of a copy was written while the copy reads it")


class _Several:
    """Copies as one."""

    def __init__(self, copies: Sequence[CopyTicket]) -> None:
        self._copies = copies

    def ready(self) -> bool:
        return all(copy.ready() for copy in self._copies)

    def order(self) -> None:
        for copy in self._copies:
            copy.order()

    def wait(self) -> None:
        for copy in self._copies:
            copy.wait()

    def settle(self) -> None:
        for copy in self._copies:
            copy.settle()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
