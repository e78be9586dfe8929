"""`python -m bench.muon`: what Muon's steps cost beside its iterations, and what its offload costs.

A GPT-2 of bf16 weights with fp32 masters, gradients given once, steps in turn: AdamW and Muon with
state in memory, Muon with all of it on NVMe, and torch.optim.Muon with AdamW over fp32 parameters.
Of a step the seconds in all, those of the Newton-Schulz iterations, and what is left: bookkeeping,
in units of AdamW's step. Medians over rounds, and the least and the most.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench.support.machine import write_result
from gemini import GeminiDDP
from gemini.optim import HybridAdam, HybridMuon
from gemini.optim.matrices import updater
from gemini.optim.muon import routed
from gemini.optim.rules import matrix_rule

BOOKKEEPING, OFFLOAD = 1.5, 1.03  # at most: of AdamW's step, and of the resident step
ROWS = ("ours/adamw", "ours/muon", "ours/muon-nvme", "torch/muon")


class Iterations:
    """Seconds spent in them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = work(*args, **kwargs)
            self.seconds += time.perf_counter() - started
            return found

        return run


def model_of(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=8192, n_positions=128
    )
    return GPT2LMHeadModel(config)


def steps_of(name: str, module: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """Makes one step, with the gradients there are."""
    if name == "torch/muon":
        groups = {group["use_muon"]: group["params"] for group in routed(module)}
        parts = [
            torch.optim.Muon(groups[True], lr=1e-3),
            torch.optim.AdamW(groups[False], lr=1e-3, fused=True),
        ]
        module(input_ids=tokens, labels=tokens).loss.backward()

        def both() -> None:
            for part in parts:
                part.step()

        return both
    model = GeminiDDP(module, cast_inputs=False)
    fraction = 1.0 if name.endswith("nvme") else 0.0
    optimizer: Any
    if name == "ours/adamw":
        optimizer = HybridAdam(model.parameters(), lr=1e-3, nvme_offload_fraction=fraction)
    else:
        optimizer = HybridMuon(model, lr=1e-3, nvme_offload_fraction=fraction)

    def step() -> None:
        optimizer.step()

    def begin() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    begin()
    step.begin = begin  # type: ignore[attr-defined]  # a step takes the gradients
    return step


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a name."""
    torch.manual_seed(0)
    module = model_of(args.layers, args.width)
    tokens = torch.randint(0, 8192, (1, 128))
    steps = {name: steps_of(name, copy.deepcopy(module), tokens) for name in args.only}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    iterations = Iterations()
    theirs = torch.optim._muon
    with (
        mock.patch.object(updater, "directed", iterations.timed(matrix_rule.directed)),
        mock.patch.object(
            theirs, "_zeropower_via_newtonschulz",
            iterations.timed(theirs._zeropower_via_newtonschulz),
        ),
    ):  # fmt: skip
        for turn in range(args.rounds + 1):
            for name, step in steps.items():
                iterations.seconds, started = 0.0, time.perf_counter()
                step()
                found = time.perf_counter() - started, iterations.seconds
                if turn:  # the first makes state
                    spent[name].append(found)
                getattr(step, "begin", lambda: None)()
            print(f"round {turn} of {args.rounds}", file=sys.stderr, flush=True)
    return [_row(name, spent) for name in spent]


def _row(name: str, spent: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    steps = [step for step, _ in spent[name]]
    rest = [step - inside for step, inside in spent[name]]
    adam = [step for step, _ in spent["ours/adamw"]]
    resident = [step for step, _ in spent.get("ours/muon", spent[name])]
    return {
        "name": name,
        "step_s": statistics.median(steps),
        "least_s": min(steps),
        "most_s": max(steps),
        "iterations_s": statistics.median(inside for _, inside in spent[name]),
        "bookkeeping_over_adamw": statistics.median(a / b for a, b in zip(rest, adam, strict=True)),
        "over_resident": statistics.median(a / b for a, b in zip(steps, resident, strict=True)),
    }


def table(result: dict[str, Any]) -> str:
    """In markdown."""
    lines = [
        "| step | s | least to most | iterations | the rest, of AdamW's step | of resident |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {row['step_s']:.3f} | {row['least_s']:.3f} to {row['most_s']:.3f} "
        f"| {row['iterations_s']:.3f} | {row['bookkeeping_over_adamw']:.2f} "
        f"| {row['over_resident']:.3f} |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    numel = sum(param.numel() for param in model_of(args.layers, args.width).parameters())
    result = {"numel": numel, "rounds": args.rounds, "rows": measure(args)}
    print(table(result))
    if args.json is not None:
        write_result(args.json, result)
    by_name = {row["name"]: row for row in result["rows"]}
    late = [
        by_name.get("ours/muon", {}).get("bookkeeping_over_adamw", 0.0) > BOOKKEEPING,
        by_name.get("ours/muon-nvme", {}).get("over_resident", 0.0) > OFFLOAD,
    ]
    return int(any(late))


if __name__ == "__main__":
    sys.exit(main())
