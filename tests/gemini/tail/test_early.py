"""Spans updated while backward runs, with a tail behind it or without: the bits of serial steps,
and what is done again."""

from functools import partial
from unittest import mock

import pytest
import torch

from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.optim import HybridLamb, HybridMuon
from gemini.placement.timetable.updates import BOTH, SPECULATE
from gemini.runtime.inspect.reports import when_updated
from gemini.runtime.step import early
from gemini.runtime.step.early import EarlySpans
from optim import HybridAdam, NvmeConfig
from tests.support.apart import Apart
from tests.support.device.placed import SpareLayer, batch, device
from tests.support.loops.schedules import (
    HOMES,
    Iteration,
    Little,
    ends_in_backward,
    loads,
    program,
    same,
    short,
)
from tests.support.loops.tails import PRECISIONS, SCHEDULES, batches, one_step, wrapped


class Spare(Little):
    """The first chunk, which is reduced last, has a parameter that no call uses."""

    def __init__(self):
        super().__init__()
        self.embed.spare = torch.nn.Parameter(torch.ones(330))


ONCE, TWICE = Iteration(), Iteration(backwards=2)


def then(**last):
    """An iteration that backward expects nothing wrong of, behind two and before one."""
    return program((ONCE, ONCE, Iteration(**last), ONCE))


LOOPS = {
    "plain": program((ONCE,) * 3),
    "accumulates": program((TWICE,) * 3),
    "under no_sync": program((Iteration(backwards=2, synced=False),) * 3),
    "once more": program((ONCE, ONCE, TWICE)),  # behind gradients that seemed final
    "unused": program((ONCE,) * 3),
    "skips": then(skipped=True),
    "takes no step": then(stepless=True),
    "raises": then(broken="backward"),
    "schedules rates": short(SCHEDULES["schedules_rates"], 3),
    "changes a rate": then(between="changes a rate"),
    "reads gradients": program((Iteration(between="reads gradients"),) * 3),
    "scales one": then(between="scales one"),
    "writes a weight": then(between="writes a weight"),
    "reads masters": then(between="reads masters"),
    "reads state": then(between="reads state"),
    "loads": loads,
    "ends in backward": ends_in_backward,
}
BLOCKS = {"min_chunk_size_m": 1500 / 2**20, "search_range_m": 0}  # two of a chunk
PLACES = ("kernels", "kernels, parameters", "kernels, all", "kernels and disk")
# what copies state, to show or to follow it, is given memory of both
MIXES = ("writes a weight", "loads")
CLIPS = {"bites": 1e-3, "does not bite": 1e6}


def check(what, home="kernels", update=SPECULATE, **options):
    """What was counted in a loop that ends with the bits of serial steps."""
    module = {"module": Spare} if what == "unused" else {}
    found = same(LOOPS[what], update, home, apart=what not in MIXES, **BLOCKS, **module, **options)
    assert found.early["begun"] > 0
    assert any(found.tails) == (update == BOTH)
    return found.early


@pytest.mark.parametrize(
    ("home", "update"), [("kernels", SPECULATE), ("kernels, parameters", BOTH)]
)
def test_a_step_commits_what_backward_has_updated(home, update):
    counts = check("plain", home, update)
    assert counts["committed"] == counts["begun"]
    assert counts["otherwise"] == 0 < counts["as expected"]


def test_a_span_is_updated_while_the_backward_of_other_layers_is_to_come():
    """Events in their order: layers whose backward is over, and updates."""
    events, where = [], HOMES["kernels"]()
    model, optimizer = wrapped(SPECULATE, **where)
    for i, layer in enumerate(model.module.layers):
        layer[3].weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(i))
    update = EarlySpans.update

    def updated(self, block, gradient, changes):
        update(self, block, gradient, changes)
        events.append("update")

    with Apart(where["device"]), mock.patch.object(EarlySpans, "update", updated):
        for batch in batches(3):
            one_step(model, optimizer, batch)
        optimizer.close()
    of_first, of_last = events.index(2, 1), len(events) - 1 - events[::-1].index(0)
    assert "update" in events[of_first:of_last]
    assert "update" not in events[: events.index(0)]  # the first step expects nothing


def rows():
    """All pairs: every loop in every home, and with either update."""
    for i, what in enumerate(LOOPS):
        for j, home in enumerate(PLACES):
            yield what, home, (SPECULATE, BOTH)[(i + j + j // 2) % 2]


@pytest.mark.ci
@pytest.mark.parametrize(("what", "home", "update"), list(rows()))
def test_every_loop_has_the_bits_of_serial_steps(what, home, update):
    assert check(what, home, update)["committed"] > 0


@pytest.mark.ci
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(("what", "home", "update"), [
    ("plain", "kernels", BOTH), ("plain", "kernels, all", SPECULATE),
    ("accumulates", "kernels, parameters", BOTH), ("skips", "kernels", SPECULATE),
])  # fmt: skip
def test_a_clip_and_a_loss_scale_have_the_bits_of_serial_steps(what, home, update, clip):
    counts = check(what, home, update, max_norm=CLIPS[clip], **PRECISIONS["fp16"])
    assert (counts["committed"] > 0) == (clip != "bites")


def test_a_clip_that_bites_has_the_same_spans_updated_again():
    counts = check("plain", max_norm=1e-3)
    assert counts["as expected"] == counts["committed"] == 0 < counts["otherwise"]


@pytest.mark.ci
def test_what_a_user_changes_after_backward_is_done_again_and_nothing_else():
    every = check("reads masters")
    edited = check("writes a weight")
    assert 0 < edited["committed"] < edited["begun"]
    assert every["committed"] == every["begun"]


def test_streams_have_a_window_of_spans_and_the_step_has_the_rest():
    with mock.patch.object(early, "EARLY_WINDOW", 2):  # of which none leaves before the host waits
        counts = check("plain")
    assert counts["committed"] == counts["begun"] == 2 * 2


def test_a_budget_bounds_the_room_of_second_versions():
    torch.manual_seed(0)
    for budget, most in (("155KiB", 3), ("1MiB", 100)):
        module = torch.nn.Sequential(*[SpareLayer() for _ in range(2)])
        model = GeminiDDP(
            module, device(by_triton=True), AutoPlacement("105KiB", budget),
            min_chunk_size_m=0.004, update=SPECULATE,
        )  # fmt: skip
        optimizer = HybridAdam(model.parameters(), nvme=NvmeConfig(block_numel=1024))
        state = optimizer.targets[0] and model.engine.target.tiered_state
        begun = [block for slab in state.host_slabs for block in slab.blocks if slab.begin(block)]
        assert len(begun) <= most
        optimizer.close()


@pytest.mark.parametrize(
    ("kind", "policy", "options", "words"),
    [
        (HybridLamb, StaticPlacement(1.0, 1.0), {}, "every element alike"),
        (HybridMuon, StaticPlacement(1.0, 1.0), {}, "every element alike"),
        (HybridAdam, StaticPlacement(1.0, 0.0), {}, "no state is in host memory"),
        (HybridAdam, StaticPlacement(1.0, 1.0), {"master_weights": False}, "no masters"),
    ],
)
def test_where_nothing_can_be_early_a_step_is_serial_and_says_why(kind, policy, options, words):
    torch.manual_seed(0)
    model = GeminiDDP(SpareLayer(), device(by_triton=True), policy, update=SPECULATE, **options)
    optimizer = kind(model if kind is HybridMuon else model.parameters(), lr=1e-3)
    optimizer.bind() if hasattr(optimizer, "bind") else None
    model(batch(0)).float().pow(2).mean().backward()
    optimizer.step()
    assert model.engine.overlap.in_use() == "serial"
    assert words in when_updated(model.engine.overlap)
    optimizer.close()


DEEP = partial(Little, 6)  # more chunks than are reduced at once
OF_RANKS = [("kernels", SPECULATE), ("kernels", BOTH), ("kernels, parameters", BOTH)]


def two_ranks(rank):
    for home, update in OF_RANKS:
        for what in ("plain", "accumulates", "under no_sync"):
            assert check(what, home, update, module=DEEP)["committed"] > 0, (what, home, update)
        clipped = check("plain", home, update, module=DEEP, max_norm=1e-3)
        assert clipped["committed"] == 0, (home, update)
    return True


@pytest.mark.ci
def test_two_ranks_have_the_bits_of_serial_steps():
    assert run_ranks(two_ranks, 2, processes=True) == [True] * 2
