"""A model larger than memory: `examples/train_gpt.py` under a hard limit of resident memory.

    python -m bench.capacity --json PATH                 6 and 4 GiB, clipped in each step and not
    python -m bench.capacity --rss-limit 6GiB --max-norm 1
    python -m bench.capacity --update serial             all in step()

The child process may not allocate more than the limit (RLIMIT_DATA: its heap and private mappings),
and its VmHWM is checked beside it. `device_budget` is the limit less `SLACK_BYTES` for the process
itself: interpreter, libraries, threads, text and what operators allocate and no trace sees.
Blocks are updated in backward where the last steps were not clipped, and the others behind the next
forward.

disk_bound_seconds: a step's bytes over the disk's mixed speed, which is measured before and behind
every run. compute_seconds: forward and backward of the same example where all is in memory, without
limit and without an optimizer.
core_bound_seconds: a step's seconds on a processor over the number of cores.
Exit status 1 where the limit was passed or the loss does not fall, 2 where there is no room to run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.support import matmul
from bench.support.disk import mixed_gb_per_s
from bench.support.machine import MALLOC_ENVIRONMENT, write_result
from gemini.nvme import default_folder
from gemini.nvme.files.file import free_bytes
from gemini.placement.timetable.updates import AUTO, UPDATES
from gemini.plan.models import build
from gemini.units import format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parent.parent
SLACK_BYTES = 3 << 29
NEVER_CLIPS = 1000.0  # norms of a new model are below 100
LEARNING_RATE = "1e-5"  # the first step of Adam is as long as the rate: more overshoots
ENVIRONMENT = {
    **MALLOC_ENVIRONMENT,
    "MALLOC_ARENA_MAX": "2",
    # a thread of a product that waits for the other gives its core to who updates, and what it
    # waits is no second of a processor
    "OMP_WAIT_POLICY": "passive",
}
# state 12, parameters 2, each in two versions; gradients 2; while the model is made, originals 4
DISK_BYTES_PER_PARAMETER = 2 * (12 + 2) + 4


def disk_needed(num_params: int) -> int:
    """Bytes on disk at most, everything spilled: for GPT-2 XL about 50 GB."""
    return num_params * DISK_BYTES_PER_PARAMETER


def run(args: argparse.Namespace, limit: int, max_norm: float, folder: Path) -> dict[str, Any]:
    """Train in a child process under `limit` bytes. Raises CalledProcessError where it dies."""
    return train(
        args, limit, "--lean", "--lr", LEARNING_RATE, "--device-budget", str(limit - SLACK_BYTES),
        "--nvme-dir", str(folder), "--update", args.update, "--max-norm", str(max_norm),
    )  # fmt: skip


def train(args: argparse.Namespace, limit: int, *options: str) -> dict[str, Any]:
    """The example, with these options."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run.json"
        command = [
            sys.executable, "-m", matmul.__name__, str(ROOT / "examples/train_gpt.py"),
            "--model", args.model, "--steps", str(args.steps), "--batch", "1", "--seq", "128",
            "--device", "cpu", "--json", str(out), *options,
        ]  # fmt: skip
        path = os.pathsep.join([str(ROOT), str(ROOT / "io"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            command,
            check=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def median(values: Sequence[float]) -> float:
    """But for the first step, which has no tail before it and has learned nothing."""
    return float(statistics.median(values[1:] or values))


def summary(
    result: dict[str, Any], limit: int, gb_per_s: float, compute_seconds: float
) -> dict[str, Any]:
    """What is asked of a run; bytes and seconds are those of a step, the median."""
    read, written = int(median(result["bytes_read"])), int(median(result["bytes_written"]))
    return {
        "max_norm": float(result["arguments"]["max_norm"]),
        "peak_rss_mib": round(result["final_peak_rss_mib"], 1),
        "rss_limit_mib": limit >> 20,
        "losses": result["train_loss"],
        "val_loss": result["val_loss"],
        "mixed_disk_gb_per_s": gb_per_s,
        "bytes_read": read,
        "bytes_written": written,
        "step_seconds": median(result["step_seconds"]),
        "disk_bound_seconds": (read + written) / (gb_per_s * 1e9),
        "compute_seconds": compute_seconds,
        "core_bound_seconds": median(result["cpu_seconds"]) / len(os.sched_getaffinity(0)),
        "nvme_bytes": result["nvme_bytes"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rss-limit", action="append", help="as in 6GiB; may be given twice")
    parser.add_argument("--update", choices=[*UPDATES, AUTO], default="both")
    parser.add_argument(
        "--max-norm", action="append", type=float, help="gradients are clipped to it; as above"
    )
    parser.add_argument("--nvme-dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--json", type=Path, help="write what was measured")
    args = parser.parse_args()
    limits = [parse_bytes(limit) for limit in args.rss_limit or ["6GiB", "4GiB"]]
    max_norms = args.max_norm or [1.0, NEVER_CLIPS]
    folder = args.nvme_dir or default_folder()
    num_params = sum(param.numel() for param in build(args.model).parameters())
    needed, free = disk_needed(num_params), free_bytes(folder)
    if free < needed:
        print(
            f"{args.model} needs {format_bytes(needed)} of disk and {folder} has "
            f"{format_bytes(free)} free; name another folder with --nvme-dir"
        )
        return 2
    speeds = [mixed_gb_per_s(folder)]
    compute_seconds = median(train(args, resource.RLIM_INFINITY, "--floor")["step_seconds"])
    rows = []
    for limit, max_norm in itertools.product(limits, max_norms):
        result = run(args, limit, max_norm, folder)
        speeds.append(mixed_gb_per_s(folder))
        rows.append(summary(result, limit, statistics.mean(speeds[-2:]), compute_seconds))
        print(json.dumps(rows[-1]), flush=True)
        if args.json is not None:
            written = {
                **rows[0], "runs": rows, "model": args.model, "num_params": num_params,
                "update": args.update,
                "mixed_disk_gb_per_s": statistics.median(speeds),
                "physical_memory_gib": psutil.virtual_memory().total / 2**30,
            }  # fmt: skip
            write_result(args.json, written)
    good = all(
        row["peak_rss_mib"] <= row["rss_limit_mib"] and row["losses"][-1] < row["losses"][0]
        for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
