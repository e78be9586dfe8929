"""The engine of some folders, and the shares of several disks, which are measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemini.nvme import Engine, make_engine, probe
from gemini.optim.rules.config import NvmeConfig

log = logging.getLogger("gemini.nvme")


@dataclass(frozen=True, slots=True)
class Disks:
    """Folders for blocks, and how fast each is."""

    folders: Sequence[Path]
    weights: Sequence[float]  # blocks are striped in proportion
    engine: Engine


def measure_disks(folders: Sequence[Path], config: NvmeConfig) -> Disks:
    """Folders with the engine that was asked for. Where there are several, each is measured."""
    name = config.engine
    if not isinstance(name, str):
        return Disks(folders, [1.0] * len(folders), name)
    weights = [1.0]
    if len(folders) > 1:
        seconds = 2.0 / len(folders)
        weights = [
            probe(folder, name, seconds=seconds, allow_ram=config.allow_ram).mixed
            for folder in folders
        ]
        log.info("disks %s with engine %s", dict(zip(folders, weights, strict=True)), name)
    return Disks(folders, weights, make_engine(name, folders[0]))
