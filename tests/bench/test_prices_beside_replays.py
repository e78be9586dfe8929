"""Prices of plans beside replays of what the engine asked of a stub of CUDA for the same plans.

`bench/results/cuda-prices.json` has the replays; `tests.cuda_stub.prices` records them anew.
"""

import json
from pathlib import Path

import pytest

from gemini.placement.timetable.updates import ASKED, SAME_SECONDS, UPDATES, best_update
from tests.support.cards import CARDS, HOMES, planned, prices

KEPT = json.loads(Path("bench/results/cuda-prices.json").read_text(encoding="utf-8"))["cases"]
MOST = 0.05  # of a replay
TOLD = 0.005  # of it, by which errors of two prices differ where these are nearly alike
CASES = [(name, card) for name in KEPT for card in KEPT[name]]


def test_all_homes_and_updates_were_replayed():
    assert {name.split(", ")[0] for name in KEPT} == HOMES.keys()
    assert {name.split(", ")[1] for name in KEPT} == {*ASKED}
    assert all(row.keys() == CARDS.keys() for row in KEPT.values())


@pytest.mark.parametrize("home", HOMES)
def test_a_price_is_what_its_calls_take(home):
    result = planned(home)
    for card in CARDS:
        priced = prices(result, CARDS[card])
        for update in priced:
            row = KEPT[f"{home}, {update}"]
            assert priced[update] == pytest.approx(row[card]["replay"], rel=MOST), (card, update)
            assert priced[update] == pytest.approx(row[card]["price"], rel=0.01), (card, update)


@pytest.mark.parametrize("home", HOMES)
def test_no_update_is_chosen_that_a_replay_shows_slower(home):
    result = planned(home)
    for card in CARDS:
        replays = {
            update: KEPT[f"{home}, {update}"][card]["replay"]
            for update in UPDATES
            if f"{home}, {update}" in KEPT
        }
        chosen = best_update(prices(result, CARDS[card]))
        assert replays[chosen] <= replays["serial"], (card, chosen)
        # what is not chosen may be what no prediction tells apart
        assert replays[chosen] <= min(replays.values()) * (1 + SAME_SECONDS + TOLD), (card, chosen)
