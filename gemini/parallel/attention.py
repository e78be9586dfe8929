"""Attention over a sequence of which each rank has a part: by heads (Ulysses), or in a ring.

P ranks · B rows · s tokens a rank · H query heads, K of keys and values · D width of a head

Ulysses: two all-to-alls change [B, H, s, D] to [B, H / P, P * s, D] and back; between them torch's
own attention sees the whole sequence. Bytes that a rank sends, of i bytes an element: forward
(2 H + 2 K) B s D i (P - 1) / P, and as much in backward. If there are fewer heads of keys than
ranks, each is repeated first, and K is P.

Ring: keys and values pass all ranks; what queries see of each block is merged by its log-sum-exp,
which is exact. The sequence is cut in 2 P pieces, of which rank r has r and 2 P - 1 - r: so all
have 2 P + 1 blocks to compute. Sums are fp32. Bytes: forward 2 n (P - 1), backward
2 n (P - 1) + 2 m P, where n = B K s D i, and m is the same of fp32.

Slopes [H] are those of ALiBi: a key at position p of the sequence has slope * p added to its
scores. A tile knows where its keys are, so nothing more is sent. With slopes Ulysses computes as a
ring of one rank does, because torch's attention would need a bias of [H / P, P * s, P * s].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

QUERIES = 1024  # whose scores exist at a time, [B, H, QUERIES, s / 2] in fp32


def positions(ring: bool, length: int, rank: int, ranks: int) -> Tensor:
    """Positions of one rank's tokens in the sequence, [length / P]."""
    if not ring:
        size = length // ranks
        return torch.arange(rank * size, (rank + 1) * size)
    pieces = torch.arange(length).view(2 * ranks, -1)
    return pieces[[rank, 2 * ranks - 1 - rank]].flatten()


# -- Ulysses --


class _Swap(Function):
    """All-to-all between [all heads, part of the sequence] and [part of the heads, all of it]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, whole: bool) -> Tensor:
        ctx.group, ctx.whole = group, whole
        return _to_sequence(x, group) if whole else _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (_to_heads if ctx.whole else _to_sequence)(grad, ctx.group), None, None


def _to_sequence(x: Tensor, group: Any) -> Tensor:
    batch, heads, length, width = x.shape
    ranks = group.size()
    got = exchanged(x.reshape(batch, ranks, heads // ranks, length, width).transpose(0, 1), group)
    return got.permute(1, 2, 0, 3, 4).reshape(batch, heads // ranks, ranks * length, width)


def _to_heads(x: Tensor, group: Any) -> Tensor:
    batch, heads, length, width = x.shape
    ranks = group.size()
    parts = x.reshape(batch, heads, ranks, length // ranks, width).permute(2, 0, 1, 3, 4)
    got = exchanged(parts, group)
    return got.transpose(0, 1).reshape(batch, ranks * heads, length // ranks, width)


def exchanged(
    x: Tensor, group: Any, sent: list[int] | None = None, received: list[int] | None = None
) -> Tensor:
    """All-to-all of x [n, ...]. sent, received: rows per rank; None divides them equally."""
    found = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
    sizes: Any = {"output_split_sizes": received, "input_split_sizes": sent}
    dist.all_to_all_single(found, x.contiguous(), **sizes, group=group)
    return found


def ulysses(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float, group: Any,
    slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention by heads, [B, H, s, D]. Collective.

    Heads of keys and values are repeated where there are fewer than ranks. slopes: [H] of ALiBi,
    with which nothing is dropped.
    Raises ValueError for heads that the ranks do not divide.
    """
    ranks, heads, few = group.size(), q.shape[1], k.shape[1]
    if heads % ranks or (few % ranks and ranks % few):
        raise ValueError(
            f"{heads} query heads and {few} of keys are exchanged over {ranks} ranks; expected "
            "numbers that sp_size divides: another sp_size, or "
            "sequence_parallelism_mode='ring_attn', which leaves heads whole"
        )
    if few % ranks:
        k, v = (x.repeat_interleave(ranks // few, dim=1) for x in (k, v))
    q, k, v = (_Swap.apply(x, group, True) for x in (q, k, v))
    if slopes is None:
        out = scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    else:
        own = slopes.chunk(ranks)[dist.get_rank(group)]
        out = _in_ring(q, k, v, scale, _Ring(None, 1), own)
    swapped: Tensor = _Swap.apply(out, group, False)
    return swapped


# -- ring --


@dataclass(frozen=True, slots=True)
class _Tile:
    """Scores of some queries and keys of a block.

    first: the first query in its piece, if queries and keys are of one piece, else None.
    at: position of the first key in the sequence.
    """

    queries: slice
    keys: slice
    first: int | None
    at: int


class _Ring:
    """Order in which ranks pass blocks: around `inner` neighbours, then to the next such group.

    With inner = P that is one ring. group: None is a ring of one rank, which has all tokens in
    order.
    """

    def __init__(self, group: Any, inner: int) -> None:
        self.group, self._inner = group, inner
        self.ranks: int = 1 if group is None else group.size()
        self.me: int = 0 if group is None else dist.get_rank(group)

    def pieces(self, rank: int) -> tuple[int, ...]:
        """Numbers of the pieces of the sequence that a rank has, in its order."""
        return (0,) if self.ranks == 1 else (rank, 2 * self.ranks - 1 - rank)

    def owner(self, step: int, rank: int | None = None) -> int:
        """Rank whose block `rank` (None: this one) has after `step` passes."""
        outer, at = divmod(self.me if rank is None else rank, self._inner)
        crossed = step // self._inner
        outer = (outer - crossed) % (self.ranks // self._inner)
        return outer * self._inner + (at - (step - crossed)) % self._inner

    def begin(self, tensors: Sequence[Tensor], step: int) -> tuple[list[Tensor], list[Any]]:
        """Begin pass `step`. Returns buffers, which are filled when the works have ended."""
        outer, at = divmod(self.me, self._inner)
        if (step + 1) % self._inner:
            to, of = (outer * self._inner + (at + d) % self._inner for d in (1, -1))
        else:
            to, of = ((self.me + d * self._inner) % self.ranks for d in (1, -1))
        return self._sent(tensors, to, of)

    def home(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send each block's tensors to its owner after the last pass, and wait for this rank's."""
        if self.ranks == 1:
            return list(tensors)
        last = self.ranks - 1
        to = self.owner(last)
        of = next(rank for rank in range(self.ranks) if self.owner(last, rank) == self.me)
        return ended(self._sent(tensors, to, of))

    def _sent(self, tensors: Sequence[Tensor], to: int, of: int) -> tuple[list[Tensor], list[Any]]:
        to, of = (dist.get_global_rank(self.group, rank) for rank in (to, of))
        tensors = [x.contiguous() for x in tensors]
        found = [torch.empty_like(x) for x in tensors]
        # one batch: every rank sends and receives, and a ring of sends alone would wait for itself
        sends = [dist.P2POp(dist.isend, x, to, self.group) for x in tensors]
        receives = [dist.P2POp(dist.irecv, x, of, self.group) for x in found]
        return found, dist.batch_isend_irecv([*sends, *receives])

    def tiles(self, other: int, size: int) -> Iterator[_Tile]:
        """Tiles of scores that causality leaves. size: tokens of a piece."""
        for a, mine in enumerate(self.pieces(self.me)):
            for b, theirs in enumerate(self.pieces(other)):
                for begin in range(0, size, QUERIES) if mine >= theirs else ():
                    end = min(begin + QUERIES, size)
                    seen = end if mine == theirs else size
                    yield _Tile(
                        slice(a * size + begin, a * size + end),
                        slice(b * size, b * size + seen),
                        begin if mine == theirs else None,
                        theirs * size,
                    )


def ended(passed: tuple[list[Tensor], list[Any]]) -> list[Tensor]:
    found, works = passed
    for work in works:
        work.wait()
    return found


@dataclass(frozen=True, slots=True)
class _Scoring:
    """How scores follow from queries and keys. slopes: [K, H / K, 1, 1] fp32, or None."""

    scale: float
    slopes: Tensor | None

    def scores(self, q: Tensor, k: Tensor, tile: _Tile) -> Tensor:
        """Scores of one tile [B, K, H / K, queries, keys] in fp32, -inf where causality hides."""
        scores = (q.float() @ k.float().transpose(-1, -2)) * self.scale
        if self.slopes is not None:
            keys = torch.arange(tile.at, tile.at + k.shape[-2], device=k.device)
            scores += self.slopes * keys
        if tile.first is not None:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(tile.first + 1), -torch.inf)
        return scores


class _RingAttention(Function):
    """Ring attention: q [B, K, H / K, s, D]; k, v [B, K, 1, s, D] -> like q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: _Scoring, ring: _Ring) -> Tensor:
        size = q.shape[-2] // len(ring.pieces(ring.me))
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = out.new_full(q.shape[:-1], -torch.inf)
        there = [k, v]
        for step in range(ring.ranks):
            # begun before computing, so that the next block travels meanwhile
            passed = ring.begin(there, step) if step < ring.ranks - 1 else (there, [])
            for tile in ring.tiles(ring.owner(step), size):
                rows, cols = tile.queries, tile.keys
                scores = how.scores(q[..., rows, :], there[0][..., cols, :], tile)
                of_block = scores.logsumexp(-1)
                # earlier sums are rescaled to the new log-sum-exp, so no block is needed twice
                new = torch.logaddexp(lse[..., rows], of_block)
                part = (scores - new[..., None]).exp() @ there[1][..., cols, :].float()
                out[..., rows, :] *= (lse[..., rows] - new).exp()[..., None]
                out[..., rows, :] += part
                lse[..., rows] = new
            there = ended(passed)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how, ctx.ring = how, ring
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        how, ring = ctx.how, ctx.ring
        size = q.shape[-2] // len(ring.pieces(ring.me))
        grad = grad.float()
        delta = (grad * out).sum(-1)
        dq = torch.zeros_like(out)
        there, grads = [k, v], [out.new_zeros(k.shape), out.new_zeros(v.shape)]
        for step in range(ring.ranks):
            is_last = step == ring.ranks - 1
            passed = (there, []) if is_last else ring.begin(there, step)
            for tile in ring.tiles(ring.owner(step), size):
                rows, cols = tile.queries, tile.keys
                of_q, of_k, of_v = q[..., rows, :], there[0][..., cols, :], there[1][..., cols, :]
                weights = (how.scores(of_q, of_k, tile) - lse[..., rows, None]).exp()
                arrived = grad[..., rows, :]
                ds = arrived @ of_v.float().transpose(-1, -2) - delta[..., rows, None]
                ds = ds.mul_(weights).mul_(how.scale)
                dq[..., rows, :] += ds @ of_k.float()
                grads[0][..., cols, :] += _over_heads(ds, of_q.float())
                grads[1][..., cols, :] += _over_heads(weights, arrived)
            there = ended(passed)
            # gradients follow a block, and leave when this rank's are added; keys need not go home
            grads = ring.home(grads) if is_last else ended(ring.begin(grads, step))
        return dq.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), None, None


def _over_heads(a: Tensor, b: Tensor) -> Tensor:
    """Product of a^T and b, summed over the query heads that share keys."""
    return (a.transpose(-1, -2) @ b).sum(2, keepdim=True)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, group: Any, inner: int,
    slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal ring attention, [B, H, s, D], with tokens in the order of `positions`. Collective.

    slopes: [H] of ALiBi.
    """
    return _in_ring(q, k, v, scale, _Ring(group, inner), slopes)


def _in_ring(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, ring: _Ring, slopes: Tensor | None
) -> Tensor:
    few = k.shape[1]
    grouped = q.unflatten(1, (few, -1))
    if slopes is not None:
        slopes = slopes.float().view(few, -1, 1, 1)
    how = _Scoring(q.shape[-1] ** -0.5 if scale is None else scale, slopes)
    out: Tensor = _RingAttention.apply(grouped, k[:, :, None], v[:, :, None], how, ring)
    return out.flatten(1, 2)
