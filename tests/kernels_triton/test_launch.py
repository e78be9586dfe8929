"""Where kernels run, and what they make of a gradient that is no number."""

import contextlib

import numpy
import pytest
import torch
import triton

from kernels_triton import digest, launch, ops
from optim.adam import AdamRule
from optim.adaptive import LionRule
from optim.rules.clipping import Clip
from optim.sgd import SGDRule
from optim.state.pieces import Piece
from optim.update.triton_update import TritonUpdater

OPTIONS = {
    "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.9,
    "dampening": 0.0, "nesterov": False, "adamw_mode": True, "bias_correction": True,
    "amsgrad": False, "maximize": False,
}  # fmt: skip
DEVICE = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device
pytestmark = [] if launch.is_interpreted() else [pytest.mark.gpu]


def step(rule, grad, max_norm=None):
    slabs = {plane.name: torch.zeros(64, device=DEVICE) for plane in rule.layout.planes}
    hyper = rule.hyper(OPTIONS)
    piece = Piece(
        torch.ones(64, device=DEVICE), grad.to(DEVICE), None, tuple(slabs.values()), hyper, 0, 0
    )
    updater = TritonUpdater(rule, [0], DEVICE)
    if max_norm is not None:
        updater.set_limits(Clip(max_norm=max_norm))
        updater.measure([piece])
        updater.finish_measure()
    updater.begin([hyper], with_norm=max_norm is not None)
    updater.update([piece], slabs)
    return piece.param, slabs


@pytest.mark.values
@pytest.mark.parametrize("rule", [AdamRule(), LionRule(), SGDRule()], ids=lambda r: r.name)
def test_a_gradient_that_is_no_number_shows_in_the_state_as_on_the_cpu(rule):
    """A plain module is measured by nobody; a clamp that drops NaN would step by its limit."""
    grad = torch.zeros(64)
    grad[3] = float("nan")
    param, slabs = step(rule, grad)
    assert torch.isnan(slabs[rule.layout.planes[0].name][3])
    assert not torch.isinf(param).any() and bool(torch.isfinite(param[:3]).all())


def test_every_launch_is_on_the_device_of_its_tables(monkeypatch):
    """Triton takes the current device, whatever the tensors are on."""
    inside, entered = [], []

    @contextlib.contextmanager
    def on(device):
        entered.append(device)
        inside.append(device)
        yield
        inside.pop()

    launched = []
    for module in (ops, digest):
        monkeypatch.setattr(module, "on", on)
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Watched(name, kernel, inside, launched))
    step(AdamRule(), torch.ones(64), max_norm=1.0)
    digest.digest_on_device(torch.arange(64, device=DEVICE), 0, 1)
    found = {name for name, _ in launched}
    assert found == {"norm_kernel", "finish_kernel", "prologue_kernel", "update_kernel",
                     "_digest_kernel"}  # fmt: skip
    assert all(device == DEVICE for _, device in launched) and len(entered) == len(launched)


class Watched:
    """A kernel that notes on which device it was launched."""

    def __init__(self, name, kernel, inside, launched):
        self.name, self.kernel, self.inside, self.launched = name, kernel, inside, launched

    def __getitem__(self, grid):
        self.launched.append((self.name, self.inside[-1] if self.inside else None))
        return self.kernel[grid]


def test_the_guard_of_a_gpu_is_that_gpu():
    guard = launch.on(torch.device("cuda", 1))
    assert isinstance(guard, torch.cuda.device) and guard.idx == 1


@pytest.mark.parametrize(
    ("pair", "works"),
    [(("3.6.0", "2.3.5"), True), (("3.6.0", "2.4.6"), False), (("3.7.0", "2.4.0"), True),
     (("3.9.0", "2.4.6"), True), (("3.6.0", "3.0.0"), False)],
)  # fmt: skip
def test_pairs_whose_interpreter_fails_in_every_kernel_are_refused(pair, works):
    with contextlib.nullcontext() if works else pytest.raises(ImportError, match=r"numpy<2\.4"):
        launch.check_interpreter(*pair)


def test_the_pair_that_these_tests_run_with_works():
    launch.check_interpreter(triton.__version__, numpy.__version__)
