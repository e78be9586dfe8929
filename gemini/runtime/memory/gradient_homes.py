"""Homes of reduced gradients that do not wait for the step on the device: files, host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.tickets import CopyTicket, Ticket
from gemini.units import ChunkId

from .backend import Backend
from .files.blocks import Flat
from .files.tensor_files import TensorFiles

if TYPE_CHECKING:
    from .backend import FileConfig


class GradientFiles:
    """Gradients in files: one as wide as the chunks, and one in fp32 once backwards add up.

    Nothing is ever committed: a gradient lives for one step.
    """

    def __init__(self, tensors: Mapping[ChunkId, Flat], config: FileConfig) -> None:
        self._tensors = tensors
        self._config = config
        self._narrow = TensorFiles(tensors, replace(config, label=config.label + "gradients-"),
                                   versioned=False)  # fmt: skip
        self._wide: TensorFiles | None = None

    @property
    def files(self) -> list[TensorFiles]:
        return [self._narrow] if self._wide is None else [self._narrow, self._wide]

    def write(self, chunk: ChunkId, values: Tensor) -> None:
        self.files_of(chunk, values.dtype).write(chunk, values)

    def read(self, chunk: ChunkId, into: Tensor) -> Ticket[None]:
        return self.files_of(chunk, into.dtype).read(chunk, into)

    def close(self) -> None:
        for files in self.files:
            files.close()

    def files_of(self, chunk: ChunkId, dtype: torch.dtype) -> TensorFiles:
        """Files for gradients of this dtype."""
        if dtype == self._tensors[chunk].dtype:
            return self._narrow
        assert dtype == torch.float32
        if self._wide is None:
            wide = {c: Flat(flat.numel, dtype) for c, flat in self._tensors.items()}
            config = replace(self._config, label=self._config.label + "sums-")
            self._wide = TensorFiles(wide, config, versioned=False)
        return self._wide


class HostGradients:
    """Gradients in host memory, a tensor for each chunk that has one.

    Backward goes on while they leave the device. The device waits for the oldest copy in three
    cases: the plan has no room for more, it counts on the gradient to be gone, or one is read.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rooms: Mapping[ChunkId, int] = {}  # see `ShardPlan.leaving_bytes`
        self._reserved: dict[ChunkId, Tensor] = {}  # [S]; the memory is kept between steps
        self._tensors: dict[ChunkId, Tensor] = {}  # those of it that were written
        self._arrivals: dict[ChunkId, CopyTicket] = {}
        self._leaving: deque[_Leaving] = deque()
        self.nbytes = 0  # of all of them
        self.leaving_nbytes = 0  # on the device, of those that have not left it

    @property
    def tensors(self) -> Mapping[ChunkId, Tensor]:
        """[S] of every chunk that had a gradient."""
        return self._tensors

    def moment(self, *, begins: bool) -> None:
        """Note that a call begins or ends, and order the copies that are due.

        In the plan a gradient has left one moment after the next call has begun.
        """
        while self._leaving and self._leaving[0].is_due:
            self._let_go()
        if begins:
            for leaving in self._leaving:
                leaving.is_due = True

    def all_leave(self) -> None:
        """Order all copies under way before what the device does next."""
        while self._leaving:
            self._let_go()

    def _let_go(self) -> None:
        """Order the oldest copy before what the device does next, which may reuse its memory."""
        first = self._leaving.popleft()
        first.copy.order()
        self.leaving_nbytes -= first.values.nbytes

    def _ordered(self, chunk: ChunkId) -> CopyTicket:
        """Copy that brought a gradient, ordered before what the device does next."""
        # A copy: a tail may look here while the training thread changes gradients of other chunks.
        while any(leaving.chunk == chunk for leaving in tuple(self._leaving)):
            self._let_go()  # one stream has all of them, so those before it have left too
        self._arrivals[chunk].order()
        return self._arrivals[chunk]

    def reserve(self, chunk: ChunkId, numel: int, dtype: torch.dtype) -> None:
        """Reserve memory for a chunk's gradient [numel], pinned, before a backward writes it: pages
        that are pinned there hold up the collectives of other ranks."""
        self._memory_of(chunk, numel, dtype)

    def _memory_of(self, chunk: ChunkId, numel: int, dtype: torch.dtype) -> Tensor:
        memory = self._reserved.get(chunk)
        if memory is None or memory.dtype != dtype:
            self.nbytes -= 0 if memory is None else memory.nbytes
            memory = self._reserved[chunk] = self._backend.allocate_host(numel, dtype)
            self.nbytes += memory.nbytes
        return memory

    def write(self, chunk: ChunkId, values: Tensor) -> None:
        memory = self._tensors[chunk] = self._memory_of(chunk, values.numel(), values.dtype)
        # The memory is kept between steps: the last gradient may still be on its way into it.
        if chunk in self._arrivals:
            self._ordered(chunk)
        with DeferredSignals():  # a copy that nobody knows of would read memory that is freed
            self._arrivals[chunk] = self._backend.copy(memory, values)
            self._leaving.append(_Leaving(chunk, self._arrivals[chunk], values))
            self.leaving_nbytes += values.nbytes
        while self.leaving_nbytes > self.rooms.get(chunk, 0):
            self._let_go()

    def read(self, chunk: ChunkId, into: Tensor) -> Ticket[None]:
        self._ordered(chunk)
        return self._backend.copy(into, self._tensors[chunk])

    def copied(self, chunk: ChunkId) -> tuple[Tensor, CopyTicket]:
        """[S] in host memory, and the copy that brings it there, in the order of whose stream its
        memory on the device is not given back."""
        return self._tensors[chunk], self._arrivals[chunk]

    def arrived(self, chunk: ChunkId) -> tuple[Tensor, CopyTicket]:
        """[S] in host memory, and the copy that brings it there."""
        return self._tensors[chunk], self._ordered(chunk)


@dataclass(slots=True)
class _Leaving:
    chunk: ChunkId
    copy: CopyTicket
    values: Tensor  # what it reads, on the device
    is_due: bool = False  # a call has begun since
