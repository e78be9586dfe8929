"""Several ranks: the same bits wherever data is, and what one rank has alone is told to all.

Updates beside one process of torch: test_numerics.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.shared.models import Tower, seeded, token_batches, token_loss
from bench.shared.reference import flat
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import masters_of
from tests.support.said import said

pytestmark = pytest.mark.ci

SMALL = {"min_chunk_size_m": 0.004}
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}
STEPS = 20


def train(rank, precision, shard_param_frac, fraction, max_norm, folder):
    world_size = dist.get_world_size()
    model = GeminiDDP(
        Tower(seed=rank),  # rank 0's weights count
        placement_policy=StaticPlacement(shard_param_frac),
        precision=precision,
        max_norm=max_norm,
        **SMALL,
    )
    optimizer = HybridAdam(
        model.parameters(),
        **ADAM,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=1024),
    )
    for parts in token_batches(STEPS, world_size):
        token_loss(model, parts[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    norm = optimizer.last_report.grad_norm
    model.engine.manager.prepare(tuple(chunk.spec.id for chunk in model.engine.chunks))
    seen = flat(model.engine.params)
    gathers = model.engine.manager.gathers
    optimizer.close()
    return seen, norm, gathers


def test_placements_end_in_the_same_bits(tmp_path):
    """ZeRO-3, ZeRO-2, half of each; state in RAM, on disk, half of each."""
    digests = {}
    for frac, fraction in ((1.0, 0.0), (0.0, 0.0), (0.5, 0.3), (1.0, 1.0), (0.0, 1.0)):
        results = run_ranks(train, 2, "bf16", frac, fraction, 0.3, str(tmp_path))
        digests[frac, fraction], norm, gathers = results[0]
        for seen, its_norm, _ in results:
            assert torch.equal(seen, results[0][0]) and its_norm == norm
        assert (gathers > STEPS) == (frac > 0)
    first = next(iter(digests.values()))
    assert all(torch.equal(first, other) for other in digests.values())
    assert list(tmp_path.iterdir()) == []


def another_model(rank):
    with seeded():
        module = nn.Linear(3, 3) if rank == 0 else nn.Linear(3, 4)
    return said(GeminiDDP, module), type(module.weight) is nn.Parameter


def test_ranks_with_different_models_are_told_so_on_every_rank():
    for text, untouched in run_ranks(another_model, 2):
        assert "rank 1 has parameter weight of shape (4, 3)" in text and untouched


def a_disk_fails_on_one_rank(rank, folder):
    from tests.support.disks.faults import spoil_block

    model = GeminiDDP(Tower(), **SMALL)
    optimizer = HybridAdam(
        model.parameters(),
        nvme_offload_fraction=1.0,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=1024),
    )
    for step, parts in enumerate(token_batches(2, dist.get_world_size())):
        token_loss(model, parts[rank]).backward()
        before = masters_of(model, optimizer)
        if step == 1 and rank == 1:
            spoil_block(optimizer, 2)
        text = said(optimizer.step)
        optimizer.zero_grad()
    # the other rank's own block cannot be read any more
    same = rank != 0 or torch.equal(before[:1000], masters_of(model, optimizer)[:1000])
    return text, same


def test_a_failing_disk_on_one_rank_stops_the_step_on_all(tmp_path):
    (said0, same0), (said1, _) = run_ranks(a_disk_fails_on_one_rank, 2, str(tmp_path))
    assert "disks of ranks [1] failed" in said0 and same0
    assert "block 2 " in said1 and "checksum" in said1
