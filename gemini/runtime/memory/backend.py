"""Memory and copies of the compute device, `cpu` and `cuda`, and a folder for what is in neither.

A backend hands out device memory whose storage can be freed and refilled, host memory, and copies
between the two as tickets (`optim.state.memory`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gemini.memtracer.monitor import CudaMonitor, Monitor, process_monitor
from gemini.optim.state.memory import CpuMemory, CudaMemory, Memory
from gemini.units import BLOCK_NUMEL

if TYPE_CHECKING:
    from gemini.nvme import Pin, WriteMeter


class Backend(Memory, Protocol):
    """Compute device of the modules, its memory and host memory."""

    has_host_tier: bool  # host memory is another pool than device memory
    updates_by_triton: bool  # kernels of the device update all state; else the host does
    shards_start_on_host: bool  # where no budget places them, parameters wait in host memory

    def free(self, tensor: Tensor) -> None:
        """Give the tensor's storage back; its shape stays. Reading it is then undefined."""
        ...

    def refill(self, tensor: Tensor) -> None:
        """Give a freed tensor its storage again, uninitialised."""
        ...

    def monitor(self) -> Monitor | None:
        """Monitor of memory in use on the device; None where it cannot be read."""
        ...

    def bytes_in_use(self) -> int | None:
        """Bytes in use on the device now, of everything; None where nobody counts them."""
        ...


class CpuBackend(CpuMemory):
    """Backend of the CPU: device and host are one memory; copies are done when they return."""

    has_host_tier = False
    updates_by_triton = False
    shards_start_on_host = False

    def monitor(self) -> Monitor | None:
        return process_monitor()

    def bytes_in_use(self) -> None:
        """See `Backend`: what a process grows by is known too roughly."""


class CudaBackend(CudaMemory):
    """Backend of a GPU: modules compute on the current stream, copies run on another."""

    has_host_tier = True
    updates_by_triton = True
    shards_start_on_host = False

    def monitor(self) -> Monitor:
        return CudaMonitor(self.device)

    def bytes_in_use(self) -> int:
        # nested: flat statistics are sorted by name
        statistics = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(statistics["allocated_bytes"]["all"]["current"])


@dataclass(frozen=True, slots=True)
class FileConfig:
    """Folder of the files of one rank, and how blocks move."""

    folder: str | None = None  # None: a temporary folder on a disk
    block_numel: int = BLOCK_NUMEL  # elements
    depth: int = 2  # blocks read ahead of their update
    label: str = ""
    meter: WriteMeter | None = None  # of the optimizer that these belong to
    memory: Memory = field(default_factory=CpuMemory)  # tensors are there, or the host's
    pins: bool = True  # staging, where that speeds up copies

    @property
    def pin(self) -> Pin | None:
        """Function that registers staging with the device."""
        return self.memory.pin if self.pins else None

    def checked_folder(self) -> Path:
        """Folder of the files. Raises FolderError."""
        from gemini.nvme import check_folder, default_folder

        return check_folder(self.folder) if self.folder is not None else default_folder()


def make_backend(device: torch.device, pin_memory: bool = True) -> Backend:
    """Backend of a compute device.

    Raises ValueError for a kind that has none, and for a GPU that is not this process's current
    one: collectives and the allocator of user code would work on another.
    """
    if device.type == "cpu":
        return CpuBackend()
    if device.type != "cuda":
        raise ValueError(f"device {device} has no backend; expected cpu or cuda")
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise ValueError(
            f"device {device} is not the current one of this process, cuda:{current}; call "
            f"torch.cuda.set_device({device.index}) before you wrap the module"
        )
    return CudaBackend(torch.device("cuda", current), pin_memory)
