"""Where kernels run: on the device of their tensors, or in an interpreter that works here."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device and its current stream: make it that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_interpreter(triton: str, numpy: str) -> None:
    """Raise ImportError for versions whose interpreter fails inside every kernel."""
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        raise ImportError(
            f"Triton {triton} cannot interpret kernels with NumPy {numpy}: install numpy<2.4, or "
            "triton>=3.7, or unset TRITON_INTERPRET where there is a GPU"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
