"""Weights of a chunk in their most exact form, to read and to set.

The most exact form is the optimizer's fp32 master; without one the fp32 original, from which the
master will start; without either the shard. User writes to the shard are in all three.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.dtypes import BYTES
from gemini.runtime.memory.originals import has_same_values
from gemini.runtime.memory.user_writes import follow_shard
from gemini.runtime.parts import Parts
from gemini.units import ChunkId

log = logging.getLogger("gemini")


def master_of(parts: Parts, chunk: Chunk) -> Tensor:
    """Copy of a chunk's weights, [S] fp32 on the CPU; of an opaque chunk its bytes."""
    if parts.target is not None and chunk.spec.trainable:
        return parts.target.read_master(chunk)
    dtype = torch.float32 if chunk.spec.dtype != BYTES else chunk.dtype
    return weights_without_master(parts, chunk).to("cpu", dtype, copy=True)


def set_master(parts: Parts, chunk: Chunk, values: Tensor) -> None:
    """Set a chunk's weights to `values` [S] fp32: the master or original, and the rounded shard."""
    if parts.target is not None and chunk.spec.trainable:
        parts.target.write_master(chunk, values)
    else:
        set_without_master(parts, chunk, values)


def exact_dtype(parts: Parts, chunk: Chunk) -> torch.dtype:
    """Dtype in which a chunk's weights lose nothing: fp32 with masters or originals."""
    trained = parts.target is not None and chunk.spec.trainable
    has_master = trained and parts.precision_settings.master_weights
    in_fp32 = has_master or chunk.spec.id in parts.originals
    return torch.float32 if in_fp32 else chunk.dtype


def full_chunk(parts: Parts, chunk: Chunk) -> Tensor:
    """Masters of a chunk from all ranks, [S * W] fp32, on the device of collectives. Collective."""
    mine = master_of(parts, chunk).to(parts.comm.device)
    return parts.links[chunk.spec.group].gather_for_all(mine, chunk.spec.id)


def weights_without_master(parts: Parts, chunk: Chunk) -> Tensor:
    """Weights [S] of a chunk without masters: fp32 originals, or the shard in the chunk's dtype.

    The tensor is the stored one, or a copy of a file's content: after a change call
    `set_without_master`.
    """
    shard = chunk.load_shard()
    originals = parts.originals
    original = originals.get(chunk.spec.id)
    originals.rest()
    if original is None:
        return shard
    follow_shard(original, shard.to(original.device))
    return original


def set_without_master(parts: Parts, chunk: Chunk, values: Tensor) -> None:
    """Set the weights [S] of a chunk without masters: shard and original."""
    chunk.store_shard(values)
    originals = parts.originals
    if chunk.spec.id in originals:
        originals.put(chunk.spec.id, values)
        originals.rest()
    elif not chunk.spec.trainable and values.dtype.itemsize > chunk.dtype.itemsize:
        is_exact = has_same_values(values.to(chunk.dtype), values)
        (originals.lost.discard if is_exact else originals.lost.add)(chunk.spec.id)


def tell_rounded(parts: Parts, chunks: Collection[ChunkId], what: str) -> None:
    """Warn, on rank 0, of frozen weights among these chunks that have lost their fp32 values.

    what: has the rounded ones.
    """
    lost = sorted(parts.originals.lost & set(chunks))
    names = [parts.layout.params[s.param].name for c in lost for s in parts.layout.chunks[c].slots]
    if names and parts.comm.rank == 0:
        log.warning(
            "%s the values of %s and %d more frozen parameters as they were rounded to %s; wrap "
            "with keep_originals=True to keep what came in fp32, 4 bytes a parameter",
            what, names[0], len(names) - 1, parts.precision_settings.dtype,
        )  # fmt: skip


def tell_rounded_once(parts: Parts) -> None:
    """`tell_rounded` of all chunks, before the first values that leave the engine."""
    lost = parts.originals.lost
    if lost and not parts.originals.was_told:
        parts.originals.was_told = True
        tell_rounded(parts, lost, "state dicts, checkpoints and unwrap() have")
