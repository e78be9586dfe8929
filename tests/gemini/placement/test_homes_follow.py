"""Homes follow what batches ask for: budgets hold whatever length comes, and bits stay the same."""

import gc
import random
import re
import warnings

import pytest
import torch

from bench.shared.models import Tower, seeded
from gemini import BudgetWarning
from gemini.memtracer.trace import ASSUMED_SIGNATURE, Trace, TraceMoment
from gemini.placement.renting import Raised, Tenancy
from gemini.placement.tiers import Tier
from gemini.runtime.schedule.iteration_plans import MAX_PLANS
from gemini.runtime.schedule.sampler import MAX_SIGNATURES
from tests.support.loops.lengths import KIB, Loop, assert_same

S, L = 4, 40  # 0.1 and 1 MiB of activations; 0.34 MiB of model data


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        yield


@pytest.mark.parametrize(
    "lengths", [(S, S, L, L, S, L), (L, L, S, S, S, S, L)], ids=["short", "long"]
)
def test_no_iteration_passes_a_budget_whatever_length_comes_and_no_bit_changes(lengths, no_warning):
    """But the first of all: nothing was measured before."""
    kib = 1250
    loop, free = (Loop(budget).train(*lengths) for budget in (kib, 1 << 20))
    assert max(free.peaks) > kib * KIB
    assert max(loop.peaks[1:]) <= kib * KIB
    assert loop.moves[0] > 0
    assert_same(loop, free)


def test_state_goes_to_disk_where_the_host_is_full(no_warning):
    lengths = (S, S, L, S, L)
    loop, free = Loop(1200, "200KiB").train(*lengths), Loop(1 << 20).train(*lengths)
    assert max(loop.peaks[1:]) <= 1200 * KIB
    plan = loop.model.engine.planning.plan
    assert plan.blocks_on(Tier.NVME) and plan.blocks_on(Tier.HOST)
    assert_same(loop, free)


@pytest.mark.parametrize(
    ("budgets", "update"), [((1250,), "tail"), ((1250, "300KiB"), "serial")], ids=["host", "disk"]
)
def test_backwards_that_add_up_and_evaluation_between_them_pass_no_budget(
    budgets, update, no_warning
):
    """Gradients that wait count, and sums in fp32 too. An overlapped step reads them where they
    waited, when their homes have changed."""
    steps = [(S, S), (S, S), (S, L), (L, S), (S, -L, S), (S, L, S), (-L, L), (L, L)]
    loop = Loop(*budgets, update=update).train(*steps)
    free = Loop(1 << 20).train(*steps)
    assert max(free.peaks) > 1250 * KIB >= max(loop.peaks[1:])
    assert loop.moves[0] > 0
    assert_same(loop, free)


def test_two_engines_on_one_device_hold_their_budgets_in_turns(no_warning):
    first = Loop(1250)
    second = Loop(1250, sim=first.sim)
    free = Loop(1 << 20).train(S, S, L, L, S, L)
    for length in (S, S, L, L, S, L):
        first.train(length)
        second.train(length)
    assert max(*first.peaks[2:], *second.peaks[2:]) <= 2 * 1250 * KIB
    assert_same(first, free)
    assert_same(second, free)


def test_what_the_host_has_no_room_for_stays_and_that_is_said():
    loop = Loop(1200, "60KiB", "1KiB").train(S, S, L)
    with pytest.warns(BudgetWarning, match=r"host_budget of 60.00 KiB is .* too small"):
        loop.train(L)
    assert loop.on_device() > 0


def test_lengths_that_take_turns_move_nothing_after_the_second_long_one():
    loop = Loop(1250).train(S, L, S, L)
    moves, peaks = loop.moves, loop.on_device()
    loop.train(S, L, S, L, S, L)
    assert loop.moves == moves and loop.on_device() == peaks


def test_homes_rise_again_where_short_batches_go_on():
    loop = Loop(1250).train(S, S)
    everything_there = loop.on_device()
    loop.train(L)
    assert loop.on_device() < everything_there
    loop.train(*[S] * 8)
    assert loop.on_device() == everything_there


def test_reports_say_what_moved_and_for_which_batch():
    loop = Loop(1250).train(S, S)
    assert str(loop.model.memory_report()).splitlines()[-1].startswith("moves 0 down, 1 up ")
    loop.train(L)
    last = r"moves 1 down .* KiB, 1 up .* KiB; the last one down for train iteration of int64"
    for text in (str(loop.model.memory_report()), loop.model.explain("head.weight")):
        assert re.search(last + r"\[40, 9\], which asks for [0-9.]+ .iB", text), text


def test_explain_has_all_that_left_with_its_batch_until_it_comes_back():
    loop = Loop(1250).train(S, S)

    def reasons():
        texts = [loop.model.explain(name) for name, _ in loop.model.named_parameters()]
        return [re.findall(r"^left: (.*)$", text, re.MULTILINE) for text in texts]

    assert not any(reasons())
    for known in ("a bound", "measured"):
        loop.train(L)
        left = reasons()
        assert sum(map(bool, left)) > 1
        asked = re.compile(rf".*B, for: train .*\[40, 9\], which asks for .*iB \({known}\)")
        assert all(asked.fullmatch(line) for lines in left for line in lines)
        loop.train(*[S] * 8)
        assert not any(reasons())


def test_constant_lengths_move_nothing_after_the_first_iteration():
    loop = Loop(1250).train(L, L)
    moves = loop.moves
    loop.train(*[L] * 8)
    assert loop.moves == moves


def test_what_fits_in_no_homes_is_said_before_its_forward():
    loop = Loop(1000).train(S, S, L)  # nobody has seen it, and what may be too much is no warning
    calls = []
    loop.model.module.register_forward_pre_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        with pytest.raises(BudgetWarning, match=r"int64\[40, 9\] needs more .* device_budget of"):
            loop.forward(L)
    assert calls == []
    assert any("checkpointing" in line for line in loop.model.memory_report().overruns)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error", BudgetWarning)
        loop.train(S, L)
    assert loop.on_device() == 0


def test_homes_that_were_refused_keep_nothing_of_an_iteration():
    """Frames of the training loop are behind those of the planner, and hold outputs."""
    gc.disable()
    try:
        loop = Loop(1000).train(S, S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            loop.train(L, L, L, S, L)
    finally:
        gc.enable()
    assert len({loop.peaks[i] for i in (2, 3, 4, 6)}) == 1


def test_nothing_grows_with_the_number_of_lengths(no_warning):
    loop = Loop(1000).train(S, *range(5, 5 + MAX_SIGNATURES + 4))
    engine = loop.model.engine
    assert len(engine.sampler.collector.traces) == MAX_SIGNATURES
    assert 0 < len(engine.planning.others) <= MAX_PLANS
    assert max(loop.peaks) <= 1000 * KIB
    longest = max(t.peak_non_model_bytes for t in engine.sampler.traces())
    loop.train(*[S, 5, 6] * 8, *range(3, 3 + MAX_SIGNATURES))
    assert longest == max(t.peak_non_model_bytes for t in engine.sampler.traces())


# -- a device without memory --


class Dropping(Tower):
    def forward(self, ids):
        return super().forward(ids * (torch.rand(ids.shape) > 0.3))


def exhausted_at(loop, count):
    """Let the operator that makes the `count`-th storage of the next forward find no memory."""
    pages = loop.sim.pages
    made, left = pages.operator_made, [count]

    def operator_made(tensor):
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("no memory")
        made(tensor)

    pages.operator_made = operator_made
    return left


@pytest.mark.parametrize("first", [2, 9, 30, 50])
def test_a_forward_that_finds_no_memory_is_tried_again_with_the_same_bits(first):
    with seeded():
        free = Loop(1 << 20, module=Dropping()).train(S, S, S)
    with seeded():
        loop = Loop(1 << 20, module=Dropping()).train(S)
        left = exhausted_at(loop, first)
        loop.train(S)
        assert left[0] < 0 and loop.moves[0] == 1
        loop.train(S)
    assert_same(loop, free)


def test_a_forward_is_not_tried_again_where_it_changed_buffers_or_a_graph_is_open():
    class Counts(Tower):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, ids):
            self.count += 1
            return super().forward(ids)

    loop = Loop(1 << 20, module=Counts()).train(S)
    exhausted_at(loop, 20)
    with pytest.raises(torch.OutOfMemoryError) as info:
        loop.forward(S)
    assert "changed buffers" in info.value.__notes__[0]
    loop = Loop(1 << 20).train(S)
    loss = loop.forward(S)
    exhausted_at(loop, 20)
    with pytest.raises(torch.OutOfMemoryError) as info:
        loop.forward(S)
    assert "waits for its backward" in info.value.__notes__[0]
    assert loop.moves[0] == 0 and loss.requires_grad


# -- renting against buying --

UNITS = 16  # of state that may have to be away; each costs 2 in every step, and a move of it 1


def level_of(length):
    return max(0, min(UNITS, round((length - 512) * UNITS / 3584)))


def drawn(name):
    generator = random.Random(0)

    def one():
        return min(4096, max(32, int(generator.lognormvariate(5.7, 0.9))))

    return {
        "drawn": [one() for _ in range(800)],
        "longest of 8": [max(one() for _ in range(8)) for _ in range(800)],
        "by turns": [256, 4096] * 400,
        "one in 50": [4096 if i % 50 == 49 else 256 for i in range(800)],
        "bursts": [4096 if (i // 20) % 5 == 4 else 256 for i in range(800)],
        "ever longer": [256 + 4 * i for i in range(800)],
        "one in all": [256] * 400 + [4096] + [256] * 399,
    }[name]


def best(levels):
    """Cost of the best moves of all, by one who knows what comes."""
    costs = {0: 0}
    for need in levels:
        costs = {
            away: min(cost + abs(away - before) for before, cost in costs.items()) + 2 * away
            for away in range(need, UNITS + 1)
        }
    return min(costs.values())


@pytest.mark.parametrize("name", ["drawn", "longest of 8", "by turns", "one in 50", "bursts",
                                  "ever longer", "one in all"])  # fmt: skip
def test_moves_and_streams_cost_at_most_twice_what_the_best_would(name):
    levels = [level_of(length) for length in drawn(name)]
    tenancy, away, cost = Tenancy(), 0, 0
    for need in levels:
        moment = TraceMoment("forward", "enter", "", (), need)
        tenancy.note(Trace("train", ASSUMED_SIGNATURE, "", (moment,)))
        if need > away:
            cost, away = cost + need - away, need
            tenancy.end()
        cost += 2 * away

        def raised(trace, away=away):
            risen = away - trace.peak_non_model_bytes
            return Raised(trace, None, 2 * risen, 2 * risen) if risen > 0 else None

        found = tenancy.what_pays(raised)
        if found is not None:
            now = found.inputs.peak_non_model_bytes
            cost, away = cost + away - now, now
            tenancy.end()
    assert cost <= 2 * best(levels)
