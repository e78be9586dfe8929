"""Bytes of weights that a step reads, and its seconds, by micro-batches and their order.

    python -m bench.accumulate                       1, 2, 4 and 8 micro-batches, about two minutes
    python -m bench.accumulate --micro-batches 8 --layers 16
    python -m bench.accumulate --json PATH
    python -m bench.accumulate --row large           models that people train: accumulate_rows.py

Without `--row`: a decoder of GPT-2's shape, whose weights, gradients and state do not fit
`device_budget`, on a CPU: the disk is the tier below. Each row trains its own model from the same
weights: two steps that are measured by nobody, as homes and plans follow the first, then `--steps`
more.

read_mib: of parameters, from files, in forward and backward of one step, without its update.
step_seconds: the median of whole steps, updates too. A digest is of all weights at the end.

With one micro-batch both orders are the same code; what differs there are the homes that a plan
chose by measured speeds.

Exit status 1 where the two orders end with other weights.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from bench import accumulate_rows
from bench.support.machine import write_result
from gemini import AutoPlacement, GeminiDDP
from gemini.placement.orders import ORDERS
from gemini.units import MIB
from optim import HybridAdam

WARM_STEPS = 2
VOCAB = 2048


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        shape = (rows, length, width // 64, 64)
        q, k, v = (part.view(shape).transpose(1, 2)
                   for part in self.qkv(self.first(hidden)).chunk(3, -1))  # fmt: skip
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.mixed(seen.transpose(1, 2).reshape(hidden.shape))
        found: Tensor = hidden + self.outer(nn.functional.gelu(self.inner(self.second(hidden))))
        return found


class Decoder(nn.Module):
    """Embedding, blocks and a tied head: [B, T] ids -> [B, T, VOCAB] logits."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def measured(args: argparse.Namespace, order: str, count: int, folder: str) -> dict[str, Any]:
    """One row, in this process."""
    module = Decoder(args.width, args.layers)
    params = sum(param.numel() * 4 for param in module.parameters())
    budget = int(args.budget * params)
    policy = AutoPlacement(budget, nvme_dir=folder)
    model = GeminiDDP(module, "cpu", policy, precision="fp32", min_chunk_size_m=0.25)
    optimizer = HybridAdam(model.parameters(), lr=1e-4)
    storage = model.engine.storage
    generator = torch.Generator().manual_seed(1)

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return found / count

    read, seconds, losses = [], [], []
    for _ in range(WARM_STEPS + args.steps):
        given = list(torch.randint(VOCAB, (count, 1, args.seq), generator=generator))
        before, begun = storage.traffic().nvme_read, time.perf_counter()
        losses.append(float(sum(gemini.accumulate(model, given, loss, order=order))))
        read.append(storage.traffic().nvme_read - before)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
    return {
        "order": order,
        "micro_batches": count,
        "params_mib": params / MIB,
        "budget_mib": budget / MIB,
        "read_mib": median(read[WARM_STEPS:]) / MIB,
        "step_seconds": median(seconds[WARM_STEPS:]),
        "losses": losses,
        "digest": model.digest(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of both orders side by side."""
    lines = [
        "| micro-batches | read one by one, MiB | layer by layer | ratio "
        "| step one by one, s | layer by layer | ratio |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for count in dict.fromkeys(row["micro_batches"] for row in rows):
        layers, batches = ({row["order"]: row for row in rows if row["micro_batches"] == count}[o]
                           for o in ORDERS)  # fmt: skip
        read = layers["read_mib"] / max(batches["read_mib"], 1e-9)
        step = layers["step_seconds"] / batches["step_seconds"]
        lines.append(
            f"| {count} | {batches['read_mib']:.0f} | {layers['read_mib']:.0f} | {read:.2f} "
            f"| {batches['step_seconds']:.2f} | {layers['step_seconds']:.2f} | {step:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accumulate_rows.add_flags(parser)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, help="default: 32, or 128 of a row")
    parser.add_argument("--steps", type=int, help="default: 2, or those of the row, all counted")
    parser.add_argument("--budget", type=float, default=1.0, help="of the bytes of all weights")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.row is not None:
        args.seq = args.seq or 128
        figures = accumulate_rows.row(args)
        if args.json is not None:
            write_result(args.json, figures)
        if accumulate_rows.has_failed(figures):
            raise SystemExit(1)
        return
    args.seq, args.steps = args.seq or 32, args.steps or 2
    warnings.simplefilter("ignore", gemini.BudgetWarning)  # activations nobody measured yet
    logging.getLogger("gemini").setLevel(logging.ERROR)
    rows = []
    for count in args.micro_batches:
        for order in ORDERS:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measured(args, order, count, folder))
    print(table(rows))
    differs = [one["micro_batches"] for one, other in zip(rows[::2], rows[1::2], strict=True)
               if (one["digest"], one["losses"]) != (other["digest"], other["losses"])]  # fmt: skip
    if args.json is not None:
        figures = {"width": args.width, "layers": args.layers, "seq": args.seq, "rows": rows}
        write_result(args.json, figures)
    if differs:
        raise SystemExit(f"the orders end with other weights at {differs} micro-batches")


if __name__ == "__main__":
    main()
