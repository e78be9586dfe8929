"""`colossalai.nn`'s layers of 1D tensor parallelism: torch's layers, split as they are made.

They are split over the ranks that the launch's configuration has for layers, by a word of the plans
in `gemini.integrations.parallel`; without such ranks they are torch's. Values are the first rank's.
A weight's `shape` is that of the whole, and its `to_local()` is this rank's part.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from gemini.integrations.config import global_context, plugin_of
from gemini.integrations.parallel.plans import split_layer
from gemini.integrations.parts import this_device

Dropout = Dropout1D = nn.Dropout
LayerNorm = LayerNorm1D = nn.LayerNorm
CrossEntropyLoss = nn.CrossEntropyLoss

# features that the linear layer made last gives, a part on each rank
_PARTS: ContextVar[int | None] = ContextVar("_PARTS", default=None)


def _split(layer: nn.Module, how: str, weight: nn.Parameter | None = None) -> None:
    """How it is split; then it has another layer's weight, if there is one. Collective."""
    sizes = plugin_of(global_context.config, zero_stage=1).sizes
    mesh = sizes.mesh(this_device()) if sizes.tp > 1 else None
    if mesh is not None:
        split_layer(layer, how, mesh["tp"])
    if weight is not None:
        layer.weight = weight


class Linear1D_Col(nn.Linear):
    """Each rank computes a part of the output, of all of the input."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        gather_output: bool = False,
        weight: nn.Parameter | None = None,
    ) -> None:
        """gather_output: the parts are put together. weight: of a layer that is split alike."""
        super().__init__(in_features, out_features, bias, dtype=dtype)
        _split(self, "colwise_gather_output" if gather_output else "colwise", weight)
        _PARTS.set(None if gather_output else out_features)


class Linear1D_Row(nn.Linear):
    """Each rank has a part of the input, and what they compute of it is summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        parallel_input: bool = True,
        weight: nn.Parameter | None = None,
    ) -> None:
        """parallel_input: ranks are given their parts. weight: of a layer that is split alike."""
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
    """`Linear1D_Row` where the layer made before gives parts of as many features, else `_Col`."""
    if in_features == _PARTS.get():
        return Linear1D_Row(in_features, out_features, bias, dtype)
    return Linear1D_Col(in_features, out_features, bias, dtype, gather_output)


def Classifier1D(
    in_features: int, num_classes: int, weight: nn.Parameter | None = None, bias: bool = True
) -> Linear1D_Row:
    """A `Linear1D_Row`, which may have the weight of an `Embedding1D`; its output is whole."""
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
    """A `Linear1D_Col`, which may have the weight of a `VocabParallelEmbedding1D`."""
    return Linear1D_Col(in_features, num_classes, bias, None, gather_output, weight)


class Embedding1D(nn.Embedding):
    """Each rank has some features of every row; the output is whole. Options are torch's."""

    def __init__(self, num_embeddings: int, embedding_dim: int, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        _split(self, "embedding_colwise")


class VocabParallelEmbedding1D(nn.Embedding):
    """Each rank has some of the rows; the output is whole. Options are torch's."""

    def __init__(self, num_embeddings: int, embedding_dim: int, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        _split(self, "embedding_rowwise")


Linear, Classifier, Embedding = Linear1D, VocabParallelClassifier1D, VocabParallelEmbedding1D
