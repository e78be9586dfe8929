"""Debian's `fio` as the ceiling of a disk: file, piece, depth and page size are ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemini.nvme import PIECE_BYTES  # what we split transfers into

DEPTH = 4  # transfers at a time
# Our buffers are in huge pages. A disk that takes a few hundred segments at a time moves two to
# three times as much of them, so fio's buffers, which it takes from malloc, are in some too
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
BEYOND = 1.05  # of a ceiling: what is faster by more shows that it is none


@dataclass(frozen=True, slots=True)
class FioRun:
    """What one run moved, in GB (10**9) a second, and the CPU seconds it took for each GB."""

    read_gb_s: float
    write_gb_s: float
    cpu_s_per_gb: float


def available() -> str | None:
    """Why fio cannot be used, or None."""
    return None if shutil.which("fio") else "fio is not installed (Debian: apt install fio)"


def check_ceilings(ratios: Mapping[str, float]) -> None:
    """Raises SystemExit where something is faster than what the disk can do, as these say: then fio
    was held up by what ran beside it, or ran otherwise than we do."""
    found = [f"{name} is {ratio:.2f}" for name, ratio in ratios.items() if ratio > BEYOND]
    if found:
        raise SystemExit(
            f"no ceiling: {', '.join(found)}; nothing was written. Measure again on a machine that "
            "does nothing else"
        )


def run(engine: str, kind: str, path: Path, nbytes: int) -> FioRun:
    """`kind` is read, write or rw (half and half) over `nbytes` of the file at `path`, once.

    psync: DEPTH threads, each on its own part of the file. io_uring: one thread, DEPTH in flight.
    """
    pieces = nbytes // PIECE_BYTES // DEPTH * DEPTH
    command = [
        "fio", "--name=bench", f"--filename={path}", f"--rw={kind}", f"--ioengine={engine}",
        f"--bs={PIECE_BYTES}", "--direct=1", "--thread", "--group_reporting", "--fsync_on_close=1",
        "--allow_file_create=0", "--output-format=json", "--rwmixread=50", "--norandommap",
    ]  # fmt: skip
    if engine == "psync":
        share = pieces // DEPTH * PIECE_BYTES
        command += [f"--numjobs={DEPTH}", f"--size={share}", f"--offset_increment={share}"]
    else:
        command += [f"--iodepth={DEPTH}", f"--size={pieces * PIECE_BYTES}"]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env={**os.environ, **HUGE_PAGES}
    )
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()[-300:]}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    # runtimes are in ms; usr_cpu and sys_cpu are per cent of the job's whole time, over all threads
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return FioRun(
        read_gb_s=job["read"]["bw_bytes"] / 1e9,
        write_gb_s=job["write"]["bw_bytes"] / 1e9,
        cpu_s_per_gb=cpu_seconds / (moved / 1e9),
    )
