"""Begin and end of module calls: what is traced ahead is what an engine goes through."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.host import calls
from bench.shared.models import Tower
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement, trace

ROWS = torch.ones(3, 7)


class Layers(nn.Module):
    """A chain, so that the last module's backward comes first."""

    def __init__(self, middle=None):
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.middle = middle or nn.Linear(7, 7)
        self.last = nn.Linear(7, 7)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


@dataclass
class Answer:
    x: torch.Tensor


class GivesDataclass(nn.Linear):
    def forward(self, x):
        return Answer(super().forward(x))


class OpensDataclass(Layers):
    def __init__(self):
        super().__init__(GivesDataclass(7, 7))

    def forward(self, x):
        return self.last(self.middle(self.first(x)).x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x):
        return self.experts[0](x) + self.experts[2](x)


class Checkpointed(Layers):
    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))


class Tied(Layers):
    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight


class Twice(Layers):
    def forward(self, x):
        return self.last(self.middle(self.middle(self.first(x))))


MODELS = {
    "chain": Layers,
    "a dataclass between": OpensDataclass,
    "experts": lambda: Layers(Experts()),
    "checkpointed": Checkpointed,
    "tied": Tied,
    "used twice": Twice,
}


def seen_by_engine(model, inputs):
    """Events that an engine that releases chunks samples."""
    wrapped = GeminiDDP(
        model, SimBackend(), StaticPlacement(offload_param_frac=1.0), min_chunk_size_m=0.0001
    )
    wrapped(inputs).float().sum().backward()
    wrapped.engine.sampler.end()
    (found,) = wrapped.memory_stats.traces.values()
    return [moment.event for moment in found.moments]


@pytest.mark.parametrize("name", MODELS)
def test_a_trace_made_ahead_has_the_events_that_an_engine_samples(name):
    model = MODELS[name]()
    ahead = trace(model, (ROWS,))
    assert [moment.event for moment in ahead.moments] == seen_by_engine(model, ROWS)


def test_a_module_whose_inputs_have_no_gradient_is_in_use_until_the_backward_ends():
    """A tied embedding: nobody says when its gradient is whole before the backward is."""
    model, ids = Tower(), torch.zeros(4, 9, dtype=torch.int64)
    ahead = trace(model, (ids,), loss=lambda logits: logits.float().sum())
    last = [(m.edge, m.module) for m in ahead.moments if m.module == "embed"]
    assert last == [("enter", "embed"), ("leave", "embed"), ("enter", "embed")]
    assert [moment.event for moment in ahead.moments] == seen_by_engine(model, ids)


# one of them has signals wait for a gather, and each takes turns with threads that read
BARS = {"forward": (69, 14), "backward": (96, 15)}


@pytest.mark.parametrize("mode", ["resident", pytest.param("gathered", marks=pytest.mark.ci)])
def test_a_layer_costs_few_calls_in_few_files(mode):
    for row in calls.per_layer(mode):
        if row["phase"] in BARS:
            most_calls, most_files = BARS[row["phase"]]
            assert row["calls"] <= most_calls, row
            assert row["files"] <= most_files, row
