"""Placement policies as frozen values, and what their names mean. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.units import ChunkId


@dataclass(frozen=True, slots=True)
class StaticPlacement:
    """Fixed fractions, each met within one chunk.

    shard_param_frac: parameters that are released between uses; 1 is ZeRO-3, 0 is ZeRO-2.
    """

    shard_param_frac: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.shard_param_frac <= 1:
            raise ValueError(f"shard_param_frac={self.shard_param_frac} is outside [0, 1]")


Placement = StaticPlacement
NAMED: dict[str, Placement] = {"static": StaticPlacement(), "cuda": StaticPlacement()}


def parse_placement(policy: str | Placement) -> Placement:
    """A policy from its name, or itself. Raises ValueError for a name that is none."""
    if isinstance(policy, StaticPlacement):
        return policy
    if policy not in NAMED:
        raise ValueError(
            f"placement_policy={policy!r} is unknown; expected one of {sorted(NAMED)}, "
            "or a placement dataclass"
        )
    return NAMED[policy]


def leading_within(nbytes: Sequence[int], fraction: float) -> tuple[ChunkId, ...]:
    """The leading chunks whose share of all bytes is nearest to `fraction`."""
    wanted = fraction * sum(nbytes)
    taken = 0.0
    chosen: list[ChunkId] = []
    for chunk, size in enumerate(nbytes):
        if taken + size / 2 > wanted:
            break
        taken += size
        chosen.append(ChunkId(chunk))
    return tuple(chosen)
