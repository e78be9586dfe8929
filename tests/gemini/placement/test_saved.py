"""Plans in which bytes saved for backward leave the device: one problem with the homes of state."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement import draft
from gemini.placement.cost import bounds
from gemini.placement.draft import Draft
from gemini.placement.plan import MoveKind, SavedHomes, UpdatePath
from gemini.placement.planner import PlanInputs, make_plan, plan_within
from gemini.placement.policy import AutoPlacement
from gemini.placement.problem import Homes
from gemini.placement.saved import Spilling
from gemini.placement.sizes import Bandwidths, BudgetError, Budgets, StateBytes
from gemini.placement.tiers import Tier
from gemini.placement.timetable.steps import num_uses

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
BLOCK = 512
POLICY = AutoPlacement(steady_cap_ratio=1.0)


def traced(specs, saved, rest):
    """Each module saves its bytes in forward; its backward lets go of them, and works with them."""
    trace = sequential_trace(specs)
    there, moments = 0, []
    owed = dict(zip(dict.fromkeys(m.module for m in trace.moments), saved, strict=True))
    for moment in trace.moments:
        nbytes, forward = owed[moment.module], moment.phase == "forward"
        if moment.edge == "enter" and not forward:
            there -= nbytes
        at_work = nbytes if moment.edge == "enter" else 0
        moments.append(
            replace(
                moment, saved_bytes=there, non_model_bytes=there + at_work + rest,
                seconds=nbytes * (1 + (not forward)) * 1e-9 if moment.edge == "enter" else 0.0,
            )
        )  # fmt: skip
        if moment.edge == "enter" and forward:
            there += nbytes
    return replace(trace, moments=tuple(moments))


@cache
def drawn(seed):
    """Inputs of a small mixed problem: equal blocks of state, layers that save much or little,
    links that are slow or fast, with a host tier or without."""
    r = random.Random(seed)
    layers, even = r.randint(2, 4), r.random() < 0.5
    specs = [ParamSpec(f"m{i}.p", (2 * BLOCK,), "bfloat16") for i in range(layers)]
    unit = r.randint(2000, 20_000)
    saved = [unit if even else r.randint(100, 2 * unit) for _ in specs]
    layout = ChunkLayout.build(specs, 2 * BLOCK * r.choice([1, 2, layers]))
    has_host = r.random() < 0.6
    speed = 1e9 * r.choice([0.3, 1.0, 3.0])
    disk = speed * r.uniform(0.1, 0.7)
    links = Bandwidths(speed, speed, disk, disk, 1e12, 1e12, 1e10, 1e12)
    inputs = PlanInputs(
        layout=layout, trace=traced(specs, saved, r.randint(0, unit)), state=StateBytes(12, True),
        bandwidths=links, has_host_tier=has_host, depth=1, max_prefetch=0, block_numel=BLOCK,
        off_device=UpdatePath.STREAM,
        fixed_params=tuple(D for _ in layout.chunks),
        spilling=Spilling(
            *(r.choice([0, 500, 1500]) for _ in range(3)),
            has_files=not has_host or r.random() < 0.6,
        ),
    )  # fmt: skip
    whole = make_plan(replace(inputs, spilling=None), POLICY).profile.peak(D)
    state = 2 * 12 * BLOCK * layers
    budget = whole - round((sum(saved) + state) * r.uniform(0.02, 0.6))
    host = round((sum(saved) + state) * r.choice([0.2, 0.5, 1.0, 9.0])) + 20_000
    inputs = replace(inputs, budgets=Budgets(budget, host, 1 << 30))
    try:
        Draft(inputs, POLICY).choose_homes()
    except BudgetError as error:  # most problems have an answer
        more = round(error.missing_bytes * r.uniform(0.9, 2))
        inputs = replace(inputs, budgets=inputs.budgets.with_more(error.tier, more))
    return inputs


def seconds(made, homes):
    """Price by which homes are chosen."""
    uses, before = num_uses(made.needs, len(made.problem.chunks)), made.problem.backward
    compute = made.compute
    return sum(
        bounds(homes, made.problem, uses, sum(compute), made.reductions, sum(compute[:before]))
    )


def best_of_all(inputs):
    """Least price of all homes that fit, with the most saved bytes that each leaves room for: found
    by trying, as room for more is room for fewer."""
    made, plain = Draft(inputs, POLICY), Draft(replace(inputs, budgets=Budgets()), POLICY)
    spilling, saved = inputs.spilling, made.saved_bytes
    chunks, most = made.problem.chunks, max(saved)
    blocks = [(c.id, b) for c in chunks for b in range(len(c.blocks))]
    tiers = (D, H, N) if inputs.has_host_tier else (D, N)
    # every plan leaves room for the buffers of the lowest homes, or has all on the device
    lowest = made.problem.staging(made.problem.lowest(made.problem.below()))[0].nbytes
    best = None
    for count in product(range(len(blocks) + 1), repeat=len(tiers) - 1):
        if sum(count) > len(blocks):
            continue
        order = [t for t, n in zip(tiers[1:], count, strict=True) for _ in range(n)]
        order = [*sorted(order, key=tiers.index, reverse=True)] + [D] * (len(blocks) - sum(count))
        for grads in product((D, tiers[1]), repeat=len(chunks)):
            homes = Homes.all_on(D, chunks)
            homes.grad = list(grads)
            for (chunk, block), tier in zip(blocks, order, strict=True):
                homes.state[chunk][block] = tier
            if any(g is N and set(s) != {N} for g, s in zip(grads, homes.state, strict=True)):
                continue  # what is updated in memory has no gradient in a file
            homes.device_staging, homes.host_staging = made.problem.staging(homes)
            result = plain.finish(homes)
            if not fits(result, inputs, (H, N)):
                continue
            some_leave = {*order, *grads} != {D}
            more = lowest - homes.device_staging.nbytes if some_leave else 0
            peak = result.profile.peak(D)
            if peak + more > inputs.budgets.device:
                ram = 0 if inputs.has_host_tier else spilling.staging_bytes
                totals = [n + ram for n in result.profile.total(D)]
                whole = [*saved, saved[-1], 0]

                def holds(room, more=0, totals=totals, whole=whole):
                    return all(
                        total + more - s + min(s, room) <= inputs.budgets.device
                        for total, s in zip(totals, whole, strict=True)
                    )

                if not holds(spilling.least_room, more):
                    continue
                low, high = spilling.least_room, most
                while low < high:
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if holds(middle) else (low, middle - 1)
                left = inputs.budgets.host - result.profile.peak(H) - spilling.staging_bytes
                if inputs.has_host_tier and left < 0:
                    continue
                if peak > inputs.budgets.device:
                    if not spilling.has_files and most - low + spilling.in_flight_bytes > left:
                        continue
                    left = left if inputs.has_host_tier else 0
                    homes.saved = spilling.homes(low, most, left)
            price = seconds(made, homes)
            if best is None or price < best[0]:
                best = price, homes
    return best


def fits(result, inputs, tiers):
    return all(result.profile.peak(tier) <= inputs.budgets.of(tier) for tier in tiers)


@pytest.mark.parametrize("seed", range(100))
def test_a_plan_is_as_short_as_the_best_of_all(seed):
    inputs = drawn(seed)
    best = best_of_all(inputs)
    try:
        made = Draft(inputs, POLICY)
        homes = made.choose_homes()
    except BudgetError:
        assert best is None
        return
    assert best is not None
    assert seconds(made, homes) == pytest.approx(best[0], rel=1e-9), (homes, best[1])


@cache
def planned(seed):
    try:
        policy = AutoPlacement(steady_cap_ratio=0.9) if seed % 2 else POLICY
        return (inputs := drawn(seed)), make_plan(inputs, policy)
    except BudgetError:
        return inputs, None


@pytest.mark.parametrize("seed", range(100))
def test_a_plan_holds_its_budgets_at_every_moment_and_its_moves_bring_back_what_leaves(seed):
    inputs, result = planned(seed)
    if result is None:
        return
    plan, budgets, moments = result.plan, inputs.budgets, inputs.trace.moments
    assert all(max(result.profile.total(t)) <= budgets.of(t) for t in (D, H, N))
    moves = [move for move in plan.forecast.moves if move.chunk is None]
    assert all(move.kind is MoveKind.SAVED and move.block is None for move in moves)
    saved = plan.saved
    if saved is None:
        assert not moves and result.profile.rows[D, "non-model"][: len(moments)] == tuple(
            m.non_model_bytes for m in moments
        )
        return
    most = inputs.trace.peak_saved_bytes
    assert saved.host_bytes + saved.nvme_bytes == most - saved.kept_bytes > 0
    assert inputs.spilling.has_files or not saved.nvme_bytes
    out, back = Counter(), Counter()
    for move in moves:
        (out if move.src is D else back)[move.dst if move.src is D else move.src] += move.nbytes
        assert (moments[move.begin].phase == "forward") == (move.src is D)
    wanted = {t: n for t, n in ((H, saved.host_bytes), (N, saved.nvme_bytes)) if n}
    assert out == back == wanted
    # carried out: what is on the device, with what comes early and what has not left yet
    here = 0
    for i, moment in enumerate(moments):
        there = moment.saved_bytes
        gone = sum(m.nbytes for m in moves if m.src is D and m.end <= i)
        come = sum(m.nbytes for m in moves if m.dst is D and m.begin <= i)
        late = sum(m.nbytes for m in moves if m.dst is D and m.end > i)
        here = (
            there - gone + come
            if moment.phase == "forward"
            else there - (most - saved.kept_bytes - come)
        )
        assert here <= max(saved.room_bytes, saved.returns_within), i
        if moment.phase == "backward":  # what the period reads is there
            assert late <= there
    assert replace(plan).digest() == plan.digest()
    assert replace(plan, saved=None).digest() != plan.digest()


def test_where_all_fits_nothing_leaves_and_the_plan_is_the_same():
    for seed in range(40):
        inputs = drawn(seed)
        inputs = replace(inputs, budgets=Budgets(1 << 20, 1 << 20, 1 << 20))
        kept = make_plan(replace(inputs, spilling=None), POLICY)
        found = make_plan(inputs, POLICY)
        assert found.plan == kept.plan and found.plan.digest() == kept.plan.digest()
        assert found.plan.saved is None and found.cost.seconds == kept.cost.seconds


def test_a_plan_that_may_spill_is_no_longer_than_one_that_may_not():
    better = 0
    for seed in range(100):
        inputs = drawn(seed)
        try:
            kept = Draft(replace(inputs, spilling=None), POLICY)
            homes = kept.choose_homes()
        except BudgetError:
            continue
        both = Draft(inputs, POLICY)
        mine = seconds(both, both.choose_homes())
        assert mine <= seconds(kept, homes)
        better += mine < seconds(kept, homes)
    assert better > 10


def test_homes_are_filled_so_often_and_no_more(monkeypatch):
    """Once for each order where nothing may leave; else beside three rooms, with the host for
    saved bytes or for model data first, and then in the best of these ways twice a round."""
    counts = []
    fill = draft.fill
    monkeypatch.setattr(draft, "fill", lambda *a: counts.append(1) or fill(*a))
    for seed in range(20):
        inputs = drawn(seed)
        for spilling, most in ((None, 6), (inputs.spilling, 6 + 3 * 2 * 6 + 2 * 6)):
            counts.clear()
            with suppress(BudgetError):
                Draft(replace(inputs, spilling=spilling), POLICY).choose_homes()
            assert len(counts) <= 2 * most  # with the cap and without


def test_an_iteration_that_saves_more_keeps_its_homes_and_lets_some_leave():
    inputs, result = planned(
        next(s for s in range(100) if planned(s)[1] and not drawn(s).has_host_tier)
    )
    more = replace(
        inputs.trace,
        moments=tuple(
            replace(
                m, saved_bytes=2 * m.saved_bytes, non_model_bytes=m.non_model_bytes + m.saved_bytes
            )
            for m in inputs.trace.moments
        ),
    )
    found = plan_within(result.plan, replace(inputs, trace=more), POLICY)
    assert [s.state_homes for s in found.plan.shards] == [s.state_homes for s in result.plan.shards]
    assert found.plan.saved.nvme_bytes > more.peak_saved_bytes // 2
    assert max(found.profile.total(D)) <= inputs.budgets.device
    with pytest.raises(BudgetError):
        plan_within(result.plan, replace(inputs, trace=more, spilling=None), POLICY)
    less = replace(
        inputs.trace,
        moments=tuple(replace(m, saved_bytes=0, non_model_bytes=0) for m in more.moments),
    )
    assert plan_within(result.plan, replace(inputs, trace=less), POLICY).plan.saved is None


def test_a_phase_takes_as_long_as_its_computation_or_what_leaves_in_it():
    """Worked out by hand: 8000 bytes leave for the host at 1000 a second, and 2000 for a file at
    500; forward computes for 5 seconds and backward for 20, in which they come back."""
    inputs = drawn(0)
    links = Bandwidths(1000.0, 1000.0, 500.0, 500.0, 1e12, 1e12, 1e12, 1e12)
    inputs = replace(inputs, bandwidths=links, has_host_tier=True, budgets=Budgets())
    made = Draft(inputs, POLICY)
    homes = Homes.all_on(D, made.problem.chunks)
    kept = bounds(homes, made.problem, [0] * 9, 25.0, {}, 5.0)
    homes.saved = SavedHomes(0, 0, 8000, 2000)
    least, most = bounds(homes, made.problem, [0] * 9, 25.0, {}, 5.0)
    assert kept == (25.0, 25.0)
    assert least == 10.0 + 20.0  # all 10 000 bytes pass the link to the host
    assert most == 25.0 + 2 * (10.0 + 4.0)
