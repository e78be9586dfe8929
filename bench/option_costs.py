"""What options that nobody has to take cost a step, each beside a step without it.

deltas      marks of what updates change (`weights(deltas=True)`): seconds of `step()`
receipts    a receipt of each step (`gemini.receipts`): seconds of an iteration
canonical   gradients in the order of micro-batches, at 2 ranks: seconds of an iteration

Both kinds of steps take turns in one process a rank, so that what else the machine does is of both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.shared.workers import run_ranks
from bench.support.machine import write_result
from gemini import GeminiDDP, HybridAdam
from gemini.receipts.taking import Receipts

WARM_UP = 2
SIZES = {
    "llama-69m": (768, 8, 8000, 4, 128),  # hidden, layers, vocabulary, sequences, tokens of each
    "tiny": (64, 2, 128, 2, 16),
}


@dataclass
class Job:
    """One model and its optimizer. receipts: taken behind each step; None: none."""

    model: GeminiDDP
    optimizer: HybridAdam
    ids: torch.Tensor
    receipts: Receipts | None = None

    @classmethod
    def make(cls, size: str, **options: Any) -> Job:
        hidden, layers, vocabulary, sequences, tokens = SIZES[size]
        config = transformers.LlamaConfig(
            hidden_size=hidden, intermediate_size=8 * hidden // 3, num_hidden_layers=layers,
            vocab_size=vocabulary, num_attention_heads=4, num_key_value_heads=4,
        )  # fmt: skip
        torch.manual_seed(0)
        model = GeminiDDP(transformers.LlamaForCausalLM(config), **options)
        optimizer = HybridAdam(model.parameters(), lr=1e-6)
        return cls(model, optimizer, torch.randint(vocabulary, (sequences, tokens)))

    def backward(self) -> None:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def iteration(self) -> None:
        self.backward()
        self.step()
        self.optimizer.zero_grad()
        if self.receipts is not None:
            self.receipts.saw(self.ids)
            self.receipts.stepped()


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _of_steps(job: Job) -> float:
    job.backward()
    found = _seconds(job.step)
    job.optimizer.zero_grad()
    return found


def _of_iterations(job: Job) -> float:
    return _seconds(job.iteration)


def in_turns(jobs: list[Job], clock: Callable[[Job], float], rounds: int) -> list[list[float]]:
    """Seconds of each job, round by round."""
    found: list[list[float]] = [[] for _ in jobs]
    for number in range(WARM_UP + rounds):
        order = range(len(jobs)) if number % 2 else range(len(jobs) - 1, -1, -1)
        for i in order:
            seconds = clock(jobs[i])
            if number >= WARM_UP:
                found[i].append(seconds)
    return found


def canonical(rank: int, size: str, rounds: int) -> tuple[list[list[float]], list[int]]:
    """Seconds, and bytes given to collectives of chunks, without and with the option."""
    jobs = [Job.make(size, canonical=asked) for asked in (False, True)]
    before = [job.model.engine.comm.chunk_bytes for job in jobs]
    found = in_turns(jobs, _of_iterations, rounds)
    sent = [job.model.engine.comm.chunk_bytes - b for job, b in zip(jobs, before, strict=True)]
    return found, sent


def row(name: str, found: list[list[float]], **more: Any) -> dict[str, Any]:
    """Median of the ratios of rounds, and the least and the largest."""
    without, taken = found
    ratios = sorted(b / a for a, b in zip(without, taken, strict=True))
    return {
        "option": name, "seconds_without": statistics.median(without),
        "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1], **more,
    }  # fmt: skip


def measured(size: str, rounds: int) -> list[dict[str, Any]]:
    marks = [Job.make(size), Job.make(size)]
    for _ in marks[1].model.weights(deltas=True):
        pass
    rows = [row("deltas", in_turns(marks, _of_steps, rounds))]
    receipts = [Job.make(size), Job.make(size)]
    receipts[1].receipts = Receipts(None, receipts[1].model, receipts[1].optimizer)
    rows.append(row("receipts", in_turns(receipts, _of_iterations, rounds)))
    found, sent = run_ranks(canonical, 2, size, rounds, processes=True)[0]
    rows.append(row("canonical", found, bytes_ratio=sent[1] / sent[0]))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| option | seconds without | ratio | range |", "|---|---|---|---|"]
    lines += [
        f"| {r['option']} | {r['seconds_without']:.3f} | {r['ratio']:.3f} | "
        f"{r['least']:.3f} to {r['most']:.3f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="llama-69m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = measured(args.model, args.rounds)
    print(table(rows))
    if args.json:
        write_result(args.json, {"model": args.model, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
