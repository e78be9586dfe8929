"""Weights that leave: the bits that are trained, in bounded buckets, of versions that count."""

import pytest
import torch
from torch import nn

from bench.shared.models import Tower, seeded, token_batches, token_loss
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.transfer.buckets import ranges_of
from gemini.units import PAGE_BYTES, align_up
from optim import HybridAdam, NvmeConfig
from tests.support.spilled import BLOCKS, SMALL
from tests.support.towers import weights_of

SMALL_BUCKET = 3000  # bytes
HOMES = {
    "resident": StaticPlacement(),
    "host": StaticPlacement(offload_param_frac=1.0),
    "replicated": StaticPlacement.zero(2),
    "files": None,
}


def made(home, folder, precision="bf16", **options):
    placement = HOMES[home] or AutoPlacement(
        torch.distributed.get_world_size() * 150 << 10, nvme_dir=folder
    )
    device = None
    if home == "host":
        device = SimBackend(torch.distributed.get_rank())
    module, trace = Tower(), None
    if home == "files":  # where activations take nothing
        trace = sequential_trace(specs_of(module, {"fp32": "float32"}.get(precision, "bfloat16")))
    model = GeminiDDP(
        module, device, placement_policy=placement, precision=precision, trace=trace, **SMALL,
        **options,
    )  # fmt: skip
    return model, HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)


def received(model, **asked):
    """Weights as a receiver copies them, and the largest bucket."""
    found, most = {}, 0
    for bucket in model.weights(**asked):
        assert bucket.digest() == bucket.digest()
        most = max(most, bucket.nbytes)
        for name, tensor in bucket.tensors.items():
            assert name not in found
            found[name] = tensor.clone()
    return found, most


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def sent(rank, home, folder, precision, world_size):
    model, optimizer = made(home, folder, precision)
    largest = max(param.nbytes for param in weights_of(model).values())
    for parts in token_batches(3, world_size):
        token_loss(model, parts[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        in_files = {c.spec.id for c in model.engine.chunks if c.files is not None}
        assert bool(in_files) == (home == "files")
        found, most = received(model, bytes=SMALL_BUCKET)
        assert most <= max(SMALL_BUCKET, largest)
        assert_same(found, weights_of(model))
    whole, _ = received(model)
    assert_same(whole, found)
    optimizer.close()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("home", HOMES)
def test_every_rank_gets_what_the_model_computes_with(home, precision, tmp_path):
    for world_size in (1, 3):
        results = run_ranks(sent, world_size, home, str(tmp_path), precision, world_size)
        for found in results[1:]:
            assert_same(found, results[0])


def differences(rank, home, folder, update):
    model, optimizer = made(home, folder, "fp16", update=update)
    (ids,) = token_batches(1, 1)[0]
    *_, bucket = model.weights()
    version, before = bucket.version, weights_of(model)
    assert received(model, since=version) == ({}, 0)
    token_loss(model, ids).backward()
    model.module.layers[0][0].weight.grad.fill_(float("inf"))
    optimizer.step()  # skipped
    optimizer.zero_grad()
    found, _ = received(model, since=version)
    assert_same(weights_of(model), before)
    assert all(torch.equal(before[name], value) for name, value in found.items())
    token_loss(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    after = weights_of(model)
    found, _ = received(model, since=version)
    assert_same(before | found, after)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and changed <= found.keys()
    *_, bucket = model.weights()
    with torch.no_grad(), model.summon_full_params():
        model.module.layers[1][1].bias.fill_(0.25)
    found, _ = received(model, since=bucket.version)
    assert [*found] == ["layers.1.1.bias"] and found["layers.1.1.bias"].eq(0.25).all()
    optimizer.close()


@pytest.mark.parametrize(("home", "update"), [("resident", "serial"), ("files", "tail")])
def test_what_has_changed_since_a_version_is_enough(home, update, tmp_path):
    run_ranks(differences, 1, home, str(tmp_path), update)


def blocks_read(rank, folder):
    with seeded():
        module = nn.Sequential(*(nn.Linear(96, 96) for _ in range(8)))
    trace = sequential_trace(specs_of(module, "bfloat16"))
    placement = AutoPlacement("220KiB", nvme_dir=folder)
    model = GeminiDDP(
        module, placement_policy=placement, trace=trace, min_chunk_size_m=0.02, search_range_m=0
    )
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)
    engine = model.engine
    chunks = [chunk for chunk in engine.chunks if chunk.files is not None]
    block_numel = engine.planning.block_numel
    assert max(chunk.spec.shard_numel for chunk in chunks) > 4 * block_numel
    in_memory = block_numel * chunks[0].dtype.itemsize
    in_file = align_up(in_memory, PAGE_BYTES)
    largest = max(param.nbytes for param in weights_of(model).values())
    found, before = [], engine.storage.traffic().nvme_read
    for _ in model.weights(bytes=SMALL_BUCKET):
        read = engine.storage.traffic().nvme_read - before
        num_blocks = max(SMALL_BUCKET, largest) // in_memory + 2
        assert read <= num_blocks * in_file
        before += read
        found.append(read)
    optimizer.close()
    return found


def test_of_a_shard_in_a_file_the_blocks_of_a_bucket_are_read(tmp_path):
    (found,) = run_ranks(blocks_read, 1, str(tmp_path))
    assert sum(read > 0 for read in found) > 4


def test_frozen_weights_leave_once_and_a_step_between_buckets_is_told():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    inner[0].requires_grad_(False)
    model = GeminiDDP(inner, precision="bf16")
    optimizer = HybridAdam(model.parameters())
    *_, bucket = model.weights()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    assert {*received(model, since=bucket.version)[0]} == {"1.weight", "1.bias"}
    begun = model.weights(bytes="1B")
    next(begun)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="of another version"):
        next(begun)
    other = GeminiDDP(nn.Linear(8, 8), precision="bf16")
    with pytest.raises(ValueError, match="of another model"):
        next(other.weights(since=bucket.version))
    optimizer.close()


def test_what_is_rewound_is_another_version(tmp_path):
    model = GeminiDDP(Tower(), precision="bf16", **SMALL)
    optimizer = HybridAdam(
        model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path),
        nvme=NvmeConfig(block_numel=1024, keep_versions=1),
    )  # fmt: skip
    (ids,) = token_batches(1, 1)[0]
    for _ in range(2):
        token_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    *_, bucket = model.weights()
    have, _ = received(model)
    model.rewind(1)
    found, _ = received(model, since=bucket.version)
    assert_same(have | found, weights_of(model))
    assert not torch.equal(have["embed.weight"], found["embed.weight"])
    optimizer.close()


def test_ranges_have_every_wanted_parameter_once():
    model = GeminiDDP(Tower(), precision="bf16", **SMALL)
    layout = model.engine.layout
    for wanted in (range(len(layout.params)), range(1, len(layout.params), 3)):
        for nbytes in (1, 100, 5000, 1 << 30):
            seen = []
            for one in ranges_of(layout, wanted, nbytes):
                chunk = layout.chunks[one.chunk]
                inside = [chunk.slots[i].param for i in one.slots if chunk.slots[i].param in wanted]
                assert len(inside) == 1 or len(one) * 2 <= nbytes
                seen += inside
                ranks = [part for _, part, _ in one.parts_of(chunk.shard_numel)]
                assert [i for part in ranks for i in range(part.start, part.stop)] == [
                    *range(len(one))
                ]
            assert sorted(seen) == [*wanted]
