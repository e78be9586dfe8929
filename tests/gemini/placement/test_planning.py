"""Planning by itself: ranks that compare plans, and what a measured iteration changes."""

from dataclasses import replace

import pytest

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.forecast import forward_of, with_bytes_added
from gemini.memtracer.trace import TraceMoment, sequential_trace
from gemini.placement.fit import StateRequest
from gemini.placement.planner import PlanInputs, make_plan, plan_within
from gemini.placement.policy import AutoPlacement, StaticPlacement
from gemini.placement.predict import predict
from gemini.placement.sizes import Bandwidths, BudgetError, Budgets, StateBytes
from gemini.placement.speeds import USUAL
from gemini.placement.tiers import Tier
from gemini.placement.timetable.steps import reductions_of
from gemini.runtime.schedule.planning import Planning

ADAM = StateBytes(per_element=12, has_master=True)
SPECS = [ParamSpec(f"m{i}.weight", (64, 63 + i), "bfloat16", trainable=True) for i in range(6)]
ACTIVATIONS = 100_000
ROOM = Budgets(device=1_200_000)


class Ranks:
    """What others say: the same, or what they are told to."""

    def __init__(self, world_size=1, others=None):
        self.world_size, self.rank, self.others = world_size, 0, others
        self.rounds = 0

    def gather_objects(self, value):
        self.rounds += 1
        if self.others is None:
            return [value] * self.world_size
        return [value, *self.others]


def trace_of(activations, specs=SPECS):
    return sequential_trace(specs, activations)


def planning(policy=None, comm=None, budgets=ROOM, *, has_trace=True, activations=ACTIVATIONS):
    comm = comm or Ranks()
    layout = ChunkLayout.build(SPECS, 8192, comm.world_size)
    assert isinstance(USUAL, Bandwidths)
    inputs = PlanInputs(
        layout=layout, trace=trace_of(activations), state=ADAM, bandwidths=USUAL,
        budgets=budgets, block_numel=1024,
    )  # fmt: skip
    policy = policy or AutoPlacement(budgets.device, nvme_dir=".")
    return Planning(comm, policy, inputs, has_trace=has_trace)


def homes(plan):
    return [(s.param_home, s.grad_home, s.state_homes) for s in plan.shards]


def test_ranks_that_planned_otherwise_are_found():
    assert {chunk.num_shards for chunk in planning(comm=Ranks(2)).plan.chunks} == {2}
    with pytest.raises(AssertionError, match="ranks made different plans from the same inputs"):
        planning(comm=Ranks(2, others=["another digest"]))


def test_a_policy_that_says_all_itself_follows_no_measurement():
    static = planning(StaticPlacement(), budgets=Budgets())
    before = static.plan
    assert not static.replan(trace_of(5 * ACTIVATIONS))
    assert not static.replan_together(trace_of(5 * ACTIVATIONS)) and static.higher() is None
    assert static.plan is before


def test_what_was_planned_with_a_trace_stays_while_the_same_calls_come():
    made = planning()
    before = made.plan
    assert not made.replan(trace_of(ACTIVATIONS // 2)) and made.plan is before
    other = trace_of(ACTIVATIONS // 2)
    assert not made.replan(replace(other, signature="other inputs"))  # of the same calls
    half = len(other.moments) // 2
    twice = other.moments[:half] + other.moments[:2] + other.moments[half:]  # a module again
    longer = replace(other, signature="longer", moments=twice)
    assert made.replan(longer)  # a trace made ahead has no signature: it was of these inputs
    assert made.plan is not before and homes(made.plan) == homes(before)
    assert not made.replan(longer)
    now = made.plan
    assert made.replan(replace(other, signature="shorter"))  # planned beside it, in its homes
    assert made.plan is now and homes(made.others["train", "shorter", 0].result.plan) == homes(
        before
    )
    assert made.steps_for("train", "shorter") is not made.steps_for("train", "longer")
    assert not made.replan(replace(other, signature="shorter"))


def test_an_assumption_gives_way_to_the_first_measurement_and_homes_rise_once():
    made = planning(has_trace=False, activations=900_000)
    low = made.plan
    assert any(home is not Tier.DEVICE for s in low.shards for home in s.state_homes)
    assert made.higher() is None  # nothing was measured
    assert made.replan(trace_of(0)) and made.has_trace
    assert homes(made.plan) == homes(low)
    raised = made.higher()
    assert raised is not None and made.plan is not raised.plan
    count = sum(home is Tier.DEVICE for s in raised.plan.shards for home in s.state_homes)
    assert count > sum(home is Tier.DEVICE for s in low.shards for home in s.state_homes)
    made.use_plan(raised)
    assert made.plan is raised.plan and made.higher() is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("short", [0, 300_000, 900_000])
def test_where_an_iteration_lacks_room_nothing_is_gathered_but_what_its_calls_need(
    ranks, kind, short
):
    """At other moments it asks for `short` less, and gathers keep what that leaves at most."""
    made = planning(comm=Ranks(ranks))
    asked = trace_of(1_400_000)
    less = [-short * (moment not in (4, 5)) for moment, _ in enumerate(asked.moments)]
    asked = with_bytes_added(asked, less)
    asked = asked if kind == "train" else forward_of(asked)
    found = made.lowered(asked, params_stay=False)
    plan = found.result.plan
    total = predict(plan, [m.non_model_bytes for m in asked.moments]).total(Tier.DEVICE)
    needs = asked.chunk_needs(made.inputs.layout.chunk_of())
    lacking = [m for m, _ in enumerate(needs) if total[m] > ROOM.device]
    assert found.refused is not None and lacking
    assert found.refused.missing_bytes == max(total[: len(needs)]) - ROOM.device
    for moment in lacking:
        gathered = {g.chunk for g in plan.gathers if g.begin <= moment < g.release}
        assert gathered <= {*needs[moment]}
        assert all(s.param_home is not Tier.DEVICE or s.chunk in needs[moment] for s in plan.shards)
    kept = [g for g in plan.gathers if g.release - g.begin > 2]
    assert bool(kept) == bool(short)


def test_what_lacks_no_more_than_measurements_may_be_wrong_by_goes_on_by_its_plan():
    """Without steps payloads stay as long as the plan has room, whatever was measured."""
    made = planning()
    before, asked = made.result, trace_of(9 * ACTIVATIONS)
    with pytest.raises(BudgetError) as lacks:
        plan_within(made.plan, replace(made.inputs, trace=asked), made.policy)
    assert not made.has_room(asked)
    made.overruns.noise_bytes = lacks.value.missing_bytes
    assert made.overruns.noise_bytes < 8 * ACTIVATIONS  # it is not what was planned, and a bit more
    assert made.has_room(asked) and made.result is before
    assert made.steps_for(asked.kind, asked.signature) is before.steps


def test_a_state_that_fits_nowhere_changes_nothing():
    made = planning(budgets=Budgets(device=1_200_000, host=0, nvme=0))
    before, inputs = made.plan, made.inputs
    with pytest.raises(BudgetError):
        made.plan_state(StateRequest(StateBytes(400, has_master=True), 0.0, 1024, 2))
    assert made.plan is before and made.inputs is inputs


def test_a_gradient_has_as_long_to_leave_as_the_call_behind_it_takes():
    """Of calls in each other too: b is called inside of a, and c behind both."""
    a, b, c = range(3)
    backward = [("enter", a), ("enter", b), ("leave", b), ("leave", a), ("enter", c), ("leave", c)]
    moments = [
        TraceMoment(phase, edge, f"m{param}", (param,), 0)
        for phase, calls in (("forward", [("enter", c), ("leave", c)]), ("backward", backward))
        for edge, param in calls
    ]
    layout = ChunkLayout.build(SPECS[:3], 4096)
    trace = replace(trace_of(0, SPECS[:3]), moments=tuple(moments))
    inputs = PlanInputs(layout=layout, trace=trace, state=ADAM, bandwidths=USUAL)
    plan = make_plan(inputs, StaticPlacement(1.0, 1.0, 1.0)).plan
    assert {shard.grad_home for shard in plan.shards} == {Tier.HOST}
    spans = {r.chunk: (r.last - 2, r.end - 2) for r in plan.forecast.reductions}
    assert spans == {a: (3, 5), b: (2, 5), c: (5, 6)}
    nbytes = [chunk.shard_bytes for chunk in plan.chunks]
    leaving = [shard.leaving_bytes for shard in plan.shards]
    assert leaving == [nbytes[a] + nbytes[b], nbytes[b], nbytes[c]]


@pytest.mark.parametrize(
    ("backward", "first"),
    [
        # one weight in two modules: autograd hands on the sum as the last of them ends
        ([("enter", "head"), ("leave", "head"), ("enter", "embed"), ("leave", "embed")], 2),
        # what is computed again in a backward of its own hands on its part
        (2 * [("enter", "block"), ("leave", "block")], 0),
        ([("enter", "head"), ("enter", "block"), ("leave", "head"), ("enter", "block")], 0),
        ([("leave", "head"), ("enter", "embed"), ("leave", "embed")], 1),
        ([("leave", "head"), ("leave", "head")], 0),
    ],
    ids=["tied", "again", "tied and again", "a leave alone", "leaves alone"],
)
def test_a_gradient_has_a_buffer_from_where_it_arrives_first(backward, first):
    moments = [TraceMoment("backward", edge, module, (0,), 0) for edge, module in backward]
    trace = replace(trace_of(0, SPECS[:1]), moments=tuple(moments))
    found = reductions_of(trace, {0: 0}, (0,), over_ranks=())
    assert found[0].first == first
    over_ranks = reductions_of(trace, {0: 0}, (0,), over_ranks=(0,))
    assert over_ranks[0].first == 0


def test_a_buffer_of_several_gradients_is_there_from_the_first():
    """b arrives before a, which is used again behind it."""
    moments = [
        TraceMoment("backward", edge, module, (param,), 0)
        for module, param in (("head", 0), ("b", 1), ("embed", 0))
        for edge in ("enter", "leave")
    ]
    trace = replace(trace_of(0, SPECS[:2]), moments=tuple(moments))
    found = reductions_of(trace, {0: 0, 1: 0}, (0,), over_ranks=())
    assert (found[0].first, found[0].last) == (2, 5)
