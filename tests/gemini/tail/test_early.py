"""Spans updated while backward runs, with a tail behind it or without: the bits of serial steps,
and what is done again."""

import contextlib
from collections import Counter
from functools import cache
from unittest import mock

import pytest
import torch
from torch import nn

from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.optim import HybridLamb, HybridMuon
from gemini.placement.timetable.updates import BOTH, SPECULATE
from gemini.runtime.inspect.reports import when_updated
from gemini.runtime.step import early
from gemini.runtime.step.early import Committing, EarlySpans
from optim import HybridAdam, NvmeConfig
from optim.step.triton_step import TritonStep
from tests.support.apart import Apart
from tests.support.device.placed import SpareLayer, batch, device, wrapped
from tests.support.loops.tails import differences, everything, has_tail

STATE, ALL, SUMS = (False, False, True), (True, False, True), (True, True, True)


class Broken(RuntimeError):
    pass


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(33, 65), nn.Linear(65, 33)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Loop:
    """A loop on the simulated device, and how many spans were updated early and committed."""

    def __init__(self, update, homes=STATE, spare=False, **options):
        self.backend = device(by_triton=True)
        torch.manual_seed(0)
        module = nn.Sequential(*[(SpareLayer if spare else Layer)() for _ in range(3)])
        self.model, self.optimizer = wrapped(
            module, self.backend, homes, update=update, block_numel=2048, **options
        )
        self.counts = Counter()

    def backward(self, number, scale=1.0):
        (self.model(batch(number)).float().pow(2).mean() * scale).backward()

    def step(self):
        self.optimizer.step()
        self.counts["tails"] += has_tail(self.optimizer)
        self.optimizer.zero_grad()


@contextlib.contextmanager
def counting(counts):
    """Count spans that are begun in backward, that a step finds as expected, and commits."""
    update, decided, commit = EarlySpans.update, TritonStep.decided_as, Committing.update_block

    def updated(self, block, gradient, changes):
        before = self._early.get(block.id)
        update(self, block, gradient, changes)
        counts["begun"] += self._early.get(block.id) is not before

    def decided_as(self, expected):
        found = decided(self, expected)
        counts["as expected" if found else "otherwise"] += 1
        return found

    def update_block(self, block, planes, views):
        counts["committed"] += block.id in self._early
        return commit(self, block, planes, views)

    with (
        mock.patch.object(EarlySpans, "update", updated),
        mock.patch.object(TritonStep, "decided_as", decided_as),
        mock.patch.object(Committing, "update_block", update_block),
    ):
        yield


def plain(loop):
    for number in range(3):
        loop.backward(number)
        loop.step()


def accumulating(loop):
    for number in range(3):
        loop.backward(2 * number)
        loop.backward(2 * number + 1)
        loop.step()


def under_no_sync(loop):
    for number in range(3):
        with loop.model.no_sync():
            loop.backward(2 * number)
        loop.backward(2 * number + 1)
        loop.step()


def once_more(loop):
    """A backward that nobody expected, after one whose gradients seemed final."""
    plain(loop)
    loop.backward(7)
    loop.backward(8)
    loop.step()


def with_overflow(loop):
    for number in range(4):
        loop.backward(number, scale=float("inf") if number == 2 else 1.0)
        loop.step()


def without_a_step(loop):
    plain(loop)
    loop.backward(7)
    loop.optimizer.zero_grad()
    plain(loop)


def with_an_error(loop):
    plain(loop)
    hook = loop.model.module[0].a.weight.register_hook(_raises)
    with contextlib.suppress(Broken):
        loop.backward(7)
    hook.remove()
    loop.optimizer.zero_grad()
    plain(loop)


def _raises(grad):
    raise Broken


def with_a_schedule(loop):
    """The next step's rate is known before its backward; one is changed after it."""
    for number in range(4):
        loop.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
        loop.backward(number)
        if number == 2:
            loop.optimizer.param_groups[0]["lr"] = 3e-3
        loop.step()


def reading_gradients(loop):
    for number in range(3):
        loop.backward(number)
        for param in loop.model.parameters():
            if param.grad is not None:
                param.grad.clone()
        loop.step()


def changing_gradients(loop):
    plain(loop)
    loop.backward(7)
    loop.model.module[1].a.weight.grad.mul_(0.5)
    loop.step()


def writing_weights(loop):
    plain(loop)
    loop.backward(7)
    with torch.no_grad():
        loop.model.module[1].a.bias.add_(0.25)
    loop.step()


def loading(loop):
    plain(loop)
    saved = loop.optimizer.state_dict()
    loop.backward(7)
    loop.step()
    loop.backward(8)
    loop.optimizer.load_state_dict(saved)
    loop.step()


def saving(loop):
    plain(loop)
    loop.backward(7)
    loop.model.state_dict()
    loop.optimizer.state_dict()
    loop.step()


def closing(loop):
    plain(loop)
    loop.backward(7)


@cache
def serial(way, homes, options):
    return run(way, "serial", homes, dict(options))[0]


def run(way, update, homes, options):
    loop = Loop(update, homes, **options)
    # what copies state to show or to follow it is host's and device's at once
    apart = contextlib.nullcontext() if way in (writing_weights, loading) else Apart(loop.backend)
    with apart, counting(loop.counts):
        way(loop)
        found = everything(loop.model, loop.optimizer)
        loop.optimizer.close()
        loop.backend.check()
    return found, loop.counts


def check(way, homes=STATE, update=SPECULATE, **options):
    expected = serial(way, homes, tuple(options.items()))
    found, counts = run(way, update, homes, options)
    assert differences(found, expected) == []
    assert counts["begun"] > 0
    assert (counts["tails"] > 0) == (update == BOTH)
    return counts


def test_a_step_without_a_clip_commits_what_backward_has_updated():
    counts = check(plain)
    assert counts["committed"] == counts["begun"]
    assert counts["otherwise"] == 0 < counts["as expected"]


def test_a_tail_commits_what_backward_has_updated_and_updates_the_rest():
    counts = check(plain, ALL, BOTH)
    assert counts["committed"] == counts["begun"] and counts["tails"] == 3


def test_a_span_is_updated_while_the_backward_of_other_layers_is_to_come():
    """Events in their order: layers whose backward is over, and updates."""
    events = []
    loop = Loop(SPECULATE)
    for i, layer in enumerate(loop.model.module):
        layer.b.weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(i))
    update = EarlySpans.update

    def updated(self, block, gradient, changes):
        update(self, block, gradient, changes)
        events.append("update")

    with Apart(loop.backend), mock.patch.object(EarlySpans, "update", updated):
        plain(loop)
        loop.optimizer.close()
    of_first, of_last = events.index(2, 1), len(events) - 1 - events[::-1].index(0)
    assert "update" in events[of_first:of_last]
    assert "update" not in events[: events.index(0)]  # the first step expects nothing


WAYS = [
    (accumulating, {}, True),
    (under_no_sync, {}, True),
    (once_more, {}, True),
    (with_overflow, {"precision": "fp16"}, True),
    (without_a_step, {}, True),
    (with_an_error, {}, True),
    (with_a_schedule, {}, True),
    (reading_gradients, {}, True),
    (changing_gradients, {}, True),
    (writing_weights, {}, True),
    (loading, {}, True),
    (saving, {}, True),
    (closing, {}, True),
    (plain, {"spare": True}, True),
    (plain, {"max_norm": 1e6}, True),
    (plain, {"max_norm": 1e-3}, False),
    (accumulating, {"max_norm": 1e-3}, False),
]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("homes", "update"),
    [(STATE, SPECULATE), (ALL, SPECULATE), (SUMS, SPECULATE), (STATE, BOTH), (SUMS, BOTH)],
    ids=["state", "all", "gradients too", "state, tail", "all and gradients, tail"],
)
@pytest.mark.parametrize(("way", "options", "counts"), WAYS)
def test_whatever_comes_between_backward_and_step_has_the_bits_of_serial_steps(
    way, options, counts, homes, update
):
    found = check(way, homes, update, **options)
    assert (found["committed"] > 0) == counts


def test_a_clip_that_bites_has_the_same_spans_updated_again():
    counts = check(plain, max_norm=1e-3)
    assert counts["as expected"] == counts["committed"] == 0 < counts["otherwise"]


@pytest.mark.ci
def test_what_a_user_changes_after_backward_is_done_again_and_nothing_else():
    every = check(saving)
    edited = check(writing_weights)
    assert 0 < edited["committed"] < edited["begun"]
    assert every["committed"] == every["begun"]


def test_streams_have_a_window_of_spans_and_the_step_has_the_rest():
    with mock.patch.object(early, "EARLY_WINDOW", 2):  # of which none leaves before the host waits
        counts = check(plain)
    assert counts["committed"] == counts["begun"] == 2 * 2


def test_a_budget_bounds_the_room_of_second_versions():
    torch.manual_seed(0)
    for budget, most in (("155KiB", 3), ("1MiB", 100)):
        module = nn.Sequential(*[SpareLayer() for _ in range(2)])
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
    assert words in when_updated(model.engine)
    optimizer.close()


def two_ranks(rank):
    found = {}
    for name, way, options in (
        ("plain", plain, {}),
        ("accumulating", accumulating, {}),
        ("clipped", plain, {"max_norm": 1e-3}),
        ("no sync", under_no_sync, {}),
    ):
        for homes, updates in ((STATE, (SPECULATE, BOTH)), (ALL, (BOTH,))):
            expected, _ = run(way, "serial", homes, options)
            for update in updates:
                early, counts = run(way, update, homes, options)
                found[name, homes, update] = (
                    differences(early, expected), counts["begun"] > 0, counts["committed"] > 0,
                )  # fmt: skip
    return found


@pytest.mark.ci
def test_two_ranks_have_the_bits_of_serial_steps():
    for found in run_ranks(two_ranks, 2, processes=True):
        for (name, *_), (wrong, begun, committed) in found.items():
            assert (wrong, begun, committed) == ([], True, name != "clipped")
