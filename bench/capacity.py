"""A model larger than memory: `examples/train_gpt.py` under a hard limit of resident memory.

    python -m bench.capacity --json PATH      6 and 4 GiB, clipped in each step and not, moments in
                                              fp32 and in 8 bits
    python -m bench.capacity --rss-limit 6GiB --max-norm 1 --state fp32
    python -m bench.capacity --update serial  all in step()
    python -m bench.capacity --qlora          LoRA on a base of 4 bits, in 2.5 GiB

The child process may not allocate more than the limit (RLIMIT_DATA: its heap and private mappings),
and its VmHWM is checked beside it. `device_budget` is the limit less `SLACK_BYTES` for the process
itself: interpreter, libraries, threads, text and what operators allocate and no trace sees.
Blocks are updated behind the next forward, unless `--update serial` is given.

disk_bound_seconds: a step's bytes over the disk's mixed speed, which is measured before and behind
every run. compute_seconds: forward and backward of the same example where all is in memory, without
limit and without an optimizer.
core_bound_seconds: a step's seconds on a processor over the number of cores.

`--qlora` (`bench.qlora`): a base of Llama 3.2 3B's shape in NF4 with adapters on all projections,
under the limit (files in the page cache, then read from the disk in every pass), then in the least
budget for what a run cannot do without: embedding and head, two layers, adapters, activations.
`least_peak_mib` is that with the process itself and 5 %. Bounds are compute_seconds, a step of
plain peft with everything resident, and the bytes that a step reads at the speed of that run's own
reads. Last, four runs share one base, and one is alone: PSS of their processes, in which no page
cache is.

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
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.support import matmul
from bench.support.disk import mixed_gb_per_s
from bench.support.machine import MALLOC_ENVIRONMENT, write_result
from gemini.nvme import default_folder
from gemini.nvme.files.file import free_bytes
from gemini.optim.rules.state_layout import KINDS
from gemini.placement.timetable.updates import TAIL, UPDATES
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
QLORA, QLORA_LIMIT, QLORA_STEPS = "llama-3.2-3b", "2.5GiB", 6
QLORA_SLACK_BYTES = 13 << 26  # for the process: more modules and libraries, fewer operators
SHARING = 4  # runs of one base
# state 12, parameters 2, each in two versions; gradients 2; while the model is made, originals 4
DISK_BYTES_PER_PARAMETER = 2 * (12 + 2) + 4


def disk_needed(num_params: int) -> int:
    """Bytes on disk at most, everything spilled: for GPT-2 XL about 50 GB."""
    return num_params * DISK_BYTES_PER_PARAMETER


def run(
    args: argparse.Namespace, limit: int, max_norm: float, state: str, folder: Path
) -> dict[str, Any]:
    """Train in a child process under `limit` bytes. Raises CalledProcessError where it dies."""
    return train(
        args, limit, "--lean", "--lr", LEARNING_RATE, "--device-budget", str(limit - SLACK_BYTES),
        "--nvme-dir", str(folder), "--update", args.update, "--max-norm", str(max_norm),
        "--state", state,
    )  # fmt: skip


def train(args: argparse.Namespace, limit: int, *options: str) -> dict[str, Any]:
    """The example, with these options."""
    return result_of(
        "examples/train_gpt.py", limit, "--model", args.model, "--steps", str(args.steps),
        "--batch", "1", "--seq", "128", "--device", "cpu", *options,
    )  # fmt: skip


def result_of(script: str, limit: int, *options: str) -> dict[str, Any]:
    """What a script writes that may have `limit` bytes. Raises CalledProcessError where it dies."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run.json"
        with started(script, limit, *options, "--json", str(out)) as process:
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, process.args)
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result


@contextmanager
def started(script: str, limit: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of it, which has ended when the body has."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "io"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", matmul.__name__, str(ROOT / script), *options],
        stdin=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        process.communicate()  # its standard input ends


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
        "state": result["arguments"]["state"],
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


# -- a frozen base --


def qlora(args: argparse.Namespace, limit: int, folder: Path) -> dict[str, Any]:
    """All of `--qlora`, below `folder`."""
    shape, steps = args.model or QLORA, str(args.steps or QLORA_STEPS)
    base, files = folder / "base", folder / "files"
    files.mkdir()
    script, unlimited = "bench/qlora.py", resource.RLIM_INFINITY
    with started(script, unlimited, "--make", "--base", str(base), "--shape", shape) as process:
        assert process.wait() == 0
    given = ("--base", str(base), "--steps", steps)
    pair = result_of(script, unlimited, "--pair", *given)
    print(json.dumps(pair), flush=True)
    rows: list[dict[str, Any]] = []

    def budgeted(budget: int, limit: int, *flags: str) -> None:
        options = ("--device-budget", str(budget), "--nvme-dir", str(files))
        run = result_of(script, limit, *given, *options, *flags)
        rows.append(
            {"device_budget": budget, "cold": "--cold" in flags, **of_a_base(run, limit, pair)}
        )
        print(json.dumps(rows[-1]), flush=True)

    budgeted(limit - QLORA_SLACK_BYTES, limit)
    budgeted(limit - QLORA_SLACK_BYTES, limit, "--cold")
    parts = rows[0]["parts"]
    least = sum(parts.values()) - parts["libraries"]
    budgeted(least, limit)
    options = ("--base", str(base), "--steps", "2", "--device-budget", str(least))
    alone, of_base = pss_of(1, files, *options)
    together, _ = pss_of(SHARING, files, *options)
    shared = {
        "runs": SHARING, "pss_bytes": together, "pss_bytes_alone": alone, "base_bytes": of_base,
        "share": (together + of_base) / (of_base + SHARING * alone),
    }  # fmt: skip
    print(json.dumps(shared), flush=True)
    return {"model": shape, "seq": 128, "runs": rows, "pair": pair, "shared": shared}


def of_a_base(run: dict[str, Any], limit: int, pair: dict[str, Any]) -> dict[str, Any]:
    """What is asked of a run; a step is the median of those behind the second, by when homes are
    final."""
    seconds = statistics.median(run["step_seconds"][2:])
    read, compute = run["bytes_read"][-1], pair["plain_step_seconds"]
    by_reads = read / (run["read_gb_per_s"] * 1e9) if read else 0.0
    return {
        "peak_rss_mib": round(run["peak_rss_bytes"] / 2**20, 1),
        "rss_limit_mib": limit >> 20,
        "least_peak_mib": round(1.05 * sum(run["parts"].values()) / 2**20, 1),
        "parts": run["parts"],
        "losses": run["losses"],
        "bytes_read": read,
        "planned_read_bytes": run["planned_read_bytes"][-1],
        "read_gb_per_s": run["read_gb_per_s"],
        "step_seconds": seconds,
        "read_bound_seconds": by_reads,
        "compute_seconds": compute,
        "of_bound": seconds / max(compute, by_reads),
        "frozen_file_bytes": run["frozen_file_bytes"],
    }


def pss_of(count: int, files: Path, *options: str) -> tuple[int, int]:
    """PSS of so many runs that have one base, when all have trained; bytes of that base's files."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        outs = [Path(scratch) / f"{i}.json" for i in range(count)]
        given = ("--hold", "--nvme-dir", str(files), *options)
        processes = [
            stack.enter_context(
                started("bench/qlora.py", resource.RLIM_INFINITY, *given, "--json", str(out))
            )
            for out in outs
        ]
        while not all(out.exists() for out in outs):
            time.sleep(0.5)
            if any(process.poll() is not None for process in processes):
                raise subprocess.CalledProcessError(1, "bench.qlora")
        found = 0
        for process in processes:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
            found += int(text.split("\nPss:")[1].split()[0]) * 1024
        return found, sum(path.stat().st_size for path in files.glob("gemini-base-*"))


def is_good(result: dict[str, Any]) -> bool:
    """Whether the limit held, the least peak too, losses fall, and what is read was planned."""
    shared = result["shared"]
    most = 1.15 * shared["base_bytes"] + shared["runs"] * shared["pss_bytes_alone"]
    return (
        shared["pss_bytes"] + shared["base_bytes"] <= most
        and all(
            row["peak_rss_mib"] <= row["rss_limit_mib"]
            and row["losses"][-1] < row["losses"][0]
            and row["bytes_read"] == row["planned_read_bytes"]
            for row in result["runs"]
        )
        and result["runs"][-1]["peak_rss_mib"] <= result["runs"][-1]["least_peak_mib"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="default: gpt2-xl, or llama-3.2-3b with --qlora")
    parser.add_argument("--steps", type=int, help="default: 4, or 6 with --qlora")
    parser.add_argument("--qlora", action="store_true")
    parser.add_argument("--rss-limit", action="append", help="as in 6GiB; may be given twice")
    parser.add_argument("--update", choices=UPDATES, default=TAIL)
    parser.add_argument(
        "--max-norm", action="append", type=float, help="gradients are clipped to it; as above"
    )
    parser.add_argument("--state", action="append", choices=KINDS, help="of moments; as above")
    parser.add_argument("--nvme-dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--json", type=Path, help="write what was measured")
    args = parser.parse_args()
    if args.qlora and args.steps is not None and args.steps < 3:
        parser.error(f"--steps {args.steps} with --qlora; expected 3: homes are final behind two")
    default_limits = [QLORA_LIMIT] if args.qlora else ["6GiB", "4GiB"]
    limits = [parse_bytes(limit) for limit in args.rss_limit or default_limits]
    max_norms, states = args.max_norm or [1.0, NEVER_CLIPS], args.state or ["fp32", "8bit"]
    folder = args.nvme_dir or default_folder()
    if args.qlora:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            result = qlora(args, limits[0], Path(scratch))
        if args.json is not None:
            write_result(args.json, result)
        return 0 if is_good(result) else 1
    args.model, args.steps = args.model or "gpt2-xl", args.steps or 4
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
    for limit, max_norm, state in itertools.product(limits, max_norms, states):
        result = run(args, limit, max_norm, state, folder)
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
