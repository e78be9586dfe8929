"""Digest of an engine's weights, equal on all ranks unless replicas have diverged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.opaque import OpaqueChunk
from gemini.chunk.storage import Chunk
from gemini.digests import digest_of
from gemini.optim.rules.control_vector import ControlVector
from gemini.runtime.weights import Weights

WORD_BYTES = 8
_Sum = Callable[[Tensor, int, int], Tensor]


@torch.no_grad()
def digest(weights: Weights, control_vector: ControlVector) -> str:
    """Digest of weights in the compute dtype, step counts and the loss scale. Collective.

    Chunks that are never released are summed from this rank's own payload, so a rank whose copy
    differs has another digest; other chunks are summed over the shards of this rank's replica.
    Chunks, placement and world size do not change the digest; a split of parameters by torch does.
    """
    said = repr(
        (param_sums(weights), _counts(weights), sorted(control_vector.state_dict().items()))
    )
    return hashlib.sha256(said.encode()).hexdigest()[:16]


@torch.no_grad()
def param_sums(weights: Weights) -> list[int]:
    """Sums of the words of each parameter, as `digest` has them. Collective."""
    weights.write_back_changes()
    sharding = weights.sharding
    from gemini.kernels_triton.digest import digest_on_device, digest_reference

    def by_kernel(words: Tensor, first: int, salt: int) -> Tensor:
        sharding.backend.address(words)  # raises for memory that no kernel reaches
        return digest_on_device(words, first, salt)

    on_device = by_kernel if sharding.backend.updates_by_triton else digest_reference
    shared = {
        group: torch.zeros(len(sharding.layout.params), dtype=torch.int64)
        for group in sharding.links
    }
    own = {group: torch.zeros_like(sums) for group, sums in shared.items()}
    for chunk in sharding.chunks:
        if chunk.spec.id in sharding.never_released and chunk.gathered:
            chunk.wait_gathered()
            for slot, place in enumerate(chunk.spec.slots):
                whole = chunk.view(chunk.payload, slot)
                own[chunk.spec.group][place.param] = of_run(whole, 0, place.param, on_device)
        else:
            add = digest_reference if chunk.shard_on_host else on_device
            for param, total in _of_shard(sharding.layout, chunk, add):
                shared[chunk.spec.group][param] += total.cpu()
    sums = [0] * len(sharding.layout.params)
    for group, links in sharding.links.items():
        there = shared[group].to(links.shards.device)
        links.shards.all_reduce(there).wait()
        there += own[group].to(there.device)
        if links.split is not None:
            # An odd factor for each place: parts that are swapped give another sum, and no bit of
            # a sum is lost.
            there *= 2 * links.split.rank + 1
            links.split.all_reduce(there).wait()
        sums = [total + other for total, other in zip(sums, there.tolist(), strict=True)]
    return sums


@torch.no_grad()
def base_digests(weights: Weights) -> dict[str, str]:
    """Digests of opaque parameters by name on the first rank, empty on the others. Collective.

    A digest depends on bytes and form alone. It is made once, and again after the parameter was
    written.
    """
    weights.write_back_changes()
    sharding = weights.sharding
    mine = [c.spec.id for c in sharding.chunks if isinstance(c, OpaqueChunk) and not c.is_named]
    for chunk_id in sorted({c for of_rank in sharding.comm.gather_objects(mine) for c in of_rank}):
        chunk = sharding.chunks[chunk_id]
        payload = sharding.links[chunk.spec.group].gather(weights.master_of(chunk))
        for slot in chunk.spec.slots:
            one = sharding.opaque[slot.param]
            said = hashlib.sha256(digest_of(one.form).encode())
            if payload is not None:
                said.update(payload[slot.offset : slot.offset + slot.numel].cpu().numpy().tobytes())
            one.digest = said.hexdigest()
    if sharding.comm.rank:
        return {}
    return {one.names[0]: str(one.digest) for one in sharding.opaque.values()}


def _of_shard(layout: ChunkLayout, chunk: Chunk, add: _Sum) -> list[tuple[int, Tensor]]:
    shard = chunk.load_shard()
    return [
        (
            part.param,
            of_run(
                shard[part.offset : part.offset + part.numel],
                part.param_offset,
                part.param,
                add,
            ),
        )
        for part in layout.shard_segments(chunk.spec, chunk.rank)
    ]


def of_run(values: Tensor, start: int, param: int, add: _Sum) -> Tensor:
    """Sum of `values` [n], the elements of a parameter from `start` on, a multiple of 64."""
    per_word = WORD_BYTES // values.itemsize
    whole = values.numel() // per_word * per_word
    total = add(values[:whole].contiguous().view(torch.int64), start // per_word, param)
    if whole < values.numel():
        rest = pad(values[whole:], (0, per_word - values.numel() + whole))
        total = total + add(rest.view(torch.int64), (start + whole) // per_word, param)
    return total


def _counts(weights: Weights) -> list[float]:
    if weights.target is None:
        return []
    return [float(state["step"]) for state in weights.target.state_views().values()]
