"""Parameters that are alone in their chunks at world size 1: their gradients are not copied."""

from functools import partial
from unittest.mock import patch

import torch
from torch import nn

from gemini import GeminiDDP, init_empty
from gemini.chunk.layout import ALONE_NUMEL, ParamSpec, training_layout
from gemini.runtime.autograd.calls import Calls
from gemini.runtime.wrap.materialise import Materialiser
from optim import HybridAdam, NvmeConfig


def test_large_trainable_parameters_are_alone_and_the_others_packed_in_order():
    specs = [
        ParamSpec("a", (3,), "bfloat16"),
        ParamSpec("large", (512, 512), "bfloat16"),
        ParamSpec("b", (5,), "bfloat16"),
        ParamSpec("frozen", (512, 512), "bfloat16", trainable=False),
        ParamSpec("odd", (ALONE_NUMEL + 1,), "bfloat16"),  # a shard of it has room left over
    ]
    layout = training_layout(specs, 1 << 20, 1)
    names = [[specs[slot.param].name for slot in chunk.slots] for chunk in layout.chunks]
    assert names == [["a", "b", "odd"], ["large"], ["frozen"]]
    assert layout.chunks[1].payload_numel == 512 * 512


def test_at_more_ranks_chunks_are_what_is_sent():
    specs = [ParamSpec(str(i), (512, 512), "bfloat16") for i in range(8)]
    assert len(training_layout(specs, 1 << 20, 1).chunks) == 8
    assert len(training_layout(specs, 1 << 20, 2).chunks) == 2


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def trained(model, steps=3):
    """Weights after three steps, the second of which adds up two backwards."""
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=1 << 16))
    torch.manual_seed(1)
    for step in range(steps):
        for _ in range(1 + (step == 1)):
            model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_a_gradient_of_autograd_is_the_chunks_gradient(monkeypatch):
    made = {}
    arrived = Calls.gradient_arrived

    def look(calls, index, grad):
        made[index] = grad.untyped_storage().data_ptr()
        arrived(calls, index, grad)

    monkeypatch.setattr(Calls, "gradient_arrived", look)
    model = GeminiDDP(layers(), precision="fp32")
    model(torch.randn(4, 512)).square().mean().backward()
    kept = {
        slot.param: chunk.grad.untyped_storage().data_ptr()
        for chunk in model.engine.chunks
        if len(chunk.spec.slots) == 1
        for slot in chunk.spec.slots
    }
    assert len(kept) == 4
    assert all(made[param] == address for param, address in kept.items())


def test_updates_are_those_of_the_plain_module():
    plain, wrapped = trained(layers()), trained(GeminiDDP(layers(), precision="fp32"))
    start = layers().state_dict()
    for name, before in start.items():
        torch.testing.assert_close(wrapped[name] - before, plain[name] - before, rtol=0, atol=0)


def test_values_are_made_a_module_at_a_time_in_the_modules_order():
    """The packed chunk has a bias of every layer; no weight waits for it, nor is made twice."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(512, 512)
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
            self.last = nn.Linear(512, 512)
            self.last.weight = self.first.weight

    torch.manual_seed(0)
    real = Tied()
    made, most = [], []

    def reset(module):
        made.append(module)
        nn.Linear.reset_parameters(module)
        most.append(len(model_values.waiting()))

    with init_empty():
        module = Tied()
    for inner in module.modules():
        if isinstance(inner, nn.Linear):
            inner.reset_parameters = partial(reset, inner)
    model_values = Materialiser(module)
    torch.manual_seed(0)
    with patch("gemini.ddp.Materialiser", lambda *_: model_values):
        model = GeminiDDP(module, precision="fp32")
    assert len(made) == 5 and max(most) == 0 and not model_values.waiting()
    assert torch.equal(model.state_dict()["layers.2.weight"], real.layers[2].weight)
    assert torch.equal(model.state_dict()["first.weight"], real.first.weight)
