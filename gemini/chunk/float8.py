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
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini.comm.links import Links
from gemini.tickets import CopyTicket, Ticket

from .layout import ChunkSpec
from .storage import Chunk, ChunkMemory

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max  # 448
LEAST_SCALE = torch.finfo(torch.float32).tiny  # of zeros
GAP = -1
Run = tuple[int, int, int]  # first element, how many, parameter or `GAP`


class Float8Chunk(Chunk):
    """Chunk of floating parameters of a sharding group of several ranks, gathered as float8."""

    def __init__(self, spec: ChunkSpec, memory: ChunkMemory, links: Links, **options: Any) -> None:
        super().__init__(spec, memory, links, **options | {"never_released": False})
        # [P] fp32, of the last gather
        self._most = torch.zeros(len(spec.slots), device=self.payload.device)
        self._is_exact = True  # the payload: nothing was gathered
        own, whole = tuple(self._runs()), tuple(_whole(spec))
        if memory.updates_by_triton:
            from gemini.kernels_triton.float8 import Float8Runs

            device = self.payload.device
            self._own: Runs = Float8Runs(own, device)
            self._whole: Runs = Float8Runs(whole, device)
        else:
            self._own, self._whole = OperatorRuns(own), OperatorRuns(whole)

    def _begin_gather(self) -> Ticket[None]:
        own = self.own_part(self.payload)
        brought = None
        if self.files is not None:
            self._read_file(own).wait()
        elif self.shard_on_host:
            brought = self.bring(own)
        else:
            own = self.shard_memory
        return self._send(own, brought)

    @torch.no_grad()
    def _send(self, shard: Tensor, brought: CopyTicket | None) -> Ticket[None]:
        most, self._is_exact = self._most, False
        # of the stream that computes, which reads it last: there its memory is used again
        sent = self._memory.allocate(self.spec.payload_numel, torch.uint8)
        own = self.own_part(sent)
        # the reduction waits for gathers before it, which what is computed must not
        with self._memory.after_copies(and_work=True):
            if brought is not None:
                brought.order()
            self._own.largest(shard, most.zero_())
            self._links.shards.all_reduce(most, largest=True).wait()
            self._own.pack(shard, most, own)
            gather = self._links.shards.all_gather(sent, own, self.spec.id)
        return _Arriving(self, gather, sent)

    def _runs(self) -> Iterator[Run]:
        """Of every segment of this rank's shard."""
        first, last = self.rank * self.spec.shard_numel, (self.rank + 1) * self.spec.shard_numel
        for i, slot in enumerate(self.spec.slots):
            begin, end = max(slot.offset, first), min(slot.offset + slot.numel, last)
            if begin < end:
                yield begin - first, end - begin, i

    @torch.no_grad()
    def unpack(self, gathered: Tensor) -> None:
        """Fill the payload with the [S * W] of float8 that arrived."""
        self._whole.unpack(gathered, self._most, self.payload)

    @torch.no_grad()
    def written(self) -> Tensor:
        """[S] of the shard: elements that differ from what was gathered were written; others keep
        their bits."""
        mine = super().written()
        if self._is_exact:
            return mine
        shard = self.load_shard().to(mine.device)
        known = self._memory.allocate(mine.numel(), mine.dtype).zero_()
        sent = self._memory.allocate(mine.numel(), torch.uint8)
        self._own.pack(shard, self._most, sent)
        self._own.unpack(sent, self._most, known)
        return torch.where(mine == known, shard, mine, out=known)


def _whole(spec: ChunkSpec) -> Iterator[Run]:
    for i, slot in enumerate(spec.slots):
        yield slot.offset, slot.numel, i
    for begin, end in spec.gaps():
        yield begin, end - begin, GAP


class Runs(Protocol):
    """Runs of parameters in one stretch of elements; gaps are 0.

    values [N] of the stretch · most fp32 [P], the largest magnitude of each parameter · sent uint8
    [N], bits of float8
    """

    def largest(self, values: Tensor, most: Tensor) -> None: ...
    def pack(self, values: Tensor, most: Tensor, sent: Tensor) -> None: ...
    def unpack(self, sent: Tensor, most: Tensor, values: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class OperatorRuns:
    """By operators of torch, to the bits of `gemini.kernels_triton.float8`."""

    runs: tuple[Run, ...]

    def largest(self, values: Tensor, most: Tensor) -> None:
        for first, numel, i in self.runs:
            most[i] = torch.maximum(most[i], values[first : first + numel].abs().amax().float())

    def pack(self, values: Tensor, most: Tensor, sent: Tensor) -> None:
        scales = _scales(most)
        for first, numel, i in self.runs:
            run = slice(first, first + numel)
            sent[run] = (values[run].float() / scales[i]).to(FLOAT8).view(torch.uint8)

    def unpack(self, sent: Tensor, most: Tensor, values: Tensor) -> None:
        scales, sent = _scales(most), sent.view(FLOAT8)
        for first, numel, i in self.runs:
            run = slice(first, first + numel)
            if i == GAP:
                values[run].zero_()
            else:
                values[run].copy_(sent[run].float() * scales[i])


def _scales(most: Tensor) -> Tensor:
    return (most / LARGEST).clamp_(min=LEAST_SCALE)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Gather of float8 that is under way."""

    chunk: Float8Chunk
    gather: Ticket[None]
    gathered: Tensor  # [S * W]

    def ready(self) -> bool:
        return self.gather.ready()

    def wait(self) -> None:
        self.gather.wait()
        self.chunk.unpack(self.gathered)
