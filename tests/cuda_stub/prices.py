"""Prices of updates beside a replay: python -m tests.cuda_stub tests.cuda_stub.prices [--check]

Records steady iterations by home of model data and `update`, replays their calls at several speeds
(`tests.cuda_stub.replay`), and asks the planner for the price of the same iteration. Writes
`bench/results/cuda-prices.json`, or nothing with `--check`; 1 where a price is further from its
replay than it may be.

What stands for what: `tests.support.cards`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.support.gpu_sections import Stack
from bench.support.machine import write_result
from gemini.optim.state.memory import EventTicket
from gemini.optim.update.triton_update import TritonUpdater
from gemini.placement.result import PlanResult
from gemini.placement.timetable.updates import is_early
from tests.cuda_stub.apart import in_a_process
from tests.cuda_stub.cases import (
    ALL,
    BOTH,
    EARLY,
    ON_NVME,
    PARAMS,
    RESIDENT,
    STATE,
    TAIL,
    Case,
    training,
)
from tests.cuda_stub.races import Call
from tests.cuda_stub.recorder import recorded, watched
from tests.cuda_stub.replay import ReplaySpeeds, begins, replay
from tests.support.cards import CARDS, DEPTH, CardSpeeds, numel_of, planned, prices

KEPT = Path("bench/results/cuda-prices.json")
WARM, RECORDED = 4, 6  # iterations; of those recorded the mean of all but the first and the last
MOST = 0.05  # of a replay, that a price may differ by
# bytes an element that leave for the host in backward: of an early update, and of a gradient
LEAVING = {"state on the host": 14, "all on the host": 16}
GEMM = {"forward": "aten.addmm", "backward": "aten.mm"}
SMALL = ("aten.copy_", "aten.add.", "aten.tanh", "aten.sum", "aten.zero_", "aten._to", "aten.pow",
         "aten.fill", "aten.mean", "aten.ones", "aten.div", "aten.mul")  # fmt: skip


PLACED: dict[str, tuple[Any, dict[str, Any]]] = {
    "resident": (RESIDENT, {}),
    "state on the host": (STATE, {}),
    "parameters on the host": (PARAMS, {}),
    "all on the host": (ALL, {}),
    "state on NVMe": (RESIDENT, ON_NVME),
}
OVERLAPS: dict[str, dict[str, str]] = {
    "serial": {}, "tail": TAIL, "speculate": EARLY, "both": BOTH
}  # fmt: skip


def case_of(home: str, update: str, told: Callable[[int], None]) -> Case:
    policy, options = PLACED[home]
    return Case(
        policy, options, disk=bool(options), depth=DEPTH, engine=OVERLAPS[update],
        module=lambda width, depth: ToldStack(width, depth, told),
    )  # fmt: skip


class _Streams:
    """How far streams are with early updates as backward goes on, by the speeds of a replay.

    What a loop gives them depends on it: an event that is asked answers by this.
    """

    def __init__(self, card: CardSpeeds, home: str) -> None:
        self._layer = card.backward / DEPTH
        # of an element
        self._seconds = LEAVING.get(home, 0) / card.links(numel_of(planned(home))).device_to_host
        self._now = self._last = 0.0
        self._ends: dict[int, float] = {}  # of copies, by ticket
        self._tickets: list[EventTicket] = []  # which none of these may take the place of

    def passed(self, layer: int) -> None:
        """Backward comes to a layer: what is asked beside it is answered as of its end."""
        self._now = (DEPTH - layer) * self._layer
        if layer == DEPTH - 1:
            self._last = 0.0
            self._ends.clear()
            self._tickets.clear()

    @contextmanager
    def answering(self) -> Iterator[None]:
        ready, update = EventTicket.ready, TritonUpdater.update_block

        def updating(updater: Any, block: Any, planes: Any, views: Any, into: Any = None) -> Any:
            copies = update(updater, block, planes, views, into)
            if into is not None:
                self._last = max(self._last, self._now) + self._seconds * block.numel
                self._ends[id(copies)] = self._last
                self._tickets.append(copies)
            return copies

        def is_ready(ticket: EventTicket) -> bool:
            end = self._ends.get(id(ticket))
            return ready(ticket) if end is None else end <= self._now

        with (
            patch.object(EventTicket, "ready", is_ready),
            patch.object(TritonUpdater, "update_block", updating),
        ):
            yield


class ToldStack(Stack):
    """A stack that tells to which layer backward comes."""

    def __init__(self, width: int, depth: int, told: Callable[[int], None]) -> None:
        super().__init__(width, depth)
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            x.register_hook(lambda grad, number=number: self.told(number))
        return x


def speeds_of(card: CardSpeeds, numel: int) -> ReplaySpeeds:
    """Speeds of a replay of the stack."""
    links = card.links(numel)
    operators = {
        GEMM["forward"]: card.forward / DEPTH,
        GEMM["backward"]: card.backward / (2 * DEPTH - 1),  # the input has no gradient
        **dict.fromkeys(SMALL, 0.0),
    }
    return ReplaySpeeds(
        host_to_device=links.host_to_device, device_to_host=links.device_to_host,
        device_memory=links.device_memory, disk_read=links.nvme_read, disk_write=links.nvme_write,
        operators=operators,
    )  # fmt: skip


def replayed(calls: list[Call], speeds: ReplaySpeeds) -> float:
    """Mean seconds of an iteration, from begin to begin: a tail's thread is sometimes late in one,
    and early in the next."""
    found = begins(replay(calls, speeds), GEMM["forward"])
    assert len(found) == RECORDED * DEPTH
    return (found[-DEPTH] - found[DEPTH]) / (RECORDED - 2)


def record(home: str, update: str, card: CardSpeeds) -> tuple[list[Call], PlanResult]:
    """Calls of steady iterations, and their plan; what streams have done when they are asked, they
    have on this card."""
    streams = _Streams(card, home)
    with watched(), streams.answering(), training(case_of(home, update, streams.passed)) as loop:
        for _ in range(WARM):
            loop.iteration()
        with recorded(late=True) as calls:
            for _ in range(RECORDED):
                loop.iteration()
            loop.settle()
        return calls, loop.planning.result


def compared(home: str, update: str) -> dict[str, Any]:
    """By card: seconds of the replay, and the price. Empty: another `update` runs."""
    found: dict[str, Any] = {}
    kept: tuple[list[Call], PlanResult] | None = None
    for name, card in CARDS.items():
        if update not in prices(planned(home), card):
            continue
        if kept is None or is_early(update):
            kept = record(home, update, card)
        calls, result = kept
        seconds = replayed(calls, speeds_of(card, numel_of(result)))
        found[name] = {"replay": seconds, "price": prices(result, card)[update]}
    return found


def told(name: str, row: dict[str, Any]) -> list[str]:
    """Lines of a row; those that miss say so."""
    lines = []
    for card, one in row.items():
        off = one["price"] / one["replay"] - 1
        miss = "" if abs(off) <= MOST else "  MISSES"
        lines.append(
            f"{name}, {card}: replay {one['replay']:.3f} s, price {one['price']:.3f} s, "
            f"{off:+.1%}{miss}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_stub tests.cuda_stub.prices")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--home", choices=PLACED, help="this one, and write nothing")
    parser.add_argument("--json", type=Path, default=KEPT)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    missed = False
    for home in [args.home] if args.home else PLACED:
        for update in OVERLAPS:
            row = in_a_process(lambda home=home, update=update: compared(home, update))
            if row:
                found[f"{home}, {update}"] = row
                lines = told(f"{home}, {update}", row)
                print("\n".join(lines), flush=True)
                missed |= any("MISSES" in line for line in lines)
    if not (args.check or args.home):
        write_result(args.json, {"cases": found})
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
