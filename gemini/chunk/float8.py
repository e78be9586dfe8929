"""A chunk whose parameters are gathered as float8: half of the bytes of 16-bit ones.

W world size · S numel of a shard · P parameters of the chunk

One scale a parameter, its largest magnitude over all ranks / 448: what is gathered is the same
whatever W is. [P] of fp32 is reduced before [S * W] bytes are gathered. A value is off by 2^-4 of
itself at most, or by 2^-10 of the scale where that is more. Shards, masters, gradients and all that
is saved keep their dtype: so a payload is never its shard here, as under ZeRO-1 and 2 otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemini.runtime.comm.links import Links
from gemini.tickets import Ticket

from .layout import ChunkSpec
from .storage import Chunk, ChunkMemory

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max  # 448
LEAST_SCALE = torch.finfo(torch.float32).tiny  # of zeros


class Float8Chunk(Chunk):
    """Chunk of floating parameters of a sharding group of several ranks, gathered as float8."""

    def __init__(self, spec: ChunkSpec, memory: ChunkMemory, links: Links, **options: Any) -> None:
        super().__init__(spec, memory, links, **options | {"never_released": False})
        self._scales: Tensor | None = None  # [P] fp32, of the last gather; None: payload is exact

    def _begin_gather(self) -> Ticket[None]:
        own = self.own_part(self.payload)
        if self.files is not None:
            self._read_file(own).wait()
        elif self.shard_on_host:
            self.bring(own).order()
        else:
            own = self.shard_memory
        return self._send(own)

    @torch.no_grad()
    def _send(self, shard: Tensor) -> Ticket[None]:
        most = torch.zeros(len(self.spec.slots), device=shard.device)
        for i, run in self._runs():
            most[i] = shard[run].abs().amax()
        self._links.shards.all_reduce(most, largest=True).wait()
        self._scales = scales = (most / LARGEST).clamp_(min=LEAST_SCALE)
        sent = self._memory.allocate(self.spec.payload_numel, torch.uint8)
        own = self.own_part(sent)
        for i, run in self._runs():
            own[run] = _packed(shard[run], scales[i]).view(torch.uint8)
        gather = self._links.shards.all_gather(sent, own, self.spec.id)
        return _Arriving(self, gather, sent.view(FLOAT8), scales)

    def _runs(self) -> Iterator[tuple[int, slice]]:
        """(parameter, its run of elements in this rank's shard) of every segment."""
        first, last = self.rank * self.spec.shard_numel, (self.rank + 1) * self.spec.shard_numel
        for i, slot in enumerate(self.spec.slots):
            begin, end = max(slot.offset, first), min(slot.offset + slot.numel, last)
            if begin < end:
                yield i, slice(begin - first, end - first)

    @torch.no_grad()
    def unpack(self, gathered: Tensor, scales: Tensor) -> None:
        """Fill the payload with the [S * W] of float8 that arrived."""
        for i in range(len(self.spec.slots)):
            self.view(self.payload, i).copy_(self.view(gathered, i).float() * scales[i])
        for begin, end in self.spec.gaps():
            self.payload[begin:end].zero_()

    @torch.no_grad()
    def written(self) -> Tensor:
        """[S] of the shard: elements that differ from what was gathered were written; others keep
        their bits."""
        mine = super().written()
        if self._scales is None:
            return mine
        shard, known = self.load_shard().to(mine.device), torch.zeros_like(mine)
        for i, run in self._runs():
            known[run] = _packed(shard[run], self._scales[i]).float() * self._scales[i]
        return torch.where(mine == known, shard, mine)


def _packed(values: Tensor, scale: Tensor) -> Tensor:
    return (values.float() / scale).to(FLOAT8)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Gather of float8 that is under way."""

    chunk: Float8Chunk
    gather: Ticket[None]
    gathered: Tensor  # [S * W]
    scales: Tensor  # [P]

    def ready(self) -> bool:
        return self.gather.ready()

    def wait(self) -> None:
        self.gather.wait()
        self.chunk.unpack(self.gathered, self.scales)
