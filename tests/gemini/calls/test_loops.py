"""Loops written for torch: the wrapped module has torch's updates, wherever its data lives.

At several ranks the same loops run in tests/dist/test_loops.py. All loops compare updates in fp32,
summed in another order: 1e-6.
"""

import pytest
import torch
from torch import nn

from gemini import GeminiDDP
from optim import HybridAdam
from optim.rules.loss_scale import LossScale
from tests.support.loops.cases import BUILDS, LOOPS
from tests.support.loops.programs import IN_KERNELS
from tests.support.loops.sides import (
    BESIDE,
    PLACEMENTS,
    WIDTH,
    Net,
    batch,
    difference,
    loss_of,
    plain,
    updates,
    wrapped,
)

BOUND = 1e-6
BOUNDS = {"clip by norm 1": 1e-5}  # torch adds the magnitudes of a tensor up in fp32


def cases():
    """A loop runs in one place; a third of them as a slower test beside a pass, too."""
    everywhere = list(PLACEMENTS)
    for i, name in enumerate(LOOPS):
        places = ["resident", "host"] if "place" in name else everywhere
        place = places[i % len(places)]
        if name.startswith("unfrozen") and place == "files":  # see test_unfreeze.py
            place = "nvme"
        yield pytest.param(name, place)
        if i % 3 == 0 and "place" not in name:
            # kernels of the interpreter take a second a loop
            beside = [place for place in BESIDE if place not in IN_KERNELS or i % 12 == 0]
            yield pytest.param(name, beside[i // 3 % len(beside)], marks=pytest.mark.ci)


@pytest.mark.parametrize(("name", "place"), list(cases()))
def test_a_loop_written_for_torch_has_the_updates_of_torch(name, place):
    assert difference(LOOPS[name], BUILDS.get(name, Net), place) < BOUNDS.get(name, BOUND)


IN_PLACE = [name for name in LOOPS if name.startswith("in place")]


@pytest.mark.parametrize(
    ("name", "precision"), [(name, ("bf16", "fp16")[i % 2]) for i, name in enumerate(IN_PLACE)]
)
def test_an_operator_in_place_has_the_bits_of_the_same_out_of_place(name, precision):
    """In 16 bits the reference is the wrapped module itself, without the operator in place."""
    runs = []
    for loop in (LOOPS[name], LOOPS[name.replace("in place", "out of place")]):
        scale = LossScale(initial_scale=2.0**8) if precision == "fp16" else None
        model, optimizer = wrapped(BUILDS.get(name, Net), precision=precision, loss_scale=scale)
        loop(model, optimizer)
        runs.append(updates(model, BUILDS.get(name, Net)))
    assert torch.equal(*runs)
    assert float(runs[0].norm()) > 0


def test_no_output_of_gpt2_is_copied(monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=97, n_positions=16)
    model = GeminiDDP(GPT2LMHeadModel(config), min_chunk_size_m=0.004)
    ids = torch.randint(97, (2, 16))
    copies = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda self, **kw: (copies.append(self.shape), clone(self, **kw))[1]
    )
    outputs = {}
    model.module.register_forward_hook(lambda module, args, out: outputs.update(out))
    found = model(input_ids=ids, labels=ids)
    assert found["logits"].data_ptr() == outputs["logits"].data_ptr()
    assert found["loss"].data_ptr() == outputs["loss"].data_ptr()
    assert copies == []


def test_what_is_returned_twice_is_one_tensor_with_one_gradient():
    class Twice(Net):
        def forward(self, x):
            x = super().forward(x)
            return x, x

    def loop(model, optimizer):
        a, b = model(batch(0)[0])
        assert a is b
        (a.float().pow(2).mean() + b.float().pow(3).mean()).backward()
        optimizer.step()

    assert difference(loop, Twice) < BOUND
    a, b = wrapped(Twice, precision="fp16")[0](batch(0)[0])  # where each output is another tensor
    assert a is b


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_input_that_is_returned_keeps_its_gradient(precision):
    """In fp16 its own gradient carries no loss scale, though the output's does."""

    class PassesOn(Net):
        def forward(self, x):
            return super().forward(x), x

    seen = []
    for make in (plain, lambda build: wrapped(build, precision=precision)):
        model, _ = make(PassesOn)
        x = batch(0)[0].requires_grad_()
        y, same = model(x * 1)
        ((y + same).float().sum() / 7).backward()
        seen.append(x.grad)
    # fp16 has 11 bits: 3 layers round 3 times
    assert torch.allclose(seen[0], seen[1], rtol=1e-6 if precision == "fp32" else 4e-3)


def raising(model, seed=0):
    """A backward that an error ends after the gradients of the last layer."""
    handle = model.layers[1].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, seed).backward()
    handle.remove()


CLEARS = {
    "model": lambda model, optimizer: model.zero_grad(),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "parent": lambda model, optimizer: nn.Sequential(model).zero_grad(),
    "None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.mark.parametrize(
    ("place", "clear"), [*zip(PLACEMENTS, [*CLEARS, "optimizer"], strict=True)]
)
def test_after_an_error_in_a_backward_nothing_goes_on_before_zero_grad(place, clear):
    model, optimizer = wrapped(place=place)
    loss_of(model, 1).backward()
    raising(model)
    for step in (optimizer.step, lambda: loss_of(model, 0).backward(), lambda: list(
        model.named_gradients()), lambda: model.layers[0].weight.grad.norm(),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="a backward ended in an error"):
            step()
    with torch.no_grad():
        model(batch(0)[0])
    CLEARS[clear](model, optimizer)
    assert all(param.grad is None for param in model.parameters())
    loss_of(model, 2).backward()
    optimizer.step()
    torch_model, torch_optimizer = plain(place=place)
    loss_of(torch_model, 2).backward()
    torch_optimizer.step()
    got, want = updates(model, place=place), updates(torch_model, place=place)
    assert float((got - want).norm() / want.norm()) < BOUND


def test_a_step_inside_a_backward_is_refused():
    model, optimizer = wrapped()
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda param: optimizer.step())
    with pytest.raises(RuntimeError, match="inside a backward"):
        loss_of(model, 0).backward()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_of_torch_is_refused_at_its_first_step(make):
    module = Net()
    optimizer = make(module.parameters(), lr=0.1)
    model = GeminiDDP(module, precision="fp32")
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"HybridAdam"):
        optimizer.step()
    assert torch.equal(model.state_dict()["layers.0.weight"], Net().layers[0].weight)
    optimizer = HybridAdam(model.parameters())
    optimizer.step()
    assert WIDTH == 24
