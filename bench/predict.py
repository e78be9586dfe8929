"""Predicted beside measured peak memory: a plan's profile against VmHWM, a process for each model.

    python -m bench.predict --json predict.json

Predicted is the plan's peak (model data, staging, and activations of a trace on fake tensors) above
what the process had resident before the model was made; with a tail, and gradients that live into
the forward, at a usual machine's speeds. Malloc takes 8 to 14 % more by default; the
row named `+malloc` shows that, the others run with MALLOC_MMAP_THRESHOLD_=65536.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.support.machine import write_result
from gemini.memtracer.trace import Trace
from gemini.placement.planner import PlanInputs, PlanResult, make_plan
from gemini.placement.policy import AutoPlacement
from gemini.placement.sizes import wider_chunks
from gemini.placement.tiers import Tier
from gemini.plan.machine import TYPICAL

ROOT = Path(__file__).resolve().parent.parent
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}
STEPS = 3  # the first is not measured: it warms up


@dataclass(frozen=True, slots=True)
class Case:
    """One process."""

    model: str  # of gemini.plan.models
    batch: int = 4
    seq: int = 128
    lora: int | None = None
    nvme_frac: float = 0.0  # of the optimizer state
    exact_malloc: bool = True
    update: str = "serial"

    @property
    def name(self) -> str:
        parts = [self.model]
        if self.lora is not None:
            parts.append(f"lora{self.lora}")
        if self.nvme_frac:
            parts.append(f"nvme{self.nvme_frac:g}")
        if self.update != "serial":
            parts.append(self.update)
        if not self.exact_malloc:
            parts.append("malloc")
        return "+".join(parts)


CASES = (
    Case("gpt2"),
    Case("gpt2", nvme_frac=1.0),
    Case("gpt2", nvme_frac=1.0, update="tail"),
    Case("llama-150m"),
    Case("bert-base"),
    Case("t5-small"),
    Case("vit-base"),
    Case("gpt2", lora=16),
    Case("gpt2", exact_malloc=False),
)


def rows(
    name: str, predicted: dict[str, int], measured: dict[str, int]
) -> list[dict[str, str | int | float]]:
    """A row for every tier that holds anything."""
    return [
        {
            "model": name,
            "tier": tier,
            "predicted_bytes": predicted[tier],
            "measured_bytes": measured[tier],
            "error": predicted[tier] / measured[tier] - 1,
        }
        for tier in predicted
        if measured[tier]
    ]


def measure(case: Case) -> list[dict[str, str | int | float]]:
    """Predict, then train some steps in this process. The device is RAM."""
    import torch

    from gemini import GeminiDDP
    from gemini.memtracer.collector import trace
    from gemini.memtracer.monitor import peak_rss_bytes, reset_peak_rss
    from gemini.optim import HybridAdam
    from gemini.plan import models
    from gemini.plan.activations import example_inputs

    torch.manual_seed(0)
    model = models.build(case.model)
    if case.lora is not None:
        model = models.add_lora(model, case.lora)
    itemsizes = models.itemsizes(model)
    shapes = example_inputs(model, case.batch, case.seq)
    traced = trace(model, shapes)
    _warm_up(torch)
    base = peak_rss_bytes()

    wrapped = GeminiDDP(model, device="cpu", update=case.update)
    trainable = [param for param in wrapped.parameters() if param.requires_grad]
    optimizer = HybridAdam(trainable, nvme_offload_fraction=case.nvme_frac)
    for step in range(STEPS):
        if step == 1:
            reset_peak_rss()
        wrapped(**_inputs(torch, shapes)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    layout = wrapped.engine.layout
    inputs = PlanInputs(
        layout=layout, trace=untimed(traced),
        state=wrapped.engine.planning.inputs.state, has_host_tier=False,
        nvme_state_frac=case.nvme_frac, bandwidths=TYPICAL["cpu"],
        with_originals=wider_chunks(layout, itemsizes, frozen=False),
        flops=6.0 * sum(spec.numel for spec in layout.params) * case.batch * case.seq,
    )  # fmt: skip
    planned = make_plan(inputs, AutoPlacement())
    on_device = device_bytes(planned, case.update)
    predicted = {"device": base + on_device, "nvme": int(planned.profile.peak(Tier.NVME))}
    measured = {"device": peak_rss_bytes(), "nvme": optimizer.nvme_bytes}
    return rows(case.name, predicted, measured)


def device_bytes(planned: PlanResult, update: str) -> int:
    """The peak of the device, with the gradients that a tail holds in the forward."""
    if update != "tail":
        return planned.profile.peak(Tier.DEVICE)
    held = planned.overlapped["tail"].kept_bytes
    totals = planned.profile.total(Tier.DEVICE)
    return max(n + more for n, more in zip_longest(totals, held, fillvalue=0))


def untimed(trace: Trace) -> Trace:
    """On fake tensors: how long they took says nothing."""
    return replace(trace, moments=tuple(replace(m, seconds=0.0) for m in trace.moments))


def _inputs(torch: Any, shapes: Any) -> dict[str, Any]:
    """Values for shapes: tokens below any vocabulary, labels below any number of classes."""
    made: dict[str, Any] = {}
    for name, value in shapes.items():
        if not isinstance(value, torch.Tensor):
            made[name] = value
        elif value.is_floating_point():
            made[name] = torch.randn(value.shape)
        else:
            made[name] = torch.randint(0, 2 if name == "next_sentence_label" else 1000, value.shape)
    return made


def _warm_up(torch: Any) -> None:
    """What a process pays once: thread pools, libraries' code and scratch."""
    layer = torch.nn.Linear(256, 256).bfloat16()
    layer(torch.randn(256, 256).bfloat16()).sum().backward()


def run(case: Case) -> list[dict[str, Any]]:
    """`measure` in a process of its own."""
    environment = {**os.environ, **(EXACT_MALLOC if case.exact_malloc else {})}
    path = os.pathsep.join([str(ROOT), str(ROOT / "io"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "bench.predict", "--case", json.dumps(asdict(case))],
        env={**environment, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
        encoding="utf-8", check=True,
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'model':24s} {'tier':8s} {'predicted':>12s} {'measured':>12s} {'error':>8s}"]
    for row in found:
        lines.append(
            f"{row['model']:24s} {row['tier']:8s} {row['predicted_bytes'] / 2**20:8.0f} MiB "
            f"{row['measured_bytes'] / 2**20:8.0f} MiB {row['error']:+8.2%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="rows whose name begins like this")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one process: prints its rows
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measure(Case(**json.loads(args.case)))))
        return
    found = [row for case in CASES if case.name.startswith(args.only or "") for row in run(case)]
    print(table(found))
    if args.json is not None:
        write_result(args.json, {"rows": found})


if __name__ == "__main__":
    main()
