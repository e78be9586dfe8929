"""Several ranks against one process that accumulates the same parts in fp32, on updates."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.shared.models import Choosy, Tower, seeded, token_batches, token_loss
from bench.shared.reference import flat, relative_error, train_reference
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam, NvmeConfig

pytestmark = pytest.mark.ci

SMALL = {"min_chunk_size_m": 0.004}
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}
STEPS = 20


def full_masters(model, optimizer):
    """fp32 weights of all ranks' shards, in parameter order."""
    found = []

    def look(block, planes):
        for part in block.segments:
            inside = slice(part.offset, part.offset + part.numel)
            found.append((part.param, part.param_offset, planes["master"][inside].clone()))

    optimizer.targets[0].tiered_state.visit(look)
    everywhere = model.engine.comm.gather_objects(found)
    return flat([v for *_, v in sorted((e for r in everywhere for e in r), key=lambda e: e[:2])])


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
    masters = full_masters(model, optimizer) if precision == "bf16" else seen
    peak = model.engine.manager.gathers
    optimizer.close()
    return masters, seen, norm, peak


def reference(world_size, precision, max_norm):
    return train_reference(
        Tower(),
        lambda ps: torch.optim.AdamW(ps, **ADAM),
        token_batches(STEPS, world_size),
        token_loss,
        torch.float32 if precision == "fp32" else torch.bfloat16,
        max_norm,
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_agree_with_one_process(world_size, precision, tmp_path):
    """World size 3 pads every shard. The bounds are the issue's: 1e-6 in fp32, 5e-3 in bf16."""
    start = flat(list(Tower().parameters()))
    want = reference(world_size, precision, 0.3)
    bound = 1e-6 if precision == "fp32" else 5e-3
    results = run_ranks(train, world_size, precision, 1.0, 0.0, 0.3, str(tmp_path))
    for masters, seen, norm, _ in results:
        assert relative_error(masters - start, want - start) < bound
        assert torch.equal(seen, results[0][1]) and norm == results[0][2]


def test_placements_end_in_the_same_bits(tmp_path):
    """ZeRO-3, ZeRO-2, half of each; state in RAM, on disk, half of each."""
    digests = {}
    for frac, fraction in ((1.0, 0.0), (0.0, 0.0), (0.5, 0.3), (1.0, 1.0), (0.0, 1.0)):
        results = run_ranks(train, 2, "bf16", frac, fraction, 0.3, str(tmp_path))
        digests[frac, fraction] = results[0][1]
        gathers = results[0][3]
        assert (gathers > STEPS) == (frac > 0)
    first = next(iter(digests.values()))
    assert all(torch.equal(first, other) for other in digests.values())
    assert list(tmp_path.iterdir()) == []


def overflow_on_one_rank(rank):
    model = GeminiDDP(Tower(), **SMALL)
    optimizer = HybridAdam(model.parameters())
    (parts,) = token_batches(1, dist.get_world_size())
    before = full_masters(model, optimizer)
    if rank == 1:
        model.layers[1][3].weight.register_hook(lambda grad: grad * float("nan"))
    token_loss(model, parts[rank]).backward()
    optimizer.step()
    report = optimizer.last_report
    return report.skipped, report.nonfinite, torch.equal(before, full_masters(model, optimizer))


def test_a_nan_on_one_rank_skips_the_step_on_all():
    results = run_ranks(overflow_on_one_rank, 2)
    assert {(skipped, same) for skipped, _, same in results} == {(True, True)}
    names = {name for _, name, _ in results}
    assert len(names) == 1 and "layers.1.3.weight" in names.pop()


def unused_on_some_ranks(rank):
    """Head 0 is used everywhere, head 1 on rank 1 only, head 2 nowhere."""
    model = GeminiDDP(Choosy(), precision="fp32", min_chunk_size_m=1)
    optimizer = HybridAdam(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        x = torch.ones(2, 5)
        (model(x, 0) + (model(x, 1) if rank else 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.engine.manager.prepare(tuple(chunk.spec.id for chunk in model.engine.chunks))
    unused = torch.equal(model.heads[2].weight, Choosy().heads[2].weight)
    return flat(model.engine.params), unused, optimizer.targets[0].step_counts[-1]


def test_parameters_unused_on_all_ranks_stay_and_on_some_are_updated():
    results = run_ranks(unused_on_some_ranks, 2)
    assert torch.equal(results[0][0], results[1][0])
    assert [(unused, steps) for _, unused, steps in results] == [(True, 0), (True, 0)]
    module = Choosy()
    assert not torch.equal(results[0][0], flat(list(module.parameters())))


def another_model(rank):
    with seeded():
        module = nn.Linear(3, 3) if rank == 0 else nn.Linear(3, 4)
    try:
        GeminiDDP(module)
    except ValueError as error:
        return str(error), type(module.weight) is nn.Parameter
    return "", False


def test_ranks_with_different_models_are_told_so_on_every_rank():
    for said, untouched in run_ranks(another_model, 2):
        assert "rank 1 has parameter weight of shape (4, 3)" in said and untouched


def a_disk_fails_on_one_rank(rank, folder):
    from tests.support.disks.faults import spoil_block

    model = GeminiDDP(Tower(), **SMALL)
    optimizer = HybridAdam(
        model.parameters(),
        nvme_offload_fraction=1.0,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=1024),
    )
    batches = token_batches(2, dist.get_world_size())
    said = ""
    for step, parts in enumerate(batches):
        token_loss(model, parts[rank]).backward()
        before = full_masters(model, optimizer)
        if step == 1 and rank == 1:
            spoil_block(optimizer, 2)
        try:
            optimizer.step()
        except RuntimeError as error:
            said = str(error)
        optimizer.zero_grad()
    # the other rank's own block cannot be read any more
    same = rank != 0 or torch.equal(before[:1000], full_masters_here(optimizer)[:1000])
    return said, same, len(model.engine.chunks)


def full_masters_here(optimizer):
    found = []

    def look(block, planes):
        for part in block.segments:
            inside = slice(part.offset, part.offset + part.numel)
            found.append((part.param, part.param_offset, planes["master"][inside].clone()))

    optimizer.targets[0].tiered_state.visit(look)
    return flat([values for *_, values in sorted(found, key=lambda e: e[:2])])


def test_a_failing_disk_on_one_rank_stops_the_step_on_all(tmp_path):
    (said0, same0, _), (said1, _, _) = run_ranks(a_disk_fails_on_one_rank, 2, str(tmp_path))
    assert "disks of ranks [1] failed" in said0 and same0
    assert "block 2 " in said1 and "checksum" in said1
