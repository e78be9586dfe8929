"""torch.compile below and around a wrapped module."""

import pytest
import torch
from torch import nn

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat, relative_error, train_reference
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP
from gemini.ddp import NO_GRAPH
from optim import HybridAdam

SMALL = {"min_chunk_size_m": 0.004}
ADAM = {"lr": 1e-2, "eps": 1e-3}
STEPS = 4


def blocks_compiled(module, by):
    for i, layer in enumerate(module.layers):
        module.layers[i] = torch.compile(layer, backend=by)
    return module


def blocks_compiled_in_place(module, by):
    for layer in module.layers:
        layer.compile(backend=by)
    return module


def all_compiled(module, by):
    return torch.compile(module, backend=by)


def unchanged(module, by):
    return module


# Hooks and gradients go with "aot_eager" as with "inductor", which takes seconds a graph and is all
# in `deep`.
WAYS = [
    (blocks_compiled, unchanged),
    (blocks_compiled_in_place, unchanged),
    (all_compiled, unchanged),
    (unchanged, all_compiled),  # the graph breaks at every hook
    (blocks_compiled, all_compiled),
]
CI = [(*way, "sim", "aot_eager") for way in WAYS] + [(*WAYS[0], "sim", "inductor")]
DEEP = [(*way, device, "inductor") for way in WAYS for device in ("sim", "cpu")]
DEEP.remove(CI[-1])


@pytest.mark.ci
def test_a_compiled_wrapper_breaks_its_graph_once_and_a_whole_graph_is_refused():
    torch._dynamo.reset()
    model = GeminiDDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "cpu", precision="fp32")
    torch._dynamo.utils.counters.clear()
    torch.compile(model, backend="eager")(torch.ones(2, 3)).sum().backward()
    reasons = list(torch._dynamo.utils.counters["graph_break"])
    assert reasons and all(NO_GRAPH in r or "marked" in r for r in reasons), reasons
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile what is called between"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("below", "around", "device", "by"),
    [pytest.param(*case, marks=pytest.mark.ci) for case in CI]
    + [pytest.param(*case, marks=pytest.mark.deep) for case in DEEP],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_compiled_module_trains_and_evaluates_as_an_eager_one(below, around, device, by):
    torch._dynamo.reset()
    batches = token_batches(STEPS, 1)
    start = flat(list(Tower().parameters()))
    plain = Tower()
    want = train_reference(plain, lambda ps: torch.optim.AdamW(ps, **ADAM, weight_decay=0.0),
                           batches, token_loss)  # fmt: skip
    backend = SimBackend(1) if device == "sim" else device
    model = GeminiDDP(below(Tower(), by), backend, precision="fp32", **SMALL)
    called = around(model, by)
    optimizer = HybridAdam(model.parameters(), **ADAM)
    for (batch,) in batches:
        loss = token_loss(called, batch)
        assert torch.isfinite(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.module.named_parameters()]
    state = model.state_dict()
    assert relative_error(flat([state[name] for name in names]) - start, want - start) < 1e-6
    ((other,),) = token_batches(1, 1, seed=9)
    with torch.no_grad():
        assert torch.allclose(token_loss(called, other), token_loss(plain, other), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"mode": "reduce-overhead"}, {"mode": "max-autotune"},
     {"options": {"triton.cudagraphs": True}}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("in_place", [False, True])
def test_cuda_graphs_of_the_model_are_refused_with_a_reason(options, in_place):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if in_place:
        module[1].compile(**options)
    else:
        module[1] = torch.compile(module[1], **options)
    with pytest.raises(ValueError, match=r"1 is compiled into CUDA graphs, .* fixed addresses"):
        GeminiDDP(module)
    assert type(module[0].weight) is nn.Parameter  # nothing was changed
    if not in_place:
        with pytest.raises(ValueError, match="the module is compiled into CUDA graphs"):
            GeminiDDP(module[1])
