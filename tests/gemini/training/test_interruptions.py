"""Errors and Ctrl-C: what they leave is whole, and who should be told is told."""

import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from bench.shared.workers import start_process
from gemini import GeminiDDP, load_checkpoint, save_checkpoint
from nvme.files import calls
from optim import HybridAdam


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def drops_all(model, optimizer):
    model.zero_grad()


def makes_all_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def drops_its_groups_and_the_rest(model, optimizer):
    optimizer.zero_grad()
    model.first.bias.grad = None


def of_an_output(model, x):
    return model(x).square().mean()


def of_a_parameter(model, x):
    """Its gradient is the first thing that a backward comes to."""
    return model.last.bias.square().sum()


@pytest.mark.parametrize("begins", [of_an_output, of_a_parameter])
@pytest.mark.parametrize("clear", [drops_all, makes_all_zeros, drops_its_groups_and_the_rest])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_gradient_that_an_error_left_behind_goes_with_the_others(clear, error, begins):
    torch.manual_seed(0)
    net, plain, raises = Net(), Net(), [True]
    plain.load_state_dict(net.state_dict())

    def mine(param):  # before ours, which would have taken the gradient
        if raises and raises.pop():
            raise error("mine")

    net.last.bias.register_post_accumulate_grad_hook(mine)
    model = GeminiDDP(net, precision="fp32")
    params = list(model.parameters())
    if clear is drops_its_groups_and_the_rest:
        params = [p for p in params if p is not model.first.bias]
    optimizer = HybridAdam(params, lr=0.1)
    one, other = torch.randn(2, 3, 8)
    with pytest.raises(error, match="mine"):
        begins(model, one).backward()
    clear(model, optimizer)
    model(other).square().mean().backward()
    plain(other).square().mean().backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.clone(), param.grad)


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("enter", [lambda model: model, lambda model: model.module])
def test_ctrl_c_in_a_forward_ends_it(enter):
    """torch calls no hook behind a forward that ends in what is no Exception. What is frozen is
    unfrozen where a forward begins."""
    net = Net()
    net.first.requires_grad_(False)
    model = GeminiDDP(net, precision="fp32")
    optimizer = HybridAdam(model.parameters())
    handle = net.last.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        enter(model)(torch.ones(2, 8))
    handle.remove()
    optimizer.zero_grad()
    net.first.requires_grad_(True)
    model(torch.ones(2, 8)).sum().backward()
    assert not model.engine.passes.depth and net.first.weight.grad is not None
    optimizer.step()


def test_ctrl_c_in_an_evaluation_ends_it():
    """Nobody drops gradients then, which would end it too."""
    model = GeminiDDP(Net(), precision="fp32")
    handle = model.module.last.register_forward_pre_hook(stop)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 8))
    handle.remove()
    assert not model.engine.passes.depth


FAILS = """
import errno
import torch
from optim import HybridAdam
from gemini import GeminiDDP
from tests.support.disks.faults import failing

model = GeminiDDP(torch.nn.Linear(64, 64), update="tail", precision="fp32")
optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir={folder!r})
for last in (False, True):
    model(torch.ones(2, 64)).sum().backward()
    if last:
        full = failing("pwritev", errno.ENOSPC, times=1)
        full.__enter__()
    optimizer.step()
    optimizer.zero_grad()
"""
IS_TOLD = """
try:
    model.state_dict()
except RuntimeError as error:
    assert "ENOSPC" in str(error)
"""


@pytest.mark.ci
def test_a_program_whose_last_step_failed_unasked_says_so_and_has_an_exit_status(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FAILS.format(folder=str(tmp_path))],
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 120 and "Traceback" not in done.stderr, done.stderr
    assert "the last step failed, and does not count" in done.stderr and "ENOSPC" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
@pytest.mark.parametrize(("more", "status"), [("", 1), (IS_TOLD, 0)])
def test_a_process_that_was_told_of_its_last_step_ends_in_peace(more, status, tmp_path):
    process = start_process(exec, FAILS.format(folder=str(tmp_path)) + more, {})
    process.join()
    assert process.exitcode == status


@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename"])
def test_ctrl_c_in_a_save_stays_what_it_is_and_leaves_no_half(call, tmp_path):
    model = GeminiDDP(Net(), precision="fp32")
    optimizer = HybridAdam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()

    def interrupted(*_):
        raise KeyboardInterrupt

    with mock.patch.object(calls, call, interrupted), pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "one", model, optimizer)
    assert not (tmp_path / "one").exists()
    save_checkpoint(tmp_path / "one", model, optimizer)
    load_checkpoint(tmp_path / "one", model, optimizer)
