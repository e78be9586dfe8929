"""A digest of an engine's weights, equal on all ranks unless replicas have diverged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from gemini.chunk.storage import Chunk
from gemini.runtime.parts import Parts
from gemini.runtime.step.weights import adopt_changes

WORD_BYTES = 8
_Sum = Callable[[Tensor, int, int], Tensor]


@torch.no_grad()
def digest(parts: Parts) -> str:
    """Of weights in the compute dtype, step counts and the loss scale. Collective.

    What this rank has whole (chunks that are never released) is summed from what it has, so a
    replica that differs gives another digest; what is sharded is summed over ranks. It does not
    depend on chunks, placement or world size.
    """
    adopt_changes(parts)
    from kernels_triton.digest import digest_on_device, digest_reference

    def by_kernel(words: Tensor, first: int, salt: int) -> Tensor:
        parts.backend.address(words)  # raises for what no kernel reaches
        return digest_on_device(words, first, salt)

    on_device = by_kernel if parts.backend.updates_by_triton else digest_reference
    own: dict[int, Tensor] = {}
    shared = torch.zeros(len(parts.layout.params), dtype=torch.int64)
    for chunk in parts.chunks:
        if chunk.spec.id in parts.kept and chunk.gathered:
            chunk.wait_gathered()
            for slot, place in enumerate(chunk.spec.slots):
                whole = chunk.view(chunk.payload, slot)
                own[place.param] = _of_run(whole, 0, place.param, on_device)
        else:
            add = digest_reference if chunk.shard_on_host else on_device
            for param, total in _of_shard(parts, chunk, add):
                shared[param] += total.cpu()
    shared = shared.to(parts.comm.device)
    parts.comm.all_reduce(shared).wait()
    sums = shared.tolist()
    for param, total in own.items():
        sums[param] = int(total)
    said = repr((sums, _counts(parts), sorted(parts.scaler.state_dict().items())))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _of_shard(parts: Parts, chunk: Chunk, add: _Sum) -> list[tuple[int, Tensor]]:
    shard = chunk.load_shard()
    return [
        (
            part.param,
            _of_run(
                shard[part.offset : part.offset + part.numel],
                part.param_offset,
                part.param,
                add,
            ),
        )
        for part in parts.layout.shard_parts(chunk.spec, parts.comm.rank)
    ]


def _of_run(values: Tensor, start: int, param: int, add: _Sum) -> Tensor:
    """Of elements [start, ...) of a parameter; `start` is a multiple of 64."""
    per_word = WORD_BYTES // values.itemsize
    whole = values.numel() // per_word * per_word
    total = add(values[:whole].contiguous().view(torch.int64), start // per_word, param)
    if whole < values.numel():
        rest = pad(values[whole:], (0, per_word - values.numel() + whole))
        total = total + add(rest.view(torch.int64), (start + whole) // per_word, param)
    return total


def _counts(parts: Parts) -> list[float]:
    if parts.target is None:
        return []
    return [float(state["step"]) for state in parts.target.shown_state().values()]
