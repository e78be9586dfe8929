"""Builders of old scripts' models for pipelines: layers in the order in which they run.

`initialize` cuts their layers into stages, by the sizes of the configuration.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

Parts = list[list[tuple[int, int]]]


class LayerSequence(nn.Sequential):
    """Sequence of layers under their own names; num_chunks: stages of a rank."""

    num_chunks = 1


class _Between(nn.Module):
    """Module that calls a function between layers."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        return self._function(x)


class PipelinableContext:
    """Context that finds the module built in it, and makes a sequence of its children."""

    def __init__(self) -> None:
        self._parents: dict[int, nn.Module] = {}
        self._children: set[int] = set()
        self._layers: LayerSequence | None = None

    def __enter__(self) -> PipelinableContext:
        here = threading.get_ident()

        # torch's hook is global: other threads, which may stand for ranks, build their own models
        def noted(module: nn.Module, name: str, child: nn.Module | None) -> None:
            if child is not None and threading.get_ident() == here:
                self._parents[id(module)] = module
                self._children.add(id(child))

        self._hook = register_module_module_registration_hook(noted)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def to_layer_list(self, exec_seq: Sequence[Any] | None = None) -> None:
        """Make the sequence of layers.

        exec_seq: names of children in the order in which they run; between them functions, or
            (function, "front" or "behind"). None: all children, in the order they were made.

        Raises ValueError where no one module was built.
        """
        roots = [one for i, one in self._parents.items() if i not in self._children]
        if len(roots) != 1:
            raise ValueError(
                f"{len(roots)} modules were built inside PipelinableContext; expected one: "
                "with pipelinable: model = Model()"
            )
        children = dict(roots[0].named_children())
        self._layers = LayerSequence(
            OrderedDict(
                (step, children[step]) if isinstance(step, str)
                else (f"between_{i}", _Between(step[0] if isinstance(step, tuple) else step))
                for i, step in enumerate(children if exec_seq is None else exec_seq)
            )
        )  # fmt: skip
        self._parents.clear()

    def partition(self, num_chunks: int, pipeline_size: int, rank: int) -> LayerSequence:
        """Return all layers, which `initialize` cuts into `num_chunks` stages a rank.

        Raises ValueError before `to_layer_list`.
        """
        if self._layers is None:
            raise ValueError("partition() of no layers; call to_layer_list() first")
        return build_pipeline_model(self._layers, num_chunks)


def build_pipeline_model(
    layers: nn.Sequential, num_chunks: int = 1, verbose: bool = False
) -> LayerSequence:
    """Sequence of the same layers, which `initialize` cuts into `num_chunks` stages a rank."""
    made = LayerSequence(OrderedDict(layers.named_children()))
    made.num_chunks = num_chunks
    return made


def partition_uniform(num_items: int, pipeline_parallel_size: int, num_chunks: int) -> Parts:
    """Partition of layers: by rank (first, end) of each of its chunks. The last parts are larger.

    Raises ValueError for items that the chunks do not divide.
    """
    if num_items % num_chunks:
        raise ValueError(
            f"{num_items} layers in num_chunks={num_chunks}; expected a number that divides them"
        )
    each, ranks = num_items // num_chunks, pipeline_parallel_size
    sizes = [(each + rank) // ranks for _ in range(num_chunks) for rank in range(ranks)]
    return _by_rank(sizes, ranks)


def partition_balanced(
    weights: Sequence[float], pipeline_parallel_size: int, num_chunks: int
) -> Parts:
    """Partition as of `partition_uniform`, whose heaviest part is as light as possible.

    Raises ValueError for fewer layers than parts.
    """
    parts = pipeline_parallel_size * num_chunks
    if len(weights) < parts:
        raise ValueError(f"{len(weights)} layers in {parts} parts; expected one or more in each")
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[n]: of the first n layers in so many parts, the largest sum; and where the last begins
    best: list[float] = [0.0, *(float("inf") for _ in weights)]
    begins: list[list[int]] = []
    for part in range(parts):
        found, begin = [float("inf")] * len(best), [0] * len(best)
        for n in range(part + 1, len(best)):
            found[n], begin[n] = min(
                (max(best[first], sums[n] - sums[first]), first) for first in range(part, n)
            )
        best, begins = found, [*begins, begin]
    ends = [len(weights)]
    for begin in reversed(begins):
        ends.append(begin[ends[-1]])
    sizes = [end - first for first, end in zip(ends[:0:-1], ends[-2::-1], strict=True)]
    return _by_rank(sizes, pipeline_parallel_size)


def _by_rank(sizes: Sequence[int], ranks: int) -> Parts:
    found: Parts = [[] for _ in range(ranks)]
    first = 0
    for i, size in enumerate(sizes):
        found[i % ranks].append((first, first + size))
        first += size
    return found
