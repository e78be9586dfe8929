"""Chunk as memory: payload, shard and gradients, and what changes them.

W world size · S numel of a shard · payload [S * W] in the compute dtype

[Note: one storage] The payload has one storage for the life of the chunk. It is freed with
`resize_(0)` and refilled on gather, never shared with another chunk: autograd keeps views of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import profiler

from gemini.comm.links import Links, Tie
from gemini.dtypes import DTYPES
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.ranges import OFF, named
from gemini.tickets import CopyTicket, Ticket
from gemini.units import ChunkId, ParamId

from .gradient import Account, ChunkGradient, GradientOffload
from .layout import ChunkLayout, ChunkSpec


class ChunkMemory(Protocol):
    """Memory that a chunk needs of a backend; see `gemini.runtime.memory.backend`."""

    updates_by_triton: bool

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor: ...
    def free(self, tensor: Tensor) -> None: ...
    def refill(self, tensor: Tensor) -> None: ...
    def allocate_host(self, numel: int, dtype: torch.dtype) -> Tensor: ...
    def copy(self, dst: Tensor, src: Tensor, behind: Sequence[CopyTicket] = ()) -> CopyTicket: ...
    def after_copies(self, and_work: bool = False) -> AbstractContextManager[None]: ...


class ShardFiles(Protocol):
    """Shards in files; see `gemini.runtime.memory.files.tensor_files`."""

    def read(
        self, chunk: ChunkId, into: Tensor, behind: Ticket[None] | None = None, first: int = 0
    ) -> Ticket[None]:
        """Begin to fill [S] with a shard as of the end of the update with ticket `behind`; or a
        part of it, whole blocks from block `first` on."""
        ...

    def block_numel(self, chunk: ChunkId) -> int:
        """Elements of a block of a shard; its last one may have fewer."""
        ...

    def replace(self, chunk: ChunkId, values: Tensor) -> None:
        """Write [S], which counts from then on."""
        ...


@dataclass(frozen=True, slots=True)
class _Sent:
    """Gather of shards that is ordered after the copy that brought this rank's."""

    copy: CopyTicket
    gather: Ticket[None]

    def ready(self) -> bool:
        return self.gather.ready()

    def wait(self) -> None:
        self.copy.order()
        self.gather.wait()


def params_in(
    layout: ChunkLayout, chunk: ChunkSpec, payload: Tensor
) -> Iterator[tuple[ParamId, Tensor]]:
    """Every parameter of a chunk and its part of [S * W], a view of its shape, in order."""
    for slot in chunk.slots:
        flat = payload[slot.offset : slot.offset + slot.numel]
        yield slot.param, flat.view(layout.params[slot.param].shape)


class Chunk:
    """One chunk on one rank.

    The shard is this rank's part of the payload where the chunk is `never_released` and its shard
    lives on the device; at world size 1 every shard on the device is its payload.

    files: where the shard lives; None: in memory.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        memory: ChunkMemory,
        links: Links,
        *,
        never_released: bool = False,
        shard_on_host: bool = False,
        files: ShardFiles | None = None,
        gradients_travel_as: torch.dtype | None = None,
        gradient_offload: GradientOffload | None = None,
    ) -> None:
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self._memory = memory
        self._links = links
        self.payload = memory.allocate(spec.payload_numel, self.dtype)  # [S * W], device
        self.files = files
        self.shard_on_host = shard_on_host
        on_device = not shard_on_host and files is None
        self.is_unsharded = links.world_size == 1 and on_device
        self.in_payload = self.is_unsharded or (never_released and on_device)
        self.account = Account()  # of what this chunk and its gradients hold; see `count_in`
        self._shard: Tensor | None = None  # [S], device or pinned host
        self._copies: list[CopyTicket] = []  # that may still read or write the shard
        if self.in_payload:
            self._shard = self.payload if self.is_unsharded else self.own_part(self.payload)
        elif files is None:
            make = memory.allocate_host if shard_on_host else memory.allocate
            self._shard = make(spec.shard_numel, self.dtype)
        # the payload has its storage and, once `pending` has ended, its values
        self.gathered = True
        self.account.payloads += self.payload.nbytes
        self.pending: Ticket[None] | None = None  # of the gather that fills the payload
        self.updating: Ticket[None] | None = (
            None  # of a step that changes the shard while a pass runs
        )
        self.gradient = ChunkGradient(spec, memory, links, gradients_travel_as, gradient_offload)
        self.gradient.account = self.account
        self._count_shard(1)

    def sum_by(self, kind: type[ChunkGradient]) -> None:
        """Sum gradients as this kind does, from now on; there are none yet."""
        self.gradient = kind(self.spec, self._memory, self._links)
        self.gradient.account = self.account

    @property
    def may_be_payload(self) -> bool:
        """Whether the shard is, or will be after a promotion, a view of the payload."""
        return self.in_payload or self._links.world_size == 1

    def count_in(self, account: Account) -> None:
        """Move the bytes that this chunk holds, and will hold, to another account."""
        for sign, new in ((-1, self.account), (1, account)):
            self.account = self.gradient.account = new
            new.payloads += sign * self.gathered * self.payload.nbytes
            new.gradients += sign * self.gradient.nbytes
            self._count_shard(sign)

    def _count_shard(self, sign: int) -> None:
        if self.shard_on_host:
            self.account.host_shards += sign * self.memory_nbytes
        else:
            self.account.device_shards += sign * self.memory_nbytes

    @property
    def grad(self) -> Tensor | None:
        """[S], this rank's part of the reduced gradient, if it is on the device."""
        return self.gradient.shard

    @property
    def shard(self) -> Tensor:
        """[S] in memory, to read and to write; see `load_shard` for one that may live in a file.

        The host waits for copies of it that are under way.
        """
        # in this order: an update that is waited for may itself begin a copy of the shard
        shard = self.shard_memory
        self.settle_copies()
        return shard

    @property
    def shard_memory(self) -> Tensor:
        """[S] in memory, for the device and for copies only: the device comes behind those that are
        under way, and the host does not wait."""
        assert self._shard is not None, f"the shard of chunk {self.spec.id} is in a file"
        if self.updating is not None:
            self.wait_updated()
        for copy in self._copies:
            copy.order()
        if self.in_payload:  # a gather may be writing it
            self.wait_gathered()
        return self._shard

    @property
    def is_parked(self) -> bool:
        """Whether the shard's memory is given away for a while; see `optim.state.parking`.

        Waits for no update.
        """
        shard = self._shard
        return shard is not None and shard.untyped_storage().nbytes() < shard.nbytes

    def movable(self) -> list[Tensor]:
        """Tensors in memory that parking moves, when nothing is under way."""
        self.wait_gathered()
        self.gradient.end_reduce()
        held = [self.payload, self.gradient.buffer, self.gradient.shard, self.gradient.own]
        if self.files is None:
            held.append(self.shard)
        return [tensor for tensor in held if tensor is not None]

    def begin_update(self, ticket: Ticket[None]) -> None:
        """Note that a step reads the gradient and changes the shard until `ticket`: their readers
        wait."""
        self.updating = self.gradient.updating = ticket

    def wait_updated(self) -> None:
        """Wait until the shard is that of the last step."""
        if self.updating is not None:
            with named("wait for update of", "chunk", self.spec.id):
                self.updating.wait()
            self.updating = None

    def is_copied(self, ticket: CopyTicket) -> None:
        """Note a copy to or from the shard: who reads or writes that next comes behind it."""
        if self.shard_on_host:
            self._copies = [copy for copy in self._copies if not copy.ready()]
            self._copies.append(ticket)

    def settle_copies(self) -> None:
        """Let the host wait for copies of the shard that are under way."""
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.settle()

    @property
    def memory_nbytes(self) -> int:
        """Bytes of the shard in memory that are no part of the payload."""
        return 0 if self._shard is None or self.in_payload else self._shard.nbytes

    def load_shard(self) -> Tensor:
        """[S]: the shard itself, or a copy of one in a file. `store_shard` takes changes back."""
        if self.files is None:
            return self.shard
        copy = self._memory.allocate(self.spec.shard_numel, self.dtype)
        self._read_file(copy).wait()
        return copy

    def load_part(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the shard: a view, or a copy of what is in a file, of which
        whole blocks are read."""
        if self.files is None:
            return self.shard[start:stop]
        block_numel = self.files.block_numel(self.spec.id)
        first = start // block_numel
        begin, end = first * block_numel, -(-stop // block_numel) * block_numel
        copy = self._memory.allocate(min(end, self.spec.shard_numel) - begin, self.dtype)
        self.files.read(self.spec.id, copy, self.updating, first).wait()
        return copy[start - begin : stop - begin]

    def _read_file(self, into: Tensor) -> Ticket[None]:
        """Begin to fill [S] with the shard, as the last step makes it."""
        assert self.files is not None
        return self.files.read(self.spec.id, into, self.updating)

    def store_shard(self, values: Tensor) -> None:
        """Make [S] `values` of any dtype the shard."""
        if self.files is not None:
            self.files.replace(self.spec.id, values.to(self.dtype))
        elif values is not self._shard:
            self.shard.copy_(values)

    def bring_home(self, on_host: bool) -> None:
        """Bring the shard to memory, and nearer: to the host, or to the device."""
        self._count_shard(-1)
        try:
            self._bring_home(on_host)
        finally:
            self._count_shard(1)

    def _bring_home(self, on_host: bool) -> None:
        if not on_host and self._links.world_size == 1:
            self.gather()
            self.wait_gathered()
            self._shard = self.payload
            self.is_unsharded = self.in_payload = True
        else:
            make = self._memory.allocate_host if on_host else self._memory.allocate
            shard = make(self.spec.shard_numel, self.dtype)
            if self.files is not None:
                self._read_file(shard).wait()
            else:
                self._memory.copy(shard, self.shard).settle()  # then the old one is dropped
            self._shard = shard
        self.files = None
        self.shard_on_host = on_host

    def leave_device(self) -> None:
        """Send the shard from the device to host memory; the payload may be released then."""
        assert self.files is None and not self.shard_on_host
        self.wait_gathered()
        self._count_shard(-1)
        try:
            shard = self._memory.allocate_host(self.spec.shard_numel, self.dtype)
            self._memory.copy(shard, self.shard).settle()
            self._shard = shard
            self.is_unsharded = self.in_payload = False
            self.shard_on_host = True
        finally:
            self._count_shard(1)

    def leave_memory(self, files: ShardFiles) -> None:
        """Drop the shard, which `files` have by now; the payload may be released then."""
        assert self.files is None
        self.settle_copies()
        self._count_shard(-1)
        self._shard, self.files = None, files
        self.is_unsharded = self.in_payload = self.shard_on_host = False

    @property
    def rank(self) -> int:
        """Index of this rank's shard."""
        return self._links.rank

    @property
    def has_replicas(self) -> bool:
        """Whether other ranks have the same shard, and must come to the same."""
        return self._links.num_replicas > 1

    @property
    def tie(self) -> Tie | None:
        """Tie of a weight that other stages have too, which has this chunk alone."""
        return self._links.tie

    @property
    def counts(self) -> bool:
        """Whether this rank speaks for its shard, in sums over ranks and in what is saved."""
        return self._links.counts

    def view(self, tensor: Tensor, slot: int) -> Tensor:
        """Part of a [S * W] tensor that belongs to one parameter, flat."""
        place = self.spec.slots[slot]
        return tensor[place.offset : place.offset + place.numel]

    def own_part(self, tensor: Tensor) -> Tensor:
        """This rank's [S] of a [S * W] tensor."""
        start = self._links.rank * self.spec.shard_numel
        return tensor[start : start + self.spec.shard_numel]

    def keep_shard(self) -> None:
        """Copy this rank's shard out of a payload that was just filled or changed."""
        self.wait_gathered()
        if not self.in_payload:
            if self.files is not None:
                self.files.replace(self.spec.id, self.written())
            else:
                self._memory.copy(self.shard, self.written()).wait()

    def written(self) -> Tensor:
        """[S]: the shard, as a gathered payload has it."""
        return self.own_part(self.payload)

    def gather(self) -> None:
        """Begin to make the whole payload, unless it is gathered; `wait_gathered` ends it."""
        if self.gathered:
            return
        profiled = profiler._is_profiler_enabled
        shown = named("gather", "chunk", self.spec.id) if profiled else OFF
        # Ctrl-C between these lines would leave a payload that counts as gathered without a ticket,
        # or a gather that this rank has begun and never waits for.
        with shown, DeferredSignals():
            self._memory.refill(self.payload)
            self.gathered = True
            self.account.payloads += self.payload.nbytes
            try:
                self.pending = self._begin_gather()
            except BaseException:
                self._free()
                raise

    def _begin_gather(self) -> Ticket[None]:
        alone = self._links.world_size == 1
        own = self.payload if alone else self.own_part(self.payload)
        if self.files is not None:
            read = self._read_file(own)
            if alone:
                return read
            read.wait()
            return self._links.shards.all_gather(self.payload, own, self.spec.id)
        if not self.shard_on_host:
            return self._links.shards.all_gather(self.payload, self.shard_memory, self.spec.id)
        brought = self.bring(own)
        if alone:
            return brought
        # the collective's stream waits for the copy, and what the device computes does not
        with self._memory.after_copies():
            gather = self._links.shards.all_gather(self.payload, own, self.spec.id)
        return _Sent(brought, gather)

    def bring(self, into: Tensor) -> CopyTicket:
        """Begin to copy [S] from host memory, behind the copies of it that are under way: the
        device does not wait for those."""
        self.wait_updated()
        assert self._shard is not None
        brought = self._memory.copy(into, self._shard, self._copies)
        self.is_copied(brought)
        return brought

    def gather_again(self) -> None:
        """Begin to gather a payload that is never released: the shards have changed."""
        if self.in_payload:
            if not self.is_unsharded:
                self.pending = self._links.shards.all_gather(self.payload, self.shard, self.spec.id)
            return
        self.release()
        self.gather()

    def wait_gathered(self) -> None:
        """Wait for the gather. Raises what went wrong; then a payload that may be released is as if
        it had never been asked for."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        profiled = profiler._is_profiler_enabled
        try:
            with named("wait for", "chunk", self.spec.id) if profiled else OFF:
                pending.wait()
        except BaseException:
            if not self.in_payload:
                # Ctrl-C may have come before it waited: memory that a copy or a read still fills
                # must not be freed. A collective cannot be waited for twice.
                if self._links.world_size == 1:
                    with suppress(Exception):
                        pending.wait()
                self._free()
            raise

    def release(self) -> None:
        """Free the payload; the shard holds the values."""
        assert self.gathered and not self.in_payload
        if self.pending is not None:
            self.wait_gathered()
        self._free()

    def _free(self) -> None:
        self.gathered = False
        self.account.payloads -= self.payload.nbytes
        self._memory.free(self.payload)
