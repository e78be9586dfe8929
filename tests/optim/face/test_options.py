"""torch's options of Adam and SGD on plain modules: amsgrad, maximize, nesterov, dampening."""

import inspect

import pytest
import torch

import optim
from optim import FusedAdam, HybridAdam, HybridMuon, HybridSGD, NvmeConfig
from tests.support.plain_training import give_gradients, make_params, train, update_error

SMALL = NvmeConfig(block_numel=1024)
SHRINK = 0.3  # the largest v so far soon is an old one
SGD = [
    {"maximize": True},
    {"maximize": True, "weight_decay": 0.1},
    {"momentum": 0.9, "maximize": True},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "dampening": -0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1},
]


def small_params():
    return make_params(shapes=[(1,), (3,), (17,), (1023,), (1025,), (33, 41), (5, 3, 7)])


def test_momentum_that_begins_later_begins_as_torchs():
    for ours, theirs in zip(*momentum_that_begins_later(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("on_triton")
def test_momentum_that_begins_later_begins_as_torchs_by_triton():
    assert update_error(*momentum_that_begins_later(), small_params()) < 1e-6


def momentum_that_begins_later():
    results = []
    for cls in (HybridSGD, torch.optim.SGD):
        params = small_params()
        optimizer = cls(params, lr=0.1)
        train(params, optimizer, 2)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(params, optimizer, 2, first=2)
        optimizer.param_groups[0]["momentum"] = 0.0  # the buffer waits
        train(params, optimizer, 1, first=4)
        optimizer.param_groups[0]["momentum"] = 0.5
        results.append(train(params, optimizer, 2, first=5))
    return results


# -- groups that differ --------------------------------------------------------------------------


def two_groups(params):
    return [{"params": params[:3], "amsgrad": True, "maximize": True}, {"params": params[3:]}]


def run_two_groups(cls, **more):
    params = small_params()
    optimizer = cls(two_groups(params), lr=1e-2, betas=(0.9, 0.9), weight_decay=0.0, **more)
    return train(params, optimizer, 6, shrink=SHRINK), optimizer


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_groups_may_differ_in_amsgrad(fraction, tmp_path):
    nvme = {"nvme_offload_fraction": fraction, "nvme_offload_dir": tmp_path, "nvme": SMALL}
    got, _ = run_two_groups(HybridAdam, **nvme)
    want, _ = run_two_groups(torch.optim.AdamW, foreach=False)
    assert update_error(got[:3], want[:3], small_params()[:3]) < 1e-6
    assert update_error(got[3:], want[3:], small_params()[3:]) < 1e-6


@pytest.mark.usefixtures("path")
def test_amsgrad_that_ends_leaves_its_plane_alone():
    results = []
    for cls in (HybridAdam, torch.optim.AdamW):
        params = small_params()
        optimizer = cls(params, lr=1e-2, betas=(0.9, 0.9), weight_decay=0.0, amsgrad=True)
        train(params, optimizer, 3, shrink=SHRINK)
        optimizer.param_groups[0]["amsgrad"] = False
        results.append(train(params, optimizer, 3, first=3, shrink=SHRINK))
    assert update_error(*results, small_params()) < 1e-6


def test_a_group_with_amsgrad_may_be_added_later():
    results = []
    for cls in (HybridAdam, torch.optim.AdamW):
        params = small_params()
        optimizer = cls(params[:3], lr=1e-2, betas=(0.9, 0.9), weight_decay=0.0)
        train(params[:3], optimizer, 2)
        optimizer.add_param_group({"params": params[3:], "amsgrad": True})
        results.append(train(params, optimizer, 5, first=2, shrink=SHRINK))
    assert update_error(*results, small_params()) < 1e-6


def test_amsgrad_that_is_asked_for_too_late_is_refused():
    params = small_params()
    optimizer = HybridAdam(params)
    train(params, optimizer, 1)
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["amsgrad"] = True
    give_gradients(params, 1)
    with pytest.raises(ValueError, match="make the optimizer with amsgrad=True"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    saved = torch.optim.AdamW(params, amsgrad=True).state_dict()
    optimizer.param_groups[0]["amsgrad"] = False
    with pytest.raises(ValueError, match="make the optimizer with amsgrad=True"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["amsgrad"] is False


def test_bad_options_are_named():
    params = small_params()
    with pytest.raises(ValueError, match="nesterov=True with momentum=0 "):
        HybridSGD(params, nesterov=True)
    with pytest.raises(ValueError, match="dampening=0"):
        HybridSGD(params, momentum=0.9, dampening=0.5, nesterov=True)
    with pytest.raises(ValueError, match="dampening=nan"):
        HybridSGD(params, momentum=0.9, dampening=float("nan"))
    with pytest.raises(ValueError, match=r"dampening=0\.5 without momentum"):
        HybridSGD(params, dampening=0.5)
    with pytest.raises(ValueError, match="FusedAdam got a parameter on cpu"):
        FusedAdam(params, amsgrad=True, maximize=True)


OPTIMIZERS = [name for name in optim.__all__ if name.startswith(("Hybrid", "CPU", "Fused"))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_torch_gives_by_position_is_never_another_option(name):
    """Behind the rate torch has betas, where Colossal-AI has bias_correction."""
    cls = getattr(optim, name)
    params = [torch.nn.Parameter(torch.zeros(4, 4))]
    names = [n for n in inspect.signature(cls).parameters if n not in ("params", "lr")]
    with pytest.raises(TypeError) as refused:
        cls(params, 1e-3, (0.9, 0.95))
    assert "got (0.9, 0.95) behind; expected it by name: " in str(refused.value)
    assert ("betas=" in str(refused.value)) == ("betas" in names)
    with pytest.raises(TypeError, match="weigth_decay'; did you mean weight_decay"):
        cls(params, weigth_decay=0.1)
    with pytest.raises(TypeError, match="lr='3e-4' is a str; expected a number"):
        cls(params, "3e-4")
    if not name.startswith("Fused"):
        assert cls(params, 1e-2).param_groups[0]["lr"] == 1e-2


WRONG_TYPES = {
    "bias_correction": ((0.9, 0.95), r"expected True or False \(decay rates are betas=\(0.9, 0.95"),
    "amsgrad": ("False", "expected True or False"),
    "maximize": (0.1, "expected True or False"),
    "betas": (0.9, "expected two numbers"),
    "eps": ("1e-8", "is a str; expected a number"),
    "lr": (None, "is a NoneType; expected a number"),
    "weight_decay": ([0.1], "is a list; expected a number"),
    "nvme_offload_fraction": ("0.5", "is a str; expected a number"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_an_option_of_another_type_is_a_type_error_wherever_it_is_given(name):
    value, said = WRONG_TYPES[name]
    params = small_params()
    with pytest.raises(TypeError, match=f"{name}=.*{said}"):
        HybridAdam(params, **{name: value})
    optimizer = HybridAdam(params[:1])
    if name not in optimizer.defaults:
        return
    with pytest.raises(TypeError, match=f"{name}=.*{said}"):
        optimizer.add_param_group({"params": params[1:], name: value})
    assert len(optimizer.param_groups) == 1
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(TypeError, match=f"{name}=.*{said}"):
        optimizer.load_state_dict(saved)
    before = params[0].detach().clone()
    optimizer.param_groups[0][name] = value
    give_gradients(params, 0)
    with pytest.raises(TypeError, match=f"{name}=.*{said}"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_rates_and_flags_that_torch_takes_are_taken():
    import numpy as np

    for options in ({"lr": torch.tensor(1e-2)}, {"lr": np.float32(1e-2)}, {"amsgrad": np.True_}):
        HybridAdam(small_params(), **options)
    HybridAdam(small_params(), amsgrad=1, maximize=None)


def test_a_module_is_no_parameters():
    with pytest.raises(TypeError, match=r"a Linear; expected .*HybridAdam\(model.parameters\(\)\)"):
        HybridAdam(torch.nn.Linear(2, 2))
    assert HybridMuon(torch.nn.Linear(2, 2)).param_groups


@pytest.mark.filterwarnings("ignore:.*duplicate parameters.*:UserWarning")
def test_a_parameter_that_is_in_a_group_twice_is_refused():
    """torch warns, and updates it twice a step."""
    params = small_params()
    optimizer = HybridAdam(params[:3])
    with pytest.raises(ValueError, match="in its group twice"):
        optimizer.add_param_group({"params": [params[3], params[4], params[3]]})
    assert len(optimizer.param_groups) == 1


# -- numbers that come as tensors ----------------------------------------------------------------


def test_betas_of_tensors_are_numbers():
    pair = (torch.tensor([[0.9]]), torch.tensor(0.9))
    results = []
    for cls in (HybridAdam, torch.optim.AdamW):
        params = small_params()
        results.append(train(params, cls(params, lr=1e-2, betas=pair, weight_decay=0.0), 4))
    assert update_error(*results, small_params()) < 1e-6


# -- state dicts ---------------------------------------------------------------------------------
