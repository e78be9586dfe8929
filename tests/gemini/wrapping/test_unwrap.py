"""What cannot be wrapped is refused as it was; unwrapping gives a plain module back."""

import pickle

import pytest
import torch
from torch import nn

from gemini import AutoPlacement, GeminiDDP
from optim import HybridAdam
from tests.support.loops.sides import (
    HOMES,
    Net,
    batch,
    full_step,
    loss_of,
    wrapped,
)


class Other(nn.Parameter):
    pass


def test_what_is_refused_is_left_as_it_was():
    module = Net()
    module.layers[1].weight = Other(module.layers[1].weight.detach())
    before = {name: (type(p), p.dtype) for name, p in module.named_parameters()}
    with pytest.raises(ValueError, match=r"layers\.1\.weight is a Other"):
        GeminiDDP(module)
    assert before == {name: (type(p), p.dtype) for name, p in module.named_parameters()}
    module.layers[1].weight = nn.Parameter(module.layers[1].weight.detach())
    GeminiDDP(module)


@pytest.mark.parametrize("what", [[nn.Linear(2, 2)], None, torch.ones(2), Net])
def test_what_is_no_module_is_refused_by_name(what):
    with pytest.raises(ValueError, match=rf"module is a {type(what).__name__}"):
        GeminiDDP(what)


def test_a_module_of_torchscript_is_refused_by_name():
    module = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="1 is compiled by TorchScript"):
        GeminiDDP(module)


def test_a_split_parameter_is_refused_by_name():
    class DTensor(torch.Tensor):  # torch's own needs a process group; it is known by its name
        pass

    module = Net()
    del module.layers[0].bias
    split = torch.ones(24).as_subclass(DTensor).requires_grad_()
    module.layers[0]._parameters["bias"] = split
    with pytest.raises(ValueError, match=r"layers\.0\.bias is a DTensor"):
        GeminiDDP(module)


@pytest.mark.parametrize("place", HOMES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_unwrap_gives_the_plain_module_back(place, precision):
    model, optimizer = wrapped(place=place, precision=precision)
    params, kinds = dict(model.named_parameters()), {}
    for seed in range(2):
        full_step(model, optimizer, seed)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    module = model.unwrap()
    assert module is model.module
    for name, param in module.named_parameters():
        kinds[name] = type(param)
        assert param is params[name] and param.dtype == torch.float32
        assert torch.equal(param, want[name]) and param.grad is None
    assert set(kinds.values()) == {nn.Parameter}
    x, _ = batch(0)
    plain = Net(len(module.layers))
    plain.load_state_dict(want)
    assert torch.equal(module(x), plain(x))
    pickle.loads(pickle.dumps(module))
    optimizer_of_torch = torch.optim.SGD(module.parameters(), lr=0.1)
    loss_of(module, 0).backward()
    optimizer_of_torch.step()
    for use in (lambda: model(x), optimizer.step, model.unwrap):
        with pytest.raises(RuntimeError, match=r"unwrapped|closed"):
            use()
    again = GeminiDDP(module, precision="fp32")
    full_step(again, HybridAdam(again.parameters()))


def test_unwrap_without_room_is_refused_and_training_goes_on(monkeypatch):
    from gemini.runtime.memory import machine

    model, optimizer = wrapped(precision="bf16")
    full_step(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "memory_left", lambda: 100)
        with pytest.raises(MemoryError, match=r"too little on cpu; expected room for them"):
            model.unwrap()
    full_step(model, optimizer, 1)
    want = dict(model.state_dict())
    assert all(
        torch.equal(want[name], value) for name, value in model.unwrap().state_dict().items()
    )


def test_unwrap_gives_files_back(tmp_path):
    placement = AutoPlacement("100KiB", nvme_dir=str(tmp_path))
    model, optimizer = wrapped(place="files", placement_policy=placement, precision="bf16")
    full_step(model, optimizer)
    assert len(list(tmp_path.iterdir())) > 1
    model.unwrap()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", HOMES)
def test_closing_the_optimizer_loses_no_bit_of_a_weight(place):
    model, optimizer = wrapped(place=place, precision="bf16")
    for seed in range(3):
        full_step(model, optimizer, seed)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    assert any(not torch.equal(v, v.bfloat16().float()) for v in want.values())
    optimizer.close()
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name]), name
    second = HybridAdam(model.parameters(), lr=0.1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name]), name
    full_step(model, second)
    second.close(keep_masters=False)
    assert all(torch.equal(v, v.bfloat16().float()) for v in model.state_dict().values())


@pytest.mark.parametrize("place", HOMES)
def test_frozen_weights_are_given_back_as_they_came(place):
    def build(depth=3):
        module = Net(depth)
        module.layers[0].requires_grad_(False)
        return module

    model, optimizer = wrapped(build, place, precision="bf16", keep_originals=True)
    full_step(model, optimizer)
    want = Net(len(model.layers)).layers[0]
    for state in (model.state_dict(), dict(model.unwrap().state_dict())):
        assert torch.equal(state["layers.0.weight"], want.weight)
        assert torch.equal(state["layers.0.bias"], want.bias)
