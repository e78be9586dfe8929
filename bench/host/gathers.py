"""What is gathered in a room, by rule: how far each is above the bytes that any schedule moves.

    python -m bench.host.gathers --model gpt2-xl llama-7b --json bench/results/gathers.json

Chunks are those that the search chooses, modules run in layout order, and room is a share of all
payloads (no less than one moment needs). Every rule of what is given up first is seen alone and
with what it leaves filled; `filled` is filling from nothing, `chosen` what a plan follows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.support.machine import write_result
from gemini.chunk.layout import ChunkLayout
from gemini.chunk.sizing.search import search_chunk_configuration
from gemini.memtracer.trace import Kind, sequential_trace
from gemini.placement.timetable.belady import (
    CacheProblem,
    Key,
    best_schedule,
    by_rule,
    evaluate,
    farthest_use,
    filled,
    intervals_of,
)
from gemini.plan import models

WORLD_SIZE = 2  # chunks and needs hardly depend on it
SHARES = (0.3, 0.45, 0.6, 0.8)
RULES: dict[str, Key] = {
    "farthest use": farthest_use,
    "nearest use": lambda interval: (-interval.end, interval.item),
    "least recent use": lambda interval: (-interval.start, -interval.item),
}


def problem_of(layout: ChunkLayout, kind: Kind, share: float) -> CacheProblem:
    """A training iteration, whose step makes every payload worthless, or an evaluation."""
    nbytes = tuple(chunk.payload_bytes for chunk in layout.chunks)
    needs = tuple(
        tuple(map(int, chunks))
        for chunks in sequential_trace(layout.params, kind=kind, overlap=True).chunk_needs(
            layout.chunk_of()
        )
    )
    last = {chunk: moment for moment, chunks in enumerate(needs) for chunk in chunks}
    ends = tuple(
        tuple(c for c in chunks if kind == "train" and last[c] == moment)
        for moment, chunks in enumerate(needs)
    )
    most = max(sum(nbytes[chunk] for chunk in chunks) for chunks in needs)
    return CacheProblem(needs, nbytes, (max(most, int(share * sum(nbytes))),) * len(needs), ends)


def gaps(problem: CacheProblem) -> dict[str, float]:
    """By rule: bytes above the bound, as a fraction of it."""
    chosen = best_schedule(problem)
    intervals, free = intervals_of(problem), problem.free_room()
    moved = {"chosen": chosen.bytes_moved}
    for name, key in RULES.items():
        cached = by_rule(problem, intervals, free, key)
        moved[name] = evaluate(problem, cached).bytes_moved
        moved[f"{name}, filled"] = evaluate(
            problem, filled(problem, cached, intervals, free)
        ).bytes_moved
    moved["filled"] = evaluate(problem, filled(problem, [], intervals, free)).bytes_moved
    return {name: nbytes / chosen.lower_bound - 1 for name, nbytes in moved.items()}


def rows_of(name: str) -> list[dict[str, Any]]:
    layout = search_chunk_configuration(models.build(name), world_size=WORLD_SIZE).layout
    kinds: tuple[Kind, ...] = ("train", "eval")
    return [
        {"model": name, "kind": kind, "share": share, **gaps(problem_of(layout, kind, share))}
        for kind in kinds
        for share in SHARES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes gathered in a room, by rule")
    parser.add_argument("--model", nargs="+", default=["gpt2", "gpt2-xl", "llama-7b"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.model:
        for row in rows_of(name):
            rows.append(row)
            found = ", ".join(f"{rule} {gap:.1%}" for rule, gap in list(row.items())[3:])
            print(f"{name}, {row['kind']}, room {row['share']:.0%}: {found}", flush=True)
    if args.json is not None:
        write_result(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
