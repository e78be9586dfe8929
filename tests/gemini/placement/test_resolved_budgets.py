"""Budgets become numbers once: from a policy and a machine to bytes of one rank."""

from dataclasses import replace

import pytest

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.homes.budgets import USABLE, Machine, resolve
from gemini.placement.planner import PlanInputs, make_plan
from gemini.placement.policy import AutoPlacement, ConstPlacement, StaticPlacement
from gemini.placement.sizes import UNLIMITED, Budgets, StateBytes
from gemini.placement.tiers import Tier

GPUS = Machine(4, 1, has_host_tier=True, device_bytes_left=1000)
CPU = Machine(4, 4, has_host_tier=False, device_bytes_left=1000)


@pytest.mark.parametrize(
    ("policy", "machine", "wanted"),
    [
        (StaticPlacement(), CPU, Budgets()),
        (ConstPlacement(400), GPUS, Budgets(device=400)),
        (ConstPlacement(400), CPU, Budgets(device=100)),
        (AutoPlacement(400, 800, 1200), GPUS, Budgets(400, 200, 300)),
        (AutoPlacement(400, 800, 1200), CPU, Budgets(100, 200, 300)),
        (AutoPlacement(800, 400), CPU, Budgets(100, 100)),
        (AutoPlacement(), GPUS, Budgets()),
    ],
)
def test_every_pool_is_divided_among_the_ranks_that_share_it(policy, machine, wanted):
    assert resolve(policy, machine, model_bytes=10) == wanted


@pytest.mark.parametrize("machine", [GPUS, CPU])
def test_a_model_that_may_not_fit_what_is_left_has_that_for_its_budget(machine):
    left = 1000 // machine.ranks_per_device
    assert resolve(AutoPlacement(), machine, left // 2).device == UNLIMITED
    assert resolve(AutoPlacement(), machine, left // 2 + 1).device == round(USABLE * left)
    assert resolve(StaticPlacement(), machine, 1 << 40) == Budgets()


def test_ram_beside_a_gpu_is_what_is_left_of_it_divided_among_the_ranks_of_the_node():
    """Nothing else keeps a plan from more RAM than there is: pinned memory is not swapped."""
    machine = replace(GPUS, host_bytes_left=4000)
    assert resolve(AutoPlacement(), machine, 500).host == UNLIMITED
    assert resolve(AutoPlacement(), machine, 501) == Budgets(device=900, host=900)
    assert resolve(ConstPlacement(400), machine, 501) == Budgets(device=400, host=900)
    assert resolve(AutoPlacement(host_budget=8000), machine, 501).host == 2000
    assert resolve(StaticPlacement(), machine, 501) == Budgets()
    assert resolve(AutoPlacement(), replace(CPU, host_bytes_left=4000), 501).host == UNLIMITED


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
