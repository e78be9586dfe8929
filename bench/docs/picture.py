"""`make readme-picture`: the memory timeline of a real run, for README.md.

    python -m bench.docs.picture --model gpt2 --device-budget 1280MiB

Trains a few steps under a budget and draws the plan of an iteration as `model.memory_timeline`
does, but that a pass takes what it took when all was warm, and not in the iteration that was
sampled, the first. What was measured goes to bench/results/picture.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.support.machine import write_result
from gemini import AutoPlacement, GeminiDDP, trace
from gemini.nvme import default_folder
from gemini.optim import HybridAdam
from gemini.placement.picture import write_timeline
from gemini.placement.timeline import planned_timeline
from gemini.plan import models
from gemini.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
BATCH, SEQ = 4, 128


def train(name: str, budget: str, folder: Path, drawing: Path) -> dict[str, Any]:
    """Some steps under `budget`; draws to `drawing` and returns what was measured."""
    torch.manual_seed(0)
    module = models.build(name)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    model = GeminiDDP(
        module,
        device="cpu",
        placement_policy=AutoPlacement(device_budget=budget, nvme_dir=str(folder)),
        trace=trace(module, {"input_ids": ids, "labels": ids}),
    )
    optimizer = HybridAdam(model.parameters(), lr=1e-4)
    losses, forward, backward = [], [], []
    for _ in range(STEPS):
        ids = torch.randint(0, 256, (BATCH, SEQ))
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        forward.append(time.perf_counter() - began)
        loss.backward()
        backward.append(time.perf_counter() - began - forward[-1])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = {"forward": min(forward), "backward": min(backward)}
    planning = model.engine.planning
    timeline = planned_timeline(
        planning.result, planning.inputs, title=f"{name}, batch {BATCH} x {SEQ} tokens",
        verdict=f"it fits a device budget of {budget}", pass_seconds=seconds,
    )  # fmt: skip
    write_timeline(timeline, drawing)
    report = model.memory_report()
    optimizer.close()
    return {
        "model": name,
        "num_params": sum(spec.numel for spec in model.engine.layout.params),
        "batch": BATCH,
        "seq": SEQ,
        "device_budget_bytes": parse_bytes(budget),
        "losses": losses,
        "pass_seconds": seconds,
        "rows": [
            {
                "tier": row.tier, "kind": row.kind,
                "predicted_bytes": row.predicted_bytes, "measured_bytes": row.measured_bytes,
            }
            for row in report.rows
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--device-budget", default="1280MiB")
    parser.add_argument("--nvme-dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/timeline.svg")
    parser.add_argument("--json", type=Path, default=ROOT / "bench/results/picture.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        drawing = Path(scratch) / args.out.name
        figures = train(args.model, args.device_budget, args.nvme_dir or default_folder(), drawing)
        write_result(args.json, figures)  # first: the drawing is a file of the commit
        args.out.write_bytes(drawing.read_bytes())


if __name__ == "__main__":
    main()
