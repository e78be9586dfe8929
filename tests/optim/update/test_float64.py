"""fp64 parameters of plain modules: their state and their updates are fp64 too."""

import math

import pytest
import torch
from torch import nn

import gemini
from gemini import GeminiDDP
from optim import HybridAdam, HybridLion
from tests.support.plain_training import (
    ON_DISK,
    give_gradients,
    make_params,
    on_disk,
    train,
    update_error,
)


def wide_params():
    return make_params(torch.float64, [(1,), (17,), (65, 33), (1025,), (5, 3, 7)])


def test_fp64_amsgrad_and_lion_take_no_shortcut_through_fp32(tmp_path):
    results = []
    for cls in (HybridAdam, torch.optim.AdamW):
        params = wide_params()
        optimizer = cls(params, lr=1e-2, betas=(0.9, 0.9), amsgrad=True, weight_decay=0.0)
        results.append(train(params, optimizer, 5, shrink=0.3))
    assert update_error(*results, wide_params()) < 1e-13
    (param,) = make_params(torch.float64, [(65,)])
    optimizer = HybridLion([param], lr=1e-9)
    param.grad = torch.ones(65, dtype=torch.float64)
    before = param.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - param, torch.full_like(param, 1e-9), rtol=1e-6, atol=0)


def test_fp64_and_fp32_parameters_in_one_optimizer(tmp_path):
    with_gaps = torch.randn(10, 5, 2)

    def mixed():
        return [
            *make_params(shapes=[(17,), (65, 33)]),
            *wide_params()[:2],
            nn.Parameter(with_gaps.clone()[..., 0]),
        ]

    start, mine, its = mixed(), mixed(), mixed()
    order = [0, 2, 1, 3, 4]
    got = train(mine, HybridAdam([mine[i] for i in order], lr=1e-2, **on_disk(tmp_path, 0.5)), 4)
    want = train(its, torch.optim.AdamW([its[i] for i in order], lr=1e-2, weight_decay=0.0), 4)
    for a, b, c in zip(got, want, start, strict=True):
        bound = 1e-13 if c.dtype == torch.float64 else 1e-5  # one by one: small fp32 updates
        assert update_error([a], [b], [c]) < bound


def test_a_bad_option_of_one_group_changes_no_other():
    params = [*make_params(shapes=[(17,)]), *wide_params()[:1]]
    optimizer = HybridAdam([{"params": [param]} for param in params])
    train(params, optimizer, 1)
    before = [p.detach().clone() for p in params]
    give_gradients(params, 1)
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr=nan"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))


def test_a_step_that_fails_on_the_disk_of_one_target_counts_on_none(tmp_path, monkeypatch):
    params = [*make_params(shapes=[(17,), (65, 33)]), *wide_params()]
    optimizer = HybridAdam(params, **on_disk(tmp_path, 0.5))
    train(params, optimizer, 2)
    before = [p.detach().clone() for p in params]
    give_gradients(params, 2)
    monkeypatch.setattr(optimizer.targets[1].tiered_state.nvme.store, "write", _fail)
    with pytest.raises(OSError, match="on purpose"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert all(state["step"] == 2 for state in optimizer.state.values())
    monkeypatch.undo()
    others = [*make_params(shapes=[(17,), (65, 33)]), *wide_params()]
    want = train(others, HybridAdam(others), 3)
    got = train(params, optimizer, 1, first=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    written = optimizer.last_report
    assert written.traffic.nvme_write == sum(
        target.tiered_state.nvme.written_bytes_per_step for target in optimizer.targets
    )


def _fail(block, buffer):
    raise OSError("on purpose")


@pytest.mark.parametrize("norm_type", [2.0, 2.5, math.inf])
def test_norms_of_fp64_gradients_are_those_of_fp64(norm_type):
    params = wide_params()
    optimizer = HybridAdam(params)
    give_gradients(params, 0)
    want = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params]), norm_type)
    found = optimizer.clip_grad_norm_(1.0, norm_type)
    assert float(found) == pytest.approx(float(want), rel=1e-13)


@ON_DISK
def test_fp64_state_goes_through_a_checkpoint_with_every_bit(fraction, tmp_path):
    def pair(seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(5, 33).double(), nn.Linear(33, 3))
        (tmp_path / "state").mkdir(exist_ok=True)
        return module, HybridAdam(module.parameters(), **on_disk(tmp_path / "state", fraction))

    module, optimizer = pair(0)
    params = list(module.parameters())
    train(params, optimizer, 2)
    gemini.save_checkpoint(tmp_path / "a", module, optimizer)
    want = train(params, optimizer, 2, first=2)
    module, optimizer = pair(1)
    gemini.load_checkpoint(tmp_path / "a", module, optimizer)
    got = train(list(module.parameters()), optimizer, 2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_fp64_does_not_have_is_refused():
    params = wide_params()
    optimizer = HybridAdam(params, cpu_path="compile")
    give_gradients(params, 0)
    with pytest.raises(ValueError, match='use cpu_path="eager"'):
        optimizer.step()


def test_a_wrapped_fp64_module_has_state_and_masters_of_fp32():
    """What docs/numerics.md says of it: the dtype stays in the state dict, the values are fp32."""
    module = nn.Linear(5, 3, dtype=torch.float64)
    before = module.weight.detach().clone()
    model = GeminiDDP(module, "cpu", precision="fp32")
    optimizer = HybridAdam(model.parameters())
    weight = model.state_dict()["weight"]
    assert weight.dtype == torch.float64
    assert torch.equal(weight, before.float().double()) and not torch.equal(weight, before)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"]["weight"]["exp_avg"].dtype == torch.float32
