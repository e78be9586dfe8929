"""`with optimizer.parked(...)`: memory is given back, and every bit returns."""

import pytest
import torch
from torch import nn

import nvme
from bench.shared.models import token_batches, token_loss
from optim import HybridAdam
from tests.support.disks.faults import file_size_limit
from tests.support.disks.stepped import (
    copies,
    in_memory,
    make_optimizer,
    make_params,
    same,
    train,
)
from tests.support.towers import wrapped


def gradients(params):
    generator = torch.Generator().manual_seed(5)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def everything(params, optimizer):
    state = [v.clone() for s in optimizer.state_dict()["state"].values() for v in s.values()]
    return [*copies(params), *(p.grad.clone() for p in params), *state]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_parked_on_disk_comes_back_bit_for_bit(fraction, dtype, tmp_path):
    params = make_params(dtype)
    optimizer = make_optimizer(params, tmp_path, fraction)
    train(params, optimizer, 2)
    gradients(params)
    before, identities = everything(params, optimizer), [id(p) for p in params]
    with optimizer.parked("nvme"):
        held = [t.untyped_storage() for p in params for t in (p.data, p.grad)]
        held += [
            s.untyped_storage()
            for slab in optimizer.targets[0].tiered_state.device_slabs
            for s in slab.tensors.values()
        ]
        assert sum(storage.nbytes() for storage in held) == 0
        assert any("parked" in path.name for path in tmp_path.iterdir())
    assert same(everything(params, optimizer), before)
    assert identities == [id(p) for p in params]
    assert not any("parked" in path.name for path in tmp_path.iterdir())
    assert same(train(params, optimizer, 1, first=2), in_memory(3, dtype))
    optimizer.close()


def test_on_a_cpu_parking_in_host_memory_moves_nothing(tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path)
    with optimizer.parked("host"):
        assert all(p.untyped_storage().nbytes() for p in params)
    assert same(train(params, optimizer, 1), in_memory(1))
    optimizer.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_engine_is_parked_between_backward_and_step(precision, tmp_path):
    def run(park):
        model, optimizer = wrapped(precision, folder=tmp_path, fraction=0.4)
        for parts in token_batches(3, 1):
            token_loss(model, parts[0]).backward()
            if park:
                with optimizer.parked("nvme"):
                    held = [(c.payload, c.shard) for c in model.engine.chunks]
                    assert not any(t.untyped_storage().nbytes() for pair in held for t in pair)
            optimizer.step()
            optimizer.zero_grad()
        found = [chunk.shard.clone() for chunk in model.engine.chunks]
        optimizer.close()
        return found

    assert same(run(park=True), run(park=False))


def test_an_exception_in_the_body_brings_everything_back(tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path, 0.5)
    train(params, optimizer, 1)
    before = everything(params, optimizer)
    with pytest.raises(ZeroDivisionError), optimizer.parked("nvme"):
        _ = 1 / 0
    assert same(everything(params, optimizer), before)
    optimizer.close()


@pytest.mark.parametrize("limit", [4096, 2 << 20])
def test_a_full_disk_on_the_way_out_leaves_everything_in_place(limit, tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path, 0.5)
    train(params, optimizer, 1)
    before, files = everything(params, optimizer), sorted(tmp_path.iterdir())
    with (
        file_size_limit(limit),
        pytest.raises(nvme.DiskFullError, match="cannot hold"),
        optimizer.parked("nvme"),
    ):
        raise AssertionError("the body must not run")
    assert same(everything(params, optimizer), before) and sorted(tmp_path.iterdir()) == files
    with optimizer.parked("nvme"):
        pass
    assert same(everything(params, optimizer), before)
    optimizer.close()


def test_parking_counts_in_the_write_budget(tmp_path):
    param = nn.Parameter(torch.ones(1 << 20))
    optimizer = HybridAdam([param], nvme_offload_dir=tmp_path, nvme_write_budget="30MiB")
    for _ in range(2):
        with optimizer.parked("nvme"):
            assert not param.untyped_storage().nbytes()
    with (
        pytest.raises(nvme.WriteBudgetError, match=r"parking writes 12\.00 MiB, to 36\.00 MiB"),
        optimizer.parked("nvme"),
    ):
        raise AssertionError("the body must not run")
    assert torch.equal(param, torch.ones(1 << 20)) and list(tmp_path.iterdir()) == []
    optimizer.close()


def test_nothing_can_be_done_with_what_is_parked(tmp_path):
    params = make_params()
    optimizer = make_optimizer(params, tmp_path)
    with pytest.raises(ValueError, match="expected 'nvme' or 'host'"), optimizer.parked("moon"):
        pass
    with optimizer.parked("nvme"):
        for use in (optimizer.step, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="parked"):
                use()
        with pytest.raises(RuntimeError, match="parked"), optimizer.parked("nvme"):
            pass
    assert same(train(params, optimizer, 1), in_memory(1))
    optimizer.close()


def test_a_storage_that_cannot_be_freed_stays(tmp_path):
    """numpy owns it."""
    array = torch.zeros(1000).numpy()
    param = nn.Parameter(torch.from_numpy(array))
    optimizer = HybridAdam([param], nvme_offload_dir=tmp_path)
    with optimizer.parked("nvme"):
        assert param.untyped_storage().nbytes() == 4000
    optimizer.close()
