"""Layers of `colossalai.nn` for 1D tensor parallelism: torch's layers, split as they are made.

`Linear`, `Dropout` and `CrossEntropyLoss` are those of the configuration's mode; those of 2D, 2.5D
and 3D are in `gemini.integrations.classic.blocks`.

They are split over the ranks that the launch's configuration has for layers, by a word of the plans
in `gemini.parallel`; without such ranks they are plain. All ranks get the first rank's
values. A weight's `shape` is that of the whole, and its `to_local()` is this rank's part.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from gemini.api import passes_on, this_device
from gemini.integrations.config import global_context, plugin_of
from gemini.parallel.plans import split_layer
from gemini.parallel.sizes import LAYOUTS

from .blocks import BlockDropout, Linear2D, Linear2p5D, Linear3D, join_blocks

Dropout1D, Dropout = nn.Dropout, BlockDropout
LayerNorm = LayerNorm1D = nn.LayerNorm

# output features of the linear layer made last, if each rank has a part of them: so `Linear1D`
# alternates columns and rows. A context variable, because threads may stand for ranks
_PARTS: ContextVar[int | None] = ContextVar("_PARTS", default=None)


def _split(layer: nn.Module, how: str, weight: nn.Parameter | None = None) -> None:
    """Split a layer by a word of plans, then give it another layer's weight. Collective."""
    plugin = plugin_of(global_context.config, zero_stage=1)
    if plugin.tp_mode != "1d":
        raise ValueError(
            f"{type(layer).__name__} in a configuration with mode {plugin.tp_mode!r}; expected "
            "Linear in blocks, or nn's layers between join_blocks and split_blocks"
        )
    mesh = plugin.sizes.mesh(this_device()) if plugin.tp_size > 1 else None
    if mesh is not None:
        split_layer(layer, how, mesh["tp"])
    if weight is not None:
        layer.weight = weight


class Linear1D_Col(nn.Linear):
    """Linear layer split by columns: each rank computes a part of the output from all input."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        weight: nn.Parameter | None = None,
    ) -> None:
        """Make and split the layer. Collective.

        gather_output: the output is gathered. weight: that of another layer, split alike.
        """
        super().__init__(in_features, out_features, bias, dtype=dtype)
        _split(self, "colwise_gather_output" if gather_output else "colwise", weight)
        _PARTS.set(None if gather_output else out_features)


class Linear1D_Row(nn.Linear):
    """Linear layer split by rows: each rank takes a part of the input, and outputs are summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        parallel_input: bool = True,
        weight: nn.Parameter | None = None,
    ) -> None:
        """Make and split the layer. Collective.

        parallel_input: the input is in parts already. weight: that of another layer, split alike.
        """
        super().__init__(in_features, out_features, bias, dtype=dtype)
        _split(self, "rowwise" if parallel_input else "rowwise_split_input", weight)
        _PARTS.set(None)


def Linear1D(
    in_features: int,
    out_features: int,
    bias: bool = True,
    dtype: torch.dtype | None = None,
    gather_output: bool = False,
) -> Linear1D_Col | Linear1D_Row:
    """Linear layer: `Linear1D_Row` if the layer made last has its input in parts, else `_Col`."""
    if in_features == _PARTS.get():
        return Linear1D_Row(in_features, out_features, bias, dtype)
    return Linear1D_Col(in_features, out_features, bias, dtype, gather_output)


def Classifier1D(
    in_features: int, num_classes: int, weight: nn.Parameter | None = None, bias: bool = True
) -> Linear1D_Row:
    """Classifier with whole output: a `Linear1D_Row`, with an `Embedding1D`'s weight if given."""
    return Linear1D_Row(
        in_features, num_classes, bias, parallel_input=in_features == _PARTS.get(), weight=weight
    )


def VocabParallelClassifier1D(
    in_features: int,
    num_classes: int,
    weight: nn.Parameter | None = None,
    bias: bool = True,
    gather_output: bool = False,
) -> Linear1D_Col:
    """Classifier: a `Linear1D_Col`, with the weight of a `VocabParallelEmbedding1D` if given."""
    return Linear1D_Col(in_features, num_classes, bias, None, gather_output, weight)


class Embedding1D(nn.Embedding):
    """Embedding of which each rank has some features; the output is whole. Options are torch's."""

    @passes_on(nn.Embedding)
    def __init__(self, num_embeddings: int, embedding_dim: int, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        _split(self, "embedding_colwise")


class VocabParallelEmbedding1D(nn.Embedding):
    """Embedding of which each rank has some rows; the output is whole. Options are torch's."""

    @passes_on(nn.Embedding)
    def __init__(self, num_embeddings: int, embedding_dim: int, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        _split(self, "embedding_rowwise")


def Linear(
    in_features: int,
    out_features: int,
    bias: bool = True,
    dtype: torch.dtype | None = None,
    gather_output: bool = False,
) -> nn.Module:
    """Linear layer of the configuration's mode: `Linear1D`, `Linear2D`, `Linear2p5D`, `Linear3D`.

    gather_output: of 1D alone. Raises ValueError for it in another mode.
    """
    mode = plugin_of(global_context.config, zero_stage=1).tp_mode
    if mode == "1d":
        return Linear1D(in_features, out_features, bias, dtype, gather_output)
    if gather_output:
        raise ValueError(f"gather_output=True in mode {mode!r}; expected join_blocks(output)")
    in_blocks = {one.mode: one for one in (Linear2D, Linear2p5D, Linear3D)}
    return in_blocks[mode](in_features, out_features, bias, dtype)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's, for blocks too: logits are joined, and targets are whole."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        in_blocks = plugin_of(global_context.config, zero_stage=1).tp_mode in LAYOUTS
        return super().forward(join_blocks(input) if in_blocks else input, target)


Classifier, Embedding = VocabParallelClassifier1D, VocabParallelEmbedding1D
