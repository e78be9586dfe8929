"""What a step brings of a block beside its state: parameters and gradients in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from gemini.nvme import Buffer
from gemini.runtime.memory.files.tensor_files import TensorFiles
from gemini.tickets import Done, Ticket, TicketGroup
from gemini.units import BlockId, ChunkId

Buffers = Mapping[TensorFiles, Buffer]  # one of each file that the step uses


@dataclass(slots=True, eq=False)
class BesideState:
    """Record of one step; see `optim.state.flow.Record`.

    New parameters are a new version in their file, which counts together with the state. They are
    read where no whole master has their values.
    """

    id: BlockId
    chunk: ChunkId
    index: int  # of the block in its chunk
    params: TensorFiles | None
    reads_params: bool
    grads: TensorFiles | None
    param: Tensor | None = None  # [n], in a staging buffer from `begin` on
    grad: Tensor | None = None  # the same

    def begin(self, buffers: Buffers) -> Ticket[object]:
        reads = list[Ticket[None]]()
        if self.params is not None:
            self.param = self.params.values(self.chunk, self.index, buffers[self.params])
            if self.reads_params:
                reads.append(self.params.begin_read(self.chunk, self.index, buffers[self.params]))
        if self.grads is not None:
            self.grad = self.grads.values(self.chunk, self.index, buffers[self.grads])
            reads.append(self.grads.begin_read(self.chunk, self.index, buffers[self.grads]))
        return TicketGroup(reads)

    def put(self, buffers: Buffers) -> Ticket[object]:
        if self.params is None:
            return Done(None)
        return self.params.begin_write(self.chunk, self.index, buffers[self.params])
