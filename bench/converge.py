"""State of few bytes beside fp32: python -m bench.converge [--json PATH] [--picture PATH]

A small GPT-2 on the bytes of Python's standard library, from the same seeds and data: `HybridAdam`
with state in fp32, bf16 and 8 bits, and the 8-bit AdamW of bitsandbytes and torchao. Losses are of
held-out text. Exit status 1: the mean of one of ours is 0.5 % off that of fp32, and farther than
its seeds are from each other.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared.models import seeded
from bench.support.machine import write_result
from examples.train_gpt import Text
from gemini.optim import HybridAdam
from gemini.placement.picture import dark_too

BATCH, SEQ = 8, 128
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
MOST_OFF = 0.005  # of the mean of fp32
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def bitsandbytes_8bit(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(params, **OPTIONS)
    return made


def torchao_8bit(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(params, **OPTIONS)
    return made


KINDS: dict[str, Make] = {
    "ours/fp32": lambda params: HybridAdam(params, **OPTIONS),
    "ours/bf16": lambda params: HybridAdam(params, state="bf16", **OPTIONS),
    "ours/8bit": lambda params: HybridAdam(params, state="8bit", **OPTIONS),
    "bitsandbytes/8bit": bitsandbytes_8bit,
    "torchao/8bit": torchao_8bit,
}


def model_of(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=SEQ, n_layer=layers, n_embd=width, n_head=width // 32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    made: nn.Module = GPT2LMHeadModel(config)
    return made


def run(make: Make, given: argparse.Namespace, seed: int, text: Text) -> list[float]:
    """Losses of held-out text, after every `--every` steps."""
    with seeded(seed):
        model = model_of(given.layers, given.width)
    optimizer = make(model.parameters())
    batches, found = text.batches(text.train, seed=seed), []
    for step in range(1, given.steps + 1):
        ids = next(batches)
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = OPTIONS["lr"] * 0.5 * (1 + math.cos(math.pi * step / given.steps))
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        if step % given.every == 0 or step == given.steps:
            found.append(held_out(model, text))
    return found


@torch.no_grad()
def held_out(model: nn.Module, text: Text, batches: int = 16) -> float:
    some = text.batches(text.validation, seed=1)
    ids = [next(some) for _ in range(batches)]
    return fmean(float(model(input_ids=batch, labels=batch).loss) for batch in ids)


def row_of(losses: dict[str, list[list[float]]], name: str) -> dict[str, Any]:
    """The mean over seeds of the last loss, its spread, and how far it is from fp32's mean."""
    last = [of_seed[-1] for of_seed in losses[name]]
    exact = fmean(of_seed[-1] for of_seed in losses["ours/fp32"])
    return {
        "name": name, "loss": fmean(last), "least": min(last), "most": max(last),
        "off": fmean(last) / exact - 1,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """In markdown."""
    lines = ["| AdamW | held-out loss | of seeds | off fp32 |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['loss']:.4f} | {row['least']:.4f} to {row['most']:.4f} "
        f"| {row['off']:+.2%} |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Mean losses over the steps, whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.6, 4))
    for name, seeds in result["losses"].items():
        means = [fmean(at) for at in zip(*seeds, strict=True)]
        whose, _, state = name.replace("ours/", "Gemini/").replace("8bit", "8-bit").partition("/")
        style = "-" if whose == "Gemini" else "--"
        axis.plot(result["steps_at"], means, style, label=f"{whose}, {state} state")
    axis.set(
        xlabel="steps", ylabel="held-out loss", title=f"GPT-2 of {result['numel']:,} parameters"
    )
    axis.legend()
    figure.tight_layout()
    part = path.with_name(path.name + ".part")
    with matplotlib.rc_context({"svg.hashsalt": "converge"}):
        figure.savefig(part, format="svg", metadata={"Date": None})
    part.write_text(dark_too(part.read_text(encoding="utf-8")), encoding="utf-8")
    part.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=50, help="steps between losses")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help=".svg")
    given = parser.parse_args(argv)
    text = Text(None, BATCH, SEQ)
    losses: dict[str, list[list[float]]] = {name: [] for name in given.only}
    for seed in range(given.seeds):
        for name in given.only:
            losses[name].append(run(KINDS[name], given, seed, text))
            print(f"{name:18s} seed {seed}: {losses[name][-1][-1]:.4f}", flush=True)
    numel = sum(p.numel() for p in model_of(given.layers, given.width).parameters())
    at = [s for s in range(1, given.steps + 1) if s % given.every == 0 or s == given.steps]
    rows = [row_of(losses, name) for name in given.only]
    result = {
        "numel": numel, "steps": given.steps, "seeds": given.seeds, "batch": BATCH, "seq": SEQ,
        "steps_at": at, "losses": losses, "rows": rows,
    }  # fmt: skip
    print(table(result))
    if given.json is not None:
        write_result(given.json, result)
    if given.picture is not None:
        draw(result, given.picture)
    spread = max(row["most"] - row["least"] for row in rows)
    exact = rows[0]["loss"]
    far = [r["name"] for r in rows if abs(r["off"]) > MOST_OFF and abs(r["loss"] - exact) > spread]
    return int(any(name.startswith("ours") for name in far))


if __name__ == "__main__":
    sys.exit(main())
