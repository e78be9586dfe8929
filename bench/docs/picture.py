"""`make readme-picture`: the memory timeline of a real run, for README.md.

    python -m bench.docs.picture --model gpt2 --device-budget 1280MiB

Trains a few steps under a budget and draws what `model.memory_timeline` knows of an iteration:
the plan, made from its trace. The drawing is the `<svg>` of its page, without hover texts; what
was measured goes to bench/results/picture.json.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.support.machine import write_result
from gemini import AutoPlacement, GeminiDDP, trace
from gemini.nvme import default_folder
from gemini.optim import HybridAdam
from gemini.placement.timeline import COLOURS
from gemini.plan import models
from gemini.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
BATCH, SEQ = 4, 128


def svg_of(page: str) -> str:
    """The drawing of a timeline's page as a file of its own, with its style and a legend.

    Raises ValueError for a page that has no drawing.
    """
    found = re.search(r"<svg.*</svg>", page, flags=re.DOTALL)
    style = re.search(r"<style>.*</style>", page, flags=re.DOTALL)
    if found is None or style is None:
        raise ValueError("the page has no drawing; expected one of write_timeline's .html files")
    drawing = re.sub(r"<title>.*?</title>", "", found[0], flags=re.DOTALL)
    drawing = re.sub(r"></(rect|path)>", "/>", drawing)
    legend, x = [], 90
    for kind, colour in COLOURS.items():
        legend.append(
            f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 18}" y="22">{kind}</text>'
        )
        x += 40 + 8 * len(kind)
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    head, body = drawing.split(">", 1)
    sizes = re.search(r'width="(\d+)" height="(\d+)"', head)
    if sizes is not None:  # scales with the page it is on
        head += f' viewBox="0 0 {sizes[1]} {sizes[2]}"'
    shared = style[0].replace("body {", "svg {")
    return f"{head}>\n{shared}\n{background}\n{''.join(legend)}{body}\n"


def train(name: str, budget: str, folder: Path, page: Path) -> dict[str, Any]:
    """Some steps under `budget`; draws to `page` and returns what was measured."""
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
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, 256, (BATCH, SEQ))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.memory_timeline(page)
    report = model.memory_report()
    optimizer.close()
    return {
        "model": name,
        "num_params": sum(spec.numel for spec in model.engine.layout.params),
        "batch": BATCH,
        "seq": SEQ,
        "device_budget_bytes": parse_bytes(budget),
        "losses": losses,
        "rows": [
            {
                "tier": row.tier, "kind": row.kind,
                "predicted_bytes": row.predicted_bytes, "measured_bytes": row.measured_bytes,
            }
            for row in report.rows
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--device-budget", default="1280MiB")
    parser.add_argument("--nvme-dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/timeline.svg")
    parser.add_argument("--json", type=Path, default=ROOT / "bench/results/picture.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "timeline.html"
        figures = train(args.model, args.device_budget, args.nvme_dir or default_folder(), page)
        drawing = svg_of(page.read_text())
    write_result(args.json, figures)  # first: the drawing is a file of the commit
    args.out.write_text(drawing)


if __name__ == "__main__":
    main()
