"""Launches of kernels: on their tensors' device, or in an interpreter that works here."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensors' device current: Triton launches on the current device and its stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of a kernel over tiles; chosen by `choose_launch`, never tuned on live data."""

    block: int  # elements of a tile
    num_warps: int


def choose_launch(bytes_per_element: int, interpreted: bool, largest_numel: int) -> Launch:
    """Choose a launch by planes: with many, a smaller tile leaves registers for 6 blocks a
    multiprocessor (sm_90).

    The interpreter runs a tile as one numpy operation: its tile is as large as the largest segment,
    up to 2**16.
    """
    if interpreted:
        return Launch(
            block=min(1 << 16, 1 << max(6, (largest_numel - 1).bit_length())), num_warps=4
        )
    return Launch(block=4096 if bytes_per_element <= 16 else 1024, num_warps=4)


def check_interpreter(triton: str, numpy: str) -> None:
    """Raise ImportError for versions whose interpreter fails inside every kernel."""
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        raise ImportError(
            f"Triton {triton} cannot interpret kernels with NumPy {numpy}: install numpy<2.4, or "
            "triton>=3.7, or unset TRITON_INTERPRET where there is a GPU"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
