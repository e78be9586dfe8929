"""`model.park` and `model.resume`: all model data of one module leaves memory, and comes back.

On the way out every rank copies first and says so, and what has left comes back if any rank could
not. On the way back nothing is given up before every rank has all of it, so it can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from gemini.chunk.parameter import unwatch, watch
from gemini.optim.rules.config import NvmeConfig
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.optim.state.parking import (
    Parked,
    ParkedBytes,
    Where,
    bytes_to_park,
    storages_to_park,
)
from gemini.optim.state.parking import (
    park as move_away,
)
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.memory.machine import memory_left
from gemini.runtime.parts import Parts, refuse_parked
from gemini.units import format_bytes

if TYPE_CHECKING:
    from .state.shard_state import ShardState

STAYS = "model data stays where it is, on all ranks"
PARKED_STILL = "model data is parked still, on all ranks; resume() may be repeated"


def park(
    parts: Parts, target: ShardState | None, begin: Callable[[], None], where: Where
) -> ParkedBytes:
    """See `GeminiDDP.park`. begin: ends what is under way. Collective."""
    if where not in ("host", "nvme"):
        raise ValueError(f"park({where!r}); expected 'host' or 'nvme'")
    refuse_parked(parts)
    if any(chunk.is_parked for chunk in parts.chunks):
        raise RuntimeError("parameters and state are parked; leave `optimizer.parked` first")
    begin()
    away: Parked | None = None
    error: Exception | None = None
    with DeferredSignals():
        try:
            away = _moved(parts, target, where)
        except Exception as raised:
            error = raised
        said = parts.comm.gather_objects(None if error is None else str(error))
        if any(text is not None for text in said):
            if away is not None:
                away.bring_back()
                away.close()
            _raise(said, error, STAYS)
        assert away is not None
        parts.parked = away
        events = parts.events
        events.forward.listen(away.refuse)
        if parts.all_gathered:  # nobody asks for what is never released: reads are refused, too
            for param in parts.params:
                watch(param)
    return away.nbytes


def resume(parts: Parts) -> ParkedBytes:
    """See `GeminiDDP.resume`. Collective."""
    away = parts.parked
    if away is None:
        raise RuntimeError("resume() of a module that is not parked")
    parts.comm.call("model.resume()")
    error: Exception | None = None
    with DeferredSignals():
        try:
            away.bring_back()
        except Exception as raised:
            error = raised
        said = parts.comm.gather_objects(None if error is None else str(error))
        if any(text is not None for text in said):
            _raise(said, error, PARKED_STILL)
        _is_back(parts, away)
    return away.nbytes


def resume_alone(parts: Parts) -> None:
    """Bring back, if it is parked, what this rank has: its optimizer is closed, maybe as the last
    thing that a rank does whose others go on. Not collective."""
    away = parts.parked
    if away is not None:
        with DeferredSignals():
            away.bring_back()
            _is_back(parts, away)


def _is_back(parts: Parts, away: Parked) -> None:
    events, parts.parked = parts.events, None
    events.forward.leave(away.refuse)
    if parts.all_gathered:
        for param in parts.params:
            unwatch(param)
    away.close()


def _raise(said: Sequence[str | None], error: Exception | None, state: str) -> None:
    """Raise this rank's own error, or one with that of the first rank that failed."""
    if error is not None:
        error.add_note(state)
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(said) if text is not None)
    raise RuntimeError(f"rank {rank}: {text}; {state}")


def _moved(parts: Parts, target: ShardState | None, where: Where) -> Parked:
    tensors = _movable(parts, target)
    nvme = NvmeConfig() if target is None else target.parks_as
    folder = parts.planning.nvme_folder
    if folder is not None and not nvme.folders:
        nvme = replace(nvme, folders=(folder,))
    storages = storages_to_park(tensors, where)
    _check_room(parts, bytes_to_park(storages, where), nvme)
    return move_away(tensors, where, nvme)


def _movable(parts: Parts, target: ShardState | None) -> list[Tensor]:
    """Tensors of all model data in memory, when nothing is under way."""
    parts.manager.release_all()
    if target is None:
        found = [tensor for chunk in parts.chunks for tensor in chunk.movable()]
    else:
        found = list(target.movable())
    for kept in (parts.originals, *parts.storage.averages):
        kept.rest()
        found += kept.in_memory
    return found


def _check_room(parts: Parts, moved: ParkedBytes, nvme: NvmeConfig) -> None:
    """Raise BudgetError where the copies pass a budget, or the machine has no such memory."""
    planning, used = parts.planning, parts.ledger.totals()
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
