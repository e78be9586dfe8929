"""Rows of `bench.accumulate --row` with models that people train: what accumulation must reach.

large       GPT-2 large under `--limit`, dropout off, then on: both orders. read: bytes of
            parameters that forward and backward bring, of the last step.
qlora       Llama 3.2 3B's shape in NF4 with adapters (`bench.qlora`) under `--limit`: a step layer
            by layer beside that of plain peft without a budget, of as many micro-batches one after
            the other, and beside its reads at that run's own speed.
nvme        GPT-2 small, state in files, `update="tail"`, beside the same with its state in RAM, in
            both orders: what is resident layer by layer computes every layer's forward twice, too.
deepspeed   GPT-2 small with parameters and state in files, beside DeepSpeed ZeRO-3 with both on
            NVMe: processes of one run, which take turns.

A run is a process. Under a limit it may not allocate more (RLIMIT_DATA), and its VmHWM is checked
beside it; `device_budget` is the limit less what `bench.capacity` leaves for the process itself.
predicted_peak: bytes of the device, as `memory_report()` has them. measured_peak: the most at any
moment of the last iteration that was sampled.
step_seconds: the median of whole steps behind the second, by when homes and plans are final.

A run that its limit ends is named, and the others go on. Exit status 1: there was one.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from bench.capacity import LEARNING_RATE, QLORA_SLACK_BYTES, SLACK_BYTES, result_of, started
from bench.qlora import accumulated
from bench.rows.job import Job
from bench.rows.processes import PeerError, Ranks, peers_python, prepare
from gemini import AutoPlacement, GeminiDDP
from gemini.chunk.layout import ITEMSIZE
from gemini.memtracer.monitor import process_peak_rss_bytes
from gemini.nvme import default_folder
from gemini.optim import HybridAdam
from gemini.placement.orders import BATCHES, LAYERS
from gemini.placement.timetable.updates import TAIL
from gemini.plan.models import build, maker
from gemini.units import parse_bytes

HERE = "bench/accumulate_rows.py"
UNLIMITED: int = resource.RLIM_INFINITY
WARM_STEPS = 2
TOKENS = 900  # that are drawn: fewer than any vocabulary here has
PREPARE_SECONDS = 900.0  # DeepSpeed compiles


@dataclass(frozen=True, slots=True)
class Run:
    """What one process of GPT-2 trains. device_budget: None: all is resident."""

    model: str
    order: str
    micro_batches: int
    seq: int
    steps: int
    folder: str
    dropout: bool = False
    device_budget: int | None = None
    nvme_fraction: float = 0.0


def tiny() -> nn.Module:
    """GPT-2 of a size with which every row can be tried: `--model bench.accumulate_rows:tiny`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=1000))


def trained(run: Run) -> dict[str, Any]:
    """Train so in this process."""
    torch.manual_seed(0)
    with gemini.init_empty():
        module = maker(run.model)()
    for part in module.modules():
        if isinstance(part, nn.Dropout) and not run.dropout:
            part.p = 0.0
    shapes = torch.zeros(1, run.seq, dtype=torch.long)
    traced = gemini.trace(module, {"input_ids": shapes, "labels": shapes}, precision="bf16")
    placement: Any = "auto"
    if run.device_budget is not None:
        placement = AutoPlacement(run.device_budget, nvme_dir=run.folder)
    model = GeminiDDP(
        module, "cpu", placement, precision="bf16", trace=traced, update=TAIL, max_norm=1.0
    ).train()
    optimizer = HybridAdam(
        model.parameters(), lr=float(LEARNING_RATE), nvme_offload_fraction=run.nvme_fraction,
        nvme_offload_dir=run.folder,
    )  # fmt: skip
    losses, seconds = [], []
    for given in batches_of(run.micro_batches, run.seq, run.steps):
        begun = time.perf_counter()
        losses.append(accumulated(model, given, run.order))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
    found = model.engine.cycle.accumulated
    assert found is not None
    report = model.memory_report().as_dict()
    return {
        "losses": losses, "step_seconds": seconds, "digest": model.digest(),
        "read_bytes": found.counted_bytes, "predicted_read_bytes": found.predicted_bytes,
        "predicted_peak_bytes": report["device_predicted_bytes"],
        "measured_peak_bytes": model.engine.sampler.device_peaks.get(model.engine.sampler.key),
        "peak_rss_bytes": process_peak_rss_bytes(),
    }  # fmt: skip


def batches_of(micro_batches: int, seq: int, steps: int) -> list[list[Tensor]]:
    """int64 [1, seq] of each micro-batch of each step."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randint(TOKENS, (1, seq), generator=generator) for _ in range(micro_batches)]
        for _ in range(steps)
    ]


def step_of(found: dict[str, Any]) -> float:
    return float(statistics.median(found["step_seconds"][WARM_STEPS:]))


# -- rows --


def large(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both orders, with and without dropout."""
    limit, rows = parse_bytes(args.limit), {}
    for dropout in (False, True):
        found: dict[str, Any] = {}
        for order in (LAYERS, BATCHES):
            run = Run(args.model, order, args.micro_batches[-1], args.seq, args.steps, str(folder),
                      dropout, limit - SLACK_BYTES)  # fmt: skip
            found[order] = tried(run, limit)
        if all("failed" not in one for one in found.values()):
            layers, batches = found[LAYERS], found[BATCHES]
            found["asked"] = {
                "read at most 0.2": layers["read_bytes"] / max(1, batches["read_bytes"]),
                "step at most 0.65": step_of(layers) / step_of(batches),
                "digests are equal": layers["digest"] == batches["digest"],
                "losses are equal": layers["losses"] == batches["losses"],
                "peak within the limit": layers["peak_rss_bytes"] / limit,
                "measured peak by predicted": _ratio(layers, "measured", "predicted"),
            }
        rows["dropout" if dropout else "no dropout"] = found
    return rows


def _ratio(found: dict[str, Any], one: str, other: str) -> float | None:
    measured = found[f"{one}_peak_bytes"]
    return None if measured is None else measured / found[f"{other}_peak_bytes"]


def tried(run: Run, limit: int) -> dict[str, Any]:
    """What a run found, or why there is nothing."""
    try:
        found = result_of(HERE, limit, "--run", json.dumps(asdict(run)))
    except subprocess.CalledProcessError as error:
        found = {"failed": f"exit status {error.returncode}"}
    print(json.dumps({**asdict(run), **found}), flush=True)
    return found


def qlora(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Layer by layer under the limit, beside plain peft that is resident."""
    limit, count = parse_bytes(args.limit), args.micro_batches[-1]
    base, files = folder / "base", folder / "files"
    files.mkdir()
    script = "bench/qlora.py"
    with started(
        script, UNLIMITED, "--make", "--base", str(base), "--shape", args.shape
    ) as process:
        assert process.wait() == 0
    given = ("--base", str(base), "--steps", str(args.steps), "--seq", str(args.seq))
    pair = result_of(script, UNLIMITED, "--pair", *given)
    compute = count * pair["plain_step_seconds"]
    budget = ("--device-budget", str(limit - QLORA_SLACK_BYTES), "--nvme-dir", str(files))
    options = ("--accumulate", str(count), "--order", LAYERS)
    try:
        run = result_of(script, limit, *given, *budget, *options)
    except subprocess.CalledProcessError as error:
        return {"pair": pair, LAYERS: {"failed": f"exit status {error.returncode}"}}
    reads = run["bytes_read"][-1] / (run["read_gb_per_s"] * 1e9 or 1.0)
    asked = {
        "step at most 1.15 of its bound": step_of(run) / max(compute, reads),
        "peak within the limit": run["peak_rss_bytes"] / limit,
    }
    found = {**run, "compute_seconds": compute, "read_seconds": reads, "asked": asked}
    return {"pair": pair, LAYERS: found}


def nvme(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """State in files beside state in RAM, by order."""
    rows: dict[str, Any] = {}
    for order in (LAYERS, BATCHES):
        found = {}
        for name, fraction in (("nvme", 1.0), ("resident", 0.0)):
            run = Run(args.model, order, args.micro_batches[-1], args.seq, args.steps, str(folder),
                      nvme_fraction=fraction)  # fmt: skip
            found[name] = tried(run, UNLIMITED)
        rows[order] = found
        if all("failed" not in one for one in found.values()):
            found["asked"] = {
                "step at most 1.05": step_of(found["nvme"]) / step_of(found["resident"]),
                "digests are equal": found["nvme"]["digest"] == found["resident"]["digest"],
            }
    return rows


def deepspeed(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Ours layer by layer and DeepSpeed in turns, each in processes of its own."""
    count = args.micro_batches[-1]
    python = {"ours": sys.executable, "deepspeed_zero": str(args.peers_python)}
    try:
        versions = {peer: prepare(python[peer], peer, folder, PREPARE_SECONDS) for peer in python}
    except PeerError as error:
        raise SystemExit(
            f"no row with DeepSpeed: {error}; `make peers` makes its environment, "
            "--peers-python names another"
        ) from None
    batches = folder / "batches.pt"
    given = batches_of(count, args.seq, args.steps)
    torch.save(torch.stack([torch.cat(parts) for parts in given]), batches)
    params = sum(param.numel() for param in build(args.model).parameters())
    budget = int(args.budget * ITEMSIZE["bfloat16"] * params)
    jobs = {}
    for peer, options in (
        ("ours", {"device_budget": budget, "update": TAIL}),
        ("deepspeed_zero", {"offload": "nvme", "offload_param": True}),
    ):
        own = folder / peer
        (own / "state").mkdir(parents=True)
        options = {**options, "micro_batches": count}
        jobs[peer] = Job(peer, args.model, str(batches), str(own), options, batch=count,
                         threads=torch.get_num_threads())  # fmt: skip
    steps: dict[str, list[dict[str, Any]]] = {peer: [] for peer in jobs}
    ranks: dict[str, Ranks] = {}
    try:
        for peer, job in jobs.items():
            ranks[peer] = Ranks(python[peer], [job], args.timeout)
        for _ in range(args.steps):
            for peer, living in ranks.items():
                steps[peer] += living.step()
                living.settle()
        ends = {peer: living.finish() for peer, living in ranks.items()}
    finally:
        for living in ranks.values():
            living.close()
    seconds = {
        peer: statistics.median(one["step_seconds"] for one in found[WARM_STEPS:])
        for peer, found in steps.items()
    }
    asked = {"step at most 0.40": seconds["ours"] / seconds["deepspeed_zero"]}
    return {"versions": versions, "steps": steps, "ends": ends, "asked": asked}


# name -> row, its model, and steps
ROWS: dict[str, tuple[Callable[[argparse.Namespace, Path], dict[str, Any]], str, int]] = {
    "large": (large, "gpt2-large", 5),
    "qlora": (qlora, "", 5),
    "nvme": (nvme, "gpt2", 8),
    "deepspeed": (deepspeed, "gpt2", 6),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that rows have beside those of the bench."""
    parser.add_argument("--row", choices=ROWS, help="a model that people train")
    parser.add_argument("--model", help="of large, nvme and deepspeed; see gemini.plan.models")
    parser.add_argument("--shape", default="llama-3.2-3b", help="of qlora; see bench.qlora")
    parser.add_argument("--limit", default="2.5GiB", help="of large and qlora: of a process")
    parser.add_argument("--nvme-dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--peers-python", default=peers_python(), help="DeepSpeed's interpreter")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds, of deepspeed's step")


def row(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of `args.row`, printed too."""
    make, model, steps = ROWS[args.row]
    args.model = args.model or model
    args.steps = args.steps or steps
    if args.steps <= WARM_STEPS:
        raise SystemExit(f"--steps {args.steps}; expected more than {WARM_STEPS}")
    folder = args.nvme_dir or default_folder()
    with tempfile.TemporaryDirectory(prefix="bench-accumulate-", dir=folder) as scratch:
        found = make(args, Path(scratch))
    print(table(found), flush=True)
    model = args.shape if args.row == "qlora" else args.model
    return {"row": args.row, "model": model, "found": found}


def has_failed(found: dict[str, Any]) -> bool:
    """Whether a run below these figures ended without any."""
    inner = [value for value in found.values() if isinstance(value, dict)]
    return "failed" in found or any(has_failed(value) for value in inner)


def asked_of(found: dict[str, Any], name: str = "") -> list[tuple[str, str, float | bool | None]]:
    """What is asked, and what came, after the run that it is asked of: names of rows below."""
    lines = [(name, what, value) for what, value in found.get("asked", {}).items()]
    for key, inner in found.items():
        if isinstance(inner, dict) and key != "asked":
            lines += asked_of(inner, f"{name}, {key}" if name else key)
    return lines


def table(found: dict[str, Any]) -> str:
    """Figures of a row beside what is asked of them."""
    lines = ["| run | asked | reached |", "|---|---|---:|"]
    lines += [f"| {run} | {what} | {_said(value)} |" for run, what, value in asked_of(found)]
    return "\n".join(lines)


def _said(value: float | bool | None) -> str:
    if value is None:
        return "not measured"
    return ("yes" if value else "**no**") if isinstance(value, bool) else f"{value:.3f}"


def main() -> None:
    """One process of a row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    found = trained(Run(**json.loads(args.run)))
    args.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
