"""Memory that the machine has left for this rank, its speeds, and the ranks that share it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from gemini.comm.communicator import Communicator
from gemini.kept_speeds import speeds_here
from gemini.placement.homes.budgets import Machine

from .backend import Backend


def ranks_here(comm: Communicator) -> int:
    """Number of the communicator's ranks on this host. Collective."""
    here = socket.gethostname()
    return comm.gather_objects(here).count(here)


def look_at_machine(
    backend: Backend, ranks_per_node: int, nvme_folder: str | None = None
) -> Machine:
    """Look at this host: its ranks share a node, and its CPU if they compute on it."""
    return Machine(
        speeds=speeds_here(
            backend.device, nvme_folder, ranks_per_node, has_host_tier=backend.has_host_tier
        ),
        ranks_per_node=ranks_per_node,
        ranks_per_device=ranks_per_node if backend.device.type == "cpu" else 1,
        has_host_tier=backend.has_host_tier,
        device_bytes_left=_device_bytes_left(backend),
        host_bytes_left=memory_left(),
    )


def _device_bytes_left(backend: Backend) -> int:
    if backend.device.type == "cuda":
        return torch.cuda.mem_get_info(backend.device)[0]
    return memory_left()


def memory_left() -> int:
    """Bytes of RAM that this process may still use: of the machine, and of its cgroup."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(
            "no /proc/meminfo: wrapping needs Linux; expected it, or plan --gpu"
        ) from None
    fields = dict(line.split(":", 1) for line in lines if line)
    left = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used, stat in _CGROUP_FILES:
        try:
            cached = _file_pages(stat)  # counted as used, and given back when memory is asked for
            left = min(left, int(limit.read_bytes()) - int(used.read_bytes()) + cached)
        except (OSError, ValueError):  # no cgroup of that version, or "max"
            continue
    return max(left, 0)


def _file_pages(stat: Path) -> int:
    """Bytes of cached files that no process reads now."""
    fields = dict(line.split() for line in stat.read_text(encoding="utf-8").splitlines())
    return int(fields.get("inactive_file", 0))


_CGROUP: Sequence[tuple[str, str, str]] = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_CGROUP_FILES = [tuple(Path("/sys/fs/cgroup") / name for name in names) for names in _CGROUP]
