"""Shards block by block, wherever they live: for what goes through a state space in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.memory import Memory, copy_alone
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.optim.state.tiered_state import SplitMasters
from gemini.placement.sizes import StateBytes, moves_less_split
from gemini.tickets import CopyTicket


class Shards:
    """Shards, block by block in storage order; at most one that lives in a file is in memory.

    memory: of the device, if what they follow is in host memory; pinned blocks of it travel.
    """

    _host: Tensor | None = None  # pinned, of one block
    _sent: CopyTicket | None = None  # of the last block, from there

    def __init__(self, chunks: Sequence[Chunk], memory: Memory | None = None) -> None:
        self._chunks, self._memory = chunks, memory
        self._loaded: tuple[Chunk, Tensor] | None = None
        self._changed = False

    def of(self, block: Block) -> Tensor:
        """[S] that the block is a part of."""
        chunk = self._chunks[block.shard]
        if chunk.files is None:
            return chunk.shard
        if self._loaded is None or self._loaded[0] is not chunk:
            self.end()
            self._loaded = (chunk, chunk.load_shard())
        return self._loaded[1]

    def store_master(self, block: Block, planes: Planes) -> None:
        """Store a block's masters, rounded, as its weights."""
        if MASTER in planes:
            self.store(block, planes[MASTER])

    def exact(self, block: Block, planes: Planes) -> Tensor:
        """[n] fp32 weights of a block: its masters, or a copy where there are none."""
        if MASTER in planes:
            return planes[MASTER]
        shard = self.of(block)[block.elements]
        return shard.to(next(iter(planes.values())), copy=True)

    def store(self, block: Block, values: Tensor) -> None:
        """Store [n] values, rounded, in a block's part of its shard."""
        chunk, into = self._chunks[block.shard], self.of(block)[block.elements]
        if self._memory is None or chunk.shard_on_host or chunk.files is not None:
            copy_alone(into, values)
        else:
            if self._sent is not None:
                self._sent.settle()
            host = self._host
            if host is None or host.numel() < block.numel or host.dtype != into.dtype:
                host = self._host = self._memory.allocate_host(block.numel, into.dtype)
            self._sent = self._memory.copy(into, host[: block.numel].copy_(values))
            self._sent.order()
        self._changed = True

    def end(self) -> None:
        """Take the last one back."""
        if self._loaded is not None and self._changed:
            chunk, values = self._loaded
            chunk.store_shard(values)
        self._loaded, self._changed = None, False


class HostReader:
    """HostReader of a device's tensors: they reach host memory that need not be pinned through two
    pinned buffers in turn, of which one is filled while the other is emptied.

    memory: of the device. The buffers stay, as large as the largest tensor was.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffers: list[Tensor | None] = [None, None]  # uint8, pinned
        self._coming: tuple[CopyTicket, Tensor, Tensor] | None = None

    def read(self, into: Tensor, values: Tensor) -> None:
        """Begin to copy `values` to `into`, of the host, of the same numel and dtype; it is there
        after `end`."""
        first, second = self._buffers
        if first is None or first.nbytes < values.nbytes:
            first = self._memory.allocate_host(values.nbytes, torch.uint8)
        self._buffers = [second, first]
        host = first[: values.nbytes].view(values.dtype)
        ticket = self._memory.copy(host, values)
        self.end()
        self._coming = ticket, into, host

    def end(self) -> None:
        """Wait until all is where it was to go."""
        if self._coming is not None:
            (ticket, into, host), self._coming = self._coming, None
            ticket.settle()
            into.copy_(host)


class ShardMasters(SplitMasters):
    """Masters that share their upper half with shards, as the planner has it.

    chunks: by shard of the state space; more may come.
    """

    def __init__(self, chunks: Sequence[Chunk], state: StateBytes) -> None:
        self._chunks = chunks
        self._state = state

    def on_disk(self, block: Block) -> bool:
        is_split = self._chunks[block.shard].spec.id in self._state.split_on_disk
        return is_split and moves_less_split(block.numel, self._state.per_element)

    def in_memory(self, block: Block) -> bool:
        return self._chunks[block.shard].spec.id in self._state.split_in_memory

    def weights(self, block: Block) -> Tensor:
        shard = self._chunks[block.shard].shard
        return shard[block.elements]
