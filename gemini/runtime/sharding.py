"""Sharding of one module: its parameters, the chunks that have them, and ranks of shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn

from gemini.callers import torch_averages
from gemini.chunk.layout import ChunkLayout
from gemini.chunk.opaque import Opaque
from gemini.chunk.storage import Chunk
from gemini.comm.ballot import Scope
from gemini.comm.communicator import Communicator
from gemini.comm.links import Links
from gemini.nvme import NvmeError
from gemini.optim.rules.loss_scale import LossScale
from gemini.runtime.memory.backend import Backend
from gemini.runtime.wrap.precision import PrecisionSettings
from gemini.units import ChunkId, ParamId


def refuse_copies(own: object, protocol: Any) -> NoReturn:
    """Refuse copies and pickles of a wrapped module."""
    if torch_averages():
        raise TypeError(
            "torch's AveragedModel copies a module whole, and the weights of a wrapped one are "
            "shards; use gemini.EMA(model, decay=...), which averages them where they are"
        )
    raise TypeError(
        "a wrapped module cannot be copied or pickled; copy it before it is wrapped, load "
        "model.state_dict() into a plain one, save that or gemini.export_safetensors(...), or "
        "make it plain with model.unwrap()"
    )


@dataclass(eq=False, kw_only=True)
class Sharding:
    """Sharding of one module on one rank, as it was wrapped.

    Only `following` and `configure` change it: parameters are unfrozen, an optimizer has settings.
    A parameter is a view of its chunk's payload for the whole life of the engine.
    """

    params: Sequence[nn.Parameter]
    layout: ChunkLayout
    chunks: list[Chunk]
    never_released: frozenset[ChunkId]  # by the policy
    all_gathered: bool  # every chunk stays gathered: hooks and fetches have nothing to do
    chunk_of: Mapping[ParamId, ChunkId]
    slot_of: Mapping[ParamId, int]
    original_dtypes: Sequence[torch.dtype]
    opaque: Mapping[ParamId, Opaque]  # quantised parameters, whose class computes with them
    backend: Backend
    comm: Communicator  # of all ranks, for what they agree on
    links: Mapping[str, Links]  # of every sharding group
    scope: Scope
    precision_settings: PrecisionSettings

    __reduce_ex__ = refuse_copies

    @property
    def is_canonical(self) -> bool:
        """Whether gradients are summed in the order of micro-batches."""
        return self.precision_settings.canonical

    @contextmanager
    def following(self, layout: ChunkLayout) -> Iterator[None]:
        """Replace the layout by one of the same parameters, of which others are trained; the one
        before comes back if the body raises."""
        before = self.layout
        self._follow(layout)
        try:
            yield
        except BaseException:
            self._follow(before)
            raise

    def _follow(self, layout: ChunkLayout) -> None:
        self.layout = layout
        for chunk in self.chunks:
            chunk.spec = layout.chunks[chunk.spec.id]

    def configure(
        self, max_norm: float | None, norm_type: float | None, loss_scale: LossScale | None
    ) -> None:
        """Replace settings of steps; None leaves one. Raises ValueError."""
        given = {"max_norm": max_norm, "norm_type": norm_type, "loss_scale": loss_scale}
        asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.precision_settings = replace(self.precision_settings, **asked)

    def place_of(self, param: ParamId) -> tuple[Chunk, int]:
        """Chunk of a parameter, and its slot in the chunk."""
        return self.chunks[self.chunk_of[param]], self.slot_of[param]

    def own_parts(self, chunk: Chunk, param: ParamId) -> Iterator[tuple[slice, int]]:
        """Yield (slice of this rank's shard, its first element of the parameter), part by part."""
        for part in self.layout.shard_segments(chunk.spec, chunk.rank):
            if part.param == param:
                yield slice(part.offset, part.offset + part.numel), part.param_offset

    def note_readable_params(self, error: NvmeError) -> None:
        """Add to the error which parameters are still in memory: one could not be read."""
        for chunk in self.chunks:
            with suppress(NvmeError):  # what was begun ahead may be lost too; then it is not there
                chunk.wait_gathered()
        chunks = [c for c in self.chunks if (c.gathered and c.pending is None) or c.files is None]
        names = [self.layout.params[slot.param].name for c in chunks for slot in c.spec.slots]
        error.add_note(
            f"{len(names)} of {len(self.params)} parameters are in memory, with the 16 or 32 bits "
            f"in which they compute; model.salvage() has {', '.join(names) or 'none'}. The others, "
            "and fp32 masters on disk, are those of the last step if the disk comes back; "
            "else load a checkpoint"
        )
