"""Chunks as memory: payload, shard and gradients of one chunk, and what changes them.

W world size · S numel of a shard · payload [S * W] in the compute dtype

[Note: one storage] The payload has one storage for the life of the chunk. It is freed with
`resize_(0)` and refilled on gather, never shared with another chunk: autograd keeps views of it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gemini.tickets import Done, Ticket

from .layout import ChunkSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Memory(Protocol):
    """What a chunk needs of a backend; see `gemini.runtime.backend`."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor: ...
    def free(self, tensor: Tensor) -> None: ...
    def refill(self, tensor: Tensor) -> None: ...
    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor: ...
    def copy(self, dst: Tensor, src: Tensor) -> Ticket[None]: ...


class Links(Protocol):
    """What a chunk needs of a communicator; see `gemini.runtime.comm`."""

    rank: int
    world_size: int

    def all_gather(self, payload: Tensor, shard: Tensor) -> Ticket[None]: ...
    def reduce_scatter(self, shard: Tensor, payload: Tensor) -> Ticket[None]: ...


class Chunk:
    """One chunk on one rank.

    At world size 1 with its shard on the device, the payload *is* the shard and is never released.
    Gradients are packed into `grad_buffer` as they arrive; `reduce` turns it into `grad`, this
    rank's mean over ranks. A second backward before the step adds to `grad` in fp32.
    """

    def __init__(
        self, spec: ChunkSpec, memory: Memory, links: Links, *, shard_on_host: bool = False
    ) -> None:
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self._memory = memory
        self._links = links
        self.payload = memory.allocate(spec.payload_numel, self.dtype)  # [S * W], device
        self.is_whole = links.world_size == 1 and not shard_on_host
        self.shard = self.payload  # [S], device or pinned host
        if not self.is_whole:
            make = memory.allocate_host if shard_on_host else memory.allocate
            self.shard = make(spec.shard_numel, self.dtype)
        self.gathered = True  # the payload has its storage and, behind `pending`, its values
        self.pending: Ticket[None] = Done(None)  # of the gather that fills the payload
        self.grad_buffer: Tensor | None = None  # [S * W], device: this backward's gradients
        self.grad: Tensor | None = None  # [S], reduced; fp32 once it was accumulated
        self._arrived: set[int] = set()  # slots of grad_buffer that hold a gradient
        self._reduction: tuple[Ticket[None], Tensor] | None = None

    # -- parameters --

    def view(self, tensor: Tensor, slot: int) -> Tensor:
        """The part of a [S * W] tensor that belongs to one parameter, flat."""
        place = self.spec.slots[slot]
        return tensor[place.offset : place.offset + place.numel]

    def keep_shard(self) -> None:
        """Copy this rank's shard out of a payload that was just filled."""
        if not self.is_whole:
            start = self._links.rank * self.spec.shard_numel
            self._memory.copy(self.shard, self.payload[start : start + self.shard.numel()]).wait()

    def gather(self) -> None:
        """Begin to make the whole payload; `wait_gathered` ends it. Nothing if it is there."""
        if self.gathered:
            return
        self._memory.refill(self.payload)
        self.gathered = True
        if self._links.world_size == 1:
            self.pending = self._memory.copy(self.payload, self.shard)
        else:
            self.pending = self._links.all_gather(self.payload, self._on_device(self.shard))

    def wait_gathered(self) -> None:
        self.pending.wait()
        self.pending = Done(None)

    def release(self) -> None:
        """Free the payload; the shard holds the values."""
        assert self.gathered and not self.is_whole
        self.wait_gathered()
        self._memory.free(self.payload)
        self.gathered = False

    def _on_device(self, shard: Tensor) -> Tensor:
        if shard.device == self.payload.device:
            return shard
        copy = self._memory.allocate(shard.numel(), shard.dtype)
        self._memory.copy(copy, shard).wait()
        return copy

    # -- gradients --

    def add_gradient(self, slot: int, grad: Tensor) -> None:
        """Pack one parameter's gradient, divided by the world size so that the sum is the mean.

        It may arrive more than once in one backward (reentrant checkpointing): then it adds.
        """
        grad = grad.reshape(-1)
        if self._links.world_size == 1 and self.grad is not None and self.grad_buffer is None:
            self._widen()
            self.view(self.grad, slot).add_(grad)
            return
        if self.grad_buffer is None:
            self.grad_buffer = self._memory.allocate(self.spec.payload_numel, self.dtype)
        place = self.view(self.grad_buffer, slot)
        if slot in self._arrived:
            place.add_(grad, alpha=1 / self._links.world_size)
        elif self._links.world_size == 1:
            place.copy_(grad)
        else:
            torch.mul(grad, 1 / self._links.world_size, out=place)
        self._arrived.add(slot)

    @property
    def num_arrived(self) -> int:
        """Parameters whose gradient is in the buffer and not yet reduced."""
        return len(self._arrived)

    def begin_reduce(self) -> None:
        """Complete the buffer with zeros and begin to reduce it over ranks."""
        if self._links.world_size == 1:
            if self.grad_buffer is not None:
                self._fill_missing(self.grad_buffer)
                assert self.grad is None
                self.grad, self.grad_buffer = self.grad_buffer, None
            return
        self.end_reduce()
        if self.grad_buffer is None:
            self.grad_buffer = self._memory.allocate(self.spec.payload_numel, self.dtype)
        self._fill_missing(self.grad_buffer)
        reduced = self._memory.allocate(self.spec.shard_numel, self.dtype)
        ticket = self._links.reduce_scatter(reduced, self.grad_buffer)
        self._reduction = (ticket, reduced)
        self.grad_buffer = None  # the ticket keeps it alive

    def end_reduce(self) -> None:
        """Wait for the reduction under way and take its result over."""
        if self._reduction is None:
            return
        (ticket, reduced), self._reduction = self._reduction, None
        ticket.wait()
        if self.grad is None:
            self.grad = reduced
        else:
            self._widen()
            self.grad.add_(reduced)

    def drop_gradients(self) -> None:
        self.end_reduce()
        self.grad = None
        self.grad_buffer = None
        self._arrived.clear()

    def _widen(self) -> None:
        """Accumulate in fp32 from the second backward on."""
        assert self.grad is not None
        if self.grad.dtype != torch.float32:
            wide = self._memory.allocate(self.grad.numel(), torch.float32)
            self.grad = wide.copy_(self.grad)

    def _fill_missing(self, buffer: Tensor) -> None:
        for slot in range(len(self.spec.slots)):
            if slot not in self._arrived:
                self.view(buffer, slot).zero_()
        for start, end in self.spec.gaps():
            buffer[start:end].zero_()
        self._arrived.clear()
