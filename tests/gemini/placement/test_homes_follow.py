"""Homes follow what batches ask for: budgets hold whatever length comes, and bits stay the same."""

import errno
import gc
import random
import re
import signal
import warnings

import pytest
import torch
from torch import nn

import nvme
from bench.shared.models import Tower, seeded
from gemini import EMA, BudgetWarning, load_checkpoint, save_checkpoint, trace
from gemini.memtracer.forecast import with_bytes_added
from gemini.memtracer.trace import ASSUMED_SIGNATURE, Trace, TraceMoment
from gemini.placement.renting import Raised, Tenancy
from gemini.placement.tiers import Tier
from gemini.runtime.schedule.iteration_plans import MAX_PLANS
from gemini.runtime.schedule.sampler import MAX_SIGNATURES
from optim.state.slabs import Slab
from optim.state.tiered_state import TieredState
from tests.support.checkpoints import everything
from tests.support.disks.faults import failing
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


@pytest.fixture
def demoted(monkeypatch):
    """Bytes that each move down wrote, and by how many a step over the disk writes more since."""
    found, demote = [], TieredState.demote

    def step_bytes(state):
        return 0 if state.nvme is None else state.nvme.written_bytes_per_step

    def counted(state, **homes):
        written, before = state.nvme_written_total, step_bytes(state)
        demote(state, **homes)
        found.append((state.nvme_written_total - written, step_bytes(state) - before))

    monkeypatch.setattr(TieredState, "demote", counted)
    return found


def test_state_goes_to_disk_where_the_host_is_full_and_only_what_goes_is_written(
    no_warning, demoted
):
    lengths = (S, S, 32, 36, L, S)
    loop, free = Loop(1200, "120KiB").train(*lengths), Loop(1 << 20).train(*lengths)
    assert max(loop.peaks[1:]) <= 1200 * KIB
    assert loop.model.engine.planning.plan.blocks_on(Tier.NVME)
    assert_same(loop, free)
    assert len([came for _, came in demoted if came]) > 1
    assert all(written == came for written, came in demoted)


@pytest.mark.parametrize("call", ["allocate", "pwritev", "fdatasync"])
def test_a_move_to_disk_that_fails_has_moved_nothing(call):
    """The first, which makes the file, and one that comes to others in it."""
    loop, free = Loop(1200, "100KiB").train(S, 32), Loop(1 << 20).train(S, 32)
    for length in (36, L):
        before, moves = loop.model.engine.ledger.totals(), loop.moves
        with failing(call, errno.ENOSPC) as failed, pytest.raises(nvme.NvmeError):
            loop.forward(length)
        assert failed and (loop.model.engine.ledger.totals(), loop.moves) == (before, moves)
        free.ids(length)
        loop.train(length)
        free.train(length)
    assert_same(loop, free)


def test_ctrl_c_in_a_move_comes_when_all_has_moved(monkeypatch):
    loop, free = Loop(1200, "100KiB").train(S, 32), Loop(1 << 20).train(S, 32)
    keep = Slab.keep

    def interrupted(slab, blocks):
        signal.raise_signal(signal.SIGINT)
        keep(slab, blocks)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Slab, "keep", interrupted)
        loop.forward(36)
    assert loop.moves[0] == 1
    free.ids(36)
    assert_same(loop.train(36), free.train(36))


@pytest.mark.parametrize(
    ("budgets", "update"),
    [((1250,), "tail"), ((1250, "300KiB"), "serial")],
    ids=["host", "disk"],
)
def test_backwards_that_add_up_and_evaluation_between_them_pass_no_budget(
    budgets, update, no_warning
):
    """Gradients that wait count, and sums in fp32 too; an overlapped step reads where they are."""
    steps = [(S, S), (S, S), (S, L), (L, S), (S, -L, S), (S, L, S), (-L, L), (L, L), S]
    loop, free = Loop(*budgets, update=update).train(*steps), Loop(1 << 20).train(*steps)
    assert max(free.peaks) > 1250 * KIB >= max(loop.peaks[1:])
    assert loop.moves[0] > 0
    assert_same(loop, free)


def test_gradients_that_an_overlapped_step_reads_stay_until_it_has_ended():
    """Homes went down beside gradients that waited, which have others since they were dropped."""
    steps = [(22,), (3, 22), (10,)]
    with warnings.catch_warnings():  # the host has no room for sums in fp32
        warnings.simplefilter("ignore", BudgetWarning)
        loop = Loop(778, "120KiB", update="tail").train(*steps)
    assert_same(loop, Loop(1 << 20).train(*steps))


def test_gradients_that_a_slow_tail_still_reads_move_no_homes():
    """They leave as the forward asks for their chunks: no gradients wait for another backward."""
    loop = Loop(1250, update="tail").train(L, L)
    engine, moves = loop.model.engine, loop.moves
    engine.ledger.hold(lambda: 300 * KIB)
    engine.sampler.begin((loop.ids(L),), again=False)
    engine.homes.before_forward()
    assert engine.homes.waiting_bytes() == 0
    assert loop.moves == moves
    engine.ledger.hold(lambda: 0)
    loop.optimizer.close()


def test_an_average_and_a_save_that_is_under_way_as_homes_move_keep_budgets_and_bits(
    tmp_path, no_warning
):
    """An average in host memory takes nothing of the device."""
    loop, free = Loop(1200, "260KiB"), Loop(1 << 20)
    loop.train(S, S), free.train(S, S)
    saved = everything(loop.model, loop.optimizer)
    ticket = save_checkpoint(tmp_path / "a", loop.model, loop.optimizer, async_save=True)
    averages = [EMA(one.model, decay=0.5) for one in (loop, free)]
    for length in (L, S, L):
        for one, average in zip((loop, free), averages, strict=True):
            one.train(length)
            with one.sim.running():
                average.update()
    ticket.wait()
    assert loop.moves[0] > 0 and loop.model.engine.planning.plan.blocks_on(Tier.NVME)
    assert max(loop.peaks[1:]) <= 1200 * KIB < max(free.peaks)
    assert_same(loop, free)
    for one, average in zip((loop, free), averages, strict=True):
        with average.swapped():
            one.weights = {n: v.clone() for n, v in one.model.state_dict().items()}
    assert all(torch.equal(v, free.weights[n]) for n, v in loop.weights.items())
    load_checkpoint(tmp_path / "a", loop.model, loop.optimizer)
    again = everything(loop.model, loop.optimizer)["runs"]
    assert all(torch.equal(values, again[name]) for name, values in saved["runs"].items())


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


def test_a_batch_that_a_trace_came_for_needs_no_bound_of_a_shorter_one(no_warning):
    """Its homes have room for it, so nothing moves, whatever came first."""

    def loss(logits):
        targets = torch.zeros(8 * L, dtype=torch.int64)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)

    given = trace(Tower(), (torch.zeros(L, 9, dtype=torch.int64),), loss=loss)
    loop, free = (Loop(kib, trace=given).train(S, L, S, L) for kib in (1250, 1 << 20))
    assert loop.moves == (0, 0)
    assert max(loop.peaks) <= 1250 * KIB
    assert_same(loop, free)


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


@pytest.mark.parametrize("kib", [1250, 1 << 20], ids=["limited", "unlimited"])
def test_the_report_has_predicted_beside_measured_bytes_of_evaluation_and_decoding(kib):
    loop = Loop(kib).train(S, (-S, -6 * L, S))
    with torch.no_grad(), loop.sim.running():
        for length in (S, L):
            loop.model(loop.ids(length)[:, :1])
    loop.train(S)
    report = loop.model.memory_report()
    evaluation, decode = report.evaluations
    assert (evaluation.kind, decode.kind) == ("evaluation", "decode")
    assert decode.measured_bytes < evaluation.measured_bytes
    for row in report.evaluations:
        assert 0 < row.measured_bytes <= row.predicted_bytes
        assert report.as_dict()[f"{row.kind}_predicted_bytes"] == row.predicted_bytes
        assert row.kind in str(report)


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


class Lengthening(Loop):
    """Lengths are of the second size, by whose square a bound grows, and memory by less."""

    def ids(self, length):
        return torch.randint(97, (4, length), generator=self.generator)


def test_a_bound_that_fits_nowhere_keeps_nothing_where_it_lacks_room(no_warning):
    """The bound is 16 MiB, and what comes fits in the lowest homes alone, beside what its calls
    need."""
    kib, lengths = 940, (4, 80, 80)
    loop = Lengthening(kib, "3MiB", released=True).train(*lengths)
    assert max(loop.peaks) <= kib * KIB
    assert {shard.param_home for shard in loop.model.engine.planning.plan.shards} == {Tier.HOST}
    assert_same(loop, Lengthening(1 << 20, released=True).train(*lengths))


@pytest.mark.parametrize("where", ["", "head"], ids=["before its first call", "behind others"])
def test_a_forward_that_raised_is_no_measurement(where):
    loop = Loop(1250).train(S)
    module = loop.model.module.get_submodule(where)
    hook = module.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.forward(L)
    hook.remove()
    loop.train(S)
    assert not any(f"[{L}, 9]" in trace.signature for trace in loop.model.engine.sampler.traces())


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


class Small(nn.Module):
    """Dropout, and at the end statistics in a buffer or not."""

    def __init__(self, counts=False):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(97, 8), nn.Linear(8, 8), nn.Linear(8, 97)
        self.register_buffer("count", torch.zeros(1) if counts else None)

    def forward(self, ids):
        x = self.body(nn.functional.dropout(self.embed(ids), 0.3))
        if self.count is not None:
            self.count += 1
        return self.head(x)


class Exhausted:
    """A device on which the `left`-th storage that the next forward makes finds no memory."""

    def __init__(self, loop):
        self._engine, self._made, self.left = loop.model.engine, loop.sim.pages.operator_made, 0
        loop.sim.pages.operator_made = self._operator_made

    def _operator_made(self, tensor):
        if self._engine.passes.depth and torch.is_grad_enabled():
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("no memory")
        self._made(tensor)


def raised_at_every_allocation(loop, iterations):
    """Train so often; in the n-th iteration the n-th allocation of the forward raises. Returns
    how many did, and notes of what could not be tried again."""
    planning, device = loop.model.engine.planning, Exhausted(loop)
    notes = []
    for n in range(1, iterations + 1):
        nothing = with_bytes_added(planning.inputs.trace, -(1 << 30))
        higher = planning.raised(nothing)
        if higher is not None:
            loop.model.engine.homes.promote_homes(higher.result, higher.inputs)
        device.left = n
        try:
            loop.train(S)
        except torch.OutOfMemoryError as error:
            notes += error.__notes__
        if device.left > 0:
            return n - 1, notes
    raise AssertionError("a forward makes more")


def test_each_allocation_of_a_forward_raises_once_and_no_bit_changes():
    with seeded():
        loop = Loop(1 << 20, module=Small()).train(S)
        num, notes = raised_at_every_allocation(loop, 40)
    assert num > 6 and notes == []
    assert loop.moves[0] == num
    with seeded():
        assert_same(loop, Loop(1 << 20, module=Small()).train(*[S] * (num + 2)))


def test_a_forward_is_tried_again_only_before_it_changes_a_buffer():
    loop = Loop(1 << 20, module=Small(counts=True)).train(S)
    num, notes = raised_at_every_allocation(loop, 40)
    assert 0 < len(notes) < num and loop.moves[0] == num - len(notes)
    assert all("changed buffers" in note for note in notes)


def test_a_forward_is_not_tried_again_where_its_inputs_have_changed_or_a_graph_is_open(monkeypatch):
    class Shifts(Small):
        def forward(self, ids):
            return super().forward(ids.add_(1).remainder_(97))

    loop = Loop(1 << 20, module=Shifts()).train(S)
    device = Exhausted(loop)

    def note():
        device.left = 5
        with pytest.raises(torch.OutOfMemoryError) as info:
            loop.forward(S)
        return info.value.__notes__[0]

    assert "changed its inputs" in note()
    assert "changed its inputs" in note()  # a graph that nobody has is not open
    loss = loop.forward(S)
    assert "waits for its backward" in note()

    def has_another_rank(*_):
        monkeypatch.setattr(loop.model.engine.comm, "world_size", 2)

    loop.model.module.embed.register_forward_pre_hook(has_another_rank)
    assert "other ranks are in the same one" in note()
    assert loop.moves[0] == 0 and loss.requires_grad


# -- what only the middle of a forward shows --


class Widening(nn.Module):
    """A block whose activations do not follow from shapes."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.times = inner, 0

    def forward(self, x):
        x = self.inner(x)
        for _ in range(self.times):
            x = x + x.sin() * 1e-3
        return x


class Wide(Tower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(Widening, self.layers))


def widened(kib, **options):
    """A loop whose activations triple in some iterations; peaks of those, and the most that one
    call has added."""
    loop = Loop(kib, module=Wide(), **options)
    peaks = []
    for times in (0, 0, 0, 8, 0, 8, 8):
        for layer in loop.model.module.layers:
            layer.times = times
        loop.train(8)
        peaks += [loop.peaks[-1]] if times else []
    return loop, peaks, loop.model.engine.calls.midway.most_bytes


@pytest.mark.parametrize("update", ["serial", "tail"])
def test_activations_that_triple_by_values_pass_a_budget_once_by_one_call(update, no_warning):
    free, wide, most = widened(1 << 20)
    loop, peaks, _ = widened(480, update=update)
    assert wide[0] > 480 * KIB + 2 * most
    assert peaks[0] <= 480 * KIB + most
    assert max(peaks[1:]) <= 480 * KIB
    assert_same(loop, free)
    assert "as its forward was under way" in str(loop.model.memory_report())


def test_loss_and_backward_grow_as_a_forward_did_that_nothing_foresaw(monkeypatch, no_warning):
    monkeypatch.setattr("gemini.runtime.schedule.sampler.bound", lambda *_: None)
    loop, free = (Loop(kib).train(S, S, L, S, L) for kib in (1250, 1 << 20))
    assert free.peaks[2] > 1250 * KIB
    assert max(loop.peaks[1:]) <= 1250 * KIB
    assert_same(loop, free)
    assert "as its backward was under way" in str(loop.model.memory_report())


# -- renting against buying --

UNITS = 16  # of state that may have to be away; each costs 2 in every step, and a move of it 1


def level_of(length):
    return max(0, min(UNITS, round((length - 512) * UNITS / 3584)))


def test_homes_rise_once_the_last_iterations_would_have_saved_more_than_the_moves_take():
    moment = TraceMoment("forward", "enter", "", (), 256)
    tenancy, rises = Tenancy(), []
    for _ in range(8):
        tenancy.note(Trace("train", ASSUMED_SIGNATURE, "", (moment,)))
        found = tenancy.what_pays(lambda trace: Raised(trace, None, 1.0, 4.0))
        rises.append(found is not None)
    assert rises.index(True) == 3


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
