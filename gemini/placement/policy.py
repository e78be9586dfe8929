"""Placement policies as frozen values, and what follows from them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.units import Bytes, ChunkId, format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class StaticPlacement:
    """Fixed fractions, each met within one chunk.

    shard_param_frac: parameters that are released between uses; 1 is ZeRO-3, 0 is ZeRO-2.
    """

    shard_param_frac: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.shard_param_frac <= 1:
            raise ValueError(f"shard_param_frac={self.shard_param_frac} is outside [0, 1]")


@dataclass(frozen=True, slots=True)
class AutoPlacement:
    """What fits the budget stays on the device; optimizer state that does not goes to NVMe.

    device_budget: bytes, or `"8GiB"`, for everything on this rank's device; None is no limit.
    warmup_non_model_data_ratio: share of the budget left to activations and temporaries.
    """

    device_budget: int | str | None = None
    warmup_non_model_data_ratio: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_non_model_data_ratio < 1:
            raise ValueError(
                f"warmup_non_model_data_ratio={self.warmup_non_model_data_ratio} is outside [0, 1)"
            )
        if self.device_budget is not None:
            parse_bytes(self.device_budget)


Placement = StaticPlacement | AutoPlacement
NAMED: dict[str, Placement] = {
    "auto": AutoPlacement(),
    "static": StaticPlacement(),
    "cuda": StaticPlacement(),
}


class BudgetError(ValueError):
    """Model data does not fit the budget, wherever it goes."""


@dataclass(frozen=True, slots=True)
class ModelData:
    """Bytes of model data of one rank."""

    param_bytes: Bytes
    grad_bytes: Bytes
    state_bytes: Bytes
    staging_bytes: Bytes  # buffers for state on NVMe, where there is any


def parse_placement(policy: str | Placement) -> Placement:
    """A policy from its name, or itself. Raises ValueError for a name that is none."""
    if isinstance(policy, StaticPlacement | AutoPlacement):
        return policy
    if policy not in NAMED:
        raise ValueError(
            f"placement_policy={policy!r} is unknown; expected one of {sorted(NAMED)}, "
            "or a placement dataclass"
        )
    return NAMED[policy]


def state_fraction_on_nvme(placement: Placement, data: ModelData, asked: float) -> float:
    """Share of the optimizer state's bytes that goes to NVMe: what was asked for, or more.

    Raises BudgetError where parameters and gradients alone pass the budget.
    """
    if isinstance(placement, StaticPlacement) or placement.device_budget is None:
        return asked
    budget = parse_bytes(placement.device_budget)
    room = round(budget * (1 - placement.warmup_non_model_data_ratio))
    room -= data.param_bytes + data.grad_bytes
    if data.state_bytes * (1 - asked) <= room:
        return asked
    room -= data.staging_bytes
    if room < 0:
        raise BudgetError(
            f"device_budget={format_bytes(budget)} leaves {format_bytes(-room)} too little for "
            f"parameters ({format_bytes(data.param_bytes)}), gradients "
            f"({format_bytes(data.grad_bytes)}) and staging ({format_bytes(data.staging_bytes)}) "
            f"beside {placement.warmup_non_model_data_ratio:.0%} for activations; raise "
            "device_budget, lower warmup_non_model_data_ratio, or use more ranks"
        )
    return max(asked, 1 - room / data.state_bytes)


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
