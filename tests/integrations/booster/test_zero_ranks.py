"""ZeRO-1 and 2 by a Booster beside torch's DDP, at two ranks: updates, and what travels and where.

Two backwards before a step, all outside of `no_sync`.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini.ddp
from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat, relative_error
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini.integrations import Booster, HybridParallelPlugin, LowLevelZeroPlugin
from gemini.integrations.classic import ShardedModelV2, ShardedOptimizerV2

pytestmark = [
    pytest.mark.ci,
    pytest.mark.one_process("the simulated device is put into this process"),
]

WORLD, STEPS, K = 2, 3, 2
# eps so large that an update shows the gradient and not its sign alone
ADAM = {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.1}
BUCKET = 0.004  # several chunks
FP32 = 4  # bytes, as those below
MOMENTS = 2 * FP32  # in fp32 parameters are their own masters
OFFLOADED, LATE = {"cpu_offload": True}, {"overlap_allgather": True}
OPTIONS = {
    "plain": {},
    "offloaded": OFFLOADED,
    "gathered late": LATE,
    "offloaded, gathered late": OFFLOADED | LATE,
    "bf16 travels": {"communication_dtype": torch.bfloat16},
    "fp16 travels": {"communication_dtype": torch.float16},
    "fp32 travels": {"communication_dtype": torch.float32},
    "hybrid": OFFLOADED | LATE | {"communication_dtype": torch.bfloat16},
}
TRAVELS = {"bf16 travels": 2, "fp16 travels": 2, "hybrid": 2}  # of all others FP32
STAGES = (1, 2)


def plugin(stage, case):
    options = {"precision": "fp32", **OPTIONS[case]}
    if case == "hybrid":
        return HybridParallelPlugin(1, 1, zero_stage=stage, zero_bucket_size_in_m=BUCKET, **options)
    return LowLevelZeroPlugin(stage=stage, reduce_bucket_size_in_m=BUCKET, **options)


def parts_of(rank, k=K):
    return [parts[k * rank : k * (rank + 1)] for parts in token_batches(STEPS, k * WORLD)]


def update_of_ddp(rank):
    module = Tower()
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    before = flat(list(module.parameters()))
    for parts in parts_of(rank):
        for part in parts:
            (token_loss(model, part) / K).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(list(module.parameters())) - before


def counted_reductions(model):
    """How many the model makes from now on, and the bytes of their payloads."""
    count, comm = Counter(), model.engine.comm
    reduce = comm.reduce_scatter

    def counted(shard, payload, label):
        count["reductions"] += 1
        count["bytes"] += payload.nbytes
        return reduce(shard, payload, label)

    comm.reduce_scatter = counted
    return count


def boosted(rank, stage, case):
    """A run's update, what it sent, and what it held where behind its last step."""
    module = Tower()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    booster = Booster(plugin=plugin(stage, case))
    model, optimizer, *_ = booster.boost(module, optimizer)
    count, late = counted_reductions(model), []
    before = flat(list(module.parameters()))
    for parts in parts_of(rank):
        for part in parts:
            booster.backward(token_loss(model, part) / K, optimizer)
        optimizer.step()
        held = model.engine.manager.bytes_in_use()
        late.append(len(model.engine.weights.regather.arriving) > 0)
        optimizer.zero_grad()
    chunks = model.engine.chunks
    return {
        "update": flat(list(module.parameters())) - before,
        "chunks": len(chunks),
        "numel": sum(chunk.payload.numel() for chunk in chunks),
        "held": {(tier.value, kind): nbytes for (tier, kind), nbytes in held.items()},
        "late": late,
        "sent": dict(count),
    }


def sharded(rank, fp32_reduce_scatter):
    """Bytes reduced for each element, and losses, of ShardedModelV2 in fp16."""
    model = ShardedModelV2(Tower(), None, fp32_reduce_scatter=fp32_reduce_scatter)
    optimizer = torch.optim.AdamW(model.module.parameters(), **ADAM)
    optimizer = ShardedOptimizerV2(model, optimizer, initial_scale=2**10)
    count, losses = counted_reductions(model), []
    for (part,) in parts_of(rank, 1):
        loss = token_loss(model, part)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    numel = sum(chunk.spec.payload_numel for chunk in model.engine.chunks)
    return count["bytes"] / numel / STEPS, losses


def work(rank):
    found = {
        "ddp": update_of_ddp(rank),
        "sharded": [sharded(rank, is_fp32) for is_fp32 in (False, True)],
    }
    for stage in STAGES:
        for case in OPTIONS:
            found[stage, case] = boosted(rank, stage, case)
    return found


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:  # a device with a host memory of its own
        patch.setattr(gemini.ddp, "make_backend", lambda device: SimBackend(dist.get_rank()))
        return run_ranks(work, WORLD)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_updates_are_those_of_ddp(results, stage, case):
    """Sums in fp32 are in another order; bf16 has 8 bits on the way, fp16 has 11."""
    narrow = {"bf16 travels": 1e-2, "hybrid": 1e-2, "fp16 travels": 1e-3}
    for found in results:
        error = relative_error(found[stage, case]["update"], found["ddp"])
        assert error < narrow.get(case, 1e-6)
        assert error > 1e-6 or case not in narrow


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_bucket_is_reduced_once_a_step_or_in_every_backward(results, stage, case):
    for found in (rank[stage, case] for rank in results):
        times = STEPS * (1 if stage == 1 else K)
        nbytes = TRAVELS.get(case, FP32) * found["numel"]
        assert found["sent"] == {"reductions": times * found["chunks"], "bytes": times * nbytes}
        assert found["chunks"] > 1


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_offloaded_state_and_gradients_are_in_host_memory(results, stage, case):
    for found in (rank[stage, case] for rank in results):
        shard, held = found["numel"] // WORLD, found["held"]
        there, elsewhere = "device", "host"
        if OPTIONS[case].get("cpu_offload"):
            there, elsewhere = elsewhere, there
        assert held[there, "state"] == MOMENTS * shard
        assert held[there, "gradients"] == FP32 * shard
        assert (elsewhere, "state") not in held and (elsewhere, "gradients") not in held
        assert held["device", "parameters"] >= FP32 * found["numel"]


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_new_weights_are_on_their_way_behind_a_step_where_that_is_asked_for(results, stage, case):
    for found in (rank[stage, case] for rank in results):
        assert found["late"] == [bool(OPTIONS[case].get("overlap_allgather"))] * STEPS


def test_fp32_reduce_scatter_sends_fp32(results):
    for found in results:
        (narrow, losses), (wide, others) = found["sharded"]
        assert (narrow, wide) == (2, FP32)
        assert losses == pytest.approx(others, rel=1e-3)  # fp16 has 11 bits
        assert losses[-1] < losses[0]
