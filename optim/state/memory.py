"""Memory of a compute device and of its host, and copies between the two."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gemini.pages import advise_huge_pages, tiles, zeros
from gemini.tickets import Copied, CopyTicket

if TYPE_CHECKING:
    from .pinning import Pin


_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p


def copy_alone(dst: Tensor, values: Tensor) -> None:
    """`dst.copy_(values)` by this thread alone, where both are plain memory of the host.

    While threads feed a disk: a team of torch's would go on spinning on their cores for
    milliseconds (docs/log.md). It holds no lock of Python's.
    """
    is_plain = dst.shape == values.shape
    for tensor in (dst, values):
        special = tensor.is_conj() or tensor.is_neg() or tensor.requires_grad
        is_plain &= tensor.device.type == "cpu" and tensor.is_contiguous() and not special
    if not is_plain:
        dst.copy_(values)
    elif dst.dtype != values.dtype:
        for tile, source in tiles(dst.view(-1), values.view(-1)):
            tile.copy_(source)
    else:
        # not by numpy: a storage that it has seen can never be resized
        _memcpy(dst.data_ptr(), values.data_ptr(), values.nbytes)
        torch.autograd.graph.increment_version(dst)


Mover = Callable[[Tensor, Tensor], None]  # fills the first with the second
Pairs = Sequence[tuple[Tensor, Tensor]]  # (dst, src)


class Memory(Protocol):
    """Memory of one device, and of its host."""

    device: torch.device

    @property
    def pin(self) -> Pin | None:
        """Function that makes host memory fast to copy, where anything does."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [numel] on the device, one storage of its own."""
        ...

    def zeros(self, numel: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        """Zeros [numel] on the device or in host memory."""
        ...

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [numel] in host memory, pinned where that speeds up copies."""
        ...

    def copy(self, dst: Tensor, src: Tensor, behind: Sequence[CopyTicket] = ()) -> CopyTicket:
        """Begin to copy between tiers, after the work that the device was given so far, and after
        other copies. `src` must not be written and `dst` not be used until the ticket says so."""
        ...

    def copy_all(self, pairs: Pairs, after: Sequence[CopyTicket] = ()) -> CopyTicket:
        """`copy` of several, all in one direction, as one. after: copies that they come behind, and
        not behind the device's work: these end the last use of each `dst` and write of each
        `src`."""
        ...

    def mover(self) -> Mover:
        """Copier between staging buffers of the host and memory of either, for any thread. A copy
        is done when the call returns, and comes after the work that the device was given before
        `mover`; later work does not wait for it."""
        ...

    def after_copies(self, and_work: bool = False) -> AbstractContextManager[None]:
        """Context whose work, as a collective, comes after the copies to the device that were begun
        before, and_work: and after all that the device was given so far; what it computes does not
        wait for them."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """Context for another thread, once: what it launches there comes behind what the device was
        given so far, and runs beside what the thread that asked launches from now on."""
        ...

    def join(self) -> None:
        """Let what the thread that asked launches from now on come behind what was launched in its
        `beside`."""
        ...

    def address(self, tensor: Tensor) -> int:
        """Address at which a kernel of the device finds a tensor. AssertionError where it cannot
        reach it."""
        ...


class DeviceMemory:
    """Memory of a device whose copies are done when they return."""

    pin: Pin | None = None

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:  # tensors have one, and are compared
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    # an allocator reuses memory in stream order, and copies of it were ordered before
    def free(self, tensor: Tensor) -> None:
        """Give the memory of a whole storage back; `refill` makes it again, with other values."""
        tensor.untyped_storage().resize_(0)

    def refill(self, tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def zeros(self, numel: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        if on_host:
            return zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def copy(self, dst: Tensor, src: Tensor, behind: Sequence[CopyTicket] = ()) -> CopyTicket:
        return self.copy_all([(dst, src)])

    def copy_all(self, pairs: Pairs, after: Sequence[CopyTicket] = ()) -> CopyTicket:
        for dst, src in pairs:
            dst.copy_(src)
        return Copied()

    def mover(self) -> Mover:
        return copy_alone

    def after_copies(self, and_work: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        return

    def address(self, tensor: Tensor) -> int:
        assert tensor.device == self.device, (
            f"a kernel on {self.device} is given {tensor.device} memory"
        )
        return tensor.data_ptr()


class CpuMemory(DeviceMemory):
    """Memory of a CPU: device and host are the same."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        advise_huge_pages(tensor)
        return tensor

    def refill(self, tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        advise_huge_pages(tensor)

    def zeros(self, numel: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        return zeros(numel, dtype)

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.allocate(numel, dtype)


class StreamMark:
    """Mark of the work that a stream was given so far, by an event of CUDA that is recorded
    repeatedly.

    A stream that is ordered after an event comes after what was recorded by then, so the event may
    be recorded anew at once; but not while this mark may still be asked for. So the next mark gets
    the event when this one is dropped.
    """

    __slots__ = ("_event", "_free")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._free = FREE_EVENTS[stream.device]
        try:
            self._event = self._free.pop()
        except IndexError:
            self._event = torch.cuda.Event()
        stream.record_event(self._event)

    def __del__(self) -> None:
        self._free.append(self._event)

    def order(self, stream: torch.cuda.Stream) -> None:
        """Let the next work of this stream come after the mark."""
        stream.wait_event(self._event)

    def ready(self) -> bool:
        return bool(self._event.query())

    def settle(self) -> None:
        """Wait, on the host."""
        self._event.synchronize()


# by device; one that a thread takes or gives is taken or given whole
FREE_EVENTS: dict[torch.device, list[torch.cuda.Event]] = defaultdict(list)


class CudaMemory(DeviceMemory):
    """Memory of CUDA: copies run on streams of their own, so that both directions are used at once,
    and a gather for the next layer does not come behind the state of all others."""

    @staticmethod
    def pin(address: int, nbytes: int) -> Callable[[], object]:
        from .pinning import pin_slab

        return pin_slab(address, nbytes)

    def __init__(self, device: torch.device, pin_memory: bool = True) -> None:
        super().__init__(device)
        self._pin_memory = pin_memory
        self._in, self._out, self._gathers, self._beside = (
            torch.cuda.Stream(device) for _ in range(4)
        )

    def zeros(self, numel: int, dtype: torch.dtype, *, on_host: bool) -> Tensor:
        if on_host:
            return self.allocate_host(numel, dtype).zero_()
        return super().zeros(numel, dtype, on_host=False)

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        from .pinning import pinned

        return pinned(numel, dtype) if self._pin_memory else torch.empty(numel, dtype=dtype)

    def copy(self, dst: Tensor, src: Tensor, behind: Sequence[CopyTicket] = ()) -> CopyTicket:
        stream = self._gathers if dst.is_cuda else self._out
        with torch.cuda.stream(stream):
            for other in behind:
                other.order()
        return self._begin(stream, [(dst, src)])

    def copy_all(self, pairs: Pairs, after: Sequence[CopyTicket] = ()) -> CopyTicket:
        return self._begin(self._in if pairs[0][0].is_cuda else self._out, pairs, after)

    def _begin(
        self, stream: torch.cuda.Stream, pairs: Pairs, after: Sequence[CopyTicket] = ()
    ) -> CopyTicket:
        marks = [ticket.mark for ticket in after if isinstance(ticket, EventTicket)]
        if not marks:
            # After the current stream's work so far: it made `src`, or uses what `dst` replaces.
            marks = [StreamMark(torch.cuda.current_stream(self.device))]
        for mark in marks:
            mark.order(stream)
        with torch.cuda.stream(stream):
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)
        del mark, marks  # the event of one marks the end of the copies
        return EventTicket(StreamMark(stream), self.device, stream == self._out, list(pairs))

    def mover(self) -> Mover:
        # The mark is taken once: a thread's copies come after the work of before the thread began,
        # and wait for nothing that the device is given meanwhile.
        asked = StreamMark(torch.cuda.current_stream(self.device))

        def move(dst: Tensor, src: Tensor) -> None:
            if dst.is_cuda == src.is_cuda:
                copy_alone(dst, src)
                return
            stream = self._gathers if dst.is_cuda else self._out
            asked.order(stream)
            with torch.cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
            StreamMark(stream).settle()

        return move

    @contextmanager
    def after_copies(self, and_work: bool = False) -> Iterator[None]:
        if and_work:
            StreamMark(torch.cuda.current_stream(self.device)).order(self._gathers)
        with torch.cuda.stream(self._gathers):  # the stream that a collective waits for
            yield

    def beside(self) -> AbstractContextManager[None]:
        self._asked = torch.cuda.current_stream(self.device)
        StreamMark(self._asked).order(self._beside)
        return torch.cuda.stream(self._beside)

    def join(self) -> None:
        StreamMark(self._beside).order(self._asked)


@dataclass(slots=True)
class EventTicket:
    """Ticket of copies on a side stream.

    Nothing is recorded on that stream, so memory that is freed after `order` is reused at once;
    until then the ticket keeps what is copied, as its `ends`.
    """

    mark: StreamMark
    device: torch.device
    to_host: bool
    ends: list[tuple[Tensor, Tensor]]

    def ready(self) -> bool:
        return self.mark.ready()

    def order(self) -> None:
        self.mark.order(torch.cuda.current_stream(self.device))
        self.ends.clear()

    def wait(self) -> None:
        if self.to_host:
            self.settle()
        else:
            self.order()

    def settle(self) -> None:
        # not by `order`: what others give the device meanwhile would come behind the copy
        self.mark.settle()
        self.ends.clear()


def memory_of(device: torch.device) -> Memory:
    """Memory of a device, and of the host where the state of a plain module's parameters may
    live."""
    if device.type == "cpu":
        return CpuMemory()
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory(device)
