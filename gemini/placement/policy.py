"""Placement policies as frozen values, and what follows from them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from gemini.arguments import by_name
from gemini.units import ChunkId, check_block_numel

from .sizes import Budgets


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is outside [0, 1]")


KEEP, SPILL, AUTO = "keep", "spill", "auto"
ACTIVATIONS = (KEEP, SPILL, AUTO)


@by_name
@dataclass(frozen=True, slots=True)
class StaticPlacement:
    """Fixed fractions, each met within one chunk (of the state: one block).

    shard_param_frac: parameters that are released between uses; 1 is ZeRO-3, 0 is ZeRO-2.
    offload_optim_frac: of the optimizer state's bytes, in host memory.
    offload_param_frac: of the parameters' bytes, in host memory with their gradients.
    shard_grads: False keeps gradients whole, and this rank's own, until a step asks for them: then
        they are reduced, once for all backwards before it. With `shard_param_frac=0`: ZeRO-1.
    offload_grads: reduced gradients wait in host memory for a step whose state is there.

    Raises ValueError for a fraction outside [0, 1].
    """

    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    shard_grads: bool = True
    offload_grads: bool = False

    @classmethod
    def zero(cls, stage: int, *, cpu_offload: bool = False) -> StaticPlacement:
        """ZeRO of stage 1, 2 or 3. cpu_offload: state, masters and reduced gradients in host
        memory. Raises ValueError for another stage."""
        if stage not in (1, 2, 3):
            raise ValueError(f"stage={stage!r} of ZeRO; expected 1, 2 or 3")
        return cls(
            shard_param_frac=float(stage == 3),
            offload_optim_frac=float(cpu_offload),
            shard_grads=stage > 1,
            offload_grads=cpu_offload,
        )

    def __post_init__(self) -> None:
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac"):
            _check_fraction(name, getattr(self, name))

    def budgets(self) -> Budgets:
        """No limit: fractions are met whatever the machine has."""
        return Budgets()


@by_name
@dataclass(frozen=True, slots=True)
class AutoPlacement:
    """Keep what saves most time on the device, the rest on the host, and the rest of it on NVMe.

    device_budget, host_budget, nvme_budget: bytes, or `"8GiB"`; None is nine tenths of what
        is left of the device and of RAM, and all of the disk. Host and NVMe are a node's, divided
        among its ranks; so is the device where ranks compute on the CPU: there both are RAM, and
        the lower budget holds.
    nvme_dir: where files go; None is a temporary folder. It may have another name on every host:
        `$NAME`, `{node}`, `{rank}` and `{local_rank}` are replaced in each process.
    warmup_non_model_data_ratio: share of the device budget left to activations and temporaries
        when homes are chosen and no iteration was traced; less, where model data would not fit: it
        refuses nothing. What the first iteration leaves of it is filled after its step.
    steady_cap_ratio: share of what a traced iteration leaves that model data may fill.
    block_numel: elements of a block, of parameters, gradients and state: what one transfer has. A
        multiple of 1024; None is the usual 2**20, or as much less as it must be. The optimizer
        takes it. Where it is None, `NvmeConfig.block_numel` is a wish, as long as no parameter
        lives in a file: files stay as they were cut.
    activations: `"keep"`, or `"spill"`: of what forward saves for backward, the oldest goes to the
        host and to `nvme_dir` where the device budget has no room for it. `"auto"`: children of a
        ModuleList, too, are computed again in backward where that is faster, if they prove to give
        the same bits. What a layer changes after its proof is a RuntimeError.

    Raises ValueError for a ratio out of range and for what is no size. Budgets that cannot hold the
    model are a BudgetError when it is wrapped; one that an iteration passes is a `BudgetWarning`.
    How it decides: docs/placement.md.
    """

    device_budget: int | str | None = None
    host_budget: int | str | None = None
    nvme_budget: int | str | None = None
    nvme_dir: str | None = None
    warmup_non_model_data_ratio: float = 0.8
    steady_cap_ratio: float = 0.9
    block_numel: int | None = None
    activations: str = KEEP

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_non_model_data_ratio < 1:
            raise ValueError(
                f"warmup_non_model_data_ratio={self.warmup_non_model_data_ratio} is outside [0, 1)"
            )
        if not 0 < self.steady_cap_ratio <= 1:
            raise ValueError(f"steady_cap_ratio={self.steady_cap_ratio} is outside (0, 1]")
        if self.block_numel is not None:
            check_block_numel(self.block_numel)
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"activations={self.activations!r}; expected one of {ACTIVATIONS}")
        self.budgets()

    def budgets(self) -> Budgets:
        """Budgets of a node as they were given; None as no limit."""
        return Budgets.parse(self.device_budget, self.host_budget, self.nvme_budget)

    @property
    def has_files(self) -> bool:
        """Whether anything may go to files."""
        return self.nvme_dir is not None and self.budgets().nvme > 0

    def check_lower_tier(self, *, has_host_tier: bool) -> None:
        """Raise ValueError where activations have no tier below the device's memory."""
        if self.activations == SPILL and not (has_host_tier or self.has_files):
            raise ValueError(
                f"activations={self.activations!r} on the CPU, whose memory is the host's; "
                "expected a folder on a disk: AutoPlacement(nvme_dir=...), or --nvme"
            )


@by_name
@dataclass(frozen=True, slots=True)
class ConstPlacement:
    """Model data takes `device_bytes` of the device, bytes or `"8GiB"`, whatever activations take;
    the rest of it is in host memory. Ranks that compute on one CPU share these bytes.

    Raises ValueError for what is no size.
    """

    device_bytes: int | str

    def __post_init__(self) -> None:
        self.budgets()

    def budgets(self) -> Budgets:
        """Budget of one device as it was given."""
        return Budgets.parse(self.device_bytes)


Placement = StaticPlacement | AutoPlacement | ConstPlacement
NAMED: dict[str, Placement] = {
    "auto": AutoPlacement(),
    "static": StaticPlacement(),
    "cuda": StaticPlacement(1.0, 0.0, 0.0),
    "cpu": StaticPlacement(1.0, 1.0, 1.0),
    "zero1": StaticPlacement.zero(1),
    "zero2": StaticPlacement.zero(2),
    "zero3": StaticPlacement.zero(3),
}


def has_budgets(policy: Placement) -> bool:
    """Whether any budget was given. What a machine has left may bound a plan all the same."""
    return policy.budgets() != Budgets()


def spills(policy: Placement) -> TypeGuard[AutoPlacement]:
    """Whether activations may leave the device."""
    return isinstance(policy, AutoPlacement) and policy.activations != KEEP


def recomputes(policy: Placement) -> bool:
    """Whether a plan may have layers computed again in backward."""
    return isinstance(policy, AutoPlacement) and policy.activations == AUTO


def parse_placement(policy: str | Placement) -> Placement:
    """Policy of a name, also as `"ZeRO-3"`, or the policy itself. Raises ValueError for an unknown
    name."""
    if isinstance(policy, Placement):
        return policy
    near = {_plain(name): found for name, found in NAMED.items()}
    if _plain(str(policy)) not in near:
        raise ValueError(
            f"placement_policy={policy!r} is unknown; expected one of {sorted(NAMED)}, "
            "or a placement dataclass (ConstPlacement needs its bytes)"
        )
    return near[_plain(str(policy))]


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def never_released(policy: Placement, payload_bytes: Sequence[int]) -> frozenset[ChunkId]:
    """Chunks whose payloads stay gathered all the time, whatever a plan has room for (ZeRO-2)."""
    if not isinstance(policy, StaticPlacement):
        return frozenset()
    released = leading_within(payload_bytes, policy.shard_param_frac)
    return frozenset(map(ChunkId, range(len(payload_bytes)))) - frozenset(released)


def leading_within(nbytes: Sequence[int], fraction: float) -> tuple[ChunkId, ...]:
    """Leading chunks whose share of all bytes is nearest to `fraction`."""
    wanted = fraction * sum(nbytes)
    taken = 0.0
    chosen: list[ChunkId] = []
    for chunk, size in enumerate(nbytes):
        if taken + size / 2 > wanted:
            break
        taken += size
        chosen.append(ChunkId(chunk))
    return tuple(chosen)
