"""Probe of a folder's disk with an engine: two seconds, once."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemini.nvme.files.file import OpenFile, check_folder, create_files, remove_files
from gemini.tickets import Ticket

from .engines import Engine, Transfer
from .engines.tensornvme import TensorNvmeEngine
from .engines.threads import ThreadEngine
from .pool import BufferPool

log = logging.getLogger("gemini.nvme")
PROBE_BYTES = 64 << 20
TRANSFER_BYTES = 8 << 20
BUFFERS = 4

ENGINES: dict[str, Callable[[], Engine]] = {
    "threads": ThreadEngine,
    "tensornvme": TensorNvmeEngine,
}


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes a second of one engine on one disk."""

    engine: str
    read: float
    write: float

    @property
    def mixed(self) -> float:
        """Speed of both ways in turn: what a step does to a disk that is not duplex."""
        return 2 / (1 / self.read + 1 / self.write)


def probe(
    folder: str | os.PathLike[str],
    engine: str = "threads",
    *,
    seconds: float = 2.0,
    allow_ram: bool = False,
) -> Speed:
    """Measure an engine on `folder` in about `seconds`; leaves no file.

    Raises FolderError for a folder that cannot be used, DiskFullError where 64 MiB do not fit,
    and what `make_engine` does.
    """
    path = check_folder(folder, allow_ram=allow_ram)
    (file,) = create_files([path], [PROBE_BYTES], label="probe-")
    try:
        made = make_engine(engine)
        try:
            return _measure(made, file, seconds)
        finally:
            made.close()
    finally:
        remove_files([file])


def make_engine(name: str) -> Engine:
    """Engine of a name. Raises ValueError for an unknown one, NvmeError where it is refused."""
    if name not in ENGINES:
        raise ValueError(f"nvme engine {name!r} is unknown; expected one of {sorted(ENGINES)}")
    return ENGINES[name]()


@dataclass(frozen=True, slots=True)
class Disks:
    """Folders for blocks, and how fast each is."""

    folders: Sequence[Path]
    weights: Sequence[float]  # blocks are striped in proportion
    engine: Engine


def measure_disks(folders: Sequence[Path], engine: str | Engine, *, allow_ram: bool) -> Disks:
    """Folders with an engine, by its name or made. Where there are several, each is measured."""
    if not isinstance(engine, str):
        return Disks(folders, [1.0] * len(folders), engine)
    weights = [1.0]
    if len(folders) > 1:
        seconds = 2.0 / len(folders)
        weights = [
            probe(folder, engine, seconds=seconds, allow_ram=allow_ram).mixed for folder in folders
        ]
        log.info("disks %s with engine %s", dict(zip(folders, weights, strict=True)), engine)
    return Disks(folders, weights, make_engine(engine))


def _measure(engine: Engine, file: OpenFile, seconds: float) -> Speed:
    pool = BufferPool(BUFFERS, TRANSFER_BYTES)
    views = [pool.take().view for _ in range(BUFFERS)]

    def sweep(kind: str) -> float:
        """Seconds for PROBE_BYTES one way."""
        submit = engine.read if kind == "read" else engine.write
        under_way: list[Ticket[int]] = []
        started = time.perf_counter()
        for i, offset in enumerate(range(0, PROBE_BYTES, TRANSFER_BYTES)):
            if len(under_way) == BUFFERS:
                under_way.pop(0).wait()
            view = views[i % BUFFERS]
            under_way.append(submit(Transfer(file, offset, view, False)))
        for ticket in under_way:
            ticket.wait()
        return time.perf_counter() - started

    # once uncounted: the first write to allocated space also turns its extents into written ones
    sweep("write")
    best = {"read": float("inf"), "write": float("inf")}
    deadline = time.perf_counter() + seconds
    # The least of several: a neighbour's traffic only ever makes a sweep slower.
    while True:
        for kind in best:
            best[kind] = min(best[kind], sweep(kind))
        if time.perf_counter() > deadline:
            break
    return Speed(engine.name, PROBE_BYTES / best["read"], PROBE_BYTES / best["write"])
