"""Staging on a device, for blocks that it updates and whose home is elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import Planes

SETS = 3  # one travels in, one is updated, one travels out


class DeviceStaging:
    """Buffers for planes of state, for parameters and for gradients, each in turn.

    A tensor that does not fit makes its kind grow, as gradients that were added up in fp32. A user
    of a buffer must order the copies from it before `count` more buffers are taken.

    count: buffers of each kind, and blocks that may be under way at once; 0: as many as one needs.
    """

    def __init__(
        self,
        memory: Memory,
        count: int = 0,
        state_bytes: int = 0,
        param_bytes: int = 0,
        grad_bytes: int = 0,
    ) -> None:
        self.count = count or SETS
        self._states = _BufferRing(memory, self.count)
        self._params = _BufferRing(memory, self.count)
        self._grads = _BufferRing(memory, self.count)
        self._memory = memory
        self._host = torch.empty(0)  # pinned, on the way to host memory that is not
        self._states.grow(state_bytes)
        self._params.grow(param_bytes)
        self._grads.grow(grad_bytes)

    @property
    def nbytes(self) -> int:
        return self._states.nbytes + self._params.nbytes + self._grads.nbytes

    def begin(self) -> None:
        """Begin a step: blocks get the same buffers as in the step before."""
        self._params.next = self._grads.next = 0

    def planes(self, turn: int, like: Planes) -> Planes:
        """Planes in one set of buffers, shaped as `like`, one after the other; uninitialised."""
        memory = self._states.buffer(turn, sum(plane.nbytes for plane in like.values()))
        found, end = {}, 0
        for name, plane in like.items():
            start, end = end, end + plane.nbytes
            found[name] = memory[start:end].view(plane.dtype)
        return found

    def param(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Buffer [numel] for parameters, uninitialised."""
        return self._params.take(numel, dtype)

    def grad(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Buffer [numel] for a gradient, uninitialised."""
        return self._grads.take(numel, dtype)

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Buffer [numel] in host memory, uninitialised; valid until the next call."""
        words = -(-numel * dtype.itemsize // torch.float32.itemsize)
        if self._host.numel() < words:
            self._host = self._memory.allocate_host(words, torch.float32)
        return self._host.view(dtype)[:numel]


class _BufferRing:
    """Ring of `count` buffers of one size, given out in turn."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._count = count
        self._buffers: list[Tensor] = []
        self.next = 0

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def grow(self, nbytes: int) -> None:
        """Grow buffers to at least `nbytes` bytes, in whole words."""
        if nbytes and (not self._buffers or self._buffers[0].nbytes < nbytes):
            words = -(-nbytes // torch.float32.itemsize)
            self._buffers = [
                self._memory.allocate(words, torch.float32) for _ in range(self._count)
            ]

    def buffer(self, turn: int, nbytes: int) -> Tensor:
        """Bytes, uint8 [nbytes], of the buffer whose `turn` it is."""
        self.grow(nbytes)
        return self._buffers[turn].view(torch.uint8)[:nbytes]

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.grow(numel * dtype.itemsize)
        self.next = (self.next + 1) % self._count
        return self._buffers[self.next].view(dtype)[:numel]
