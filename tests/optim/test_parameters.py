"""Parameters of every kind that torch's optimizers take: with gaps, without elements, in fp64."""

import copy
import math

import pytest
import torch
from torch import nn

import gemini
from gemini import GeminiDDP
from kernels_triton.frame import is_interpreted
from optim import HybridAdam, HybridLion, HybridSGD, NvmeConfig
from optim.plain_paths import TritonPath
from tests.plain_training import give_gradients, make_params, train, update_error

SMALL = NvmeConfig(block_numel=1024)
PAIRS = [(HybridAdam, torch.optim.AdamW, {}), (HybridSGD, torch.optim.SGD, {"momentum": 0.9})]
BY_CLASS = pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS, ids=["adam", "sgd"])
ON_DISK = pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])


def on_disk(folder, fraction):
    return {"nvme_offload_fraction": fraction, "nvme_offload_dir": folder, "nvme": SMALL}


@pytest.fixture(params=["cpu", "triton"])
def path(request, monkeypatch):
    """Of updates; Triton's in the interpreter."""
    if request.param == "triton":
        if not is_interpreted():
            pytest.skip("needs Triton's interpreter")

        def triton_path(rule, config, group_of, params):
            return TritonPath(rule, rule.layout, group_of, params[0].device)

        monkeypatch.setattr("optim.plain.make_path", triton_path)
    return request.param


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


def test_a_failed_step_leaves_parameters_with_gaps_as_they_were(tmp_path, monkeypatch):
    check_undo(gapped, tmp_path, monkeypatch)


def check_undo(make, folder, monkeypatch):
    """A step whose third write fails changes no bit, and goes through when it is taken again."""
    params = make()
    optimizer = HybridAdam(params, **on_disk(folder, 1.0))
    train(params, optimizer, 2)
    before = [p.detach().clone() for p in params]
    give_gradients(params, 2)
    nvme = optimizer.targets[0]._tiers.nvme
    inner, calls = nvme._submit_write, []

    def fails_at_the_third(staged, *, with_undo):
        calls.append(staged)
        if len(calls) == 3:
            raise OSError("on purpose")
        inner(staged, with_undo=with_undo)

    monkeypatch.setattr(nvme, "_submit_write", fails_at_the_third)
    with pytest.raises(OSError, match="on purpose"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    monkeypatch.undo()
    others = make()
    want = train(others, HybridAdam(others), 3)
    got = train(params, optimizer, 1, first=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


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


def test_elements_that_share_memory_are_refused():
    with pytest.raises(ValueError, match="clone it before"):
        HybridAdam([nn.Parameter(torch.randn(1, 3).expand(5, 3))])


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


# -- fp64 ----------------------------------------------------------------------------------------


def wide_params():
    return make_params(torch.float64, [(1,), (17,), (65, 33), (1025,), (5, 3, 7)])


@BY_CLASS
@ON_DISK
def test_fp64_parameters_have_fp64_state_and_torchs_updates(
    ours, theirs, options, fraction, tmp_path
):
    start, mine, its = wide_params(), wide_params(), wide_params()
    optimizer = ours(mine, lr=1e-2, weight_decay=0.1, **options, **on_disk(tmp_path, fraction))
    got = train(mine, optimizer, 5, lambda step: (2,) if step == 1 else ())
    plain = theirs(its, lr=1e-2, weight_decay=0.1, **options)
    want = train(its, plain, 5, lambda step: (2,) if step == 1 else ())
    assert update_error(got, want, start) < 1e-13  # fp32 state gives 6e-7
    planes = [v for s in optimizer.state_dict()["state"].values() for k, v in s.items()
              if k != "step"]  # fmt: skip
    assert planes and {plane.dtype for plane in planes} == {torch.float64}


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
    def mixed():
        return [*make_params(shapes=[(17,), (65, 33)]), *wide_params()[:2], *gapped()[:1]]

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
    monkeypatch.setattr(optimizer.targets[1]._tiers.nvme, "_submit_write", _fail)
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
        target._tiers.nvme.written_bytes_per_step for target in optimizer.targets
    )


def _fail(staged, *, with_undo):
    raise OSError("on purpose")


def test_the_state_of_a_mixed_optimizer_streams_out_and_in_by_position():
    def mixed():
        return [*make_params(shapes=[(17,)]), *wide_params()[:2], *make_params(shapes=[(65,)])]

    params, others = mixed(), mixed()
    optimizer, other = HybridAdam(params), HybridAdam(others)
    train(params, optimizer, 2)
    saved = {}
    optimizer.visit_state(
        lambda run: saved.setdefault((run.name, run.plane), run.values.clone()) is None
    )
    assert {name for name, _ in saved} == {"0", "1", "2", "3"}
    other.fill_state(lambda run: saved[run.name, run.plane])
    want = optimizer.state_dict()["state"]
    for i, planes in other.state_dict()["state"].items():
        assert torch.equal(planes["exp_avg"], want[i]["exp_avg"])


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
        module = nn.Sequential(nn.Linear(5, 33), nn.Linear(33, 3)).double()
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


def test_a_failed_step_on_disk_leaves_fp64_weights_with_every_bit(tmp_path, monkeypatch):
    check_undo(wide_params, tmp_path, monkeypatch)


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
