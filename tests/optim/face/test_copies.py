"""Copies, pickles and forks of an optimizer of plain modules: what torch's optimizers do."""

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from gemini import GeminiDDP
from optim import HybridAdam, HybridLion, HybridSGD, NvmeConfig
from tests.support.plain_training import make_params, train

SMALL = NvmeConfig(block_numel=1024)
SHAPES = [(3,), (65, 33), (1025,)]
OPTIONS = {
    HybridAdam: {"amsgrad": True, "weight_decay": 0.1},
    HybridSGD: {"momentum": 0.9, "dampening": 0.5},
    HybridLion: {},
}


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


HOW = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": through_torch_save,
}


def make(cls, folder, fraction):
    params = make_params(shapes=SHAPES)
    nvme = {"nvme_offload_fraction": fraction, "nvme_offload_dir": folder, "nvme": SMALL}
    return params, cls(params, lr=1e-2, **OPTIONS[cls], **nvme)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cls", OPTIONS)
def test_a_copy_goes_on_alone_with_the_same_bits(cls, fraction, how, tmp_path):
    params, optimizer = make(cls, tmp_path, fraction)
    train(params, optimizer, 2)
    other = HOW[how](optimizer)
    assert type(other) is cls and other.param_groups[0]["lr"] == 1e-2
    others = other.param_groups[0]["params"]
    assert all(a is not b and torch.equal(a, b) for a, b in zip(params, others, strict=True))
    want = train(params, optimizer, 2, first=2)
    assert not any(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    got = train(others, other, 2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert other.nvme_bytes == optimizer.nvme_bytes
    optimizer.close()
    train(others, other, 1, first=4)  # its files are its own
    other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", HOW)
def test_a_copy_made_together_with_its_module_updates_that_copy(how):
    module = nn.Linear(5, 3)
    pair = (module, HybridAdam(module.parameters()))
    for stepped in (False, True):
        other, optimizer = HOW[how](pair)
        mine = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(mine, other.parameters(), strict=True))
        assert [int(state["step"]) for state in optimizer.state.values()] == [1, 1] * stepped
        train(list(module.parameters()), pair[1], 1)


def test_hooks_of_a_copy_and_its_schedule_work_as_torchs():
    params, optimizer = make(HybridAdam, None, 0.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(params, optimizer, 1)
    other = copy.deepcopy(optimizer)
    calls = []
    other.register_step_post_hook(lambda *_: calls.append("post"))
    torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    train(other.param_groups[0]["params"], other, 1)
    other.load_state_dict(optimizer.state_dict())
    assert calls == ["post"] and other.skipped_steps == 0


def test_a_copy_has_a_write_budget_of_its_own(tmp_path):
    params = make_params(shapes=SHAPES)
    optimizer = HybridAdam(
        params, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path, nvme=SMALL,
        nvme_write_budget="400KiB",
    )  # fmt: skip
    train(params, optimizer, 3)
    other = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="nvme_write_budget"):
        train(params, optimizer, 9)
    train(other.param_groups[0]["params"], other, 1)


def test_an_optimizer_over_a_wrapped_module_is_refused_with_the_remedy():
    model = GeminiDDP(nn.Linear(5, 3), "cpu")
    optimizer = HybridAdam(model.parameters())
    for how in HOW.values():
        with pytest.raises(TypeError, match=r"wrapped module .* state_dict\(\)"):
            how(optimizer)


def test_a_closed_optimizer_and_one_that_is_parked_are_refused():
    params, optimizer = make(HybridAdam, None, 0.0)
    train(params, optimizer, 1)
    with optimizer.parked("host"), pytest.raises(RuntimeError, match="parked"):
        copy.deepcopy(optimizer)
    optimizer.close()
    with pytest.raises(RuntimeError, match="was closed"):
        copy.deepcopy(optimizer)


# -- forks ---------------------------------------------------------------------------------------

FORK = r"""
import os, sys
import torch
from optim import HybridAdam, HybridSGD
from tests.support.plain_training import make_params, train

torch.set_num_threads(1)  # what torch needs in a process that is forked
kinds = {"adam": (HybridAdam, 0.0), "sgd": (HybridSGD, 0.0), "nvme": (HybridAdam, 1.0)}
for kind, (cls, fraction) in kinds.items():
    params = make_params(shapes=[(3,), (1201, 97)])
    optimizer = cls(params, lr=1e-2, nvme_offload_fraction=fraction, nvme_offload_dir=sys.argv[1])
    train(params, optimizer, 2)
    child = os.fork()
    try:
        optimizer.clip_grad_norm_(1.0)
        moved = train(params, optimizer, 2, first=2)
        said = sum(float(p.double().sum()) for p in moved)
    except Exception as error:
        said = f"{type(error).__name__} {error}"
    who = "parent" if child else "child"
    os.write(1, f"{kind} {who}: {said}\n".encode())  # a line at once: both write to one pipe
    optimizer.close()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.ci
def test_a_forked_child_steps_too_and_leaves_state_on_disk_to_its_parent(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert len(said) == 6
    for kind in ("adam", "sgd"):
        assert float(said[f"{kind} parent"]) == float(said[f"{kind} child"])
    assert "Make the optimizer in the process that trains" in said["nvme child"]
    assert float(said["nvme parent"]) == float(said["adam parent"])
