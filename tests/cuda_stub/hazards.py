"""Accesses in no order: python -m tests.cuda_stub tests.cuda_stub.hazards [--case NAME]

Runs iterations of each case in which no event is done until somebody has waited for it, then some
in which each that is asked is done, and looks for two accesses of the same bytes that nothing
orders, of two streams or of a stream and the host, and for memory that is unpinned under a copy.
Then orders are taken out of the code, one fault at a time, each of which must be found. 1 where a
case has a race, or a fault has none.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

from gemini.optim.state.memory import CudaMemory, EventTicket, StreamMark
from tests.cuda_stub.apart import in_a_process
from tests.cuda_stub.cases import CASES, Case, training
from tests.cuda_stub.races import Race, races
from tests.cuda_stub.recorder import recorded, watched

WARM, RECORDED = 3, 2  # iterations
SHOWN = 4  # races of a case

Found = list[tuple[Race, int]]  # and how often


def races_of(case: Case) -> Found:
    found: Counter[Race] = Counter()
    with watched(), training(case) as loop:
        for _ in range(WARM):
            loop.iteration()
        for late in (True, False):
            with recorded(late=late) as calls:
                for _ in range(RECORDED):
                    loop.iteration()
                loop.settle()
            assert any(call.what == "write" for call in calls), "nothing was recorded"
            found += races(calls)
    return found.most_common()


def _unordered(self: EventTicket) -> None:
    self.ends.clear()


def _before_anything(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Copies do not wait for what the device was given before them."""

    def copies(*given: Any, **more: Any) -> Any:
        with patch.object(StreamMark, "order", lambda mark, stream: None):
            return begin(*given, **more)

    return copies


def _unsettled(self: EventTicket) -> None:
    self.order()


Fault = tuple[str, Callable[[ExitStack], object]]  # the case that shows it, and how it is planted


def _planted(owner: type, name: str, new: Any) -> Callable[[ExitStack], object]:
    return lambda stack: stack.enter_context(patch.object(owner, name, new))


FAULTS: dict[str, Fault] = {
    "work does not come after the copy that it needs": (
        "state on the host", _planted(EventTicket, "order", _unordered),
    ),
    "work does not come after the parameters that it needs": (
        "parameters on the host", _planted(EventTicket, "order", _unordered),
    ),
    "copies do not come after the work that they follow": (
        "state on the host",
        _planted(CudaMemory, "_begin", _before_anything(CudaMemory._begin)),
    ),
    "a disk writes what a copy has not brought": (
        "state on NVMe", _planted(EventTicket, "settle", _unsettled),
    ),
    "a gather does not come after the copy of its shard": (
        "parameters on the host, two ranks",
        _planted(CudaMemory, "after_copies", lambda self, and_work=False: nullcontext()),
    ),
    "an update in backward does not come after its gradient": (
        "state on the host, in backward",
        _planted(CudaMemory, "beside", _before_anything(CudaMemory.beside)),
    ),
}  # fmt: skip


def with_fault(name: str) -> Found:
    case, plant = FAULTS[name]
    with ExitStack() as stack:
        plant(stack)
        return races_of(CASES[case])


def say(name: str, found: Found) -> None:
    print(f"{name}: {sum(times for _, times in found)} pairs in no order", flush=True)
    for (earlier, later), times in found[:SHOWN]:
        print(f"  {times} times  {earlier}\n    and  {later}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_stub tests.cuda_stub.hazards")
    parser.add_argument("--case", choices=CASES, help="this one, and no fault")
    parser.add_argument("--faults", action="store_true", help="planted faults alone")
    args = parser.parse_args()
    failed = []
    for name in [args.case] if args.case else () if args.faults else CASES:
        found = in_a_process(lambda name=name: races_of(CASES[name]))
        say(name, found)
        failed += [name] if found else []
    for name in () if args.case else FAULTS:
        found = in_a_process(lambda name=name: with_fault(name))
        print(f"fault: {name}: {sum(times for _, times in found)} pairs in no order", flush=True)
        failed += [] if found else [f"fault that is not found: {name}"]
    passed = "no race" if args.case else "no race, and every fault is found"
    print("\n".join(["failed:", *failed]) if failed else passed)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
