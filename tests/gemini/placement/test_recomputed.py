"""Plans in which layers are computed again: one problem with the homes of all other bytes."""

from dataclasses import replace
from functools import cache

import pytest

from gemini.memtracer.forecast import grown, with_bytes_added
from gemini.memtracer.layers import chosen, recomputing, with_seconds, without_choice
from gemini.memtracer.trace import Layer, Trace, TraceMoment
from gemini.placement.draft import Draft
from gemini.placement.planner import make_plan, plan_below, plan_within
from gemini.placement.policy import AutoPlacement
from gemini.placement.saved import search_number
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.schedule.iteration_plans import lowered

from .test_saved import POLICY, best_of_all, drawn, seconds

AUTO = AutoPlacement(steady_cap_ratio=1.0, activations="auto")


@cache
def with_layers(seed):
    """The problem of this number, whose modules are layers."""
    inputs = drawn(seed)
    trace, layers = inputs.trace, []
    for i, moment in enumerate(trace.moments):
        if moment.phase == "forward" and moment.edge == "enter":
            nbytes = trace.moments[i + 1].saved_bytes - moment.saved_bytes
            layers.append(Layer(moment.module, nbytes, nbytes // 10, moment.seconds))
    return replace(inputs, trace=replace(trace, layers=tuple(layers)))


def price(inputs, policy):
    made = Draft(inputs, policy)
    try:
        homes = made.choose_homes()
    except BudgetError:
        return None
    return seconds(made, homes)


@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 100, 10)], ids=str)
def test_a_plan_is_as_short_as_the_best_of_every_number(seeds):
    """And no longer than one of a single kind."""
    for seed in seeds:
        inputs = with_layers(seed)
        numbers = range(len(inputs.trace.layers) + 1)
        forecasts = [replace(inputs, trace=recomputing(inputs.trace, n)) for n in numbers]
        best = [found[0] for one in forecasts if (found := best_of_all(one)) is not None]
        mine = price(inputs, AUTO)
        assert mine == (pytest.approx(min(best), rel=1e-9) if best else None), seed
        for single in (inputs, replace(inputs, spilling=None), forecasts[-1]):
            other = price(single, POLICY)
            assert other is None or mine <= other * (1 + 1e-9)


def test_what_fits_in_no_homes_computes_again_what_lowers_its_peak():
    """Whatever it lacks then, it lacks less than with all layers kept."""
    seen = 0
    for seed in range(30):
        drawn_inputs = with_layers(seed)
        budgets = replace(drawn_inputs.budgets, host=1 << 40)
        inputs = replace(drawn_inputs, spilling=None, budgets=budgets)
        trace, numbers = inputs.trace, range(len(inputs.trace.layers) + 1)
        small = replace(inputs, trace=with_bytes_added(trace, -trace.peak_non_model_bytes))
        plan = make_plan(small, AUTO).plan
        lacking = replace(inputs, trace=grown(trace, 20))
        found = lowered(plan, lacking, small, AUTO, params_stay=False)
        assert found is not None and found.refused is not None

        def lacks(number, plan=plan, lacking=lacking):
            try:
                plan_below(plan, lacking.recomputing(number), POLICY, params_stay=False)
            except BudgetError as error:
                return error.missing_bytes
            return 0

        least = min(map(lacks, numbers))
        told = found.result.plan.recomputed
        assert lacks(0 if told is None else len(told.names)) == least
        seen += least < lacks(0)
    assert seen > 10


def test_some_layers_of_these_problems_are_computed_again_and_budgets_hold():
    numbers = set()
    for seed in range(60):
        inputs = with_layers(seed)
        try:
            result = make_plan(inputs, AUTO)
        except BudgetError:
            continue
        planned = result.plan.recomputed
        numbers.add((planned is not None, result.plan.saved is not None))
        for tier in Tier:
            assert result.profile.peak(tier) <= inputs.budgets.of(tier)
        if planned is None:
            continue
        assert result.plan.digest() != replace(result.plan, recomputed=None).digest()
        trace = result.inputs.trace
        assert trace.recomputed == len(planned.names) > 0 and planned.seconds > 0
        # what is measured stays as it was chosen
        again = plan_within(result.plan, replace(inputs, trace=trace), AUTO)
        assert again.plan.recomputed == planned
    assert len(numbers) == 4


def traced():
    """Two layers: each saves 100 bytes and what it was given, 10, and needs 5 besides."""

    def at(phase, edge, module, saved, rest=5):
        return TraceMoment(phase, edge, module, (), saved + rest, 1.0, saved)

    moments = (
        at("forward", "enter", "h.0.a", 0), at("forward", "leave", "h.0.a", 110),
        at("forward", "enter", "h.1.a", 110), at("forward", "leave", "h.1.a", 220),
        at("backward", "enter", "h.1.a", 220, 15), at("backward", "leave", "h.1.a", 110),
        at("backward", "enter", "h.0.a", 110), at("backward", "leave", "h.0.a", 0),
    )  # fmt: skip
    layers = (Layer("h.0", 100, 0, 2.0), Layer("h.1", 100, 0, 2.0))
    return Trace("train", "int64[1]", "", moments, layers)


def test_a_forecast_worked_out_by_hand():
    trace = traced()
    one = recomputing(trace, 1)
    assert [m.saved_bytes for m in one.moments] == [0, 10, 10, 120, 120, 10, 0, 0]
    # what the first layer saves is there in its backward all the same, and with it what it was
    # given
    assert [m.rest_bytes for m in one.moments] == [5, 5, 5, 5, 15, 5, 115, 5]
    assert [m.seconds for m in one.moments] == [1, 1, 1, 1, 1, 1, 3, 1]
    both = recomputing(one, 2)
    assert [m.saved_bytes for m in both.moments] == [0, 10, 10, 20, 10, 10, 0, 0]
    assert both.moments[4].rest_bytes == 125
    back = recomputing(both, 0)
    # a bound: nobody knows when a layer's backward frees what it had saved
    assert [m.saved_bytes for m in back.moments] == [0, 110, 110, 220, 210, 210, 100, 100]
    assert [m.seconds for m in back.moments] == [m.seconds for m in trace.moments]
    assert (both.signature, back.signature) == (chosen("int64[1]", 2), trace.signature)
    assert without_choice(both.signature) == trace.signature
    assert Trace.from_json(both.to_json()) == both


def test_a_forward_that_needs_more_than_its_backward_counts_beside_the_gradient():
    """The gradient that arrives is there before the backward begins: 8 bytes; of what is saved
    nothing is but the input of 10."""
    needs = [5, 5, 70, 5, 90, 8, 9, 5]
    trace = traced()
    moments = [
        replace(m, non_model_bytes=m.saved_bytes + n)
        for m, n in zip(trace.moments, needs, strict=True)
    ]
    moments[0] = replace(moments[0], non_model_bytes=150, saved_bytes=0)
    one = recomputing(replace(trace, moments=tuple(moments)), 1)
    assert one.moments[6].rest_bytes == max(9 + 110, 8 + 150)


def test_a_forecast_of_a_trace_that_knows_the_root_alone():
    moments = traced().moments
    root = tuple(replace(moments[i], module="") for i in (0, 3, 4, 7))
    whole = replace(traced(), moments=(replace(root[0], saved_bytes=220, non_model_bytes=225),
                                       *root[1:]))  # fmt: skip
    both = recomputing(whole, 2)
    assert [m.saved_bytes for m in both.moments] == [20, 20, 20, 0]
    assert [m.rest_bytes for m in both.moments] == [5, 5, 115, 5]
    assert sum(m.seconds for m in both.moments) == 4 + 4


def test_seconds_of_layers_are_those_of_their_moments():
    timed = with_seconds(traced(), [3.0, 4.0, 0, 0, 1, 1, 1, 1])
    assert [layer.seconds for layer in timed.layers] == [7.0, 0.0]


@pytest.mark.parametrize("most", [1, 8, 32, 61, 126])
def test_numbers_are_found_without_asking_for_all(most):
    for best in (1, most // 2 or 1, most):
        asked = {}

        def price(number, best=best, asked=asked):
            asked[number] = float("inf") if number < best // 2 else 1 + abs(number - best)
            return asked[number]

        search_number(most, price)
        assert min(asked, key=asked.get) == best and len(asked) <= max(9, most // 2)
    search_number(most, lambda number: {0: 0}[number])
