"""HybridAdam and its like on a plain CPU module."""

import pytest
import torch
from torch import nn

from optim import CPUAdam, HybridAdam, NvmeConfig
from tests.support.disks.faults import spoil_block
from tests.support.plain_training import give_gradients, make_params, train


def test_adam_without_bias_correction_is_the_plain_formula():
    (ours,) = (make_params(),)
    start = [p.detach().clone() for p in ours]
    give_gradients(ours, 0)
    HybridAdam(ours, lr=0.1, bias_correction=False, eps=1e-3).step()
    for p, p0 in zip(ours, start, strict=True):
        g = p.grad.double()
        want = 0.1 * (0.1 * g) / ((0.001 * g * g).sqrt() + 1e-3)
        torch.testing.assert_close((p0 - p).double(), want, rtol=2e-4, atol=1e-6)


def test_16_bit_parameters_keep_fp32_moments():
    params = make_params(torch.bfloat16)
    optimizer = HybridAdam(params, lr=1e-2)
    train(params, optimizer, 3)
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.float32}
    fp32 = [nn.Parameter(p.detach().float()) for p in make_params(torch.bfloat16)]
    give_gradients(params := make_params(torch.bfloat16), 0)
    for a, b in zip(params, fp32, strict=True):
        b.grad = a.grad.float()
    HybridAdam(params, lr=1e-2).step()
    HybridAdam(fp32, lr=1e-2).step()
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(params, fp32, strict=True))


BAD_HYPERPARAMETERS = {
    "lr": [-1.0, float("nan")],
    "betas": [(0.9, 1.0), (-0.1, 0.9), (float("nan"), 0.9)],
    "eps": [-1e-8],
    "weight_decay": [-0.1, float("inf")],
    "nvme_offload_fraction": [-0.5, 2.0],
}


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in BAD_HYPERPARAMETERS.items() for v in values]
)
def test_bad_hyperparameters_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        HybridAdam(make_params(), **{name: value})


def test_bad_parameters_are_refused():
    with pytest.raises(TypeError):
        HybridAdam(make_params(), nonsense=1)
    with pytest.raises(ValueError, match="int64"):
        HybridAdam([nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)]).step()
    with pytest.raises(ValueError, match="meta device"):
        HybridAdam([nn.Parameter(torch.zeros(3, device="meta"))]).step()
    with pytest.raises(ValueError, match="sparse"):
        embedding = nn.Embedding(4, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        HybridAdam(embedding.parameters()).step()


def test_cpu_adam_is_hybrid_adam_for_cpu_parameters():
    a, b = make_params(), make_params()
    got, want = train(a, CPUAdam(a), 2), train(b, HybridAdam(b), 2)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


# -- a step that fails in its middle -------------------------------------------------------------


def on_disk(dtype, folder, fraction, **options):
    params = make_params(dtype)
    config = NvmeConfig(block_numel=1 << 12, **options)
    optimizer = HybridAdam(
        params, nvme_offload_fraction=fraction, nvme_offload_dir=folder, nvme=config
    )
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_failed_step_leaves_weights_and_state_at_the_last_one(dtype, tmp_path):
    params, optimizer = on_disk(dtype, tmp_path, 0.8)
    train(params, optimizer, 2)
    before = [p.detach().clone() for p in params]
    for index in (7, 0, 11):
        restore = spoil_block(optimizer, index)
        give_gradients(params, 2)
        with pytest.raises(RuntimeError, match=f"block {index} "):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
        restore()
    got = train(params, optimizer, 3)
    others, clean = on_disk(dtype, tmp_path, 0.8)
    train(others, clean, 2)
    want = train(others, clean, 3)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_write_budget_ends_training_before_it_is_passed(tmp_path):
    params, optimizer = on_disk(torch.float32, tmp_path, 1.0, write_budget=20 << 20)
    with pytest.raises(RuntimeError, match="nvme_write_budget"):
        train(params, optimizer, 100)
    store = optimizer.targets[0].tiered_state.nvme.store
    assert 18 << 20 < store.traffic.written_bytes <= 20 << 20
