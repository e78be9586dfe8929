"""Budgets of one rank in bytes, from a policy and a machine, worked out once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from gemini.placement.policy import AutoPlacement, ConstPlacement, Placement, StaticPlacement
from gemini.placement.sizes import UNLIMITED, BudgetError, Budgets
from gemini.placement.speeds import USUAL_SPEEDS, Speeds
from gemini.placement.tiers import Tier
from gemini.units import Bytes

C = TypeVar("C")
P = TypeVar("P")
USABLE = 0.9  # of what the machine has left, where no budget is given


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of a node, and its speeds, as one of its ranks sees them."""

    ranks_per_node: int = 1  # share host memory and disks
    ranks_per_device: int = 1  # share the compute device: its RAM, where that is a CPU
    has_host_tier: bool = True  # else host memory is the device's
    device_bytes_left: int = UNLIMITED  # of the device, for all that share it
    host_bytes_left: int = UNLIMITED  # of the node's RAM, where that is a tier of its own
    speeds: Speeds = USUAL_SPEEDS

    def ranks_on(self, tier: Tier) -> int:
        """Number of ranks that share one pool of a tier."""
        return self.ranks_per_device if tier is Tier.DEVICE else self.ranks_per_node


def resolve(policy: Placement, machine: Machine) -> Budgets:
    """Bytes that one rank may hold on each tier.

    Every pool is divided among the ranks that share it. Device and RAM for which nothing is given
    have what the machine has left of them; fractions of `StaticPlacement` are met whatever that is.
    """
    given = given_budgets(policy, has_host_tier=machine.has_host_tier)
    budgets = given.divided(machine.ranks_per_node, machine.ranks_per_device)
    if isinstance(policy, StaticPlacement):
        return budgets
    if given.device >= UNLIMITED:
        left = machine.device_bytes_left
        budgets = replace(budgets, device=_usable(left, machine.ranks_per_device))
    if given.host >= UNLIMITED and machine.has_host_tier:
        left = machine.host_bytes_left
        budgets = replace(budgets, host=_usable(left, machine.ranks_per_node))
    return budgets


def _usable(left: int, ranks: int) -> Bytes:
    return Bytes(left if left >= UNLIMITED else int(USABLE * left) // ranks)


def in_words_of(policy: Placement, machine: Machine, error: BudgetError) -> BudgetError:
    """The budget in the user's words: by its name, for all ranks that share the pool."""
    if error.tier is None:
        return error
    name, ranks = _name(policy, machine, error.tier), machine.ranks_on(error.tier)
    given = given_budgets(policy, has_host_tier=machine.has_host_tier).of(error.tier)
    missing = ranks * (error.budget_bytes + error.missing_bytes) - given
    if given >= UNLIMITED:  # it was what the machine has left
        given, missing = Bytes(ranks * error.budget_bytes), ranks * error.missing_bytes
    shared = f", on each of {ranks} ranks" if ranks > 1 else ""
    knob = error.knob.replace(f"{error.tier.value}_budget", name)
    return BudgetError.missing(error.tier, missing, given, error.what + shared, knob, name)


def first_that_fits(chunks: Iterable[C], planned: Callable[[C], P]) -> P:
    """Plan with the first of ever smaller chunks that the budgets hold.

    Chunks are cut as long as one of two cuts leaves less missing on the device: two neighbours may
    be in use at once, as large as the one that they were. Raises BudgetError if none fits.
    """
    refused: list[BudgetError] = []
    least = 0  # the one that lacks least
    for smaller in chunks:
        try:
            return planned(smaller)
        except BudgetError as error:
            refused.append(error)
        last = len(refused) - 1
        if refused[last].tier is not Tier.DEVICE:
            break
        if refused[last].missing_bytes < refused[least].missing_bytes:
            least = last
        if last - least == 2:
            break
    raise refused[least] if len(refused) == 1 else refused[least].with_least_chunks()


def given_budgets(policy: Placement, *, has_host_tier: bool) -> Budgets:
    """Budgets of a node that bound each pool, as the policy gives them."""
    given = policy.budgets()
    if has_host_tier:
        return given
    return replace(given, device=min(given.device, given.host))  # both are RAM


def _name(policy: Placement, machine: Machine, tier: Tier) -> str:
    """Name of the argument that bounds a pool."""
    if tier is not Tier.DEVICE:
        return f"{tier.value}_budget"
    if isinstance(policy, ConstPlacement):
        return "device_bytes"
    given = policy.budgets()
    by_host = isinstance(policy, AutoPlacement) and given.host < given.device
    return "host_budget" if by_host and not machine.has_host_tier else "device_budget"
