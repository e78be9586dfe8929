"""What a steady iteration asks of CUDA: python -m tests.cuda_stub tests.cuda_stub.steps [--check]

Writes `bench/results/cuda-stub.json`, or compares its numbers: by home of model data, the launches,
copies, events and waits of one forward, backward, step and zero_grad. Whoever asks whether a copy
has ended hears that it has; who waits without asking is counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.host import launches
from bench.support.machine import write_result
from tests.cuda_stub.apart import in_a_process
from tests.cuda_stub.cases import CASES, Case, training
from tests.cuda_stub.counts import Row, asked, counted

GOLDEN = Path("bench/results/cuda-stub.json")
WARM = 4
NOTES = ("launches", "waits", "waits apart")
# What no two runs have to have alike. A thread makes an event if all are in use at that moment.
# Where one computes beside the loop, gradients get the memory that is free just then, and tables of
# other addresses are uploaded again.
CHANCE = {
    False: ("events made",),
    True: ("events made", "copy H2D pinned", "bytes H2D pinned", "allocations pinned"),
}


def iteration_of(case: Case) -> Row:
    with training(case) as loop:
        for _ in range(WARM):
            loop.iteration()
        loop.settle()
        before = launches.counted_by_all()
        with asked() as found:
            loop.iteration()
            loop.settle()
        triton = launches.counted_by_all() - before
    by_chance = {what: found.counts.pop(what, 0) for what in CHANCE[case.has_tail]}
    notes = {
        "by chance": by_chance,
        "launches": triton,
        "waits": found.waits,
        "waits apart": found.apart,
    }
    return found.counts | {note: dict(sorted(said.items())) for note, said in notes.items()}


def refused_of(case: Case, row: Row) -> Row:
    """What no steady iteration may ask for, whatever was written down."""
    most = {"copy D2H pageable": 0, "copy H2D pageable": 0}
    if not (case.has_tail or case.waits):
        most["events made"] = 0
    if not (case.several or case.waits):
        most["copy D2D"] = case.depth * case.passes
    said = row | row["by chance"]
    too_much = {what: said[what] for what in most if said.get(what, 0) > most[what]}
    return too_much if case.disk or case.waits else too_much | row["waits"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_stub tests.cuda_stub.steps")
    parser.add_argument("--case", choices=CASES, help="print this one, and no more")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where they differ")
    parser.add_argument("--json", type=Path, default=GOLDEN)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(iteration_of(CASES[args.case])))
        return 0
    found = {name: in_a_process(lambda name=name: iteration_of(CASES[name])) for name in CASES}
    refused = {name: said for name, row in found.items() if (said := refused_of(CASES[name], row))}
    if refused:
        print("a steady iteration asks for too much:", json.dumps(refused, indent=1))
        return 1
    if not args.check:
        write_result(args.json, {"iterations": found})
        return 0
    golden = json.loads(args.json.read_text(encoding="utf-8"))["iterations"]
    differ = False
    for name in sorted(found | golden):
        row, want = found.get(name, {}), golden.get(name, {})
        got, expected = counted(row), counted(want)
        for what in sorted(got | expected):
            if got.get(what) != expected.get(what):
                differ = True
                print(f"{name}: {what}: {got.get(what)}, and {expected.get(what)} in {args.json}")
        if got != expected:
            print(json.dumps({note: row.get(note) for note in NOTES}, indent=1))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
