"""`model.park` and `model.resume`: all model data of one module leaves memory, and comes back.

On the way out every rank copies first and says so, and what has left comes back if any rank could
not. On the way back nothing is given up before every rank has all of it, so it can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import UntypedStorage

from gemini.optim.rules.config import NvmeConfig
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.optim.state.parking import Parked, Where, storages_of
from gemini.optim.state.parking import park as move_away
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.memory.ledger import MemoryLedger
from gemini.runtime.memory.machine import memory_left
from gemini.runtime.schedule.planning import Planning
from gemini.runtime.weights import Weights
from gemini.units import format_bytes

if TYPE_CHECKING:
    from gemini.runtime.step.state.shard_state import ShardState

STAYS = "model data stays where it is, on all ranks"
PARKED_STILL = "model data is parked still, on all ranks; resume() may be repeated"


@dataclass(frozen=True, slots=True)
class ParkedBytes:
    """Bytes that parking moves, of one rank.

    device, ram: whose memory was given back, of devices and of the host. to_host, to_nvme: of their
    copies there, of which one is 0.
    """

    device: int
    ram: int
    to_host: int
    to_nvme: int

    @classmethod
    def of(cls, storages: Sequence[UntypedStorage], where: Where) -> ParkedBytes:
        ram = sum(s.nbytes() for s in storages if s.device.type == "cpu")
        device = sum(s.nbytes() for s in storages) - ram
        return cls(device, ram, *((device, 0) if where == "host" else (0, device + ram)))


def park(
    weights: Weights,
    planning: Planning,
    ledger: MemoryLedger,
    target: ShardState | None,
    begin: Callable[[], None],
    where: Where,
) -> ParkedBytes:
    """See `GeminiDDP.park`. begin: ends what is under way. Collective."""
    if where not in ("host", "nvme"):
        raise ValueError(f"park({where!r}); expected 'host' or 'nvme'")
    weights.refuse_parked()
    sharding = weights.sharding
    if any(chunk.is_parked for chunk in sharding.chunks):
        raise RuntimeError("parameters and state are parked; leave `optimizer.parked` first")
    begin()
    moved: tuple[Parked, ParkedBytes] | None = None
    error: Exception | None = None
    with DeferredSignals():
        try:
            moved = _moved(weights, planning, ledger, target, where)
        except Exception as raised:
            error = raised
        said = sharding.comm.gather_objects(None if error is None else str(error))
        if any(text is not None for text in said):
            if moved is not None:
                moved[0].bring_back()
                moved[0].close()
            _raise(said, error, STAYS)
        assert moved is not None
        away, nbytes = moved
        weights.park(away)
    return nbytes


def resume(weights: Weights) -> None:
    """See `GeminiDDP.resume`. Collective."""
    away = weights.parked
    if away is None:
        raise RuntimeError("resume() of a module that is not parked")
    comm = weights.sharding.comm
    comm.call("model.resume()")
    error: Exception | None = None
    with DeferredSignals():
        try:
            away.bring_back()
        except Exception as raised:
            error = raised
        said = comm.gather_objects(None if error is None else str(error))
        if any(text is not None for text in said):
            _raise(said, error, PARKED_STILL)
        weights.is_back()


def _raise(said: Sequence[str | None], error: Exception | None, state: str) -> None:
    """Raise this rank's own error, or one with that of the first rank that failed."""
    if error is not None:
        error.add_note(state)
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(said) if text is not None)
    raise RuntimeError(f"rank {rank}: {text}; {state}")


def _moved(
    weights: Weights,
    planning: Planning,
    ledger: MemoryLedger,
    target: ShardState | None,
    where: Where,
) -> tuple[Parked, ParkedBytes]:
    tensors = weights.movable()
    nvme = NvmeConfig() if target is None else target.parks_as
    folder = planning.nvme_folder
    if folder is not None and not nvme.folders:
        nvme = replace(nvme, folders=(folder,))
    nbytes = ParkedBytes.of(storages_of(tensors, where), where)
    _check_room(planning, ledger, nbytes, nvme)
    return move_away(tensors, where, nvme), nbytes


def _check_room(
    planning: Planning, ledger: MemoryLedger, moved: ParkedBytes, nvme: NvmeConfig
) -> None:
    """Raise BudgetError where the copies pass a budget, or the machine has no such memory."""
    used = ledger.totals()
    inputs, machine = planning.inputs, planning.machine
    copies = {
        Tier.HOST: moved.to_host,
        Tier.NVME: nvme.num_versions * moved.to_nvme,  # files have room for every version
    }
    for tier, nbytes in copies.items():
        left = inputs.budgets.of(tier) - used[tier]
        if tier is Tier.HOST:
            left = min(left, memory_left() // machine.ranks_per_node)
        if nbytes > max(left, 0):
            knob = f"{tier.value}_budget"
            raise BudgetError(
                f"parking takes {format_bytes(nbytes)} of {tier.value}, and {format_bytes(left)} "
                f"are left; expected room for it: raise {knob}, or park elsewhere",
                tier, nbytes - left, knob, "parked model data", inputs.budgets.of(tier),
            )  # fmt: skip
