"""What the weights of a chunk are, as exact as they are known; and how they are set.

The optimizer's fp32 master where there is one; else the fp32 original, until it becomes one; else
the shard. What a user has written to a shard counts for all three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.dtypes import BYTES
from gemini.runtime.memory.user_writes import follow_shard
from gemini.runtime.parts import Parts


def master_of(parts: Parts, chunk: Chunk) -> Tensor:
    """[S] fp32 on the CPU, a copy; of an opaque chunk its bytes."""
    if parts.target is not None and chunk.spec.trainable:
        return parts.target.read_master(chunk)
    dtype = torch.float32 if chunk.spec.dtype != BYTES else chunk.dtype
    return weights_without_master(parts, chunk).to("cpu", dtype, copy=True)


def set_master(parts: Parts, chunk: Chunk, values: Tensor) -> None:
    """The inverse: [S] fp32, and rounded to the shard."""
    if parts.target is not None and chunk.spec.trainable:
        parts.target.write_master(chunk, values)
    else:
        set_without_master(parts, chunk, values)


def exact_dtype(parts: Parts, chunk: Chunk) -> torch.dtype:
    """In which nothing of a chunk's weights is lost."""
    trained = parts.target is not None and chunk.spec.trainable
    has_master = trained and parts.precision_settings.master_weights
    in_fp32 = has_master or chunk.spec.id in parts.originals
    return torch.float32 if in_fp32 else chunk.dtype


def full_chunk(parts: Parts, chunk: Chunk) -> Tensor:
    """[S * W] fp32: every rank's masters of one chunk, where collectives are. Collective."""
    mine = master_of(parts, chunk).to(parts.comm.device)
    return parts.links[chunk.spec.group].gather_for_all(mine, chunk.spec.id)


def weights_without_master(parts: Parts, chunk: Chunk) -> Tensor:
    """[S] of a chunk whose masters no optimizer has: fp32 or as wide as the chunk.

    It is what there is, or a copy of what lies in a file: `set_without_master` takes changes back.
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
    """Make [S] the weights."""
    chunk.store_shard(values)
    if chunk.spec.id in parts.originals:
        parts.originals.put(chunk.spec.id, values)
        parts.originals.rest()
