"""Parameters of every kind that torch's optimizers take: with gaps, and without elements."""

import copy
import math

import pytest
import torch
from torch import nn

from gemini import GeminiDDP
from optim import HybridAdam
from tests.support.plain_training import (
    BY_CLASS,
    ON_DISK,
    check_undone_step,
    give_gradients,
    make_params,
    on_disk,
    train,
    update_error,
)

# -- gaps ----------------------------------------------------------------------------------------


def gapped(dtype=torch.float32):
    """Slices, a transposed slice, a diagonal; one parameter that lies in the usual way between."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    views = [
        random(10, 5, 2)[..., 0], random(33, 65), random(130, 34)[1::2, 1:].t(),
        random(3, 3, 7).diagonal(), random(9)[::4],
    ]  # fmt: skip
    return [nn.Parameter(view) for view in views]


def test_these_parameters_have_gaps():
    dense = torch.ops.aten.is_non_overlapping_and_dense
    assert [bool(dense(p)) for p in gapped()] == [False, True, False, False, False]


@BY_CLASS
@ON_DISK
def test_parameters_with_gaps_are_updated_as_by_torch(
    ours, theirs, options, fraction, path, tmp_path
):
    start, mine, its = gapped(), gapped(), gapped()
    optimizer = ours(mine, lr=1e-2, weight_decay=0.1, **options, **on_disk(tmp_path, fraction))
    got = train(mine, optimizer, 5, lambda step: (2,) if step == 1 else ())
    plain = theirs(its, lr=1e-2, weight_decay=0.1, **options)
    want = train(its, plain, 5, lambda step: (2,) if step == 1 else ())
    assert update_error(got, want, start) < 1e-6
    assert all(a.stride() == b.stride() for a, b in zip(mine, its, strict=True))
    found = optimizer.state_dict()["state"]
    for i, planes in plain.state_dict()["state"].items():
        for name in planes.keys() - {"step"}:
            assert found[i][name].shape == its[i].shape
            torch.testing.assert_close(found[i][name], planes[name], rtol=1e-5, atol=1e-6)


def test_what_lies_in_the_gaps_stays_as_it_is():
    whole = torch.arange(10.0).reshape(5, 2)
    param = nn.Parameter(whole[:, 0])
    param.grad = torch.ones(5)
    HybridAdam([param], lr=0.5).step()
    assert whole[:, 1].tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
    torch.testing.assert_close(whole[:, 0], torch.arange(0.0, 10.0, 2.0) - 0.5)


@BY_CLASS
def test_state_of_parameters_with_gaps_goes_to_torch_and_comes_from_it(ours, theirs, options):
    mine, its, back = gapped(), gapped(), gapped()
    optimizer, plain = ours(mine, lr=1e-2, **options), theirs(its, lr=1e-2, **options)
    train(its, plain, 2)
    optimizer.load_state_dict(plain.state_dict())
    for param, values in zip(mine, its, strict=True):
        param.data.copy_(values)
    start = [p.detach().clone() for p in mine]
    again = theirs(back, lr=1e-2, **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, values in zip(back, its, strict=True):
        param.data.copy_(values)
    weight_decay = optimizer.param_groups[0]["weight_decay"]
    assert weight_decay == plain.param_groups[0]["weight_decay"]
    want = train(its, plain, 2, first=2)
    assert update_error(train(mine, optimizer, 2, first=2), want, start) < 1e-6
    assert update_error(train(back, again, 2, first=2), want, start) < 1e-6


@pytest.mark.usefixtures("path")
def test_a_failed_step_leaves_parameters_with_gaps_and_counts_as_they_were(tmp_path, monkeypatch):
    check_undone_step(gapped, on_disk(tmp_path, 1.0), monkeypatch)


def test_clipping_counts_elements_and_not_gaps():
    params, others = gapped(), gapped()
    optimizer = HybridAdam(params)
    for some in (params, others):
        give_gradients(some, 0)
    norm = optimizer.clip_grad_norm_(0.5)
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(others, 0.5)), rel=1e-6)
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)


def test_a_parameter_whose_memory_order_changes_keeps_its_state():
    """`module.to(memory_format=torch.channels_last)` after the first step."""
    results = []
    for cls in (HybridAdam, torch.optim.AdamW):
        torch.manual_seed(0)
        module = nn.Conv2d(3, 5, 2)
        optimizer = cls(module.parameters(), lr=1e-2, weight_decay=0.0)
        for step in range(4):
            give_gradients(list(module.parameters()), step)
            optimizer.step()
            if step == 1:
                module.to(memory_format=torch.channels_last)
        results.append([p.detach().clone().contiguous() for p in module.parameters()])
    torch.manual_seed(0)
    start = list(nn.Conv2d(3, 5, 2).parameters())
    assert update_error(*results, start) < 1e-6


def test_a_parameter_of_another_shape_is_refused():
    param = nn.Parameter(torch.ones(8))
    optimizer = HybridAdam([param])
    train([param], optimizer, 1)
    param.data = torch.ones(16)
    param.grad = torch.ones(16)
    with pytest.raises(ValueError, match=r"has shape \(16,\); expected \(8,\)"):
        optimizer.step()


# -- no elements ---------------------------------------------------------------------------------


def with_empty():
    return make_params(shapes=[(3,), (0,), (65, 33), (4, 0, 2)])


@BY_CLASS
@ON_DISK
def test_a_parameter_without_elements_has_state_that_torch_goes_on_from(
    ours, theirs, options, fraction, path, tmp_path
):
    params = with_empty()
    optimizer = ours(params, lr=1e-2, **options, **on_disk(tmp_path, fraction))
    train(params, optimizer, 2)
    for i in (1, 3):
        state = optimizer.state_dict()["state"][i]
        assert state.pop("step") == 2
        assert state and all(plane.shape == params[i].shape for plane in state.values())
        assert optimizer.state[params[i]].keys() == {"step", *state}
    others = [nn.Parameter(p.detach().clone()) for p in params]
    plain = theirs(others, lr=1e-2)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    start = [p.detach().clone() for p in params]
    got, want = train(params, optimizer, 2, first=2), train(others, plain, 2, first=2)
    assert update_error(got, want, start) < 1e-6
    optimizer.load_state_dict(plain.state_dict())
    assert int(optimizer.state[params[1]]["step"]) == int(plain.state[others[1]].get("step", 4))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norms_take_parameters_without_elements(norm_type, path):
    params = with_empty()
    optimizer = HybridAdam(params)
    give_gradients(params, 0)
    together = torch.cat([p.grad.double().flatten() for p in params])
    want = torch.linalg.vector_norm(together, norm_type)
    assert float(optimizer.clip_grad_norm_(1.0, norm_type)) == pytest.approx(float(want), rel=1e-6)


def test_a_parameter_without_elements_of_a_wrapped_module_has_state():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(5, 3)
            self.nothing = nn.Parameter(torch.zeros(2, 0))

        def forward(self, x):
            return self.body(x) + self.nothing.sum()

    model = GeminiDDP(Odd(), "cpu", precision="fp32")
    optimizer = HybridAdam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]["nothing"]
    assert state["step"] == 1 and state["exp_avg"].shape == state["exp_avg_sq"].shape == (2, 0)
    optimizer.load_state_dict(optimizer.state_dict())
