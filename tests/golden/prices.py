"""Seconds of an iteration that ten plans predict with each update; see `tests.support.priced`.

Uneven chunks, updates that take longer than a read, masters that are split, two ranks with a slow
network: what a walk through the executors may get wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemini.placement.planner import make_plan
from gemini.placement.policy import AutoPlacement
from gemini.placement.sizes import StateBytes
from tests.support.priced import BLOCK, DISK, TEN, asked

UNEVEN = [5 * BLOCK, BLOCK, 3 * BLOCK + 100, 2 * BLOCK, BLOCK]
SLOW_UPDATES = replace(DISK, device_memory=28 * BLOCK / 1.5)
PLANS: dict[str, dict[str, Any]] = {
    "ten blocks": {"numels": TEN, "forward": 4.0},
    "a quick forward": {"numels": TEN, "forward": 0.1},
    "a quick backward": {"numels": TEN, "forward": 4.0, "backward": 5.0},
    "uneven chunks": {"numels": UNEVEN, "forward": 2.0, "backward": 40.0},
    "uneven calls": {"numels": UNEVEN, "forward": [1.0, 20.0, 0.5, 6.0, 3.0], "backward": 60.0},
    "slow updates": {"numels": TEN, "forward": 4.0, "bandwidths": SLOW_UPDATES},
    "slow updates, uneven": {"numels": UNEVEN, "forward": 2.0, "bandwidths": SLOW_UPDATES},
    "half of the state": {"numels": TEN, "forward": 3.0, "nvme_state_frac": 0.5},
    "without masters": {"numels": TEN, "forward": 4.0, "state": StateBytes(8, False)},
    "two ranks": {
        "numels": [2 * n for n in UNEVEN], "forward": 2.0, "backward": 40.0, "world_size": 2,
        "bandwidths": replace(DISK, collective=64.0 * BLOCK),
    },
}  # fmt: skip


def prices(name: str) -> dict[str, float]:
    """By update, for one of `PLANS`."""
    options = dict(PLANS[name])
    inputs = asked(options.pop("numels"), options.pop("forward"), **options)
    return dict(make_plan(inputs, AutoPlacement()).seconds_by_update)
