"""The one walker over inputs and outputs, and what memtracer sees through it."""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from gemini import AutoPlacement, GeminiDDP, trace
from gemini.memtracer.collector import input_signature
from gemini.trees import map_tensors, tensors_in
from optim import HybridAdam, NvmeConfig

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Batch:
    x: torch.Tensor
    name: str = "a"
    rest: object = None


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    later: torch.Tensor = field(init=False)  # never set


class Registered:
    """Known to torch's pytree alone."""

    def __init__(self, x):
        self.x = x


_pytree.register_pytree_node(
    Registered,
    lambda r: ([r.x], None),
    lambda xs, _: Registered(xs[0]),
    serialized_type_name="tests.Registered",
)


class Opaque:
    def __init__(self, x):
        self.inside = {"deep": [Batch(x)]}
        self.module = nn.Linear(3, 3)
        self.me = self


X, Y = torch.zeros(2, 3), torch.ones(5)
NESTS = {
    "list": [X, [Y]],
    "tuple": (X, (Y, 3)),
    "namedtuple": Pair(X, {"y": Y}),
    "mappings": OrderedDict(x=X, y=UserDict(y=Y)),
    "defaultdict": defaultdict(list, x=[X, Y]),
    "deque": deque([X, Y]),
    "dataclasses": Batch(X, rest=Batch(Y)),
    "dataclass with a field that was never set": [Frozen(X), Y],
    "registered with pytree": Registered([X, Y]),
}


@pytest.mark.parametrize("name", NESTS)
def test_a_nest_is_opened_in_order(name):
    assert [id(t) for t in tensors_in(NESTS[name])] == [id(X), id(Y)]


@pytest.mark.parametrize("name", [n for n in NESTS if "never" not in n])
def test_a_nest_keeps_its_type_when_its_tensors_change(name):
    changed = map_tensors(NESTS[name], lambda t: t + 1)
    assert type(changed) is type(NESTS[name])
    x, y = tensors_in(changed)
    assert torch.equal(x, X + 1) and torch.equal(y, Y + 1)
    if name == "defaultdict":
        assert changed["another"] == []


@pytest.mark.parametrize("name", NESTS)
def test_what_is_not_changed_is_the_same_object(name):
    assert map_tensors(NESTS[name], lambda t: t) is NESTS[name]


def test_other_objects_are_opened_where_that_is_asked_for():
    value = Opaque(X)
    assert list(tensors_in(value)) == []
    assert {id(t) for t in tensors_in(value, objects=2)} == {id(X)}  # and no module's parameters


# -- signatures --


@pytest.mark.parametrize("hold", [Batch, Registered, Opaque, lambda x: {"x": (x,)}])
def test_inputs_of_another_size_have_another_signature_whatever_holds_them(hold):
    small, large = (input_signature(((hold(torch.zeros(n, 3)),), {})) for n in (2, 200))
    assert "float32[2, 3]" in small and "float32[200, 3]" in large


class Rows(nn.Module):
    """Takes a dataclass; returns a tensor, a tuple or a dataclass of every layer."""

    def __init__(self, hold=lambda x: (x,)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Row(hold) for _ in range(8))

    def forward(self, batch):
        x = batch.x if isinstance(batch, Batch) else batch
        for layer in self.layers:
            (x,) = tensors_in(layer(x))
        return x.sum()


class Row(nn.Module):
    def __init__(self, hold):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.hold = hold

    def forward(self, x):
        return self.hold(torch.relu(x @ self.weight))


def test_a_larger_batch_in_a_dataclass_is_measured_and_planned():
    module = Rows()
    model = GeminiDDP(
        module,
        placement_policy=AutoPlacement("60MiB", warmup_non_model_data_ratio=0.9975),
        precision="fp32",
        min_chunk_size_m=0.002,
    )
    optimizer = HybridAdam(model.parameters(), nvme=NvmeConfig(block_numel=1024))
    for n in (2, 200, 200):
        model(Batch(torch.randn(n, 64))).backward()
        optimizer.step()
        optimizer.zero_grad()
    signatures = [signature for _, signature in model.memory_stats.traces]
    assert signatures == ["float32[2, 64]", "float32[200, 64]"]
    assert all(model.engine.planning.steps_for("train", s) for s in signatures)


# -- traces --


@dataclass
class Output:
    x: torch.Tensor


HOLDERS = [lambda x: (x,), lambda x: x, lambda x: {"x": [x]}, Output, Registered]


@pytest.mark.parametrize("hold", HOLDERS[1:])
def test_the_moments_of_a_trace_do_not_depend_on_what_holds_the_outputs(hold):
    inputs = {"batch": Batch(torch.zeros(3, 64))}
    wanted = trace(Rows(HOLDERS[0]), inputs, precision="fp32")
    found = trace(Rows(hold), inputs, precision="fp32")
    assert [m.event for m in found.moments] == [m.event for m in wanted.moments]
    assert [m.non_model_bytes for m in found.moments] == [m.non_model_bytes for m in wanted.moments]
    assert sum(m.phase == "backward" for m in found.moments) == 16


@pytest.mark.parametrize("hold", HOLDERS[1:])
def test_a_loss_is_found_in_what_holds_it(hold):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Rows()

        def forward(self, batch):
            return hold(self.body(batch))

    found = trace(Last(), (Batch(torch.zeros(3, 64)),), precision="fp32")
    assert found.moments[-1].phase == "backward"


def test_inputs_that_cannot_be_opened_are_refused_with_words():
    with pytest.raises(ValueError, match="an object that cannot be opened; give tensors"):
        trace(Rows(), (Opaque(torch.zeros(3, 64)),), precision="fp32")
