"""What the host spends grows with the model, and not faster: counted at n and at 2n.

A cost that grows as it should is 2 times as large, one with the square 4 times; see
`tests.support.counting`. Seconds are those of `bench.host.calls`.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.host.calls import counted
from gemini import GeminiDDP
from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.planner import PlanInputs, make_plan
from gemini.placement.sizes import Budgets, StateBytes
from gemini.placement.timetable.gathers import gather_steps
from gemini.runtime.memory.gradient_homes import HostGradients
from gemini.runtime.step.views import ShardViews
from gemini.tickets import Copied
from optim import HybridAdam
from optim.state.memory import memory_of
from optim.state.space import Block, BlockSegment
from tests.support.counting import LINEAR, growth, python_bytes


def plan_inputs(num_modules, budget=None):
    specs = [
        ParamSpec(f"m{i}.{name}", (numel,), "bfloat16")
        for i in range(num_modules)
        for name, numel in (("weight", 256), ("bias", 16))
    ]
    return PlanInputs(
        layout=ChunkLayout.build(specs, 1 << 10),
        trace=sequential_trace(specs),
        state=StateBytes(12, True),
        budgets=Budgets() if budget is None else Budgets(budget * num_modules),
        has_host_tier=False,
        block_numel=1 << 10,
    )


@pytest.mark.ci
def test_the_steps_of_a_schedule():
    def steps(num_calls):
        calls = [(i,) if edge else None for i in range(num_calls // 2) for edge in (True, False)]
        return lambda: gather_steps(calls, ())

    assert growth(steps, 250) < LINEAR
    assert growth(steps, 250, python_bytes) < LINEAR


@pytest.mark.ci
@pytest.mark.parametrize("budget", [None, 2000], ids=["resident", "spilled"])
def test_a_plan(budget):
    def plan(num_modules):
        inputs = plan_inputs(num_modules, budget)
        return lambda: make_plan(inputs)

    assert growth(plan, 100) < LINEAR


class Waiting(HostGradients):
    """A home of gradients that costs nothing."""

    def __init__(self):
        self.values = torch.zeros(64)

    def arrived(self, chunk):
        return self.values, Copied()


@pytest.mark.ci
def test_gradients_that_wait_elsewhere_for_the_step():
    gradient = SimpleNamespace(shard=None, exists=True, offloaded_dtype=torch.float32)
    shard = torch.zeros(64)
    chunk = SimpleNamespace(
        gradient=gradient, spec=SimpleNamespace(id=0), files=None, shard_memory=shard
    )
    storage = SimpleNamespace(files=[], host_gradients=Waiting(), changed=None)

    def step(num_blocks):
        blocks = [Block(i, 0, 0, 0, 64, (BlockSegment(0, 0, 64, 0),)) for i in range(num_blocks)]

        def take_all():
            memory = memory_of(torch.device("cpu"))
            views = ShardViews([chunk], [()], [1], storage, memory, staging=None, merges=True)
            views.beside((block, True) for block in blocks)
            for block in blocks:
                views.pieces(block, {})
                views.updated(block)

        return take_all

    assert growth(step, 200) < LINEAR


class Loop:
    """Wrapping a model of many small parameters, and its iterations."""

    def __init__(self, num_params, **options):
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_params // 2)))
        self.model = GeminiDDP(module, "cpu", **options)
        self.optimizer = HybridAdam(self.model.parameters())

    def iterate(self):
        self.model(torch.ones(2, 16)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


SIZES = {"one chunk": 32, "a chunk a module": 0.001}


@pytest.mark.ci
@pytest.mark.parametrize("size", SIZES)
def test_wrapping_and_the_first_iteration(size):
    def first(num_params):
        return lambda: Loop(num_params, min_chunk_size_m=SIZES[size]).iterate()

    first(20)()  # what is imported and compiled once
    assert growth(first, 60) < LINEAR


@pytest.mark.parametrize(("size", "most"), [("one chunk", 3), ("a chunk a module", 5)])
def test_an_iteration_that_is_measured_beside_those_that_are_not(size, most):
    """An iteration is measured at the begin and end of calls, and where a chunk's gradients begin
    and end: not at every gradient."""
    loop = Loop(200, min_chunk_size_m=SIZES[size], placement_policy="zero3")  # plans nothing
    assert loop.model.engine.sampler.measures
    first = counted(loop.iterate)
    loop.iterate()
    steady = counted(loop.iterate)
    assert first.calls < most * steady.calls
    measured = first.functions["gemini/memtracer/monitor.py:ProcessMonitor.period"]
    assert measured == 4 * len(loop.model.engine.chunks) + 8


def test_a_gradient_costs_ten_calls():
    """Of ours, in a backward of many small parameters; plain torch's own cost is not ours."""
    loop = Loop(200)
    loop.iterate()
    loss = loop.model(torch.ones(2, 16)).sum()
    assert counted(loss.backward).calls <= 10 * 200
