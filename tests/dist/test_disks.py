"""A disk that fails on one rank fails the step on all with its error; the next one is right."""

import errno

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP
from optim import HybridAdam, NvmeConfig
from tests.support.disks.faults import failing, file_size_limit
from tests.support.spilled import wrapped

pytestmark = pytest.mark.ci


def train(rank, precision, failing_step, limit, folder):
    """Shards after each of four steps; the failing one is tried again. And what was said."""
    model = GeminiDDP(Tower(), precision=precision, min_chunk_size_m=0.004)
    optimizer = HybridAdam(
        model.parameters(),
        nvme_offload_fraction=1.0,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=1024),
    )
    said, found = "", []
    for step, parts in enumerate(token_batches(4, 2)):
        token_loss(model, parts[rank]).backward()
        if step == failing_step:
            before = flat([chunk.shard for chunk in model.engine.chunks])
            try:
                if rank == 1:
                    with file_size_limit(limit):
                        optimizer.step()
                else:
                    optimizer.step()
            except RuntimeError as error:
                said = f"{type(error).__name__}: {error}"
            after = flat([chunk.shard for chunk in model.engine.chunks])
            assert torch.equal(before, after)
        optimizer.step()
        optimizer.zero_grad()
        found.append(flat([chunk.shard for chunk in model.engine.chunks]))
    optimizer.close()
    return found, said


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_rank_is_told_where_and_why_and_goes_on_from_the_last_step(precision, tmp_path):
    """The last blocks are the ones whose write is waited for at the end of the step."""
    clean = run_ranks(train, 2, precision, None, 0, str(tmp_path), processes=True)
    for limit in (1 << 12, 300 << 10):
        failed = run_ranks(train, 2, precision, 2, limit, str(tmp_path), processes=True)
        assert failed[1][1].startswith("FullTransferError: write of")
        assert "disks of ranks [1] failed" in failed[0][1]
        for _, said in failed:
            assert all(part in said for part in ("EFBIG", f"{tmp_path}/gemini-", "-rank1-"))
            assert " at offset " in said
        for rank in range(2):
            for got, want in zip(failed[rank][0], clean[rank][0], strict=True):
                assert torch.equal(got, want)
    assert list(tmp_path.iterdir()) == []


def train_spilled(rank, failing_step, folder):
    """Weights and state after each of three steps; rank 1's last write of parameters fails once."""
    model, optimizer = wrapped(AutoPlacement("320KiB", nvme_dir=folder))
    said, found = "", []
    for step, parts in enumerate(token_batches(3, 2)):
        token_loss(model, parts[rank]).backward()
        if step == failing_step:
            store = model.engine.storage.params.store
            name = store.paths[0].name if rank == 1 else "of no file"
            with failing("pwritev", errno.EIO, name, after=store.layout.num_blocks - 1, times=1):
                try:
                    optimizer.step()
                except RuntimeError as error:
                    said = f"{type(error).__name__}: {error}"
        optimizer.step()
        optimizer.zero_grad()
        weights = model.state_dict()
        found.append([weights[name].clone() for name in sorted(weights)])
    optimizer.close()
    return found, said


def test_a_parameter_file_that_fails_at_its_last_write_fails_the_step_on_every_rank(tmp_path):
    """Nobody has counted the step when it is known, so nobody's weights are one step ahead."""
    clean = run_ranks(train_spilled, 2, None, str(tmp_path), processes=True)
    failed = run_ranks(train_spilled, 2, 1, str(tmp_path), processes=True)
    assert failed[1][1].startswith("TransferError: write of") and "parameters" in failed[1][1]
    assert failed[0][1].startswith("RuntimeError: the disks of ranks [1] failed")
    for rank in range(2):
        for got, want in zip(failed[rank][0], clean[rank][0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert list(tmp_path.iterdir()) == []


def on_own_disk(rank, folders, budget):
    """Weights after three steps with state and parameters in the folder of this rank."""
    placement = AutoPlacement(budget, nvme_dir=folders[rank])
    model, optimizer = wrapped(placement)
    for parts in token_batches(3, 2):
        token_loss(model, parts[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    files = {str(path.parent) for store in optimizer.stores for path in store.paths}
    weights = model.state_dict()
    optimizer.close()
    return files, [weights[name].clone() for name in sorted(weights)]


def test_each_host_has_a_disk_of_its_own_name(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    found = run_ranks(on_own_disk, 2, folders, "320KiB")
    assert [files for files, _ in found] == [{folders[0]}, {folders[1]}]
    same = run_ranks(on_own_disk, 2, [None, None], "1GiB")
    for (_, got), (_, want) in zip(found, same, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(AssertionError, match="must be the same everywhere"):
        run_ranks(on_own_disk, 2, [folders[0], None], "320KiB")
