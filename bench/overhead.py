"""`python -m bench.overhead`: what the engine itself costs.

One process, everything resident: the step time of GeminiDDP over the plain module's. The fair pair
has the same maths and the same bytes: both in fp32, both updated by HybridAdam, which runs the same
tiles on the same elements. In bf16 there is none: HybridAdam on a plain module has no fp32 masters,
and updates fewer bytes. The overflow check and the norm, which a plain step does not have, and the
packing of gradients count as the engine's. Beside the pair, the plain module with torch's own fused
AdamW is shown.

    small   128 linear layers of 64 x 64: microseconds a module call, forward, backward and step
    gpt2    GPT-2 small, batch 4 x 128: the ratio of step times
    boost   the small model through `Booster(plugin=GeminiPlugin(...))`, which runs its backwards,
            over GeminiDDP with the same options: the ratio of step times, asked to be at most 1.01

Two ranks over gloo, a thread each: GPT-2 small in fp32, batch 2 x 128 a rank, under FSDP2's
`fully_shard` (every block, and the root) with torch's fused AdamW, and under GeminiDDP with
HybridAdam: step time, and each rank's peak resident memory (VmHWM of a process of its own).

Variants take turns, step by step. A ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.support.machine import MALLOC_ENVIRONMENT, peak_rss_mib, write_result
from bench.support.timing import interleaved, median_ratio
from gemini import GeminiDDP
from gemini.integrations import Booster, GeminiPlugin
from gemini.optim import HybridAdam

LAYERS, WIDTH, ROWS = 128, 64, 4
BATCH, SEQ = 4, 128
Step = Callable[[], object]


def small_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def loss_of_small(model: nn.Module, rows: Tensor) -> Tensor:
    loss: Tensor = model(rows).square().mean()
    return loss


def loss_of_gpt2(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
) -> Step:
    def step() -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- one process --


def against_plain(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of every step of the wrapped module and of plain ones."""
    variants: dict[str, Step] = {}
    for name in ("torch", "plain", "gemini"):
        torch.manual_seed(0)
        model = make()
        if name == "gemini":
            model = GeminiDDP(model, "cpu", precision="fp32")
        optimizer: torch.optim.Optimizer = HybridAdam(model.parameters())
        if name == "torch":
            optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
        variants[name] = step_of(model, optimizer, loss_of, batch)
    for step in variants.values():
        step()
    return interleaved(variants, rounds, torch.device("cpu"))


def measure_small(rounds: int) -> dict[str, Any]:
    seconds = against_plain(small_model, loss_of_small, torch.randn(ROWS, WIDTH), rounds)
    extra = [g - p for g, p in zip(seconds["gemini"], seconds["plain"], strict=True)]
    return {
        "module_calls": LAYERS,
        **{f"{name}_step_s": statistics.median(seconds[name]) for name in seconds},
        "us_per_module_call": statistics.median(extra) / LAYERS * 1e6,
    }


def measure_gpt2(rounds: int) -> dict[str, Any]:
    ids = torch.randint(50257, (BATCH, SEQ))
    seconds = against_plain(gpt2, loss_of_gpt2, ids, rounds)
    return {
        **{f"{name}_step_s": statistics.median(seconds[name]) for name in seconds},
        "ratio": median_ratio(seconds, "gemini", "plain"),
        "ratio_to_torch": median_ratio(seconds, "gemini", "torch"),
    }


def measure_boost(rounds: int) -> dict[str, Any]:
    batch = torch.randn(ROWS, WIDTH)
    variants: dict[str, Step] = {}
    torch.manual_seed(0)
    wrapped = GeminiDDP(small_model(), "cpu", "static", precision="fp32", max_prefetch=0)
    variants["wrapped"] = step_of(wrapped, HybridAdam(wrapped.parameters()), loss_of_small, batch)
    torch.manual_seed(0)
    plain = small_model()
    booster = Booster(plugin=GeminiPlugin(precision="fp32"))
    model, optimizer, *_ = booster.boost(plain, HybridAdam(plain.parameters()))

    def boosted_step() -> None:
        booster.backward(loss_of_small(model, batch), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    variants["boosted"] = boosted_step
    for step in variants.values():
        step()
    seconds = interleaved(variants, rounds, torch.device("cpu"))
    return {
        **{f"{name}_step_s": statistics.median(seconds[name]) for name in seconds},
        "ratio": median_ratio(seconds, "boosted", "wrapped"),
        "asked_at_most": 1.01,
    }


# -- two ranks --


def measure_ranks(rounds: int, world_size: int = 2) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        groups = {
            name: _Ranks(name, world_size, f"file://{folder}/{name}")
            for name in ("fsdp2", "gemini")
        }
        seconds = interleaved(
            {name: ranks.step for name, ranks in groups.items()}, rounds, torch.device("cpu")
        )
        peaks = {name: ranks.finish() for name, ranks in groups.items()}
    return {
        "world_size": world_size,
        **{f"{name}_step_s": statistics.median(seconds[name]) for name in seconds},
        **{f"{name}_peak_rss_mib": peaks[name] for name in peaks},
        "time_ratio": median_ratio(seconds, "gemini", "fsdp2"),
        "peak_ratio": max(peaks["gemini"]) / max(peaks["fsdp2"]),
    }


class _Ranks:
    """Processes of one variant, which take a step when they are told to."""

    def __init__(self, name: str, world_size: int, store: str) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world_size)]
        self._ends = [mine for mine, _ in pipes]
        with _environment({**MALLOC_ENVIRONMENT, "OMP_NUM_THREADS": "1"}):
            self._processes = [
                context.Process(
                    target=_rank, args=(name, r, world_size, store, pipes[r][1]), daemon=True
                )
                for r in range(world_size)
            ]
            for process in self._processes:
                process.start()
        for _, theirs in pipes:
            theirs.close()
        self._ask(None)  # until all are built

    def step(self) -> None:
        self._ask("step")

    def finish(self) -> list[float]:
        """MiB of peak resident memory of each rank."""
        peaks: list[float] = self._ask("finish")
        for process in self._processes:
            process.join()
        return peaks

    def _ask(self, word: str | None) -> list[Any]:
        if word is not None:
            for end in self._ends:
                end.send(word)
        return [end.recv() for end in self._ends]


def _rank(name: str, rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = gpt2()
    optimizer: torch.optim.Optimizer
    if name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    else:
        model = GeminiDDP(model, "cpu", precision="fp32")
        optimizer = HybridAdam(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    step = step_of(model, optimizer, loss_of_gpt2, torch.randint(50257, (BATCH // world_size, SEQ)))
    pipe.send("built")
    while pipe.recv() == "step":
        step()
        pipe.send("done")
    pipe.send(peak_rss_mib())
    dist.destroy_process_group()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """For the processes that are started inside."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


MEASURES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "small": (measure_small, 60),
    "gpt2": (measure_gpt2, 8),
    "boost": (measure_boost, 200),
    "ranks": (measure_ranks, 12),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="add the results to this file")
    parser.add_argument("--only", choices=MEASURES, nargs="+", default=list(MEASURES))
    parser.add_argument("--rounds", type=int, help="default: as many as are needed")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    if args.json and args.json.exists():
        result = json.loads(args.json.read_text(encoding="utf-8"))
    started = time.perf_counter()
    for name in args.only:
        measure, rounds = MEASURES[name]
        result[name] = measure(args.rounds or rounds)
        print(f"{name}: " + ", ".join(f"{k} {_shown(v)}" for k, v in result[name].items()))
    print(f"{time.perf_counter() - started:.0f} s")
    if args.json:
        write_result(args.json, result)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(_shown(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
