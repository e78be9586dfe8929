"""What an engine says on the first rank when its optimizer is made: once, in three lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from gemini.optim.rules.config import StateConfig
from gemini.placement.policy import StaticPlacement
from gemini.placement.start import Start
from gemini.runtime.parts import Parts

from .reports import when_updated

log = logging.getLogger("gemini")


def say_start(parts: Parts, config: StateConfig, update_path: str, num_groups: int) -> None:
    """`config` is of the optimizer, `update_path` of what carries out its updates."""
    if log.level <= logging.INFO:
        _say(_start_of(parts, config, update_path, num_groups).lines())


def _start_of(parts: Parts, config: StateConfig, update_path: str, num_groups: int) -> Start:
    planning, settings = parts.planning, parts.precision_settings
    plan = planning.plan
    homes = [home for shard in plan.shards for home in shard.state_homes]
    masters = "" if settings.precision == "fp32" else " with fp32 masters"
    is_static = isinstance(planning.policy, StaticPlacement)
    return Start(
        device=str(parts.backend.device),
        peaks=planning.result.profile.peaks(),
        budgets=plan.budgets,
        folders=", ".join(config.nvme.folders) or planning.nvme_folder or "a temporary folder",
        may_rise=not (planning.homes_are_final or is_static),
        update_path=update_path,
        paths={home.value: plan.path_of(home).value for home in dict.fromkeys(homes)},
        when=when_updated(parts),
        asked=parts.update,
        optimizer=config.optimizer,
        numel=sum(spec.numel for spec in parts.layout.params if spec.trainable),
        num_groups=num_groups,
        precision=settings.precision + (masters if settings.master_weights else ""),
        num_ranks=parts.comm.world_size,
    )


def _say(lines: Sequence[str]) -> None:
    """Through the program's handlers, and on stderr where it has none: Python itself would drop
    what is below a warning, so nobody would see it."""
    for line in lines:
        if log.hasHandlers():
            log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None))
        else:
            sys.stderr.write(f"{line}\n")
