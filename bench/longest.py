"""The longest sequence of GPT-2 small under a limit of memory: of torch alone, and with the tier.

    python -m bench.longest --limit 1500 --json PATH
    python -m bench.longest --model tiny --limit 24

limit: MiB that forward and backward may add to a process (`added_peak_mib` of `bench.activations`),
with all gradients and without parameters. Of both rows the longest sequence is searched by runs,
each in a process of its own, until one that passes the limit is at most `--within` longer:

plain            torch alone
spill, chunked   activations go to a disk, and logits exist 512 tokens at a time

Of the second the plan says a length before (`predicted`): the longest with which it finds homes on
a machine of that memory. At the longest length the gradients of a chunked loss are compared with
those of the same whose activations stay, for which the machine needs the memory.

Exit status 1 where they differ. Without dropout, as attention's weights would else be saved, which
grow with the square of the length.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.activations import ROWS, SHAPES, Job, built, run
from bench.support.machine import write_result
from gemini.nvme import default_folder
from gemini.placement.sizes import BudgetError
from gemini.plan.ask import Training, ask
from gemini.plan.machine import machine_of
from gemini.plan.question import Question
from gemini.units import GIB, MIB

TIERED = "spill, chunked"
STEP = 16  # tokens
PROCESS_MIB = 16  # of the limit: libraries and the allocator grow too


def parameters_mib(job: Job) -> int:
    with torch.device("meta"):
        model = built(job)
    return -(-sum(p.numel() * p.element_size() for p in model.parameters()) // MIB)


def room_mib(job: Job, limit_mib: int) -> int:
    """Room beside parameters and gradients."""
    return limit_mib - parameters_mib(job) - PROCESS_MIB


def asked(job: Job, limit_mib: int) -> Question:
    """Question of a plan on a machine that has the limit beside the parameters."""
    with torch.device("meta"):
        model = built(job)
    budget = (2 * parameters_mib(job) + room_mib(job, limit_mib)) * MIB
    machine = machine_of(
        {"device_mem": budget, "host_mem": budget, "nvme": 1024 * GIB}, device="cpu"
    )
    training = Training(
        batch=1, seq=job.seq, precision="fp32", checkpointing=False, by_trl=False,
        activations="spill" if job.row == TIERED else "keep",
    )  # fmt: skip
    return ask(model, machine, training, only=True)


def predicted_to_fit(job: Job, limit_mib: int) -> bool:
    """Whether the plan has a row within the limit; of torch alone, whether the trace has."""
    question = asked(job, limit_mib)
    if job.row == TIERED:
        try:
            question.wrapped()
        except BudgetError:
            return False
        return True
    return question.trace.peak_non_model_bytes / MIB + parameters_mib(job) <= limit_mib


def predicted(job: Job, limit_mib: int, most: int) -> int:
    """Longest sequence that is told to fit, in steps of 16 tokens; 0 where none is."""
    low, high = 0, 1
    while high * STEP <= most and predicted_to_fit(replace(job, seq=high * STEP), limit_mib):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        if predicted_to_fit(replace(job, seq=middle * STEP), limit_mib):
            low = middle
        else:
            high = middle
    return low * STEP


def measured(job: Job, limit_mib: int, start: int, within: float) -> tuple[int, list[Any]]:
    """Longest sequence that runs within the limit, and all runs: from `start` on, up by what is
    left of the limit or down by a tenth, then by halves. 0 where none does."""
    runs: list[Any] = []
    low, high, seq = 0, 0, max(STEP, start)
    while True:
        row = {"seq": seq, **run(replace(job, seq=seq))}
        runs.append(row)
        print(f"{job.row}: {seq} tokens, {row['added_peak_mib']:.0f} MiB", file=sys.stderr)
        if row["added_peak_mib"] <= limit_mib:
            low = seq
        else:
            high = seq
        if not high:
            far = limit_mib / row["added_peak_mib"]
            seq = _steps(min(2, max(1.05, far)) * low) + STEP
        elif not low:
            seq = _steps(high / 1.1)
            if seq < STEP:
                return 0, runs
        elif high <= max(low * (1 + within), low + STEP):
            return low, runs
        else:
            seq = min(max(_steps((low + high) / 2), low + STEP), high - STEP)


def _steps(seq: float) -> int:
    """Whole steps of a number of tokens."""
    return int(seq) // STEP * STEP


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=list(SHAPES), default="gpt2")
    parser.add_argument("--limit", type=int, default=1500, help="MiB")
    parser.add_argument("--within", type=float, default=0.03, help="part of a length")
    parser.add_argument("--most", type=int, default=1 << 16, help="tokens that are asked about")
    parser.add_argument("--nvme-dir", default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=args.nvme_dir or default_folder()) as folder:
        for name in ("plain", TIERED):
            job = Job(name, args.model, STEP, False, 0, folder)
            job = replace(job, room_mib=room_mib(job, args.limit))
            if job.room_mib <= 0:
                parser.error(f"--limit {args.limit}; expected more than the gradients have")
            told = predicted(job, args.limit, args.most)
            found, runs = measured(job, args.limit, told, args.within)
            rows.append({"row": name, "predicted": told, "longest": found, "runs": runs})
        plain, tiered = rows
        if not plain["longest"] or not tiered["longest"]:
            parser.error(f"--limit {args.limit}; expected room for {STEP} tokens")
        last = next(r for r in tiered["runs"] if r["seq"] == tiered["longest"])
        like = run(replace(job, row=ROWS[TIERED], seq=tiered["longest"]))
    for row in rows:
        row["predicted_over_longest"] = row["predicted"] / max(1, row["longest"])
        print(f"{row['row']}: predicted {row['predicted']}, longest {row['longest']} tokens")
    times, equal = tiered["longest"] / max(1, plain["longest"]), like["digest"] == last["digest"]
    print(f"{times:.2f} times as long; gradients {'equal' if equal else 'differ'}")
    if args.json is not None:
        figures = {
            "model": args.model, "limit_mib": args.limit, "within": args.within, "rows": rows,
            "times": times, "equal": equal,
        }  # fmt: skip
        write_result(args.json, figures)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
