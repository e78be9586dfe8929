"""Budgets of one rank in bytes, from a policy and a machine, worked out once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemini.units import Bytes

from .policy import Placement, StaticPlacement
from .sizes import UNLIMITED, Budgets

USABLE = 0.9  # of what the machine has left, where no budget is given


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank shares with others of its node."""

    ranks_per_node: int  # share host memory and disks
    ranks_per_device: int  # share the compute device: its RAM, where that is a CPU
    has_host_tier: bool  # else host memory is the device's
    device_bytes_left: int  # of the device, for all that share it


def resolve(policy: Placement, machine: Machine, model_bytes: int) -> Budgets:
    """Bytes that one rank may hold on each tier.

    Every pool is divided among the ranks that share it. A device for which nothing is given has no
    limit, unless `model_bytes` of one rank may not fit what is left of it.
    """
    given = policy.budgets()
    if not machine.has_host_tier:  # both are RAM
        given = replace(given, device=min(given.device, given.host))
    budgets = given.divided(machine.ranks_per_node, machine.ranks_per_device)
    if isinstance(policy, StaticPlacement) or given.device < UNLIMITED:
        return budgets
    left = machine.device_bytes_left // machine.ranks_per_device
    if 2 * model_bytes > left:
        budgets = replace(budgets, device=Bytes(round(USABLE * left)))
    return budgets
