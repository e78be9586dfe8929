"""Homes rise once, to what the first measured iteration leaves room for; no bit depends on it."""

import pytest
import torch

import gemini
from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, GeminiDDP
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.tiers import Tier
from nvme import ChecksumError
from optim import HybridAdam
from tests.support.checkpoints import everything, train
from tests.support.disks.faults import flip
from tests.support.spilled import BLOCKS, SMALL, assert_same, homes, wrapped

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME


def assuming(*budgets, device=None, non_model_bytes=0, **options):
    """A module whose homes were chosen for an assumption, and a trace that comes after."""
    policy = AutoPlacement(*budgets)
    model = GeminiDDP(Tower(), device, policy, max_norm=0.5, **SMALL, **options)
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)
    before = homes(model)
    trace = sequential_trace(specs_of(Tower(), "bfloat16"), non_model_bytes)
    model.engine.traced(trace)
    assert homes(model) == before  # nothing moves before gradients are dropped
    return model, optimizer


def in_memory(model):
    use = model.engine.manager.bytes_in_use()
    return sum(nbytes for (tier, _), nbytes in use.items() if tier is not N)


def test_everything_comes_to_memory_where_there_is_room_and_the_files_are_gone():
    model, optimizer = run = assuming("650KiB")
    free = wrapped(max_norm=0.5)
    assert N in set.union(*homes(model)) and optimizer.nvme_bytes > 0
    for each in (run, free):
        train(*each, token_batches(3, 1))
    assert homes(model) == ({D}, {D}, {D})
    assert optimizer.nvme_bytes == 0
    assert optimizer.last_report.traffic.nvme_read == 0
    assert_same(run, free)


@pytest.mark.parametrize(("options", "kib", "activations_kib"), [
    ({"precision": "bf16"}, 650, 300),
    ({"precision": "bf16"}, 650, 400),
    ({"precision": "fp32"}, 1300, 900),
    ({"master_weights": False}, 650, 400),
])  # fmt: skip
def test_a_part_rises_within_the_budget_and_what_left_is_given_back(
    options, kib, activations_kib, tmp_path
):
    model, optimizer = run = assuming(
        kib << 10, None, None, str(tmp_path), non_model_bytes=activations_kib << 10, **options
    )
    free = wrapped(max_norm=0.5, **options)
    low = model.engine.planning.plan.blocks_on(N)
    files = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    for each in (run, free):
        train(*each, token_batches(1, 1))
    high = model.engine.planning.plan.blocks_on(N)
    assert high and high < low
    assert {block.id for block in model.engine.target.tiered_state.nvme.blocks} == high
    assert in_memory(model) <= (kib - activations_kib) << 10
    for each in (run, free):
        train(*each, token_batches(2, 1))
    left = [path.stat().st_blocks * 512 for path in tmp_path.iterdir()]
    # a file with holes may take a page more, for the map of its extents
    assert 0 <= sum(left) - optimizer.nvme_bytes <= 4096 * len(left)
    assert sum(left) < files
    assert_same(run, free)


def test_state_rises_from_the_host_to_the_device():
    sim = SimBackend(1)
    model, _ = run = assuming("650KiB", "400KiB", device=sim, non_model_bytes=300 << 10)
    free = wrapped(max_norm=0.5)
    low = model.engine.planning.plan
    assert low.blocks_on(H)
    for each in (run, free):
        train(*each, token_batches(3, 1))
    high = model.engine.planning.plan
    assert low.blocks_on(D) < high.blocks_on(D) and high.blocks_on(H) < low.blocks_on(H)
    state = model.engine.target.tiered_state
    assert {b.id for b in state.resident} == high.blocks_on(D)
    assert {b.id for b in state.host} == high.blocks_on(H)
    assert_same(run, free)


def test_homes_wait_for_a_graph_that_waits_for_its_backward():
    """`zero_grad` between forward and backward, as many loops have it."""
    runs = [assuming("650KiB"), wrapped(max_norm=0.5)]
    for model, optimizer in runs:
        for (ids,) in token_batches(3, 1):
            loss = token_loss(model, ids)
            before = homes(model)
            optimizer.zero_grad()
            assert homes(model) == before
            loss.backward()
            optimizer.step()
    runs[0][1].zero_grad()
    assert homes(runs[0][0]) == ({D}, {D}, {D})
    assert_same(*runs)


def test_homes_wait_while_memory_is_lent_to_somebody_else(tmp_path):
    runs = [assuming("1300KiB", precision="fp32"), wrapped(max_norm=0.5, precision="fp32")]
    for model, optimizer in runs:
        (ids,) = token_batches(1, 1)[0]
        token_loss(model, ids).backward()
        optimizer.step()
        before = homes(model)
        with optimizer.parked("nvme"):
            optimizer.zero_grad()
            assert homes(model) == before
        train(model, optimizer, token_batches(2, 1, seed=3))
    assert homes(runs[0][0]) == ({D}, {D}, {D})
    assert_same(*runs)


def test_a_checkpoint_from_before_and_one_under_way_hold_what_they_should(tmp_path):
    model, optimizer = run = assuming("650KiB", non_model_bytes=360 << 10)
    ((ids,),) = token_batches(1, 1)
    token_loss(model, ids).backward()
    optimizer.step()
    saved, before = everything(*run), homes(model)
    save = gemini.save_checkpoint(tmp_path / "c", model, optimizer, async_save=True)
    optimizer.zero_grad()
    assert homes(model) != before
    train(*run, token_batches(2, 1, seed=3))
    save.wait()
    again = wrapped(max_norm=0.5)
    gemini.load_checkpoint(tmp_path / "c", *again)
    found = everything(*again)
    for name, values in saved["runs"].items():
        assert torch.equal(values, found["runs"][name]), name
    train(*again, token_batches(2, 1, seed=3))
    assert_same(run, again)


def test_a_damaged_block_is_found_and_nothing_of_the_state_has_moved():
    model, optimizer = assuming("650KiB")
    nvme = model.engine.target.tiered_state.nvme
    store = nvme.store
    last = max(range(len(nvme.blocks)), key=lambda i: nvme.blocks[i].id)
    plan = model.engine.planning.plan
    for extent in store.layout.extents()[last]:
        flip(store.paths[0], extent.offset)
    with pytest.raises(ChecksumError):
        optimizer.zero_grad()
    assert model.engine.planning.plan is plan
    assert {b.id for b in model.engine.target.tiered_state.nvme.blocks} == plan.blocks_on(N)
    with torch.no_grad():
        for (ids,) in token_batches(1, 1):
            assert torch.isfinite(token_loss(model, ids))
