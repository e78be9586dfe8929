"""A driver under Triton that launches nothing and counts: what a step asks of a device.

Triton's own path runs up to the launch: specialisation, compilation for sm_90, arguments. Import
this before any kernel, without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGET = GPUTarget("cuda", 90, 32)
# by which the host reads what is on the device, and so waits for it
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")
SETS = "__setitem__"  # waits too where it is given a number, which torch copies to the device
_counts: defaultdict[int, Counter[str]] = defaultdict(Counter)  # by thread


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        """Of an H200."""
        return {
            "max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32,
            "max_num_regs": 65536, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
        }  # fmt: skip

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        return


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self._name = src.fn.__name__
        self.launch_cooperative_grid = False

    def __call__(self, *args: Any) -> None:
        counted()[self._name] += 1


class NoLaunch:
    """What Triton asks a driver for."""

    def __init__(self) -> None:
        self.utils = _Utils()
        self.launcher_cls = _Launcher

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        return

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    @staticmethod
    def is_active() -> bool:
        return True


def counted() -> Counter[str]:
    """Launches of this thread, by the name of the kernel."""
    return _counts[threading.get_ident()]


def counted_by_all() -> Counter[str]:
    """Launches of all threads so far, by the name of the kernel."""
    return sum(list(_counts.values()), Counter())


def install() -> None:
    """From now on Triton launches nothing."""
    driver.set_active(NoLaunch())


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Calls of this thread, in here, by which the host would wait for a device."""
    found: Counter[str] = Counter()
    thread = threading.get_ident()
    before = {name: getattr(Tensor, name) for name in (*READS, SETS)}

    def counting(name: str) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            waits = name != SETS or not isinstance(args[1], Tensor)
            found[name] += waits and threading.get_ident() == thread
            return before[name](self, *args, **kwargs)

        return call

    for name in before:
        setattr(Tensor, name, counting(name))
    try:
        yield found
    finally:
        for name, original in before.items():
            setattr(Tensor, name, original)
