"""NUMA: host memory that a device copies from and to, on the node that the device is plugged in.

Memory of another node passes the link between the processors on its way: 30 to 50 % of PCIe's
speed may be lost. Pages are where the policy of their addresses says when they are first touched,
which is when they are pinned. So the policy is set just before, for these addresses alone: threads
and other memory of the process stay as they are. The node is preferred; where it is full, others
have the pages.

Nothing is done on a machine of one node, where the system does not say which node has the device,
and for a process whose policy somebody has set (`numactl`).
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

import torch

SYSFS = Path("/sys")
_PREFERRED, _DEFAULT = 1, 0  # of <linux/mempolicy.h>
# numbers of (mbind, get_mempolicy): the C library has no functions for them
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_WORD_BITS = 64


def place(address: int, nbytes: int) -> bool:
    """Prefer the current device's node for pages, from `address`, that nobody has touched. Returns
    whether that was asked for and the system does it."""
    if num_nodes() == 1 or not torch.cuda.is_initialized():
        return False
    node = node_of_device(torch.cuda.current_device())
    return node is not None and prefer(address, nbytes, node)


@cache
def num_nodes(sysfs: Path = SYSFS) -> int:
    """Number of NUMA nodes of this machine; 1 where nothing says so."""
    return max(1, len(list((sysfs / "devices/system/node").glob("node[0-9]*"))))


def node_of(pci: str, sysfs: Path = SYSFS) -> int | None:
    """Node of a PCI device, as `"0000:17:00.0"`; None where there is one node, or none is said."""
    if num_nodes(sysfs) == 1:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not know


def pci_of(index: int) -> str | None:
    """PCI address of a CUDA device; None where torch does not say it."""
    found = torch.cuda.get_device_properties(index)
    fields = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, device = (getattr(found, name, None) for name in fields)
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


@cache
def node_of_device(index: int) -> int | None:
    """Node on which this process has pinned memory of a CUDA device; None: wherever it comes."""
    pci = pci_of(index)
    return None if pci is None or has_policy() else node_of(pci)


def has_policy() -> bool:
    """Whether somebody has set where this thread's memory is, or nobody can be asked."""
    numbers = _numbers()
    if numbers is None:
        return True
    mode = ctypes.c_int(-1)
    failed = ctypes.CDLL(None).syscall(numbers[1], ctypes.byref(mode), None, 0, None, 0)
    return bool(failed) or mode.value != _DEFAULT


def prefer(address: int, nbytes: int, node: int) -> bool:
    """Prefer a node for pages, from `address`, that nobody has touched. False: the system refuses,
    as where the process may not use that node."""
    numbers = _numbers()
    if numbers is None:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[-1] = 1 << node % _WORD_BITS
    call = ctypes.CDLL(None).syscall
    # the kernel reads one bit less than it is told of
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)
    start, length = ctypes.c_void_p(address), ctypes.c_ulong(nbytes)
    return not call(numbers[0], start, length, _PREFERRED, mask, bits, 0)


def _numbers() -> tuple[int, int] | None:
    if platform.system() != "Linux":
        return None
    return _CALLS.get(platform.machine())
