"""Weights between passes: changes by the user and by a step, and who follows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from gemini.chunk.storage import Chunk
from gemini.runtime.parts import Parts, refuse_beside_pass, settle


def take_replaced(parts: Parts) -> None:
    """Write opaque parameters that their library has made anew, the same on all ranks."""
    for param, one in parts.opaque.items():
        new = one.take_back()
        if new is None:
            continue
        chunk = parts.chunks[parts.chunk_of[param]]
        shard = chunk.load_shard()
        for segment in parts.layout.shard_segments(chunk.spec, chunk.rank):
            if segment.param == param:
                start = segment.param_offset
                own = shard[segment.offset : segment.offset + segment.numel]
                own.copy_(new[start : start + segment.numel])
        chunk.store_shard(shard)
        if chunk.gathered:
            chunk.wait_gathered()
            chunk.view(chunk.payload, parts.slot_of[param]).copy_(new)


def write_back_changes(parts: Parts) -> None:
    """Make shards and masters follow what the user wrote to parameters."""
    settle(parts)
    take_replaced(parts)
    user_writes = parts.user_writes
    parts.regather.end()
    for chunk in parts.chunks:
        if chunk.gathered:
            user_writes.write_back(chunk)
    if user_writes.stale and parts.target is not None:
        parts.target.follow_shards(user_writes.stale)
        user_writes.stale.clear()


def after_step(parts: Parts, *, trained: bool = True) -> None:
    """Gather chunks again that stay gathered: all shards have changed, or only `trained` ones."""
    parts.regather.begin(trained=trained)
    parts.viewed.clear()


@contextmanager
def summoned(parts: Parts, writeback: bool) -> Iterator[None]:
    """Gather all chunks and keep them so in the body; then shards follow writes, or not."""
    with parts.lock:
        refuse_beside_pass(parts, "summon_full_params()")
        shards = _summon(parts, writeback)
    try:
        yield
    finally:
        with parts.lock:
            _dismiss(parts, shards)


def _summon(parts: Parts, writeback: bool) -> dict[Chunk, Tensor] | None:
    """Gather all chunks. Returns shards that are payloads, where writes are to be undone."""
    if parts.is_summoned:
        raise RuntimeError("parameters are summoned already")
    write_back_changes(parts)
    manager = parts.manager
    everything = tuple(chunk.spec.id for chunk in parts.chunks)
    parts.ledger.judges = False  # it is the user who asks for all of it
    manager.pin(everything)
    manager.prepare(everything, in_cycle=False)
    shards = None if writeback else {c: c.shard.clone() for c in parts.chunks if c.in_payload}
    parts.is_summoned = True
    return shards


def _dismiss(parts: Parts, shards: Mapping[Chunk, Tensor] | None) -> None:
    """Release what was summoned. shards: those of before, where writes are undone."""
    parts.is_summoned = False
    if shards is not None:
        for chunk in parts.chunks:
            parts.user_writes.forget(chunk)
            if chunk.in_payload:
                chunk.shard.copy_(shards[chunk])
    write_back_changes(parts)
    parts.manager.release_all()
    parts.ledger.judges = True
    after_step(parts, trained=False)
