"""Layouts that are predicted beside layouts that run: seconds of a step and memory of a rank.

    python -m bench.layouts --json PATH
    python -m bench.layouts --model tiny --ranks 2 --rounds 1

Every mesh that the plugins run at `--ranks` on this machine, in its fastest form by prediction and
with nothing computed again. Each runs in processes of its own, `--rounds` times, one mesh after the
other: medians of the seconds of a step, from the third on. Products, memory and collectives were
measured before by all ranks at once, and nothing is fitted to the steps.

chosen / best: seconds of the layout that is predicted to be fastest, by the least measured.
tau: Kendall's, of both orders of seconds. memory: what the process grew by at its peak beyond
libraries and its group, by the predicted bytes; the largest of all ranks.

Models: `tiny`, or a name of `gemini.plan.models`; in bf16, random weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.shared.workers import preload, run_ranks
from bench.support.machine import MALLOC_ENVIRONMENT, write_result
from gemini.integrations.autoparallel import AutoParallelPlugin, options_of
from gemini.integrations.booster import Booster
from gemini.layouts.cluster import Cluster
from gemini.layouts.layout import GlobalBatch, ParallelLayout
from gemini.layouts.machines import cluster_here
from gemini.layouts.models import shape_of
from gemini.layouts.search import Found, search
from gemini.memtracer.monitor import process_peak_rss_bytes, resident_bytes
from gemini.optim import HybridAdam
from gemini.parallel.sizes import MeshSizes
from gemini.plan.models import maker
from gemini.units import GIB, MIB

TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}  # fmt: skip
WARM = 2  # steps that are not timed


def made(name: str) -> Any:
    """Model with random weights, drawn once and repeated: four ranks draw at once."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = maker(name)() if name != "tiny" else tiny()
    drawn = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.02
    for param in model.parameters():
        if param.dim() > 1 and not param.is_meta:
            flat = param.data.view(-1)
            for start in range(0, flat.numel(), drawn.numel()):
                part = flat[start : start + drawn.numel()]
                part.copy_(drawn[: part.numel()])
    return model


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TINY))


def warm() -> None:
    """Load what libraries load once, and compile what they compile at first."""
    model = made("tiny").to(torch.bfloat16)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()


def batches(
    layout: ParallelLayout, step: GlobalBatch, vocab: int, rank: int
) -> Iterator[torch.Tensor]:
    """Token numbers int64 [rows, tokens] of this rank's data, in every step."""
    sizes = MeshSizes(
        layout.tp, layout.pp, layout.replicas, layout.sp, layout.ep, pp_inside=False
    )  # fmt: skip
    place, parts = sizes.data_place(rank, layout.ranks)
    generator = torch.Generator().manual_seed(place)
    while True:
        yield torch.randint(vocab, (step.sequences // parts, step.seq), generator=generator)


def trained(
    rank: int, name: str, found: Found, layout: ParallelLayout, steps: int
) -> dict[str, Any]:
    """One rank's seconds of each step, its peak beyond the process, and the last loss."""
    torch.manual_seed(0)
    warm()
    floor = resident_bytes(trimmed=True)
    model = made(name)
    plugin = AutoParallelPlugin(
        precision="bf16",
        found=replace(found, ranked=tuple(one for one in found.ranked if one.layout == layout)),
        **options_of(layout, found.shape.layers, found.cluster),
    )  # fmt: skip
    booster = Booster(plugin=plugin)
    optimizer: Any = HybridAdam(model.parameters(), lr=1e-4)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    del model
    data = batches(layout, found.step, found.shape.vocab, rank)
    seconds, loss = [], float("nan")
    for _ in range(WARM + steps):
        ids = next(data)
        started = time.perf_counter()
        loss = _step(booster, boosted, optimizer, layout, ids)
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[WARM:], "peak": process_peak_rss_bytes() - floor, "loss": loss}


def _step(
    booster: Booster, model: nn.Module, optimizer: Any, layout: ParallelLayout, ids: torch.Tensor
) -> float:
    if layout.pp > 1:
        found = booster.execute_pipeline(
            iter([{"input_ids": ids, "labels": ids}]), model, lambda outputs, _: outputs.loss,
            optimizer,
        )["loss"]  # fmt: skip
        loss = float("nan") if found is None else float(found)
    else:
        parts = ids.split(layout.batch)
        for part in parts:
            if part is not parts[-1] and layout.zero == "1":
                with booster.no_sync(model, optimizer):
                    _backward(booster, model, optimizer, part, len(parts))
            else:
                loss = _backward(booster, model, optimizer, part, len(parts))
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _backward(
    booster: Booster, model: nn.Module, optimizer: Any, ids: torch.Tensor, parts: int
) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    booster.backward(loss / parts, optimizer)
    return float(loss.detach())


def cluster_of_rank(_: int) -> Cluster:
    return cluster_here()


def layouts_of(found: Found) -> list[ParallelLayout]:
    """One of each mesh, the fastest by prediction."""
    return [one.layout for one in found.distinct(len(found.ranked))]


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau of two orders: pairs that agree less those that do not, of all pairs."""
    signs = [
        (1 if (a - c) * (b - d) > 0 else -1) for (a, b), (c, d) in combinations(pairs, 2)
        if (a - c) * (b - d) != 0
    ]  # fmt: skip
    return sum(signs) / max(1, len(signs))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-150m")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--most", type=int, default=0, help="layouts to run; 0: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    preload("gemini.integrations.autoparallel", "transformers.models.llama.modeling_llama")
    cluster = replace(
        run_ranks(cluster_of_rank, args.ranks, processes=True)[0], device_bytes=64 * GIB
    )
    step = GlobalBatch(args.sequences, args.seq)
    with torch.device("meta"):
        shape = shape_of(made(args.model), seq=args.seq)
    found = search(shape, cluster, step, recompute=False)
    layouts = layouts_of(found)[: args.most or None]
    print(f"{len(layouts)} layouts; {cluster}", flush=True)
    rows: dict[ParallelLayout, list[list[dict[str, Any]]]] = {layout: [] for layout in layouts}
    for _ in range(args.rounds):
        for layout in layouts:
            ranks = run_ranks(
                trained, args.ranks, args.model, found, layout, args.steps, processes=True
            )
            rows[layout].append(ranks)
            print(line_of(row_of(found, layout, [ranks])), flush=True)
    result = summary([row_of(found, layout, rounds) for layout, rounds in rows.items()])
    print(f"chosen / best {result['chosen / best']:.2f}, tau {result['tau']:.2f}, "
          f"memory within {result['memory within']:.0%}")  # fmt: skip
    if args.json:
        write_result(args.json, result | {"cluster": asdict(cluster)})
    return 0


def _price(found: Found, layout: ParallelLayout) -> Any:
    return next(one.price for one in found.ranked if one.layout == layout)


def row_of(
    found: Found, layout: ParallelLayout, rounds: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
    """What was measured of a layout, beside its price."""
    price = _price(found, layout)
    seconds = statistics.median(
        max(statistics.median(one["seconds"]) for one in ranks) for ranks in rounds
    )
    peak = statistics.median(max(one["peak"] for one in ranks) for ranks in rounds)
    return {
        "layout": str(layout), "predicted_seconds": price.total, "seconds": seconds,
        "predicted_bytes": price.peak, "bytes": peak, "memory": peak / price.peak,
        "parts": dict(price.seconds), "nbytes": dict(price.nbytes),
    }  # fmt: skip


def summary(table: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is asked of rows that are sorted by prediction."""
    best = min(row["seconds"] for row in table)
    return {
        "rows": list(table), "chosen / best": table[0]["seconds"] / best,
        "tau": tau([(row["predicted_seconds"], row["seconds"]) for row in table]),
        "memory within": max(abs(row["memory"] - 1) for row in table),
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    """Predicted and measured seconds and memory."""
    return (
        f"{row['predicted_seconds']:6.2f} {row['seconds']:6.2f} s  "
        f"{row['predicted_bytes'] / MIB:6.0f} {row['bytes'] / MIB:6.0f} MiB  {row['layout']}"
    )


if __name__ == "__main__":
    import os

    if not os.environ.keys() >= MALLOC_ENVIRONMENT.keys():
        os.execve(sys.executable, [sys.executable, "-m", "bench.layouts", *sys.argv[1:]],
                  {**os.environ, **MALLOC_ENVIRONMENT, "OMP_NUM_THREADS": "1"})  # fmt: skip
    sys.exit(main())
