"""Hard budgets: what is in use never passes them, and the numbers do not depend on them."""

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, ConstPlacement, GeminiDDP
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from nvme import WriteBudgetError
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import train
from tests.support.spilled import BLOCKS, LEAST, SMALL, assert_same, homes, wrapped

MODEL_DATA = 16 * 26112  # bytes of bf16 Tower: parameters, gradients, state, with padding
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME


def peaks(model, optimizer, batches, device_only=False):
    """The most model data on every tier at any moment of training."""
    ledger = model.engine.manager.ledger
    for (ids,) in batches:
        ledger.watched = True
        loss = token_loss(model, ids)
        ledger.watched = True  # sampling switches it off
        loss.backward()
        ledger.watched = True
        optimizer.step()
        optimizer.zero_grad()
    return {tier: sum(kinds.values()) for tier, kinds in ledger.peaks.items()}


def budget(fraction):
    return AutoPlacement(round(fraction * MODEL_DATA) + 66_000)


@pytest.mark.parametrize("fraction", [1.0, 0.75, 0.5, 0.25])
def test_weights_are_the_same_bits_within_every_budget(fraction):
    """Beside the staging buffers, 66 kB, which do not shrink with the model."""
    limited, free = wrapped(budget(fraction), max_norm=0.5), wrapped(max_norm=0.5)
    assert sum(c.spec.payload_numel for c in free[0].engine.chunks) * 16 == MODEL_DATA
    found = peaks(*limited, token_batches(3, 1))
    train(*free, token_batches(3, 1))
    assert found[D] <= limited[0].engine.planning.inputs.budgets.device
    assert (fraction < 1.0) == (N in set.union(*homes(limited[0])))
    assert_same(limited, free)


def test_a_simulated_device_and_its_host_stay_within_both_budgets():
    sim = SimBackend(1)
    model, optimizer = wrapped(AutoPlacement("90KiB", "200KiB"), device=sim)
    found = peaks(model, optimizer, token_batches(3, 1))
    assert found[D] <= 90 << 10 and found[H] <= 200 << 10 and found[N] > 0
    assert set.union(*homes(model)) == {D, H, N}


def test_a_const_budget_is_for_model_data_alone():
    model, optimizer = wrapped(ConstPlacement("160KiB"))
    found = peaks(model, optimizer, token_batches(2, 1))
    assert found[D] <= 160 << 10 and found[N] > 0


def test_the_host_has_no_tier_of_its_own_where_the_cpu_computes():
    model, _ = wrapped("cpu")
    assert homes(model) == ({D}, {D}, {D})


def test_host_and_device_are_one_memory_where_the_cpu_computes():
    lower = wrapped(AutoPlacement("1GiB", host_budget="150KiB"))[0].engine.planning
    assert lower.inputs.budgets.device == 150 << 10
    assert lower.plan.shards == wrapped(AutoPlacement("150KiB"))[0].engine.planning.plan.shards


def test_state_that_must_be_on_disk_and_may_not_be_is_an_error_before_the_first_step():
    model = GeminiDDP(Tower(), placement_policy=AutoPlacement(nvme_budget="100KiB"), **SMALL)
    with pytest.raises(BudgetError, match=r"nvme_budget of 100\.00 KiB .* too small"):
        HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme=BLOCKS)
    train(model, HybridAdam(model.parameters(), nvme=BLOCKS), token_batches(1, 1))


def test_a_disk_budget_below_what_must_go_there_is_an_error_before_the_first_step():
    with pytest.raises(BudgetError, match="nvme_budget") as info:
        wrapped(AutoPlacement("150KiB", nvme_budget="100KiB"))
    assert info.value.tier is N
    wrapped(AutoPlacement("150KiB", nvme_budget=(100 << 10) + info.value.missing_bytes))


def allocated(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_a_disk_budget_holds_while_backwards_add_up(tmp_path):
    """What is added up is in fp32, in a file of its own; originals are in one before that."""
    with pytest.raises(BudgetError) as info:
        wrapped(AutoPlacement("130KiB", nvme_budget="1B"))
    limit = 1 + info.value.missing_bytes
    model, optimizer = wrapped(AutoPlacement("130KiB", nvme_budget=limit, nvme_dir=str(tmp_path)))
    found = [allocated(tmp_path)]
    for (ids,) in token_batches(2, 1):
        for _ in range(3):
            token_loss(model, ids).backward()
            found.append(allocated(tmp_path))
        optimizer.step()
        optimizer.zero_grad()
    assert len(model.engine.storage.gradient_files.files) == 2
    # beside blocks a file has a header and an index: 64 kB are counted for all of them
    assert limit - (80 << 10) < max(found) <= limit


def written(model):
    """Bytes, by all files of a module and its optimizer."""
    files = model.engine.storage.traffic().nvme_write
    return files + model.engine.target.tiered_state.nvme_written_total


def meter_of(model):
    return model.engine.target.tiered_state.nvme.store.meter


def test_a_write_budget_is_for_all_files(tmp_path):
    def limited(write_budget):
        module = Tower()
        trace = sequential_trace(specs_of(module, "bfloat16"))
        model = GeminiDDP(module, placement_policy=LEAST, trace=trace, **SMALL)
        nvme = NvmeConfig(block_numel=1024, write_budget=write_budget)
        return model, HybridAdam(model.parameters(), lr=1e-2, nvme=nvme)

    model, optimizer = limited(None)
    meter = meter_of(model)
    at_begin = meter.written_bytes
    assert at_begin > written(model)  # and the originals, whose file is gone
    train(model, optimizer, token_batches(3, 1))
    total = meter.written_bytes
    per_step = (total - at_begin) // 3
    model, optimizer = limited(total + per_step // 2)
    train(model, optimizer, token_batches(3, 1))
    before = model.state_dict()
    with pytest.raises(WriteBudgetError, match="nvme_write_budget"):
        train(model, optimizer, token_batches(1, 1))
    assert meter_of(model).written_bytes <= total + per_step // 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    with optimizer.parked("nvme"):  # with parameters in a file: they need not move
        pass
    assert meter_of(model).written_bytes <= total + per_step // 2


def test_a_failed_optimizer_leaves_the_module_usable():
    model = GeminiDDP(
        Tower(), placement_policy=AutoPlacement("180KiB", warmup_non_model_data_ratio=0), **SMALL
    )
    with pytest.raises(BudgetError, match="device_budget"):
        HybridAdam(model.parameters(), nvme=NvmeConfig(depth=1000))
    train(model, HybridAdam(model.parameters(), nvme=BLOCKS), token_batches(1, 1))


def test_the_first_iteration_is_sampled_and_planned_with():
    model = GeminiDDP(
        Tower(), placement_policy=AutoPlacement("2MiB", warmup_non_model_data_ratio=0.85), **SMALL
    )
    optimizer = HybridAdam(model.parameters(), nvme=BLOCKS)
    assert N in set.union(*homes(model))
    assumed = model.engine.planning.inputs.trace
    train(model, optimizer, token_batches(2, 1))
    (trace,) = model.memory_stats.traces.values()
    events = [moment.event[:3] for moment in trace.moments]
    assert events[:2] == [("forward", "enter", "embed"), ("forward", "leave", "embed")]
    assert ("backward", "enter", "layers.3.1") in events
    assert len(trace.moments) > len(assumed.moments) // 2
    with torch.no_grad():
        model(token_batches(1, 1)[0][0])
    model(token_batches(1, 1)[0][0])  # ends the evaluation
    assert {kind for kind, _ in model.memory_stats.traces} == {"train", "eval"}
