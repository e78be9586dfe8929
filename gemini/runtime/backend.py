"""Memory and copies of the compute device: `cpu`, `cuda` and `sim`.

A backend hands out device memory whose storage can be freed and refilled, host memory, and copies
between the two as tickets. `sim` is a device for tests that need no GPU: its copies finish late and
in another order, freed memory is poisoned, and its host pool is separate from its device memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gemini.pages import advise_huge_pages
from gemini.tickets import Done, Ticket


class Backend(Protocol):
    """Where modules compute, and the memory beside it."""

    device: torch.device
    has_host_tier: bool  # host memory is another pool than device memory
    updates_by_triton: bool  # resident state is updated by kernels on the device
    shards_start_on_host: bool  # where no budget places them, parameters wait in host memory

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [numel] on the device, one storage of its own."""
        ...

    def free(self, tensor: Tensor) -> None:
        """Give the tensor's storage back; its shape stays. Reading it is then undefined."""
        ...

    def refill(self, tensor: Tensor) -> None:
        """Give a freed tensor its storage again, uninitialised."""
        ...

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [numel] in host memory, pinned where that speeds up copies."""
        ...

    def copy(self, dst: Tensor, src: Tensor) -> Ticket[None]:
        """Begin to copy between tiers. `src` and `dst` must be left alone until the ticket is."""
        ...


class CpuBackend:
    """Compute and host are the same memory; copies are done when they return."""

    device = torch.device("cpu")
    has_host_tier = False
    updates_by_triton = False
    shards_start_on_host = False

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        advise_huge_pages(tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(0)

    def refill(self, tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        advise_huge_pages(tensor)

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.allocate(numel, dtype)

    def copy(self, dst: Tensor, src: Tensor) -> Ticket[None]:
        dst.copy_(src)
        return Done(None)


class CudaBackend:
    """Copies run on a side stream; a ticket makes the current stream wait, not the host."""

    has_host_tier = True
    updates_by_triton = True
    shards_start_on_host = False

    def __init__(self, device: torch.device, pin_memory: bool = True) -> None:
        self.device = device
        self._pin_memory = pin_memory
        self._copies = torch.cuda.Stream(device)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def free(self, tensor: Tensor) -> None:
        # kernels of the current stream may still read it: the allocator reuses memory in stream
        # order, and every other stream that touched it was recorded by `copy`
        tensor.untyped_storage().resize_(0)

    def refill(self, tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=self._pin_memory)

    def copy(self, dst: Tensor, src: Tensor) -> Ticket[None]:
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            dst.copy_(src, non_blocking=True)
            event = self._copies.record_event()
        for tensor in (dst, src):
            if tensor.is_cuda:
                tensor.record_stream(self._copies)
        return EventTicket(event, self.device)


@dataclass(frozen=True, slots=True)
class EventTicket:
    """Work on a side stream; waiting makes the current stream wait, and never the host."""

    event: torch.cuda.Event
    device: torch.device

    def ready(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class SimBackend:
    """A simulated device in host memory: late, reordered copies; poison in freed memory.

    A copy happens when its ticket is waited for, or by chance when a later copy is begun; until
    then its destination is NaN. Freed tensors keep their memory, filled with NaN, so a read of
    released data shows as NaN where a real device would return anything.
    """

    device = torch.device("cpu")
    has_host_tier = True
    shards_start_on_host = True  # what it is for: shards that must be brought to the device

    def __init__(self, seed: int = 0, updates_by_triton: bool = False) -> None:
        self.updates_by_triton = updates_by_triton  # in the interpreter
        self._random = random.Random(seed)
        self._late: list[SimTicket] = []
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self._freed: set[int] = set()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.full((numel,), float("nan"), dtype=dtype)
        self._count(tensor.numel() * tensor.element_size())
        return tensor

    def free(self, tensor: Tensor) -> None:
        self._settle(tensor)
        if tensor.data_ptr() in self._freed:
            raise AssertionError("freed twice")
        self._freed.add(tensor.data_ptr())
        tensor.fill_(float("nan"))
        self._count(-tensor.numel() * tensor.element_size())

    def refill(self, tensor: Tensor) -> None:
        self._freed.remove(tensor.data_ptr())
        self._count(tensor.numel() * tensor.element_size())

    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.full((numel,), float("nan"), dtype=dtype)

    def copy(self, dst: Tensor, src: Tensor) -> Ticket[None]:
        dst.fill_(float("nan"))
        ticket = SimTicket(lambda: dst.copy_(src), dst)
        self._late.append(ticket)
        for other in list(self._late):
            if self._random.random() < 0.3:
                other.wait()
        self._late = [other for other in self._late if not other.ready()]
        return ticket

    def _settle(self, tensor: Tensor) -> None:
        for ticket in self._late:
            if not ticket.ready() and ticket.dst.data_ptr() == tensor.data_ptr():
                raise AssertionError("memory was freed under a copy")

    def _count(self, nbytes: int) -> None:
        self.device_bytes += nbytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)


class SimTicket:
    """A copy that has not happened yet."""

    def __init__(self, work: Callable[[], object], dst: Tensor) -> None:
        self._work: Callable[[], object] | None = work
        self.dst = dst

    def ready(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            with torch.no_grad():
                work()


def make_backend(device: torch.device, pin_memory: bool = True) -> Backend:
    """The backend of a compute device. Raises ValueError for a kind that has none."""
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda":
        return CudaBackend(device, pin_memory)
    raise ValueError(f"device {device} has no backend; expected cpu or cuda")
