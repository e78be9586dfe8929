"""Staging on a device, for blocks that it updates and whose home is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.optim.state.memory import Memory
from gemini.optim.state.pieces import Planes
from gemini.tickets import CopyTicket

SETS = 3  # one travels in, one is updated, one travels out
KINDS = ("state", "param", "grad")


class DeviceStaging:
    """Sets of buffers on a device, in turn: planes of state, parameters and a gradient of a block.

    A tensor that does not fit makes its kind grow, as gradients that were added up in fp32.

    count: sets, and blocks that may be under way at once; 0: as many as one needs.
    waits: the host waits until the block that had a set has left it, before the next one comes: a
        thread gives the streams no more blocks at once than there are sets, and what the device
        computes for another thread finds no queue. Else only the device waits.
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
        self._memory = memory
        self._buffers: dict[str, list[Tensor]] = {}  # by what they are for, one of each set
        self._outgrown: list[Tensor] = []  # in this step
        self.turn = 0  # whose buffers are given out
        self._leaving: list[CopyTicket | None] = [None] * self.count  # from each set
        # that the first copy to the set in use comes behind; and its last one, before the next
        self._left: CopyTicket | None = None
        self._coming: CopyTicket | None = None
        for kind, nbytes in zip(KINDS, (state_bytes, param_bytes, grad_bytes), strict=True):
            self._grow(kind, nbytes)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for found in self._buffers.values() for buffer in found)

    def begin(self, *, waits: bool) -> None:
        """Begin a step, which a thread takes beside the device's computing, or not."""
        self.waits = waits
        self._outgrown.clear()

    def end(self) -> None:
        """Order all copies from it before what the device does next, as its memory is freed."""
        for turn in range(self.count):
            self.use(turn)

    def use(self, number: int, *, in_window: bool = False) -> None:
        """Use one set for one block; the copies from it come before that. number: of the block, so
        that it has the same buffers in every step, in whatever order blocks come. in_window: the
        host waits for them too, if it does in this step."""
        self.turn = number % self.count
        leaving, self._leaving[self.turn] = self._leaving[self.turn], None
        self._left, self._coming = leaving, None
        if in_window and self.waits and leaving is not None and not leaving.ready():
            leaving.settle()
        if leaving is not None:
            self.arrive(leaving)

    def bring_state(self, number: int, state: Planes) -> Planes:
        """`use` a set for a block, and bring it the block's state."""
        self.turn = number % self.count
        staged = self.planes(state)
        leaving, self._leaving[self.turn] = self._leaving[self.turn], None
        if self.waits and leaving is not None:
            leaving.settle()
        # behind the copies from this set alone: the device may be busy with others
        self._left, self._coming = leaving, None
        self.bring([(staged[name], plane) for name, plane in state.items()])
        return staged

    def bring(
        self, pairs: Sequence[tuple[Tensor, Tensor]], arrival: CopyTicket | None = None
    ) -> CopyTicket:
        """Begin to copy each second tensor to the first, of this set, for what is launched next.

        arrival: the copy that brought the second ones to the host.
        """
        left, coming, self._left = self._left, self._coming, None
        if arrival is not None and left is None and coming is None:  # or buffers have grown
            arrival.order()
            arrival = None
        # Behind what left the set, or another copy to it on the same stream, the set is free.
        after = [ticket for ticket in (left, arrival) if ticket is not None]
        if coming is not None and not after:
            after = [coming]
        ticket = self._coming = self._memory.copy_all(pairs, after)
        self.arrive(ticket)
        return ticket

    def pass_by(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy each second tensor, of the host, to the first, which is of no set. The next
        use of this set comes behind that, if the host waits in this step."""
        ticket = self._memory.copy_all(pairs)  # the device may use where they go
        self.arrive(ticket)
        if self.waits:
            self._leaving[self.turn] = ticket

    def take_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyTicket:
        """Begin to copy each second tensor, of this set or of the device, to the first."""
        ticket = self._leaving[self.turn] = self._memory.copy_all(pairs)
        return ticket

    def arrive(self, ticket: CopyTicket) -> None:
        """Let what is launched next come behind a copy."""
        ticket.order()

    def planes(self, like: Planes) -> Planes:
        """Planes shaped as `like`, one after the other; uninitialised."""
        memory = self._of("state", sum([plane.nbytes for plane in like.values()]))
        found, end = {}, 0
        for name, plane in like.items():
            start, end = end, end + plane.nbytes
            found[name] = memory[start:end].view(plane.dtype)
        return found

    def param(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Buffer [numel] for parameters, uninitialised."""
        return self._of("param", numel * dtype.itemsize).view(dtype)

    def grad(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Buffer [numel] for a gradient, uninitialised."""
        return self._of("grad", numel * dtype.itemsize).view(dtype)

    def _of(self, kind: str, nbytes: int) -> Tensor:
        """Bytes, uint8 [nbytes], of the buffer whose turn it is."""
        self._grow(kind, nbytes)
        return self._buffers[kind][self.turn].view(torch.uint8)[:nbytes]

    def _grow(self, kind: str, nbytes: int) -> None:
        """Grow buffers to at least `nbytes` bytes, in whole words."""
        found = self._buffers.get(kind)
        if nbytes and (not found or found[0].nbytes < nbytes):
            # What the device still uses may become a buffer: copies to it come behind all that.
            turn = self.turn
            self.end()
            self.turn, self._left = turn, None
            self._outgrown += found or ()  # a thread's stream may read them, and theirs not wait
            words = -(-nbytes // torch.float32.itemsize)
            make = self._memory.allocate
            self._buffers[kind] = [make(words, torch.float32) for _ in range(self.count)]
