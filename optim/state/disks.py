"""Which engine and which shares of several disks: measured where that has to be known."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemini.nvme import CANDIDATES, Engine, make_engine, probe
from gemini.optim.rules.config import NvmeConfig

log = logging.getLogger("gemini.nvme")


@dataclass(frozen=True, slots=True)
class Disks:
    """Folders for blocks, and how fast each is."""

    folders: Sequence[Path]
    weights: Sequence[float]  # blocks are striped in proportion
    engine: Engine


def measure_disks(folders: Sequence[Path], config: NvmeConfig) -> Disks:
    """Measure what has to be known: the faster engine where asked, each disk where there are more.

    The engine of a choice is that of the first folder.
    """
    name = config.engine
    if not isinstance(name, str):
        return Disks(folders, [1.0] * len(folders), name)
    if name != "auto" and len(folders) == 1:
        return Disks(folders, [1.0], make_engine(name, folders[0]))
    engines = CANDIDATES if name == "auto" else [name]
    probes = [
        probe(folder, engines, seconds=2.0 / len(folders), allow_ram=config.allow_ram)
        for folder in folders
    ]
    best = probes[0].best.engine
    speeds = {p.folder: {s.engine: s.mixed for s in p.speeds} for p in probes}
    log.info("disks %s with engine %s", speeds, best)
    weights = [speeds[p.folder].get(best, p.best.mixed) for p in probes]
    return Disks(folders, weights, make_engine(best, folders[0]))
