"""Shape of a model: what a layout's time and memory are computed from. Pure.

h hidden size · a heads · g heads of keys and values · d size of a head · f size of the MLP
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KINDS = ("tp", "pp", "sp", "ep", "recompute")
GATED, PLAIN = 3, 2  # matrices of an MLP
WORD_BYTES = 14.0  # of a logit: in 16 bits, in fp32, its logarithm, and the gradients of these
SCORE_BYTES = 5.0  # of a head's score that is kept: in 16 bits, its softmax, and a mask


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of a token that backward needs: `whole` on each of the ranks that split a layer, and
    `split` between them."""

    whole: float
    split: float

    def of_rank(self, tp: int, *, in_sequence: bool) -> float:
        """Bytes on one rank. in_sequence: between split layers each rank has a part of the
        tokens."""
        return self.whole / (tp if in_sequence else 1) + self.split / tp

    @property
    def total(self) -> float:
        return self.whole + self.split


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a model that is a stack of equal layers; of any other module, one layer.

    hidden, heads, kv_heads, head_dim, vocab: 0 where a model has no such thing.
    layer_numel: elements of a layer, experts not counted; split_numel: those of them that tensor
        parallelism splits. expert_numel: of a layer's experts, of which a token uses
        `experts_used` of `experts`.
    first_numel: elements before the first layer; last_numel: behind the last one, with the head.
        tied: the head has no weight of its own.
    saved: of a layer. ends: bytes of a token at the peak in the head, beyond what layers saved.
    working: bytes of a token in a layer's backward, beyond what was saved.
    reduces: all-reduces of the hidden states in a layer's forward, and in its backward, if it is
        split.
    scores: bytes of a token for each token that it attends to, where scores are kept; else 0.
    passes: share of the passes over saved bytes that no compiler fuses away.
    can: of `KINDS`, what the model can be cut by.
    itemsize: bytes of an element that is computed with.
    trained: share of the elements whose gradients are computed.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer_numel: int
    split_numel: int
    expert_numel: int
    experts: int
    experts_used: int
    first_numel: int
    last_numel: int
    tied: bool
    saved: Saved
    ends: float
    working: float
    reduces: tuple[int, int]
    can: frozenset[str]
    is_causal: bool = True
    itemsize: int = 2
    scores: float = 0.0
    passes: float = 1.0
    trained: float = 1.0

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self.layers * (self.layer_numel + self.expert_numel) + (
            self.first_numel + self.last_numel
        )

    @property
    def used_numel(self) -> float:
        """Elements of a layer that one token is multiplied by."""
        share = self.experts_used / self.experts if self.experts else 0.0
        return self.layer_numel + share * self.expert_numel

    @property
    def head_flops(self) -> float:
        """Operations of a token in the head's forward."""
        return 2.0 * self.hidden * self.vocab

    def layer_flops(self, seq: int) -> tuple[float, float]:
        """Operations of a token in a layer's forward: of its products, and of attention to `seq`
        tokens, half of them if each attends to those before."""
        attention = 4.0 * seq * self.heads * self.head_dim * (0.5 if self.is_causal else 1.0)
        return 2.0 * self.used_numel, attention


def decoder(
    name: str, *, hidden: int, layers: int, heads: int, vocab: int, mlp: int,
    kv_heads: int | None = None, gated: bool = True, tied: bool = False, positions: int = 0,
    head_dim: int | None = None,
) -> ModelShape:  # fmt: skip
    """Shape of a dense decoder in 16 bits, from its published sizes.

    Saved bytes are those of Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models" (arXiv 2205.05198, section 4.1), with attention that keeps no scores and
    without dropout: 2 bytes of each input of a product, a norm and an activation. positions: rows
    of a table of them.
    """
    groups, size = heads if kv_heads is None else kv_heads, head_dim or hidden // heads
    attention = 2 * hidden * size * (heads + groups)
    matrices = GATED if gated else PLAIN
    split = attention + matrices * hidden * mlp
    # norms' inputs and outputs; keys, queries, values, attention's output; what the MLP activates
    whole = 2.0 * 4 * hidden
    kept = 2.0 * (2 * heads + 2 * groups) * size + 2.0 * (matrices if gated else 2) * mlp
    return ModelShape(
        name, layers, hidden, heads, groups, size, vocab,
        layer_numel=split + 2 * hidden, split_numel=split, expert_numel=0, experts=0,
        experts_used=0, first_numel=(vocab + positions) * hidden,
        last_numel=hidden + (0 if tied else vocab * hidden), tied=tied,
        saved=Saved(whole, kept), ends=WORD_BYTES * vocab, working=kept, reduces=(2, 2),
        can=frozenset(KINDS) - {"ep"},
    )  # fmt: skip


def module(name: str, numel: int, saved: float, itemsize: int = 2) -> ModelShape:
    """Shape of any other module: one layer that is not cut. saved: bytes of a sample."""
    return replace(
        decoder(name, hidden=1, layers=1, heads=1, vocab=0, mlp=1),
        layer_numel=numel, split_numel=0, first_numel=0, last_numel=0, head_dim=0, heads=0,
        kv_heads=0, saved=Saved(saved, 0.0), ends=0.0, working=0.0, can=frozenset[str](),
        is_causal=False, itemsize=itemsize,
    )  # fmt: skip
