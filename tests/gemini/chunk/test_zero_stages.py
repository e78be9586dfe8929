"""ZeRO of stages 1, 2 and 3 as values, and what plans say of them; at work in tests/dist."""

import pytest

from bench.shared.models import Tower, token_batches, token_loss
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.planner import PlanInputs, make_plan
from gemini.placement.policy import parse_placement
from gemini.placement.sizes import StateBytes
from gemini.placement.tiers import Tier
from optim import HybridAdam

BF16, STATE = 2, 12


def planned(stage, world_size, **options):
    specs = [ParamSpec(f"m{i}.w", (1000,), "bfloat16", trainable=i > 1) for i in range(9)]
    layout = ChunkLayout.build(specs, 1000, world_size)
    inputs = PlanInputs(
        layout=layout, trace=sequential_trace(specs), state=StateBytes(STATE, True), max_prefetch=0
    )
    found = make_plan(inputs, StaticPlacement.zero(stage, **options))
    trained = sum(chunk.payload_numel for chunk in layout.chunks if chunk.trainable)
    return found, sum(chunk.payload_numel for chunk in layout.chunks), trained


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_plans_predict_the_formulas_of_a_stage(stage, world_size):
    """Parameters once; state and reduced gradients by rank; at stage 1 gradients whole before."""
    found, numel, trained = planned(stage, world_size)
    profile, step = found.profile, found.plan.num_trace_moments
    assert set(profile.rows[Tier.DEVICE, "parameters"]) == {BF16 * numel}
    assert set(profile.rows[Tier.DEVICE, "state"]) == {STATE * trained // world_size}
    gradients = profile.rows[Tier.DEVICE, "gradients"]
    assert gradients[step] == BF16 * trained // world_size
    whole = stage == 1 or world_size == 1
    assert (gradients[step - 1] == BF16 * trained) == whole
    assert gradients[step - 1] <= BF16 * trained and max(gradients) <= BF16 * trained
    assert found.plan.gathers == ()


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_gradients_are_planned_in_host_memory(stage):
    found, _, trained = planned(stage, 2, cpu_offload=True)
    shards = [shard for shard in found.plan.shards if shard.grad_home is not None]
    assert {shard.grad_home for shard in shards} == {Tier.HOST}
    assert all(shard.in_payload and shard.param_home is Tier.DEVICE for shard in shards)
    assert set(found.profile.rows[Tier.HOST, "state"]) == {STATE * trained // 2}
    assert set(found.profile.rows[Tier.HOST, "gradients"]) == {BF16 * trained // 2}
    assert found.profile.rows[Tier.DEVICE, "gradients"][found.plan.num_trace_moments] == 0


def test_a_shard_of_stage_3_is_not_in_its_payload():
    found, *_ = planned(3, 2)
    assert not any(shard.in_payload or shard.never_released for shard in found.plan.shards)
    assert not found.plan.unsharded_grads


def test_stages_have_names():
    assert parse_placement("zero1") == StaticPlacement(0.0, shard_grads=False)
    assert parse_placement("zero2") == StaticPlacement(0.0)
    assert parse_placement("zero3") == StaticPlacement()
    with pytest.raises(ValueError, match="expected 1, 2 or 3"):
        StaticPlacement.zero(0)


def test_options_that_do_nothing_or_are_unknown_are_refused():
    with pytest.raises(ValueError, match="here all is; expected placement_policy="):
        GeminiDDP(Tower(), overlap_allgather=True)
    with pytest.raises(ValueError, match="communication_dtype='int8'; expected one of"):
        GeminiDDP(Tower(), communication_dtype="int8")
    with pytest.raises(ValueError, match="is wider than precision='bf16', and no budget counts"):
        GeminiDDP(Tower(), placement_policy=AutoPlacement("1GiB"), communication_dtype="fp32")


def test_one_rank_takes_the_options_of_several():
    digests = set()
    for options in ({}, {"overlap_allgather": True, "communication_dtype": "fp32"}):
        model = GeminiDDP(Tower(), placement_policy="zero1", **options)
        optimizer = HybridAdam(model.parameters(), lr=1e-2)
        token_loss(model, token_batches(1, 1)[0][0]).backward()
        optimizer.step()
        digests.add(model.digest())
    assert len(digests) == 1
