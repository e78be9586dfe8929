"""Staging on a device, for blocks that it updates and whose home is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import Planes
from gemini.tickets import CopyTicket

SETS = 3  # one travels in, one is updated, one travels out


class DeviceStaging:
    """Sets of buffers on a device, in turn: planes of state, parameters and a gradient of a block.

    A tensor that does not fit makes its kind grow, as gradients that were added up in fp32.

    count: sets, and blocks that may be under way at once; 0: as many as one needs.
    waits: the host waits for copies to the device, so that the device never does: a thread updates
        while the device computes for another. Else the device waits, and the host goes on.
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
        self.waits = False
        self._states = _Buffers(memory, self.count)
        self._params = _Buffers(memory, self.count)
        self._grads = _Buffers(memory, self.count)
        self._memory = memory
        self._host = torch.empty(0)  # pinned, on the way to host memory that is not
        self._states.grow(state_bytes)
        self._params.grow(param_bytes)
        self._grads.grow(grad_bytes)
        self.turn = 0  # whose buffers are given out
        self._leaving: list[CopyTicket | None] = [None] * self.count  # from each set

    @property
    def nbytes(self) -> int:
        return self._states.nbytes + self._params.nbytes + self._grads.nbytes

    def begin(self, *, waits: bool) -> None:
        """Begin a step, which a thread takes beside the device's computing, or not."""
        self.waits = waits

    def end(self) -> None:
        """Order all copies from it before what the device does next, as its memory is freed."""
        for turn in range(self.count):
            self.use(turn)

    def use(self, number: int) -> None:
        """Use one set for one block; the copies from it come before that. number: of the block, so
        that it has the same buffers in every step, in whatever order blocks come."""
        self.turn = number % self.count
        leaving, self._leaving[self.turn] = self._leaving[self.turn], None
        if leaving is not None:
            self.arrive(leaving)

    def bring(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyTicket:
        """Begin to copy each second tensor to the first, on the device, for what is launched
        next."""
        ticket = self._memory.copy_all(pairs)
        self.arrive(ticket)
        return ticket

    def take_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyTicket:
        """Begin to copy each second tensor, of this set or of the device, to the first."""
        ticket = self._leaving[self.turn] = self._memory.copy_all(pairs)
        return ticket

    def arrive(self, ticket: CopyTicket) -> None:
        """Let what is launched next come behind a copy."""
        if self.waits:
            ticket.settle()
        else:
            ticket.order()

    def planes(self, like: Planes) -> Planes:
        """Planes shaped as `like`, one after the other; uninitialised."""
        memory = self._states.of(self.turn, sum([plane.nbytes for plane in like.values()]))
        found, end = {}, 0
        for name, plane in like.items():
            start, end = end, end + plane.nbytes
            found[name] = memory[start:end].view(plane.dtype)
        return found

    def param(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Buffer [numel] for parameters, uninitialised."""
        return self._params.of(self.turn, numel * dtype.itemsize).view(dtype)

    def grad(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Buffer [numel] for a gradient, uninitialised."""
        return self._grads.of(self.turn, numel * dtype.itemsize).view(dtype)

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Buffer [numel] in host memory, uninitialised; valid until the next call."""
        words = -(-numel * dtype.itemsize // torch.float32.itemsize)
        if self._host.numel() < words:
            self._host = self._memory.allocate_host(words, torch.float32)
        return self._host.view(dtype)[:numel]


class _Buffers:
    """`count` buffers of one size."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._count = count
        self._buffers: list[Tensor] = []

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

    def of(self, turn: int, nbytes: int) -> Tensor:
        """Bytes, uint8 [nbytes], of the buffer whose `turn` it is."""
        self.grow(nbytes)
        return self._buffers[turn].view(torch.uint8)[:nbytes]
