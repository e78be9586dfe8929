"""AdEMAMix, whose rule has a plane more than Adam's: updates, wherever the state lives."""

import math

import pytest
import torch

import gemini
from gemini import GeminiDDP
from optim import HybridAdEMAMix, NvmeConfig
from tests.support.loops.sides import Net, full_step
from tests.support.plain_training import give_gradients, make_params, on_disk, update_error

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "beta3": 0.99, "alpha": 3.0, "weight_decay": 0.1}


def stepped(params, grads_of, warmup_steps, num_steps, eps=1e-8):
    """The paper's algorithm 1, in fp64 and by itself."""
    (b1, b2), b3, alpha = OPTIONS["betas"], OPTIONS["beta3"], OPTIONS["alpha"]
    lr, decay = OPTIONS["lr"], OPTIONS["weight_decay"]
    values = [p.detach().double() for p in params]
    state = [[torch.zeros_like(v) for _ in range(3)] for v in values]
    for t in range(1, num_steps + 1):
        a, b = alpha, b3
        if warmup_steps:
            s = t / warmup_steps
            a = min(s * alpha, alpha)
            rising = math.log(b1) * math.log(b3) / ((1 - s) * math.log(b3) + s * math.log(b1))
            b = min(math.exp(rising), b3) if s < 1 else b3
        for value, (m, v, slow), grad in zip(values, state, grads_of(t), strict=True):
            g = grad.double()
            m.mul_(b1).add_(g, alpha=1 - b1)
            slow.mul_(b).add_(g, alpha=1 - b)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            ahead = m / (1 - b1**t) + a * slow
            value -= lr * (ahead / ((v / (1 - b2**t)).sqrt() + eps) + decay * value)
    return values


@pytest.mark.parametrize("warmup_steps", [0, 3])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_updates_are_those_of_the_paper(tmp_path, fraction, warmup_steps):
    start, mine = make_params(), make_params()
    places = on_disk(tmp_path, fraction) if fraction else {}
    optimizer = HybridAdEMAMix(mine, warmup_steps=warmup_steps, **OPTIONS, **places)
    given = []
    for step in range(6):
        give_gradients(mine, step)
        given.append([p.grad.clone() for p in mine])
        optimizer.step()
    want = stepped(start, lambda t: given[t - 1], warmup_steps, 6)
    assert update_error([p.detach() for p in mine], want, start) < 1e-5
    optimizer.close()


def wrapped(fraction):
    model = GeminiDDP(Net(), precision="bf16")
    places = {"nvme_offload_fraction": fraction, "nvme": NvmeConfig(block_numel=1024)}
    return model, HybridAdEMAMix(model.parameters(), warmup_steps=3, **OPTIONS, **places)


def test_halves_of_masters_in_files_have_the_bits_of_whole_ones_in_memory():
    """fp32 masters of bf16 parameters, whose upper half is the parameter where both can be so."""
    digests, planes = [], []
    for fraction in (0.0, 1.0):
        model, optimizer = wrapped(fraction)
        for step in range(5):
            full_step(model, optimizer, step)
        digests.append(model.digest())
        state = optimizer.state_dict()["state"].values()
        planes.append([one["exp_avg_slow"] for one in state])
    assert digests[0] == digests[1]
    assert all(torch.equal(a, b) and a.norm() > 0 for a, b in zip(*planes, strict=True))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_bf16_module_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path, fraction):
    (model, optimizer), (other, its) = wrapped(fraction), wrapped(fraction)
    for step in range(2):
        full_step(model, optimizer, step)
    gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    gemini.load_checkpoint(tmp_path / "c", other, its)
    for each, steps in ((model, optimizer), (other, its)):
        full_step(each, steps, 2)
    assert model.digest() == other.digest()
    slow = {k for state in optimizer.state_dict()["state"].values() for k in state}
    assert slow == {"step", "master", "exp_avg", "exp_avg_sq", "exp_avg_slow"}


def test_moments_of_few_bits_are_refused():
    with pytest.raises(TypeError, match="state"):
        HybridAdEMAMix(make_params(), state="8bit")
    with pytest.raises(ValueError, match=r"beta3=1\.5"):
        HybridAdEMAMix(make_params(), beta3=1.5)
