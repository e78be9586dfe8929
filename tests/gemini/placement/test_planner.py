"""Plans, carried out by a simple executor that counts bytes on its own."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.docs.doc_tables import placement_example
from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.comm.communicator import Communicator
from gemini.memtracer.trace import (
    Trace,
    TraceMoment,
    model_digest,
    reduce_traces,
    sequential_trace,
)
from gemini.placement import draft
from gemini.placement.homes.budget_fill import fill
from gemini.placement.plan import MoveKind, UpdatePath
from gemini.placement.planner import PlanInputs, make_plan, plan_above, plan_within
from gemini.placement.policy import AutoPlacement, ConstPlacement, StaticPlacement, never_released
from gemini.placement.problem import step_order
from gemini.placement.sizes import (
    Bandwidths,
    BudgetError,
    Budgets,
    StateBytes,
    least_bandwidths,
    least_budgets,
)
from gemini.placement.tiers import Tier
from gemini.placement.timetable.clock import StepClock, Work
from gemini.placement.timetable.steps import num_uses
from gemini.placement.timetable.updates import SERIAL
from gemini.runtime.schedule.planning import Planning
from tests.support.priced import READ, TEN, WRITE, asked

ADAM = StateBytes(12, True)
LINKS = Bandwidths(25e9, 25e9, 5e9, 3e9, 50e9, 1.6e12, 60e9, 300e12)
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME


@st.composite
def inputs(draw):
    """A small model, some of it in a sharding group of its own, a trace of it with a reused module,
    and budgets that may be short."""
    numels = draw(st.lists(st.integers(1, 3000), min_size=1, max_size=8))
    specs = [
        ParamSpec(
            f"m{i // 2}.p{i}", (n,), "bfloat16", trainable=draw(st.integers(0, 4)) > 0,
            group="ep" if draw(st.integers(0, 3)) == 3 else "world",
        )
        for i, n in enumerate(numels)
    ]  # fmt: skip
    shards = {group: draw(st.sampled_from([1, 2, 3])) for group in ("world", "ep")}
    layout = ChunkLayout.build(specs, draw(st.integers(64, 4000)), shards)
    kind = draw(st.sampled_from(["train", "train", "eval"]))
    trace = sequential_trace(specs, kind=kind)
    moments = list(trace.moments)
    if draw(st.booleans()):  # a module used again at the end of the forward
        first = moments[:2]
        half = sum(m.phase == "forward" for m in moments)
        moments[half:half] = first
    moments = [replace(m, non_model_bytes=draw(st.integers(0, 20_000))) for m in moments]
    model_bytes = sum(numels) * 16 // layout.world_size + 20_000

    def budget(low):
        return round(model_bytes * draw(st.floats(low, 1.5)))

    return PlanInputs(
        layout=layout,
        trace=replace(trace, moments=tuple(moments)),
        state=draw(st.sampled_from([ADAM, StateBytes(8, False), StateBytes(0, False)])),
        budgets=Budgets(budget(0.3), budget(0.0), budget(0.5) * 3 + 70_000),
        bandwidths=LINKS,
        has_host_tier=draw(st.booleans()),
        depth=draw(st.integers(1, 2)),
        max_prefetch=draw(st.integers(0, 2)),
        nvme_state_frac=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        block_numel=512,
        flops=draw(st.sampled_from([0.0, 1e9, 1e10])),
    )


@dataclass
class Row:
    """What a plan asks for at one moment. First what gives memory back, then what takes it."""

    wait: list = field(default_factory=list)  # moves begun before
    release: list = field(default_factory=list)  # payloads to free
    reduced: list = field(default_factory=list)  # gradient buffers to free
    reduce: list = field(default_factory=list)  # no more gradients come
    begin: list = field(default_factory=list)  # moves
    gather: list = field(default_factory=list)
    wait_now: list = field(default_factory=list)  # moves begun and needed at this moment


def agenda(plan):
    """By moment; the last is the end of the iteration."""
    rows = [Row() for _ in range(plan.num_moments + 1)]
    for move in plan.forecast.moves:
        rows[move.begin].begin.append(move)
        (rows[move.end].wait_now if move.begin == move.end else rows[move.end].wait).append(move)
    total = plan.num_trace_moments
    for gather in plan.gathers:
        rows[gather.begin].gather.append(gather)
        wraps = gather.release > total
        rows[gather.release - total if wraps else gather.release].release.append(gather.chunk)
    for reduction in plan.forecast.reductions:
        rows[reduction.last].reduce.append(reduction.chunk)
        rows[reduction.end].reduced.append(reduction.chunk)
    return rows


def needs_gather(plan, chunk):
    """Whether its payload is another thing than its shard."""
    return plan.chunks[chunk].num_shards > 1 or plan.shards[chunk].param_home is not D


def carry_out(inputs, plan):
    """Follow the plan through two iterations, as an executor would, and count on its own.

    Returns the most bytes at once on the device. Payloads, buffers and gradients are allocated when
    the plan begins them and freed when it says so; nothing is used that is not there.
    """
    persisting = plan.device_staging.nbytes
    if not plan.has_host_tier:
        persisting += plan.host_staging.nbytes
    for sizes, shard in zip(plan.chunks, plan.shards, strict=True):
        persisting += sizes.shard_bytes * (shard.param_home is D)
        persisting += sizes.payload_bytes * (shard.never_released and needs_gather(plan, sizes.id))
        for block, home in zip(sizes.blocks, shard.state_homes, strict=True):
            persisting += block.state_bytes * (home is D)
    needs = inputs.trace.chunk_needs(inputs.layout.chunk_of())
    first = {r.chunk: r.first for r in plan.forecast.reductions}
    payloads, peak, wire = set(), 0, []
    for iteration in range(2):
        buffers, grads, under_way, issued = {}, {}, set(), []
        for moment, item in enumerate(agenda(plan)):
            for move in item.wait:
                under_way.remove(move)
                if move.kind is MoveKind.GRAD and move.block is None:
                    alone = plan.chunks[move.chunk].num_shards == 1
                    (buffers if alone else grads).pop(move.chunk)
            for chunk in item.release:
                if iteration or chunk in payloads:  # the first iteration begins with none
                    payloads.remove(chunk)
            for chunk in item.reduced:
                buffer = buffers.pop(chunk, None)
                if plan.chunks[chunk].num_shards == 1 and buffer is not None:
                    grads[chunk] = buffer  # the buffer is the gradient
            for chunk, begins in first.items():
                if begins == moment:
                    buffers[chunk] = plan.chunks[chunk].payload_bytes
            for chunk in item.reduce:
                issued.append(("reduce", chunk))
                if plan.chunks[chunk].num_shards > 1:
                    grads[chunk] = plan.chunks[chunk].shard_bytes
            under_way.update(item.begin)
            for gather in item.gather:
                assert gather.chunk not in payloads
                payloads.add(gather.chunk)
                issued.append(("gather", gather.chunk))
            for move in item.wait_now:
                under_way.remove(move)
            for chunk in needs[moment] if moment < len(needs) else ():
                if (
                    needs_gather(plan, chunk)
                    and not plan.shards[chunk].never_released
                    and iteration
                ):
                    assert chunk in payloads
                    bringing = [m for m in under_way if m.kind is MoveKind.PARAM and m.dst is D]
                    assert chunk not in {m.chunk for m in bringing}
            used = persisting + sum(plan.chunks[c].payload_bytes for c in payloads)
            used += sum(buffers.values()) + sum(grads.values())
            last = min(moment, len(needs) - 1)
            peak = max(peak, used + inputs.trace.moments[last].non_model_bytes)
        assert not under_way
        wire.append(issued)
    assert wire[0] == wire[1]
    return peak


def with_room(given_inputs):
    """The same inputs with budgets that have what the planner said is missing, if any is; and the
    plan, the one of least room, where most is in files."""
    refused = []
    while True:
        try:
            return given_inputs, make_plan(given_inputs)
        except BudgetError as error:
            assert error.missing_bytes > 0 and error.knob and str(error.missing_bytes) in str(error)
            assert error.tier not in refused
            refused.append(error.tier)
            more = {error.tier.value: given_inputs.budgets.of(error.tier) + error.missing_bytes}
            given_inputs = replace(given_inputs, budgets=replace(given_inputs.budgets, **more))


@settings(max_examples=300, deadline=None)
@given(inputs())
def test_plan_is_within_its_budgets_or_says_how_many_bytes_are_missing(given_inputs):
    given_inputs, planned = with_room(given_inputs)
    for shard in planned.plan.shards:  # what lives in memory is not updated from or to files
        if shard.grad_home is not None and N in (shard.param_home, shard.grad_home):
            assert set(shard.state_homes) <= {N}
    profile, budgets = planned.profile, given_inputs.budgets
    assert carry_out(given_inputs, planned.plan) == profile.peak(D) <= budgets.device
    assert profile.peak(H) <= budgets.host
    assert profile.peak(N) <= budgets.nvme
    again = make_plan(given_inputs).plan
    assert again == planned.plan and again.digest() == planned.plan.digest()


@pytest.mark.parametrize(
    ("numels", "world_size", "budgets", "nvme_state_frac"),
    [
        ((1, 1, -1, 583, 3000, 1024), 2, Budgets(42660, 0, 155320), 1.0),
        ((513, -1, 513, -25, 765, 1789, 1792), 1, Budgets(56508, 0, 389104), 0.5),
    ],
    ids=["another path lacks less", "parameters that come back need buffers to undo"],
)
def test_bytes_said_to_be_missing_are_enough(numels, world_size, budgets, nvme_state_frac):
    """Of hosts that are too small; a negative size is a frozen parameter's."""
    specs = [
        ParamSpec(f"m{i // 2}.p{i}", (abs(n),), "bfloat16", trainable=n > 0)
        for i, n in enumerate(numels)
    ]
    given_inputs = PlanInputs(
        layout=ChunkLayout.build(specs, 64, world_size), trace=sequential_trace(specs),
        state=ADAM, budgets=budgets, bandwidths=LINKS, has_host_tier=True, depth=1,
        max_prefetch=0, nvme_state_frac=nvme_state_frac, block_numel=512,
    )  # fmt: skip
    refused = []
    for _ in range(4):
        try:
            planned = make_plan(replace(given_inputs, budgets=budgets))
            break
        except BudgetError as error:
            refused.append(error.tier)
            budgets = replace(
                budgets, **{error.tier.value: budgets.of(error.tier) + error.missing_bytes}
            )
    assert planned.profile.peak(H) <= budgets.host
    assert H in refused and len(refused) == len(set(refused))


@settings(max_examples=300, deadline=None)
@given(inputs(), st.data())
def test_homes_rise_when_activations_take_less_than_was_assumed(given_inputs, data):
    """And nothing goes down, and the budgets hold as before."""
    given_inputs, assumed = with_room(given_inputs)
    fixed = data.draw(st.booleans())
    moments = [
        replace(m, non_model_bytes=data.draw(st.integers(0, m.non_model_bytes)))
        for m in given_inputs.trace.moments
    ]
    measured = replace(
        given_inputs,
        trace=replace(given_inputs.trace, moments=tuple(moments)),
        fixed_params=tuple(s.param_home for s in assumed.plan.shards) if fixed else None,
    )
    higher = plan_above(assumed.plan, measured, AutoPlacement())
    order = [N, H, D]
    for low, high in zip(assumed.plan.shards, higher.plan.shards, strict=True):
        rises = [
            (low.param_home, high.param_home),
            *zip(low.state_homes, high.state_homes, strict=True),
        ]
        assert all(order.index(before) <= order.index(after) for before, after in rises)
        if high.grad_home is N or high.param_home is N:
            assert set(high.state_homes) <= {N}
    budgets = given_inputs.budgets
    assert carry_out(measured, higher.plan) == higher.profile.peak(D) <= budgets.device
    assert higher.profile.peak(H) <= budgets.host and higher.profile.peak(N) <= budgets.nvme


def test_homes_stay_where_there_is_no_room_for_buffers_of_gradients_that_could_move():
    """Sizes and budgets are those of a drawn plan whose homes could not rise."""
    numels = (1373, 1373, 1753, 152, 532, 474)
    specs = [ParamSpec(f"m{i // 2}.p{i}", (n,), "bfloat16") for i, n in enumerate(numels)]
    trace = sequential_trace(specs, kind="eval")

    def inputs_of(activations):
        moments = [
            replace(moment, non_model_bytes=nbytes)
            for moment, nbytes in zip(trace.moments, activations, strict=True)
        ]
        return PlanInputs(
            layout=ChunkLayout.build(specs, 500, 2), trace=replace(trace, moments=tuple(moments)),
            state=StateBytes(0, False), budgets=Budgets(19577, 24576, 167884), bandwidths=LINKS,
            has_host_tier=True, depth=1, max_prefetch=2, nvme_state_frac=0.5, block_numel=512,
            flops=1e10,
        )  # fmt: skip

    assumed = make_plan(inputs_of((558, 1, 170, 1362, 156, 1185)))
    measured = inputs_of((98, 0, 3, 768, 82, 476))
    stays = plan_above(assumed.plan, measured, AutoPlacement())
    homes = [
        [(shard.param_home, shard.grad_home, shard.state_homes) for shard in found.plan.shards]
        for found in (stays, assumed)
    ]
    assert homes[0] == homes[1] and stays.profile.peak(D) <= measured.budgets.device


def test_what_was_left_to_activations_that_never_came_is_filled():
    given_inputs = small_inputs(has_host_tier=False)
    budget = model_bytes(given_inputs) * 3 // 2
    moments = given_inputs.trace.moments
    assumed = replace(
        given_inputs,
        trace=replace(
            given_inputs.trace,
            moments=tuple(replace(m, non_model_bytes=budget * 4 // 5) for m in moments),
        ),
        budgets=Budgets(budget),
    )
    first = make_plan(assumed, AutoPlacement(steady_cap_ratio=1.0))
    assert N in {home for shard in first.plan.shards for home in shard.state_homes}
    measured = replace(given_inputs, budgets=Budgets(budget))
    assert plan_above(first.plan, measured, AutoPlacement()).plan.forecast.moves == ()


@settings(max_examples=200, deadline=None)
@given(inputs(), st.sampled_from([(1.0, 0.0, 0.0), (0.0, 1.0, 0.5), (0.5, 0.3, 1.0)]))
def test_static_fractions_are_met_within_one_chunk_or_block(given_inputs, fractions):
    policy = StaticPlacement(*fractions)
    plan = make_plan(replace(given_inputs, nvme_state_frac=0.0), policy).plan
    if given_inputs.trace.kind == "train" and all(c.trainable for c in plan.chunks):
        payloads = [c.payload_bytes for c in plan.chunks]
        released = sum(c.payload_bytes for c in plan.chunks if not plan.shards[c.id].never_released)
        assert abs(released - fractions[0] * sum(payloads)) <= max(payloads)
    if not given_inputs.has_host_tier:
        assert all(s.param_home is D for s in plan.shards)
        return
    shards = [c.shard_bytes for c in plan.chunks]
    on_host = sum(c.shard_bytes for c in plan.chunks if plan.shards[c.id].param_home is H)
    assert abs(on_host - fractions[2] * sum(shards)) <= max(shards)
    blocks = [
        (block.numel, home)
        for sizes, shard in zip(plan.chunks, plan.shards, strict=True)
        for block, home in zip(sizes.blocks, shard.state_homes, strict=True)
    ]
    total = sum(numel for numel, _ in blocks)
    held = sum(numel for numel, home in blocks if home is H)
    assert abs(held - fractions[1] * total) <= max((n for n, _ in blocks), default=0)


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_what_a_policy_never_releases_every_plan_keeps(fraction):
    """And the engine asks for nothing else: `Planning.kept`."""
    given_inputs = small_inputs(world_size=2)
    policy = StaticPlacement(shard_param_frac=fraction)
    kept = never_released(policy, [c.payload_bytes for c in given_inputs.layout.chunks])
    assert {
        s.chunk for s in make_plan(given_inputs, policy).plan.shards if s.never_released
    } == kept
    assert (
        Planning(Communicator(None), policy, given_inputs, has_trace=False).never_released == kept
    )
    assert (len(kept) == len(given_inputs.layout.chunks)) == (fraction == 0)
    assert never_released(AutoPlacement(), [1, 2, 3]) == frozenset()


def llama_like(num_layers, hidden, inner, kv, vocab):
    specs = [("embed.weight", (vocab, hidden))]
    for i in range(num_layers):
        for name, shape in (
            ("q", (hidden, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)),
            ("o", (hidden, hidden)), ("gate", (inner, hidden)), ("up", (inner, hidden)),
            ("down", (hidden, inner)), ("norm1", (hidden,)), ("norm2", (hidden,)),
        ):  # fmt: skip
            specs.append((f"layers.{i}.{name}.weight", shape))
    specs += [("norm.weight", (hidden,)), ("head.weight", (vocab, hidden))]
    return [ParamSpec(name, shape, "bfloat16") for name, shape in specs]


def small_inputs(**changes):
    """About 5 M parameters in 9 chunks; 1 MiB of activations."""
    specs = llama_like(4, 256, 768, 128, 2048)
    layout = ChunkLayout.build(specs, 1 << 19, changes.pop("world_size", 1))
    return PlanInputs(
        **{
            "layout": layout, "trace": sequential_trace(specs, 1 << 20), "state": ADAM,
            "bandwidths": LINKS, "block_numel": 1 << 16, **changes,
        }
    )  # fmt: skip


def model_bytes(given_inputs):
    return sum(c.payload_bytes for c in given_inputs.layout.chunks) * 8


def test_everything_stays_on_the_device_where_the_budget_allows():
    given_inputs = small_inputs()
    budget = model_bytes(given_inputs) + (1 << 20)
    policy = AutoPlacement(steady_cap_ratio=1.0)
    planned = make_plan(replace(given_inputs, budgets=Budgets(budget)), policy)
    assert planned.plan.forecast.moves == () and planned.plan.gathers == ()
    assert planned.profile.peak(D) == budget
    one_less = make_plan(replace(given_inputs, budgets=Budgets(budget - 1)), policy)
    block = max((b for c in planned.plan.chunks for b in c.blocks), key=lambda b: b.numel)
    staging = 3 * (block.state_bytes + 2 * block.param_bytes)  # has to fit, too
    moved = one_less.plan.bytes_moved()
    assert moved[H, D] == moved[D, H] and 0 < moved[H, D] <= staging + block.state_bytes


@pytest.mark.parametrize("budgets", [(0.6, 10.0, 10.0), (0.6, 0.2, 10.0)], ids=["host", "nvme"])
def test_of_all_orders_of_filling_the_one_with_the_least_bounds_is_chosen(budgets, monkeypatch):
    compared, chosen = [], []
    bounds, finish = draft.bounds, draft.Draft.finish

    def noted(homes, *others):
        compared.append((bounds(homes, *others), homes))
        return compared[-1][0]

    def finished(self, homes):
        chosen.append(homes)
        return finish(self, homes)

    monkeypatch.setattr(draft, "bounds", noted)
    monkeypatch.setattr(draft.Draft, "finish", finished)
    given_inputs = small_inputs()
    limits = Budgets(*(int(share * model_bytes(given_inputs)) for share in budgets))
    make_plan(replace(given_inputs, budgets=limits), AutoPlacement())
    middles = [sum(value) for value, _ in compared]
    assert min(middles) < max(middles)
    assert chosen == [compared[middles.index(min(middles))][1]]


def bounds_and_run(given_inputs, order, policy):
    """Of the homes that an order of filling comes to; None where it does not fit."""
    made = draft.Draft(given_inputs, policy)
    uses = num_uses(made.needs, len(made.problem.chunks))
    try:
        homes = fill(made.problem, made.demand, order)
        made.check_room(homes)
    except BudgetError:
        return None
    found = draft.bounds(homes, made.problem, uses, sum(made.compute), made.reductions)
    return *found, made.finish(homes).cost.seconds


@settings(max_examples=150, deadline=None)
@given(inputs(), st.sampled_from(draft.ORDERS))
def test_no_run_passes_the_bounds_by_which_homes_are_chosen(given_inputs, order):
    found = bounds_and_run(with_room(given_inputs)[0], order, AutoPlacement())
    if found is not None:
        least, most, seconds = found
        assert least * (1 - 1e-9) <= seconds <= most * (1 + 1e-9)


def test_the_bounds_of_a_step_on_disk_worked_out_by_hand():
    """A pass of 140 s. Ten blocks are written, and all but two are read; the upper bound has these
    two as well."""
    found = bounds_and_run(asked(TEN, 4.0), "psg", AutoPlacement())
    assert found == pytest.approx((140 + 8 * READ + 10 * WRITE, 140 + 10 * (READ + WRITE), 186))


def test_parameters_and_gradients_go_to_nvme_where_ram_is_the_device():
    given_inputs = small_inputs(has_host_tier=False, budgets=Budgets(device=12 << 20))
    planned = make_plan(given_inputs)
    homes = {(s.param_home, s.grad_home) for s in planned.plan.shards}
    assert (N, N) in homes
    assert planned.profile.peak(D) <= 12 << 20 < model_bytes(given_inputs) // 3


@pytest.mark.parametrize("path", [UpdatePath.STREAM, UpdatePath.CPU])
def test_one_path_updates_all_that_is_not_on_the_device(path):
    """The backend's: nothing that a machine is faster at changes a bit."""
    slow = replace(LINKS, host_to_device=2e9, device_to_host=2e9)
    for links in (LINKS, slow):
        given_inputs = small_inputs(
            bandwidths=links, budgets=Budgets(device=20 << 20), off_device=path
        )
        plan = make_plan(given_inputs).plan
        assert plan.path_of(H) is plan.path_of(N) is path
        assert plan.path_of(D) is UpdatePath.RESIDENT and plan.blocks_on(H)
        travels = {move.block for move in plan.forecast.moves if move.kind is MoveKind.STATE}
        streams = path is UpdatePath.STREAM
        assert travels == (plan.blocks_on(H) if streams else set())
        assert bool(plan.device_staging.nbytes) == streams


def test_const_keeps_model_data_within_its_bytes_whatever_activations_take():
    policy = ConstPlacement("16MiB")
    planned = make_plan(small_inputs(budgets=policy.budgets()), policy)
    device = [
        sum(planned.profile.at(D, m).values()) - planned.profile.at(D, m)["non-model"]
        for m in range(planned.profile.num_moments)
    ]
    assert 12 << 20 < max(device) <= 16 << 20
    assert planned.plan.bytes_moved()[D, H] > 0 and planned.profile.peak(N) == 0


def test_evaluation_keeps_the_homes_of_training():
    given_inputs = small_inputs(has_host_tier=False, budgets=Budgets(device=12 << 20))
    planned = make_plan(given_inputs)
    evaluation = sequential_trace(given_inputs.layout.params, 1 << 20, kind="eval")
    other = plan_within(planned.plan, replace(given_inputs, trace=evaluation), AutoPlacement())
    assert [
        replace(s, never_released=False, why="", leaving_bytes=0) for s in other.plan.shards
    ] == [replace(s, never_released=False, why="", leaving_bytes=0) for s in planned.plan.shards]
    assert other.plan.forecast.reductions == ()
    assert {m.kind for m in other.plan.forecast.moves} <= {MoveKind.PARAM}
    too_large = sequential_trace(given_inputs.layout.params, 12 << 20, kind="eval")
    with pytest.raises(BudgetError, match="smaller batch"):
        plan_within(planned.plan, replace(given_inputs, trace=too_large), AutoPlacement())


def test_what_the_cap_keeps_free_goes_before_another_trace_is_refused():
    given_inputs = small_inputs(has_host_tier=False, budgets=Budgets(device=12 << 20))
    planned = make_plan(given_inputs)
    refused = sequential_trace(given_inputs.layout.params, 12 << 20)
    with pytest.raises(BudgetError, match="beside what lives there") as info:
        plan_within(planned.plan, replace(given_inputs, trace=refused), AutoPlacement())
    least = (12 << 20) - info.value.missing_bytes
    for nbytes, fits in ((least, True), (least + 1, False)):
        within = replace(given_inputs, trace=sequential_trace(given_inputs.layout.params, nbytes))
        try:
            found = plan_within(planned.plan, within, AutoPlacement(steady_cap_ratio=0.5))
            assert fits and found.profile.peak(D) <= 12 << 20
        except BudgetError as error:
            assert not fits and error.missing_bytes == 1


def test_faster_link_never_makes_the_predicted_step_longer():
    given_inputs = small_inputs(budgets=Budgets(device=12 << 20), flops=1e12)
    plan_seconds = make_plan(given_inputs).cost
    slower = replace(LINKS, host_to_device=5e9, device_to_host=5e9)
    slow_seconds = make_plan(replace(given_inputs, bandwidths=slower)).cost
    assert slow_seconds.seconds > plan_seconds.seconds >= plan_seconds.busy["compute"] > 0


def test_ranks_make_one_plan_from_different_measurements():
    given_inputs = small_inputs(world_size=2)
    trace = given_inputs.trace
    busier = replace(
        trace, moments=tuple(replace(m, non_model_bytes=3 << 20) for m in trace.moments)
    )
    budgets = [Budgets(device=14 << 20), Budgets(device=20 << 20, host=4 << 20)]
    links = [LINKS, replace(LINKS, nvme_read=1e9)]
    assert reduce_traces([trace, busier]) == reduce_traces([busier, trace])
    assert reduce_traces([trace, busier]).peak_non_model_bytes == 3 << 20
    assert least_budgets(budgets) == Budgets(device=14 << 20, host=4 << 20)
    assert least_bandwidths(links).nvme_read == 1e9


def test_budgets_of_a_node_are_divided_among_the_ranks_that_share_them():
    node = Budgets.parse("8GiB", "64GiB", "1TiB")
    assert node.divided(4) == Budgets(8 << 30, 16 << 30, 1 << 38)
    assert node.divided(4, ranks_per_device=4).device == 2 << 30


def test_llama_70b_over_64_ranks_is_planned_with_few_gathers_more_than_the_least():
    specs = llama_like(80, 8192, 28672, 1024, 128256)
    gib = 1 << 30
    given_inputs = PlanInputs(
        layout=ChunkLayout.build(specs, 1 << 28, 64), trace=sequential_trace(specs, 2 * gib),
        state=ADAM, bandwidths=LINKS, flops=6 * 70e9 * 4096,
        budgets=Budgets(16 * gib, 10 * gib, 1 << 40),
    )  # fmt: skip
    assert make_plan(given_inputs).plan.forecast.gather_gap <= 0.05


def test_module_inside_another_needs_the_outer_ones_chunks_too():
    specs = [ParamSpec("outer.p", (64,), "float32"), ParamSpec("outer.inner.p", (64,), "float32")]

    def at(edge, module, param):
        return TraceMoment("forward", edge, module, (param,), 0)

    moments = (
        at("enter", "outer", 0), at("enter", "inner", 1), at("leave", "inner", 1),
        at("leave", "outer", 0),
    )  # fmt: skip
    trace = Trace("eval", "", model_digest(specs), moments)
    assert trace.chunk_needs({0: 0, 1: 1}) == ((0,), (0, 1), (0,), ())


def test_blocks_on_disk_are_updated_before_those_in_host_memory():
    """They can still fail, and what is in memory is not undone."""
    planned = placement_example()
    homes = [home for shard in planned.plan.shards for home in shard.state_homes]
    states = [shard.state_homes for shard in planned.plan.shards]
    order = [home for _, home in step_order(planned.plan.chunks, states)]
    assert set(order) == {N, H} and order == sorted(order, key=(N, H).index)
    clock = StepClock(Work(planned.plan, planned.inputs), SERIAL)
    clock.run()
    assert [homes[block] for _, block in clock.updates if block is not None] == order


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_state_that_must_be_on_disk_is_there_whatever_there_is_room_for(share):
    specs = [ParamSpec(f"layers.{i}.weight", (4 << 20,), "bfloat16") for i in range(3)]
    planned = make_plan(
        PlanInputs(
            layout=ChunkLayout.build(specs, 4 << 20), trace=sequential_trace(specs),
            state=StateBytes(12, True), nvme_state_frac=share,
        )
    )  # fmt: skip
    homes = [home for shard in planned.plan.shards for home in shard.state_homes]
    assert homes.count(N) == share * len(homes)
