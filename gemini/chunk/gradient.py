"""Gradients of one chunk: packed as they arrive, reduced over ranks, accumulated.

W shards · S numel of a shard · M ranks over which a gradient is the mean
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import profiler

from gemini.comm.links import Links
from gemini.dtypes import DTYPES
from gemini.ranges import OFF, named
from gemini.tickets import Ticket
from gemini.units import ChunkId

from .layout import ChunkSpec

LAUNCHED = ("cuda",)  # devices on which each copy is a launch
PACKED_BYTES = 64 << 10  # a gradient of at most so many is packed with others, if that is a launch
PACKED_TOGETHER = 64  # at most


class Allocator(Protocol):
    """Allocator of memory on the compute device."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor: ...


class GradientOffload(Protocol):
    """Home of reduced gradients that wait for the step off the device: host memory or files."""

    def write(self, chunk: ChunkId, values: Tensor) -> None:
        """Take a copy of [S], fp32 or as wide as the chunk."""
        ...

    def read(self, chunk: ChunkId, into: Tensor) -> Ticket[None]:
        """Begin to bring back what was written, in the same dtype."""
        ...


@dataclass(slots=True)
class Account:
    """Account of the bytes that chunks hold in memory: sums over all chunks counted in it."""

    payloads: int = 0  # gathered, on the device
    device_shards: int = 0  # that are no part of a payload
    host_shards: int = 0
    gradients: int = 0  # on the device


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Reduction under way: its ticket, its result, and the payload that the ticket keeps alive."""

    ticket: Ticket[None]
    shard: Tensor
    payload: Tensor
    dtype: torch.dtype  # of the gradient; it may travel in another
    nbytes: int


class ChunkGradient:
    """Gradient of one chunk: one buffer while a backward runs, then this rank's mean over ranks.

    buffer: [S * W] in the compute dtype, with what arrived since the last reduction, divided by M
        so that a sum over ranks is the mean (and fp16 sums do not overflow). What is left in it at
        the end of a backward (`no_sync`, ZeRO-1) is accumulated in fp32 from then on.
    shard: [S], reduced; fp32 once a second reduction was added to it.
    travels_as: the dtype in which it is reduced over ranks; None: that of the buffer.
    own: [S], of a weight that other stages have too: reduced, and without the sums of its copies.
    offload: where `shard` goes as soon as it is reduced; None: it stays on the device.

    measure: called with [S] before it leaves the device; `found` is its answer, as long as the
        gradient is offloaded.

    On a GPU small gradients of a buffer are packed together: up to 4 MiB of them wait for the last.

    With one shard (W = 1) the buffer becomes the shard without a copy; where no rank adds to it, a
    gradient that fills a chunk becomes its buffer.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        memory: Allocator,
        links: Links,
        travels_as: torch.dtype | None = None,
        offload: GradientOffload | None = None,
    ) -> None:
        self._spec = spec
        self._payload_numel = spec.payload_numel
        self._gaps = spec.gaps()
        self._dtype = DTYPES[spec.dtype]
        self._memory = memory
        self._links = links
        self._travels_as = travels_as
        self.account = Account()
        # both are counted in the account: see `_set_buffer` and `_set_shard`
        self._buffer: Tensor | None = None
        self.shard: Tensor | None = None  # this rank's part of the reduced gradient, on the device
        self.own: Tensor | None = None
        self.offload = offload
        self.measure: Callable[[Tensor], Any] | None = None
        self.found: Any = None
        self.offloaded_dtype: torch.dtype | None = None  # of the offloaded [S], if there is one
        self._places: tuple[Tensor, ...] = ()  # of the buffer: one for each slot
        starts = [slot.offset for slot in spec.slots]
        self._split_numels = [  # slots, each with the gap that follows it
            numel
            for slot, following in zip(spec.slots, [*starts[1:], spec.payload_numel], strict=True)
            for numel in (slot.numel, following - slot.offset - slot.numel)
        ]
        self._unpacked: list[tuple[Tensor, Tensor]] = []  # places of the buffer, and gradients
        self._arrived: set[int] = set()  # slots of `buffer` that hold a gradient
        self._left_over = False  # the buffer holds gradients of an earlier backward
        self.apart = False  # what arrives is not added to what is reduced before its own reduction
        self._under_way: UnderWay | None = None
        self.updating: Ticket[None] | None = None  # of a step that still reads `shard`
        self.changes = 0  # of the reduced gradient, so far: equal where it is what it was

    @property
    def buffer(self) -> Tensor | None:
        """[S * W], with all that arrived in its place."""
        if self._unpacked:
            self._pack()
        return self._buffer

    @property
    def exists(self) -> bool:
        """Whether there is a reduced gradient, on the device or offloaded."""
        return self.shard is not None or self.offloaded_dtype is not None

    def send(self, offload: GradientOffload | None) -> None:
        """Send reduced gradients to this home from now on, also the present one; None: to the
        device."""
        if self.exists:
            self._taken_back()
        self.offload = offload
        self._leave()

    def load(self) -> Tensor:
        """[S]: the reduced gradient, or a copy on the device of one that is offloaded."""
        if self.offloaded_dtype is None:
            shard = self.shard
            assert shard is not None
            return shard
        assert self.offload is not None
        copy = self._memory.allocate(self._spec.shard_numel, self.offloaded_dtype)
        self.offload.read(self._spec.id, copy).wait()
        return copy

    @property
    def is_reduced(self) -> bool:
        """Whether no reduction is under way."""
        return self._under_way is None

    @property
    def nbytes(self) -> int:
        """Bytes on the device of all gradients of this chunk on this rank."""
        under_way = self._under_way.nbytes if self._under_way else 0
        return under_way + _nbytes(self._buffer) + _nbytes(self.shard) + _nbytes(self.own)

    @property
    def num_arrived(self) -> int:
        """Parameters whose gradient is in the buffer and not yet reduced."""
        return len(self._arrived)

    @property
    def next_changes_memory(self) -> bool:
        """Whether the next gradient that arrives may take memory or give some back: the first of a
        buffer does, and the last, after which it may be reduced."""
        last = len(self._arrived) + 1 >= len(self._spec.slots)
        return self._buffer is None or self._left_over or last

    def add(self, slot: int, grad: Tensor) -> None:
        """Pack one parameter's gradient. One that arrives again in the same backward is added.

        A gradient that fills the chunk becomes the buffer itself: the caller gives it away. A
        sparse one becomes dense, with torch's own sum of repeated indices.
        """
        try:
            grad = grad.reshape(-1)
        except RuntimeError:  # of sparse ones; to ask each for its layout costs every step
            grad = grad.to_dense().reshape(-1)
        alone, num_means = self._links.is_alone, self._links.num_means
        if alone and self.exists and self._buffer is None and not self.apart:
            shard = self._widened(self._taken_back())
            self._set_shard(shard)
            self._place(shard, slot).add_(grad, alpha=1 / num_means)
            return
        # The largest gradients are not copied: autograd gave their memory away, so nobody else has
        # it. Views of a larger storage are copied, as they would keep all of it alive.
        if self._buffer is None and alone and self._can_be_buffer(grad):
            self._set_buffer(grad if num_means == 1 else grad.mul_(1 / num_means))
            self._arrived.add(slot)
            return
        if self._buffer is None:
            self._set_buffer(self._memory.allocate(self._payload_numel, self._dtype))
        elif self._left_over:
            self._set_buffer(self._widened(self._buffer))
        self._left_over = False
        place = self._places[slot]
        # it is added in place, so a gradient of this slot that waits to be packed must be packed
        if slot in self._arrived:
            self._pack()
            place.add_(grad, alpha=1 / num_means)
        elif num_means == 1:
            if grad.device.type in LAUNCHED and grad.nbytes <= PACKED_BYTES:
                self._unpacked.append((place, grad))
                if len(self._unpacked) >= PACKED_TOGETHER:
                    self._pack()
            else:
                place.copy_(grad)
        else:
            torch.mul(grad, 1 / num_means, out=place)
        self._arrived.add(slot)

    def _pack(self) -> None:
        """Copy the gradients that wait to their places, in one launch."""
        if self._unpacked:
            places, grads = zip(*self._unpacked, strict=True)
            torch._foreach_copy_(places, grads)
            self._unpacked.clear()

    def _can_be_buffer(self, grad: Tensor) -> bool:
        """Whether the gradient has all elements of the chunk, and memory of its own."""
        return (
            grad.numel() == self._payload_numel
            and grad.dtype == self._dtype
            and grad.untyped_storage().nbytes() == grad.nbytes
        )

    def end_backward_unreduced(self) -> None:
        """End a backward that reduces nothing: the next one adds to the buffer."""
        self._pack()
        self._left_over = self._buffer is not None

    def begin_reduce(self) -> None:
        """Complete the buffer with zeros and begin to reduce it over ranks."""
        if self._links.is_alone:
            from_others = self._links.num_means > 1 and not self.exists
            if self._buffer is None and (from_others or self._links.tie is not None):
                # experts of other ranks may have had tokens where these had none; and copies of
                # a tied weight are all added up, or none
                self._set_buffer(self._memory.allocate(self._payload_numel, self._dtype))
            if self._buffer is not None:
                self._take_over(self._take_buffer())
            self._left_over = False
            if self.offload is not None:
                self._leave()
            return
        # one reduction of a chunk at a time: the second is added to the first one's result
        if self._under_way is not None:
            self.end_reduce()
        if self._buffer is None:
            self._set_buffer(self._memory.allocate(self._payload_numel, self._dtype))
        buffer = self._take_buffer()  # the ticket keeps it alive
        self._left_over = False
        dtype = buffer.dtype
        if self._travels_as is not None:
            buffer = self._in_dtype(buffer, self._travels_as)
        reduced = buffer
        if self._links.world_size > 1:
            reduced = self._memory.allocate(self._spec.shard_numel, buffer.dtype)
        with named("reduce", "chunk", self._spec.id) if profiler._is_profiler_enabled else OFF:
            ticket = self._links.sums.reduce_scatter(reduced, buffer, self._spec.id)
        nbytes = reduced.nbytes + (0 if reduced is buffer else buffer.nbytes)
        self._under_way = UnderWay(ticket, reduced, buffer, dtype, nbytes)
        self.account.gradients += nbytes

    def end_reduce(self) -> None:
        """Wait for the reduction under way and take its result over."""
        if self._under_way is None:
            return
        done, self._under_way = self._under_way, None
        self.account.gradients -= done.nbytes
        profiled = profiler._is_profiler_enabled
        with named("wait for gradient of", "chunk", self._spec.id) if profiled else OFF:
            done.ticket.wait()
        self._take_over(self._in_dtype(done.shard, done.dtype))
        if self.offload is not None:
            self._leave()

    def _take_over(self, reduced: Tensor) -> None:
        """Make the result the shard, or add it to the shard; of a tied weight, to its own sum."""
        if self._links.tie is not None:
            self._set_own(reduced if self.own is None else self._widened(self.own).add_(reduced))
            return
        self._add_to_shard(reduced)

    def add_own(self, total: Tensor) -> None:
        """Accumulate `total`, fp32: `own` plus the sums of the weight's other copies."""
        self._set_own(None)
        self._add_to_shard(total)
        if self.offload is not None:
            self._leave()

    def _add_to_shard(self, reduced: Tensor) -> None:
        if not self.exists:
            self.changes += 1
            self._set_shard(reduced)
        else:
            total = self._widened(self._taken_back())
            self._set_shard(total)
            total.add_(reduced)

    def scale_local(self, factor: float) -> None:
        """Multiply the gradients that are not reduced yet, in fp32."""
        if self.buffer is not None:
            self._set_buffer(self._widened(self.buffer).mul_(factor))

    def scale(self, factor: Tensor) -> None:
        """Multiply the accumulated gradients by a 0-d factor."""
        if self.exists:
            self._set_shard(self._widened(self._taken_back()).mul_(factor))
            self._leave()
        if self.own is not None:
            self._set_own(self._widened(self.own).mul_(factor))
        if self.buffer is not None:
            self._set_buffer(self._widened(self.buffer).mul_(factor))

    def zero(self) -> None:
        """Set the accumulated gradients to zeros, which are gradients all the same."""
        if self.exists:
            self._taken_back().zero_()
            self._leave()
        if self.own is not None:
            self.own.zero_()
        if self.buffer is not None:
            self.buffer.zero_()

    def change(self, change: Callable[[Tensor], object], *, wide: bool) -> None:
        """Let `change` work in place on this rank's reduced [S], made fp32 where `wide`."""
        shard = self._taken_back()
        if wide:
            shard = self._widened(shard)
            self._set_shard(shard)
        change(shard)
        self._leave()

    def local(self, slot: int) -> Tensor | None:
        """Sum of one parameter over this rank's backwards that is not reduced yet: fp32, flat;
        None: none."""
        if slot not in self._arrived:
            return None
        self._pack()
        return self._places[slot].to(torch.float32, copy=True).mul_(self._links.num_means)

    def change_local(self, slot: int, change: Callable[[Tensor], object], *, wide: bool) -> None:
        """Let `change` work in place on the sum of `local`, divided by M."""
        if slot in self._arrived:
            buffer = self.buffer
            if wide:
                assert buffer is not None
                self._set_buffer(self._widened(buffer))
            change(self._places[slot])

    def put_local(self, slot: int, values: Tensor) -> None:
        """Make fp32 `values` of one parameter the sum of `local`."""
        if self.buffer is None:
            buffer = self._memory.allocate(self._payload_numel, torch.float32)
        else:
            buffer = self._widened(self.buffer)
        self._set_buffer(buffer)
        self._left_over = True
        torch.mul(values, 1 / self._links.num_means, out=self._places[slot])
        self._arrived.add(slot)

    def forget(self, slot: int) -> None:
        """Forget that one parameter has a gradient that is not reduced yet."""
        self._arrived.discard(slot)

    def drop(self) -> None:
        """Forget every gradient, of this backward and of those before it."""
        self.end_reduce()
        if self.shard is not None:
            self._set_shard(None)
        self._set_own(None)
        self.offloaded_dtype = self.found = None
        self.changes += 1
        self._unpacked.clear()
        if self._buffer is not None:
            self.account.gradients -= self._buffer.nbytes
            self._buffer, self._places = None, ()
        self._left_over = False
        self._arrived.clear()

    def _leave(self) -> None:
        """Send the reduced gradient to its home, where it waits for the step."""
        if self.offload is not None and self.shard is not None:
            self.found = None if self.measure is None else self.measure(self.shard)
            self.offload.write(self._spec.id, self.shard)
            self.offloaded_dtype = self.shard.dtype
            self._set_shard(None)

    def _taken_back(self) -> Tensor:
        """Reduced gradient on the device, to be changed."""
        self.changes += 1
        # a step that goes on during this pass still reads the shard, so changing it waits
        if self.updating is not None:
            self.updating.wait()
            self.updating = None
        if self.offloaded_dtype is not None:
            self._set_shard(self.load())
            self.offloaded_dtype = self.found = None
        assert self.shard is not None
        return self.shard

    def _set_buffer(self, buffer: Tensor) -> None:
        assert not self._unpacked  # their places are in the old one
        self.account.gradients += buffer.nbytes
        if self._buffer is not None:
            self.account.gradients -= self._buffer.nbytes
        self._buffer = buffer
        self._places = buffer.split_with_sizes(self._split_numels)[::2]

    def _take_buffer(self) -> Tensor:
        """Take the buffer out, completed with zeros."""
        if self._unpacked:
            self._pack()
        buffer = self._buffer
        assert buffer is not None
        self._buffer, self._places = None, ()
        self.account.gradients -= buffer.nbytes
        if self._gaps or len(self._arrived) < len(self._spec.slots):
            self._fill_missing(buffer)
        self._arrived.clear()
        return buffer

    def _set_own(self, own: Tensor | None) -> None:
        self.account.gradients += _nbytes(own) - _nbytes(self.own)
        self.own = own

    def _set_shard(self, shard: Tensor | None) -> None:
        self.account.gradients += _nbytes(shard) - _nbytes(self.shard)
        self.shard = shard

    def _place(self, tensor: Tensor, slot: int) -> Tensor:
        place = self._spec.slots[slot]
        return tensor[place.offset : place.offset + place.numel]

    def _widened(self, tensor: Tensor) -> Tensor:
        """The tensor in fp32, in which sums over several backwards are kept."""
        return self._in_dtype(tensor, torch.float32)

    def _in_dtype(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype:
            return tensor
        return self._memory.allocate(tensor.numel(), dtype).copy_(tensor)

    def _fill_missing(self, buffer: Tensor) -> None:
        for slot in range(len(self._spec.slots)):
            if slot not in self._arrived:
                self._place(buffer, slot).zero_()
        for start, end in self._gaps:
            buffer[start:end].zero_()


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
