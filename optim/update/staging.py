"""Device memory through which pass the blocks that the device updates and does not hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemini.dtypes import DTYPES
from optim.rules.state_layout import StateLayout
from optim.state.memory import Memory
from optim.state.pieces import Planes

SETS = 3  # one travels in, one is updated, one travels out


@dataclass(frozen=True, slots=True)
class Reserved:
    """How much of it there is from the start: `count` buffers of each kind."""

    count: int = SETS
    state_bytes: int = 0
    param_bytes: int = 0
    grad_bytes: int = 0


class DeviceStaging:
    """Buffers for planes of state, for parameters and for gradients, each in turn.

    What does not fit makes its kind grow: gradients that were added up in fp32 do. Who takes a
    buffer has ordered, before `count` more are taken, whatever copies from it.
    """

    def __init__(self, memory: Memory, layout: StateLayout, reserved: Reserved) -> None:
        self._memory = memory
        self._layout = layout
        self.count = reserved.count  # blocks that may be under way at once
        self._planes: list[Planes] = []
        self._params = _Ring(memory, self.count)
        self._grads = _Ring(memory, self.count)
        if reserved.state_bytes:
            self._make_planes(reserved.state_bytes // layout.bytes_per_element)
        self._params.grow(reserved.param_bytes)
        self._grads.grow(reserved.grad_bytes)

    @property
    def nbytes(self) -> int:
        planes = [plane for planes in self._planes for plane in planes.values()]
        return sum(plane.nbytes for plane in planes) + self._params.nbytes + self._grads.nbytes

    def planes(self, turn: int, numel: int) -> Planes:
        """Of one set, [N] with N at least `numel`."""
        if not self._planes or next(iter(self._planes[0].values())).numel() < numel:
            self._make_planes(numel)
        return self._planes[turn]

    def param(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] for parameters, with anything in it."""
        return self._params.take(numel, dtype)

    def grad(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] for a gradient, with anything in it."""
        return self._grads.take(numel, dtype)

    def _make_planes(self, numel: int) -> None:
        self._planes = [
            {
                plane.name: self._memory.allocate(numel, DTYPES[plane.dtype])
                for plane in self._layout.planes
            }
            for _ in range(self.count)
        ]


class _Ring:
    """`count` buffers of one size, given out in turn."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._count = count
        self._buffers: list[Tensor] = []
        self._next = 0

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def grow(self, nbytes: int) -> None:
        """Buffers have so many bytes at least, in whole words."""
        if nbytes and (not self._buffers or self._buffers[0].nbytes < nbytes):
            words = -(-nbytes // torch.float32.itemsize)
            self._buffers = [
                self._memory.allocate(words, torch.float32) for _ in range(self._count)
            ]

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.grow(numel * dtype.itemsize)
        self._next = (self._next + 1) % self._count
        return self._buffers[self._next].view(dtype)[:numel]
