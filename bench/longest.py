"""The longest sequence of GPT-2 small under a limit of memory: of torch alone, and with the tier.

    python -m bench.longest --json PATH
    python -m bench.longest --limit 1200 --times 1000     the longest itself, beside the predicted
    python -m bench.longest --model tiny --limit 48 --within 0.2

limit: MiB of a process, with parameters and all gradients and without libraries, in forward and
backward (`whole_peak_mib` of `bench.activations`). Of both rows the longest sequence is searched by
runs, each in a process of its own, until one that passes the limit is at most `--within` longer:

plain            torch alone
spill, chunked   activations go to a disk, and logits exist 512 tokens at a time; with an optimizer,
                 whose homes follow, in the third iteration of a length: by then it is planned

The second search ends at `--times` times plain's longest: a step grows with the square of a length.
Both lengths are told before (`predicted`): of the second, the longest with which a plan finds homes
on a machine of that memory; of torch, from a trace, with the model's output there until backward
ends, as loops keep it. Here it goes before. At the longest length the gradients of a chunked loss
are compared with those of the same whose activations stay, for which the machine needs the memory.

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
from gemini.memtracer.trace import Trace
from gemini.nvme import default_folder
from gemini.placement.sizes import BudgetError
from gemini.plan.ask import ask
from gemini.plan.machine import machine_of
from gemini.plan.question import Question
from gemini.plan.training import Training
from gemini.units import GIB, MIB, ParamId

TIERED = "spill, chunked"
STEP, MOST_TOKENS = 16, 1 << 16
PROCESS_MIB = 16  # of the limit: libraries and the allocator grow too


def parameters_mib(job: Job) -> int:
    with torch.device("meta"):
        model = built(job)
    return -(-sum(p.numel() * p.element_size() for p in model.parameters()) // MIB)


def budgeted(job: Job, limit_mib: int) -> Job:
    """The job, in a budget within the limit; what is planned has an optimizer."""
    room = limit_mib - PROCESS_MIB - 2 * parameters_mib(job)
    return replace(job, room_mib=room, trains=job.row == TIERED)


def asked(job: Job, limit_mib: int) -> Question:
    """Question of a plan on a machine that has the limit, and a disk."""
    with torch.device("meta"):
        model = built(job)
    budget = (limit_mib - PROCESS_MIB) * MIB
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
    return peak_of_torch(question.trace, job) / MIB <= limit_mib - PROCESS_MIB


def peak_of_torch(trace: Trace, job: Job) -> int:
    """Bytes with parameters and gradients, which torch makes one by one in backward."""
    with torch.device("meta"):
        sizes = [param.numel() * param.element_size() for param in built(job).parameters()]
    formed: dict[ParamId, None] = {}  # parameters with a gradient
    peak = 0
    for moment in trace.moments:
        formed.update(dict.fromkeys(moment.params) if moment.phase == "backward" else {})
        gradients = sum(sizes[param] for param in formed)
        peak = max(peak, sum(sizes) + gradients + moment.non_model_bytes)
    return peak


def predicted(job: Job, limit_mib: int) -> int:
    """Longest sequence that is told to fit, in steps of 16 tokens; 0 where none is."""
    low, high = 0, 1
    while high * STEP <= MOST_TOKENS and predicted_to_fit(replace(job, seq=high * STEP), limit_mib):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        if predicted_to_fit(replace(job, seq=middle * STEP), limit_mib):
            low = middle
        else:
            high = middle
    return low * STEP


def measured(
    job: Job, limit_mib: int, start: int, within: float, most: int
) -> tuple[int, list[Any]]:
    """Longest sequence up to `most` that runs within the limit, and all runs: from `start` on, up
    by what is left of the limit or down by a tenth, then by halves. 0 where none does."""
    runs: list[Any] = []
    low, high, seq = 0, 0, min(max(STEP, start), most)
    while True:
        row = {"seq": seq, **run(budgeted(replace(job, seq=seq), limit_mib))}
        runs.append(row)
        print(f"{job.row}: {seq} tokens, {row['whole_peak_mib']:.0f} MiB", file=sys.stderr)
        if row["whole_peak_mib"] <= limit_mib:
            low = seq
        else:
            high = seq
        if low == most:
            return low, runs
        if not high:
            far = limit_mib / row["whole_peak_mib"]
            seq = min(_steps(min(2, max(1.05, far)) * low) + STEP, most)
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


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| activations | tokens predicted | longest | predicted / longest | gradients |",
        "|---|---:|---:|---:|---|",
    ]
    same = {TIERED: "equal" if figures["equal"] else "**differ**"}
    for row in figures["rows"]:
        lines.append(
            f"| {row['row']} | {row['predicted']} | {row['longest']} "
            f"| {row['predicted_over_longest']:.2f} | {same.get(row['row'], '')} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=list(SHAPES), default="gpt2")
    parser.add_argument("--limit", type=int, default=2000, help="MiB")
    parser.add_argument("--within", type=float, default=0.03, help="part of a length")
    parser.add_argument("--times", type=int, default=5, help="plain's longest, at most")
    parser.add_argument("--nvme-dir", default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.nvme_dir or default_folder()) as folder:
        most = MOST_TOKENS
        for name in ("plain", TIERED):
            job = Job(name, args.model, STEP, False, 0, folder)
            told = predicted(job, args.limit)
            found, runs = measured(job, args.limit, told, args.within, most)
            most = min(most, args.times * max(STEP, found))
            rows.append({"row": name, "predicted": told, "longest": found, "runs": runs})
        plain, tiered = rows
        if not tiered["longest"]:
            parser.error(f"--limit {args.limit}; expected room for {STEP} tokens")
        last = next(r for r in tiered["runs"] if r["seq"] == tiered["longest"])
        like = run(replace(job, row=ROWS[TIERED], seq=tiered["longest"]))
    for row in rows:
        row["predicted_over_longest"] = row["predicted"] / max(1, row["longest"])
    times = tiered["longest"] / plain["longest"] if plain["longest"] else None
    equal = like["digest"] == last["digest"]
    figures = {
        "model": args.model, "limit_mib": args.limit, "within": args.within, "rows": rows,
        "times": times, "equal": equal,
    }  # fmt: skip
    print(table(figures))
    if args.json is not None:
        write_result(args.json, figures)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
