"""Budgets become numbers once: from a policy and a machine to bytes of one rank."""

from dataclasses import replace

import pytest

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.fit import assume
from gemini.placement.homes.budgets import Machine, resolve
from gemini.placement.planner import PlanInputs, make_plan
from gemini.placement.policy import AutoPlacement, ConstPlacement, StaticPlacement
from gemini.placement.sizes import Budgets, StateBytes
from gemini.placement.tiers import Tier

GPUS = Machine(4, 1, has_host_tier=True, device_bytes_left=1000, host_bytes_left=4000)
CPU = Machine(4, 4, has_host_tier=False, device_bytes_left=1000)
MORE = replace(CPU, host_bytes_left=4000)


@pytest.mark.parametrize(
    ("policy", "machine", "wanted"),
    [
        (StaticPlacement(), CPU, Budgets()),
        (ConstPlacement("400B"), GPUS, Budgets(device=400, host=900)),
        (ConstPlacement("400B"), CPU, Budgets(device=100)),
        (AutoPlacement("400B", "800B", 1200), GPUS, Budgets(400, 200, 300)),
        (AutoPlacement("400B", "800B", 1200), CPU, Budgets(100, 200, 300)),
        (AutoPlacement("800B", "400B"), CPU, Budgets(100, 100)),
        (AutoPlacement(), GPUS, Budgets(device=900, host=900)),
        (AutoPlacement(), CPU, Budgets(device=225)),
        (AutoPlacement(host_budget=8000), GPUS, Budgets(device=900, host=2000)),
        (
            AutoPlacement(nvme_budget="80B"),
            replace(CPU, host_bytes_left=4000),
            Budgets(225, nvme=20),
        ),
    ],
)
def test_every_pool_is_divided_among_the_ranks_that_share_it(policy, machine, wanted):
    """Of what nobody gives, nine tenths of what is left."""
    assert resolve(policy, machine) == wanted


LAYOUT = ChunkLayout.build([ParamSpec("m.w", (512,), "bfloat16")], 512, 1)


def assumed(policy, machine, state_bytes):
    inputs = PlanInputs(
        layout=LAYOUT, trace=sequential_trace(LAYOUT.params), state=StateBytes(state_bytes, True),
        budgets=resolve(policy, machine), has_host_tier=machine.has_host_tier,
    )  # fmt: skip
    return assume(inputs, policy).trace.peak_non_model_bytes


@pytest.mark.parametrize("machine", [GPUS, CPU])
def test_activations_that_nobody_measured_push_nothing_down_where_the_model_fits_twice(machine):
    machine = replace(machine, device_bytes_left=100_000, host_bytes_left=100_000)
    budget = resolve(AutoPlacement(), machine).device
    most = budget // (2 * 512) - 4  # bytes of state beside parameter and gradient
    assert assumed(AutoPlacement(), machine, most) == 0
    assert assumed(AutoPlacement(), machine, most + 1) == round(0.8 * budget)
    given = AutoPlacement(device_budget=80_000)
    assert assumed(given, machine, 0) == round(0.8 * resolve(given, machine).device)
    in_ram = AutoPlacement(host_budget=80_000)
    assert (assumed(in_ram, machine, 0) > 0) == (not machine.has_host_tier)


def test_the_planner_keeps_to_the_numbers_and_parses_no_policy():
    specs = [ParamSpec(f"m{i}.w", (4096,), "bfloat16") for i in range(8)]
    inputs = PlanInputs(
        layout=ChunkLayout.build(specs, 4096, 2),
        trace=sequential_trace(specs),
        state=StateBytes(12, True),
        has_host_tier=False,
        block_numel=1024,
    )
    policy = ConstPlacement("280KiB")
    whole = make_plan(replace(inputs, budgets=policy.budgets()), policy)
    half = make_plan(replace(inputs, budgets=policy.budgets().divided(2, 2)), policy)
    assert 140 << 10 < whole.profile.peak(Tier.DEVICE) <= 280 << 10
    assert half.profile.peak(Tier.DEVICE) <= 140 << 10
