"""`python -m bench.train`: the same training by us and by our peers, side by side.

Same model, data, batch, seed and hyperparameters; no dropout, gradients clipped to a norm. Every
rank of every row is a process of its own (`bench/rows/worker.py`) with the same malloc settings.
Rows that are compared with each other are alive together and take turns of STEPS_A_TURN; where
they do not fit into memory together, or with `--apart`, one row runs after the other. All of it is
repeated in rounds. A turn ends when nothing of it is under way, so that no row's tail is in the
next row's time; its first step, which has no tail before it, is not counted. DeepSpeed runs in the
environment of `make peers` where that was made, what is in torch itself in ours.
A peer that is missing or crashes costs its own row. Where the processor has no bf16 products, all
rows have the same in fp32 (`bench/support/matmul.py`), and the result says so.

step, forward, backward, optimizer   seconds: medians over all steps but a process's first
                                     WARMUP_STEPS; of several ranks the slowest
start-up                             import (torch and the package) and wrap, of a built model
peak RSS                             VmHWM; of several ranks the largest
on disk                              blocks of the row's files
settings                             values that the user had to give: they are in the JSON
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.rows.job import Job
from bench.rows.processes import PeerError, Ranks, peers_python, prepare
from bench.rows.summary import WARMUP_STEPS, draw, ratio_table, ratios, summary, table
from bench.rows.table import Row, chosen, default_budgets, rows
from bench.support.machine import busy_fraction, write_result
from gemini.nvme import check_folder, default_folder
from gemini.plan.models import build

BUSY_FRACTION = 0.25  # of all cores, above which the machine is not quiet
STEPS_A_TURN = 3  # the first is not counted
BYTES_PER_PARAMETER = 28  # that a resident row takes at most, while it starts too
PREPARE_SECONDS = 900.0  # a peer may compile


@dataclass
class Measured:
    """What was measured of one row so far; a `reason` where it cannot be had."""

    row: Row
    configuration: dict[str, Any]
    starts: list[dict[str, Any]] = field(default_factory=list)  # one of each process group
    steps: list[list[dict[str, Any]]] = field(default_factory=list)  # of each process group
    reason: str | None = None


def main(argv: Sequence[str] | None = None, load: Callable[[], float] = busy_fraction) -> int:
    args = parse(argv)
    busy = load()
    if busy > BUSY_FRACTION and not args.force:
        print(
            f"the machine is busy: {busy:.0%} of its cores' time (load average "
            f"{os.getloadavg()[0]:.1f}); wait until it is quiet, or measure with --force"
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    numel = sum(param.numel() for param in build(args.model).parameters())
    every = rows(args.device, args.budgets or default_budgets(numel))
    try:
        some = chosen(every, args.peers)
        with tempfile.TemporaryDirectory(
            prefix="bench-train-", dir=check_folder(args.nvme_dir or default_folder())
        ) as name:
            measured, versions = run(some, args, Path(name), numel)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    report(measured, versions, args, busy)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", nargs="+", help="rows, or peers (torch, ours, ...); all")
    parser.add_argument("--model", default="gpt2", help="see gemini.plan.models")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, over all ranks")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6, help="of each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to it")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--budgets", nargs="+", help="of the device, for ours/auto, as in 1.5GiB")
    parser.add_argument("--apart", action="store_true", help="one row at a time")
    parser.add_argument("--nvme-dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--peers-python", default=peers_python(), help="DeepSpeed's interpreter")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for any one answer")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine")
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--plot", type=Path, help="draw step time and memory")
    args = parser.parse_args(argv)
    if args.steps <= WARMUP_STEPS or args.rounds < 1:
        parser.error(f"--steps {args.steps} --rounds {args.rounds}: more than {WARMUP_STEPS} steps "
                     "and at least one round are needed")  # fmt: skip
    if args.batch % 2:
        parser.error(f"--batch {args.batch} does not divide among 2 ranks")
    return args


# -- running --


def run(
    some: Sequence[Row], args: argparse.Namespace, folder: Path, numel: int
) -> tuple[list[Measured], dict[str, dict[str, str]]]:
    """Every row in every round; and the versions beside each peer's interpreter."""
    batches = write_batches(args, folder)
    measured = {row.name: Measured(row, configuration(row, args)) for row in some}
    versions, refused = prepare_all(some, args, folder)
    for one in measured.values():
        one.reason = refused.get(one.row.peer) or _needs_devices(one.row, args.device)
    groups: dict[str, list[Row]] = {}
    for row in some:
        if measured[row.name].reason is None:
            groups.setdefault(row.group, []).append(row)
    for turn in range(args.rounds):
        for group in groups.values():
            for together in shared(group, args, numel):
                play(together, args, folder, batches, measured, turn)
    return list(measured.values()), versions


def write_batches(args: argparse.Namespace, folder: Path) -> Path:
    """int64 [steps, batch, seq] of the text that examples/train_gpt.py trains on."""
    from examples.train_gpt import Text

    text = Text(None, args.batch, args.seq)
    batches = text.batches(text.train, args.seed)
    path = folder / "batches.pt"
    torch.save(torch.stack([next(batches) for _ in range(args.steps)]), path)
    return path


def configuration(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """What a user of this row would have written, as its worker uses it but for the folder."""
    peer = import_module(f"bench.peers.{row.peer}")
    given: dict[str, Any] = peer.settings(jobs_of(row, args, Path(), Path())[0])
    return given


def prepare_all(
    some: Sequence[Row], args: argparse.Namespace, folder: Path
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Import each peer once, which also warms the page cache: versions, and reasons of refusals."""
    versions, refused = {}, {}
    for peer in dict.fromkeys(row.peer for row in some):
        try:
            found = prepare(interpreter(peer, args), peer, folder, PREPARE_SECONDS)
            versions[peer] = found["versions"]
        except PeerError as error:
            refused[peer] = str(error)
    return versions, refused


def interpreter(peer: str, args: argparse.Namespace) -> str:
    return str(args.peers_python) if peer == "deepspeed_zero" else sys.executable


def _needs_devices(row: Row, device: str) -> str | None:
    if device == "cuda" and row.world_size > torch.cuda.device_count():
        return f"{row.world_size} ranks, {torch.cuda.device_count()} device"
    return None


def shared(group: list[Row], args: argparse.Namespace, numel: int) -> list[list[Row]]:
    """Rows that are alive together: all where memory allows, else each alone."""
    needed = sum(BYTES_PER_PARAMETER * numel * row.world_size for row in group)
    together = not args.apart and args.device == "cpu"
    if together and needed <= psutil.virtual_memory().available:
        return [group]
    return [[row] for row in group]


def play(
    group: Sequence[Row],
    args: argparse.Namespace,
    folder: Path,
    batches: Path,
    measured: dict[str, Measured],
    turn: int,
) -> None:
    """One round of rows that take turns. A row that fails gets its reason and leaves."""
    with contextlib.ExitStack() as living:
        ranks: dict[str, Ranks] = {}
        folders: dict[str, Path] = {}
        for row in group:
            one = measured[row.name]
            print(f"round {turn + 1}: {row.name}", flush=True)
            folders[row.name] = living.enter_context(_folder(folder))
            with _reason_of(one, ranks):
                jobs = jobs_of(row, args, folders[row.name], batches)
                ranks[row.name] = Ranks(interpreter(row.peer, args), jobs, args.timeout)
                living.callback(ranks[row.name].close)
                one.starts.append({"ready": ranks[row.name].ready})
                one.steps.append([])
        for first in range(0, args.steps, STEPS_A_TURN):
            for name in list(ranks):
                with _reason_of(measured[name], ranks):
                    for step in range(first, min(first + STEPS_A_TURN, args.steps)):
                        found = slowest(ranks[name].step())
                        if step == first:
                            found["follows_settle"] = 1.0
                        measured[name].steps[-1].append(found)
                    ranks[name].settle()
        for name in list(ranks):
            with _reason_of(measured[name], ranks):
                on_disk = disk_bytes(folders[name] / "state")
                end = ranks[name].finish()
                measured[name].starts[-1] |= {"end": end, "nvme_bytes": on_disk}


@contextlib.contextmanager
def _reason_of(one: Measured, ranks: dict[str, Ranks]) -> Iterator[None]:
    try:
        yield
    except PeerError as error:
        one.reason = str(error)
        print(f"{one.row.name}: {error}", flush=True)
        failed = ranks.pop(one.row.name, None)
        if failed is not None:
            failed.close()


@contextlib.contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent) as name:
        (Path(name) / "state").mkdir()
        yield Path(name)


def jobs_of(row: Row, args: argparse.Namespace, folder: Path, batches: Path) -> list[Job]:
    cores = len(os.sched_getaffinity(0))
    return [
        Job(
            row.peer, args.model, str(batches), str(folder), dict(row.options),
            device=args.device, seed=args.seed, max_norm=args.max_norm, batch=args.batch, rank=rank,
            world_size=row.world_size, threads=max(1, cores // row.world_size),
        )
        for rank in range(row.world_size)
    ]  # fmt: skip


def slowest(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of one step: each part's largest seconds over ranks, and the mean of their losses."""
    parts = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    return {**parts, "loss": statistics.fmean(rank["loss"] for rank in ranks)}


def disk_bytes(folder: Path) -> int:
    """Blocks of all files below it."""
    return sum(512 * f.lstat().st_blocks for f in folder.rglob("*") if not f.is_dir())


# -- reporting --


def report(
    measured: Sequence[Measured],
    versions: dict[str, dict[str, str]],
    args: argparse.Namespace,
    busy: float,
) -> None:
    found = [
        summary(one.row, one.configuration, one.starts, one.steps, one.reason) for one in measured
    ]
    result = {
        "model": args.model, "batch": args.batch, "seq": args.seq, "steps": args.steps,
        "rounds": args.rounds, "device": args.device, "seed": args.seed,
        "max_norm": args.max_norm,
        "busy_fraction_before": busy, "load_average_after": os.getloadavg(),
        "peer_versions": versions, "rows": found, "ratios": ratios(found),
    }  # fmt: skip
    for row in found:
        if row["name"].startswith("deepspeed"):
            print(f"\n{row['name']}: {json.dumps(row['configuration'])}")
    print("\n" + table(result) + "\n\n" + ratio_table(result))
    if args.json is not None:
        write_result(args.json, result)
    if args.plot is not None:
        draw(result, args.plot)


if __name__ == "__main__":
    sys.exit(main())
