"""Threads that read beside one that trains, a hundred times a place: the bits of no reader."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.lines import PLACES, made, step
from tests.support.loops.readers import INTERVALS, readers
from tests.support.loops.tails import differences, everything
from tests.support.one_thread import one_thread as one_thread

pytestmark = pytest.mark.timeout(0)
RUNS, STEPS = 100, 4
ONE_RANK = [name for name, place in PLACES.items() if place.ranks == 1]


@dataclass
class Pair:
    model: Any
    optimizer: Any


def trained(place: str, **beside: Any) -> tuple[dict[str, Any], list[Any]]:
    pair = Pair(*made(place))
    with readers(pair, **beside) as found:
        for number in range(STEPS):
            step(pair.model, pair.optimizer, number)
    values = everything(pair.model, pair.optimizer)
    pair.optimizer.close(keep_masters=False)
    return values, found.errors


@pytest.mark.parametrize("place", ONE_RANK)
def test_training_beside_readers_has_the_bits_of_training_alone(place: str) -> None:
    want, _ = trained(place, count=0)
    for run in range(RUNS):
        got, errors = trained(place, interval=INTERVALS[run % len(INTERVALS)], seed=run)
        assert errors == [] and differences(got, want) == [], f"run {run} at {place}"
