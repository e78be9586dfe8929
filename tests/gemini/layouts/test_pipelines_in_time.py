"""Closed forms of a pipeline's time, against torch's own orders of actions."""

import re
from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from gemini.layouts.cluster import Cluster, Link
from gemini.layouts.layout import INTERLEAVED, ONE, ZBV, GlobalBatch, ParallelLayout
from gemini.layouts.price import Pricing
from gemini.layouts.shape import decoder
from gemini.placement.sizes import Bandwidths

FAST = Link(0.0, 1e18)
CLASSES = {INTERLEAVED: schedules.ScheduleInterleaved1F1B, ZBV: schedules.ScheduleZBVZeroBubble}


def actions(style, places, times):
    """By place: (letter, stage, micro-batch) in the order in which torch runs them."""
    if style == ONE:
        return {place: one_f_one_b(place, places, times) for place in range(places)}
    stages = [
        SimpleNamespace(
            num_stages=2 * places, group_size=places, group_rank=0, stage_index=i * places,
            has_backward=True, is_first=not i, is_last=False, submod=None, device="cpu", group=None,
        )
        for i in range(2)
    ]  # fmt: skip
    order = CLASSES[style](stages, times, loss_fn=lambda *_: None).pipeline_order
    read = re.compile(r"(\d+)([A-Z])(\d+)")
    return {
        place: [(m[2], int(m[1]), int(m[3])) for one in row if one for m in [read.match(str(one))]]
        for place, row in order.items()
    }


def one_f_one_b(place, places, times):
    """Narayanan et al., figure 4: as torch's Schedule1F1B, which has no list of its actions."""
    first = min(times, places - place)
    order = [("F", place, i) for i in range(first)]
    for i in range(times):
        order.append(("B", place, i))
        order += [("F", place, first + i)] if first + i < times else []
    return order


def makespan(order, forward, backward, stages):
    """Seconds of all actions, each as soon as its place is free and its input is there."""
    last = max(stage for row in order.values() for _, stage, _ in row)
    seconds = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    seconds = {name: each / stages for name, each in seconds.items()}
    done, free, rows = {}, dict.fromkeys(order, 0.0), {p: list(row) for p, row in order.items()}
    while any(rows.values()):
        ran = False
        for place, row in rows.items():
            while row:
                letter, stage, batch = row[0]
                gives = "F" if letter == "F" else "W" if letter == "W" else "D"
                needs = [("F", stage - 1, batch)] if letter == "F" and stage else []
                if letter in "BI":
                    needs = [("F", stage, batch)]
                    needs += [("D", stage + 1, batch)] if stage < last else []
                if letter == "W":
                    needs = [("D", stage, batch)]
                if any(need not in done for need in needs):
                    break
                begins = max([free[place], *(done[need] for need in needs)])
                free[place] = done[gives, stage, batch] = begins + seconds[letter]
                row.pop(0)
                ran = True
        assert ran, "torch's order waits for itself"
    return max(free.values())


@pytest.mark.parametrize(
    ("style", "places", "more"), product((ONE, INTERLEAVED, ZBV), (2, 4), (1, 2, 3))
)
def test_the_closed_form_is_what_torchs_order_takes(style, places, more):
    times, chunks = more * places, 1 if style == ONE else 2
    # no head, and memory and links that take no time: forward 1, backward 2, all of it products
    shape = decoder("", hidden=64, layers=2 * places, heads=1, vocab=0, mlp=64)
    flops = 2 * shape.used_numel * 2  # of two layers' token: a place's forward takes 1 s
    speeds = Bandwidths(flops=flops, device_memory=1e30)
    cluster = Cluster(
        places, 8, 1 << 60, 0, speeds, 1e30, 1e30, 1e30, FAST, FAST, has_host_tier=False
    )
    layout = ParallelLayout(pp=places, style=style, chunks=chunks, batch=1, micro_batches=times)
    price = Pricing(shape, cluster, GlobalBatch(times, 1), layout).price()
    assert price.total == pytest.approx(makespan(actions(style, places, times), 1.0, 2.0, chunks))
    assert price.seconds["bubble"] > 0
