"""Weights of a chunk in their most exact form, to read and to set.

The most exact form is the optimizer's fp32 master; without one the fp32 original, from which the
master will start; without either the shard. User writes to the shard are in all three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.dtypes import BYTES
from gemini.runtime.memory.user_writes import follow_shard
from gemini.runtime.parts import Parts


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
    if chunk.spec.id in parts.originals:
        parts.originals.put(chunk.spec.id, values)
        parts.originals.rest()
