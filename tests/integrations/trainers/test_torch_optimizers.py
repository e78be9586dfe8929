"""torch's optimizers become this project's: updates, schedulers, state, what is refused."""

import copy
import pickle
import warnings

import bitsandbytes
import pytest
import torch
import torchao.optim
from torch import nn
from torch.optim.lr_scheduler import StepLR

from gemini import GeminiDDP
from gemini.integrations.torch_optimizers import convert
from optim import HybridAdafactor, HybridAdam, HybridLion, HybridMuon, HybridSGD
from tests.support.loops.sides import SMALL, Net, loss_of, updates
from tests.support.rules import LIKE_TORCH, Lion

STEPS = 4


def adam(params):
    return torch.optim.Adam(params, lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)


MADE = {
    "adamw": (lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3), HybridAdam),
    "adamw, fused": (
        lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True), HybridAdam
    ),
    "adam with L2": (adam, HybridAdam),
    "amsgrad, rate a tensor": (
        lambda params: torch.optim.Adam(
            params, lr=torch.tensor(1e-2), eps=1e-3, amsgrad=True, foreach=False
        ),
        HybridAdam,
    ),
    "sgd": (lambda params: torch.optim.SGD(params, lr=0.1, dampening=0.5), HybridSGD),
    "sgd, nesterov": (sgd, HybridSGD),
    "sgd, dampened, up": (
        lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, dampening=0.5, maximize=True),
        HybridSGD,
    ),
    "adafactor": (
        lambda params: torch.optim.Adafactor(params, lr=0.1, weight_decay=0.1, d=2.0),
        HybridAdafactor,
    ),
    **{name: (case.of_torch, case.ours) for name, case in LIKE_TORCH.items()
       if case.ours not in (HybridAdam, HybridSGD)},
}  # fmt: skip


def groups_of(module):
    """Two groups of their own rates, one with a label of the user's."""
    params = list(module.parameters())
    return [{"params": params[:2], "name": "first"}, {"params": params[2:], "lr": 3e-3}]


def train(module, optimizer, scheduler, first=0, steps=STEPS):
    for seed in range(first, first + steps):
        loss_of(module, seed).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def error(got, want):
    """||update - torch's|| / ||torch's||."""
    return float((updates(got) - updates(want)).norm() / updates(want).norm())


EIGHT_BITS = {
    "bitsandbytes": (bitsandbytes.optim.AdamW8bit, "8bit"),
    "bitsandbytes, paged": (bitsandbytes.optim.PagedAdamW8bit, "8bit"),
    "bitsandbytes, 32 bits": (bitsandbytes.optim.PagedAdamW, "fp32"),
    "torchao": (torchao.optim.AdamW8bit, "8bit"),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_adamw_of_other_packages_keeps_its_state_in_as_few_bits(name):
    make, kind = EIGHT_BITS[name]
    options = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    want, module = Net(), Net()
    theirs = HybridAdam(want.parameters(), state=kind, **options)
    train(want, theirs, StepLR(theirs, 1, 0.5))
    given = make(module.parameters(), **options)
    optimizer = convert(given)
    assert optimizer is given and isinstance(optimizer, HybridAdam)
    assert optimizer.param_groups[0].get("state", "fp32") == kind
    train(module, optimizer, StepLR(optimizer, 1, 0.5))
    assert error(module, want) < (1e-6 if name == "torchao" else 1e-15)  # its rate is in fp32


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_muon_goes_on_with_its_matrices_alone(wrapped):
    """Biases, which it has not, stay as they are; its state is taken over."""
    want, module = Net(), Net()
    theirs, given = (
        torch.optim.Muon([p for p in net.parameters() if p.dim() == 2], lr=1e-2, ns_steps=4)
        for net in (want, module)
    )
    train(want, theirs, StepLR(theirs, 1, 0.5))
    train(module, given, None, steps=1)
    scheduler = StepLR(given, 1, 0.5)
    given.param_groups[0]["lr"] = 5e-3
    if wrapped:
        model = GeminiDDP(module, precision="fp32", **SMALL)
    optimizer = convert(given)
    assert optimizer is given and isinstance(optimizer, HybridMuon)
    train(model if wrapped else module, optimizer, scheduler, first=1, steps=STEPS - 1)
    assert error(model if wrapped else module, want) < 1e-6


def test_codes_of_another_package_are_not_taken_over():
    module = Net()
    given = bitsandbytes.optim.AdamW8bit(module.parameters(), lr=1e-2)
    train(module, given, None, steps=1)
    with pytest.raises(ValueError, match="AdamW8bit has taken a step, and its state is in codes"):
        convert(given)
    other = bitsandbytes.optim.Adam8bit(module.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"bitsandbytes\.optim\.adam\.Adam8bit has no form"):
        convert(other)


@pytest.mark.parametrize(
    ("wrapped", "scheduled"),
    [("plain", "before"), ("before", "after"), ("before", "before"), ("after", "before")],
)
@pytest.mark.parametrize("name", MADE)
def test_updates_and_schedules_are_torchs(name, wrapped, scheduled):
    """1e-5: as `docs/numerics.md` has it for eager updates against torch's."""
    make, ours = MADE[name]
    want = Net()
    theirs = make(groups_of(want))
    train(want, theirs, StepLR(theirs, 1, 0.5))
    module = model = Net()
    if wrapped == "before":
        model = GeminiDDP(module, precision="fp32", **SMALL)
    given = make(groups_of(module))
    groups = list(given.param_groups)
    scheduler = StepLR(given, 1, 0.5) if scheduled == "before" else None
    optimizer = convert(given)
    scheduler = scheduler or StepLR(optimizer, 1, 0.5)
    if wrapped == "after":
        model = GeminiDDP(module, precision="fp32", **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, scheduler)
    assert optimizer is given and isinstance(optimizer, ours)
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert optimizer.param_groups[0]["name"] == "first"
    rates = [[float(group["lr"]) for group in o.param_groups] for o in (optimizer, theirs)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)
    assert error(model, want) < 1e-5


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_state_that_it_has_goes_on(name, wrapped):
    make, _ = MADE[name]
    want = Net()
    theirs = make(groups_of(want))
    train(want, theirs, None)
    module = Net()
    given = make(groups_of(module))
    train(module, given, None, steps=2)
    if wrapped:
        start = {id(p): i for i, p in enumerate(module.parameters())}
        model = GeminiDDP(module, precision="fp32", **SMALL)
        assert len(start) == len(list(model.parameters()))
    else:
        model = module
    train(model, convert(given), None, first=2, steps=STEPS - 2)
    assert error(model, want) < 1e-5


def test_a_group_that_is_added_later_has_the_options_of_the_first():
    module = Net()
    optimizer = convert(torch.optim.AdamW(list(module.parameters())[:2], lr=0.3, eps=0.5))
    optimizer.add_param_group({"params": list(module.parameters())[2:]})
    assert optimizer.param_groups[1]["eps"] == 0.5
    assert optimizer.param_groups[1]["weight_decay"] == 0.01


def test_hooks_of_steps_follow():
    optimizer, calls = torch.optim.AdamW(Net().parameters()), []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    convert(optimizer).step()
    assert calls == ["step"]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, Lion])
def test_the_name_of_the_class_stays_as_dashboards_know_it(make):
    given = make(Net().parameters(), lr=0.1)
    assert type(convert(given)).__name__ == make.__name__
    again = pickle.loads(pickle.dumps(given))
    assert type(again) is type(given) and isinstance(again, HybridAdam | HybridSGD | HybridLion)


def test_state_goes_to_disk_where_that_is_asked_for(tmp_path):
    module = Net()
    optimizer = convert(
        torch.optim.AdamW(module.parameters()),
        nvme_offload_fraction=1.0, nvme_offload_dir=str(tmp_path),
    )  # fmt: skip
    train(module, optimizer, None, steps=1)
    assert optimizer.nvme_bytes > 0 and list(tmp_path.iterdir())
    optimizer.close()


def test_ours_is_returned_as_it_is():
    optimizer = HybridAdam(Net().parameters())
    assert convert(optimizer) is optimizer
    with pytest.raises(ValueError, match="cpu_path given with a HybridAdam; expected no options"):
        convert(optimizer, cpu_path="eager")


class Changed(torch.optim.AdamW):
    """What a subclass does is unknown."""


REFUSED = {
    "another kind": (torch.optim.Rprop, {}, "torch.optim.rprop.Rprop has no form"),
    "a subclass": (Changed, {}, r"Changed has no form .* expected torch.optim.AdamW, Adam, SGD, A"),
    "an update option": (torch.optim.AdamW, {"lr": 1.0}, "lr beside an optimizer of torch's"),
    "an unknown option": (torch.optim.SGD, {"speed": 1}, "speed .* expected one of nvme_offload_f"),
    "a bad place": (torch.optim.SGD, {"nvme_offload_fraction": 2}, "is outside"),
    "a cautious lion": (
        lambda params: Lion(params, caution=True), {}, "Lion has caution=True, which HybridLion"
    ),
    "a lion's own": (lambda params: Lion(params, foo=None), {}, "Lion has foo=None"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_here_is_refused_and_nothing_changes(case):
    make, places, message = REFUSED[case]
    optimizer = make(Net().parameters())
    before, groups = dict(vars(optimizer)), copy.copy(optimizer.param_groups[0])
    cls = type(optimizer)
    with pytest.raises(ValueError, match=message):
        convert(optimizer, **places)
    assert type(optimizer) is cls and vars(optimizer) == before
    assert optimizer.param_groups[0] == groups


def test_a_decoupled_lion_is_refused():
    lion = Lion(Net().parameters())
    lion.decoupled_wd = True
    with pytest.raises(ValueError, match="decoupled_weight_decay=True; expected weight decay"):
        convert(lion)


def test_a_replaced_step_is_refused():
    optimizer = torch.optim.AdamW(Net().parameters())
    optimizer.step = lambda: None
    with pytest.raises(ValueError, match="step of this AdamW was replaced"):
        convert(optimizer)


def test_the_original_object_binds_when_its_module_is_wrapped_later():
    """What converting made in between is gone by then."""
    module = nn.Sequential(Net())
    optimizer = convert(torch.optim.AdamW(module.parameters()))
    model = GeminiDDP(module, precision="fp32", **SMALL)
    loss_of(model, 0).backward()
    model.clip_grad_norm_(0.5)
    optimizer.step()
    assert optimizer.last_report is not None and len(optimizer.targets) == 1
