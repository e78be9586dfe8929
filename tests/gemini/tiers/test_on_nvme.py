"""Parameters, gradients and state on NVMe: the same bits as in memory."""

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.shared.models import Tower, token_batches, token_loss
from gemini import AutoPlacement, GeminiDDP, init_empty
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.units import PAGE_BYTES, align_up
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import train
from tests.support.spilled import BLOCKS, LEAST, SMALL, assert_same, wrapped


def test_a_model_that_never_was_in_memory_trains_from_nvme():
    """Values are made chunk by chunk, and every gather refills what autograd saved."""
    runs = []
    for placement in (LEAST, "cuda"):
        with init_empty():
            module = Tower()
        torch.manual_seed(1)
        trace = sequential_trace(specs_of(module, "bfloat16"))
        model = GeminiDDP(module, None, placement, trace=trace, **SMALL)
        runs.append((model, HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)))
        train(*runs[-1], token_batches(3, 1))
    assert_same(*runs)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_of_gradients_on_nvme(norm_type):
    norms = []
    for model, optimizer in (wrapped(LEAST), wrapped()):
        token_loss(model, token_batches(1, 1)[0][0]).backward()
        norms.append(optimizer.clip_grad_norm_(0.1, norm_type))
    assert torch.equal(*norms)


def test_gradients_on_nvme_can_be_looked_at():
    found = []
    for model, _ in (wrapped(LEAST), wrapped()):
        token_loss(model, token_batches(1, 1)[0][0]).backward()
        found.append(dict(model.named_gradients()))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("update", ["serial", pytest.param("tail", marks=pytest.mark.ci)])
def test_what_numpy_would_write_to_a_parameter_on_nvme_is_refused_and_not_lost(update):
    """Where it is resident numpy has its memory."""
    (spilled, _), (resident, _) = runs = [wrapped(LEAST, update=update), wrapped()]
    for run in runs:
        train(*run, token_batches(1, 1))
    mine, other = (model.get_parameter("layers.2.1.weight") for model in (spilled, resident))
    for give in (lambda p: p.data, Tensor.detach):
        array = give(mine).view(torch.int16).numpy()
        assert np.array_equal(array, np.asarray(give(other).view(torch.int16)))
        with pytest.raises(ValueError, match="read-only"):
            array[:4] = 0
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(give(mine).view(torch.int16))[:4] = 0
    other.data.view(torch.int16).numpy()[:4] = 0
    mine.data.view(torch.int16)[:4] = 0
    for run in runs:
        train(*run, token_batches(1, 1, seed=7))
    assert_same(*runs)


def test_a_parameter_on_nvme_gives_its_memory_to_nobody():
    param = wrapped(LEAST)[0].get_parameter("layers.2.1.weight")
    for give in (torch.from_dlpack, lambda p: torch.from_dlpack(p.detach())):
        with pytest.raises(BufferError, match="clone"):
            give(param.data)
    assert torch.equal(torch.from_dlpack(param.detach().clone()), param)
    widened = np.asarray(param.detach().float())  # memory of its own, as it is with torch
    widened[:] = 0


def in_files(policy=LEAST):
    module = Tower()
    trace = sequential_trace(specs_of(module, "bfloat16"))
    model = GeminiDDP(module, placement_policy=policy, trace=trace, **SMALL)
    return model, [chunk for chunk in model.engine.chunks if chunk.files is not None]


LARGER = AutoPlacement("170KiB", block_numel=2048)


@pytest.mark.parametrize(
    "policy, planned, depth, wish",
    [(LEAST, 1024, 2, 2048), (LEAST, 1024, 1, 1 << 20), (LARGER, 2048, 2, 2048)],
    ids=["a wish", "fewer ahead", "the policy's"],
)
def test_files_stay_as_they_were_cut_and_the_optimizer_takes_their_blocks(
    policy, planned, depth, wish
):
    model, chunks = in_files(policy)
    files = model.engine.storage.params
    shards, written = [chunk.load_shard() for chunk in chunks], files.store.traffic.written_bytes
    assert shards and model.engine.planning.block_numel == planned
    HybridAdam(model.parameters(), nvme=NvmeConfig(depth=depth, block_numel=wish))
    assert model.engine.storage.params is files
    assert files.store.traffic.written_bytes == written
    assert model.engine.planning.block_numel == planned
    assert max(block.numel for block in model.engine.target.tiered_state.space.blocks) == planned
    assert files.staging_bytes == (depth + 2) * align_up(2 * planned, PAGE_BYTES)
    assert all(torch.equal(c.load_shard(), s) for c, s in zip(chunks, shards, strict=True))


def test_what_was_asked_of_a_file_is_there_when_it_is_read_ahead_otherwise():
    model, (chunk, *_) = in_files()
    want = chunk.load_shard()
    values = torch.empty_like(want)
    ticket = chunk.files.read(chunk.spec.id, values)
    HybridAdam(model.parameters(), nvme=NvmeConfig(depth=1))
    ticket.wait()
    assert torch.equal(values, want)


def test_an_optimizer_that_says_another_size_than_the_policy_is_refused():
    model, _ = in_files(LARGER)
    with pytest.raises(ValueError, match=r"NvmeConfig\(block_numel=1024\) beside AutoPlacement\("):
        HybridAdam(model.parameters(), nvme=NvmeConfig(block_numel=1024))
    HybridAdam(model.parameters())
    assert model.engine.planning.block_numel == 2048
