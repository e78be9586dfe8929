"""Repeated blocks of a model, found in the names of its parameters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.chunk.layout import ParamSpec


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """The layers that a model is a stack of."""

    count: int
    largest_numel: int  # 0 where there are none


def repeated_blocks(specs: Sequence[ParamSpec]) -> RepeatedBlocks:
    """Items of a list whose children have the same names, the outermost of nested lists.

    `h.0.attn.weight` and `h.1.attn.weight` are of two blocks, `h.0` and `h.1`. Items that are like
    no other item of their list are looked into: `Sequential(backbone, head)` has the blocks of its
    backbone.
    """
    numels = _count([(spec.name.split("."), spec.numel) for spec in specs])
    return RepeatedBlocks(len(numels), max(numels, default=0))


def _count(named: Sequence[tuple[list[str], int]]) -> list[int]:
    """Numel of each block below; a name is the path from here to its parameter."""
    items: dict[str, list[tuple[list[str], int]]] = {}
    for path, numel in named:
        if len(path) > 1:
            items.setdefault(path[0], []).append((path[1:], numel))
    alike: dict[tuple[str, ...], list[str]] = {}  # by the names of their children
    for item, inside in items.items():
        if item.isdecimal():
            children = tuple(sorted({path[0] for path, _ in inside}))
            alike.setdefault(children, []).append(item)
    blocks = {item for same in alike.values() if len(same) > 1 for item in same}
    numels = []
    for item, inside in items.items():
        numels += [sum(numel for _, numel in inside)] if item in blocks else _count(inside)
    return numels
