"""Whether the CPU update is compiled, where ranks have parts of a model that differ in size."""

from types import SimpleNamespace

import pytest
import torch

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.placement.plan import UpdatePath
from gemini.runtime.step import executors
from optim import HybridAdam

MINE, LARGEST = 3 * 64, 5 * 64


def elements_decided_by(monkeypatch, *, links=("world",), is_stage=False):
    """Of the model that this rank compiles for, where another rank has LARGEST."""
    found, asked = [], []

    def gathered(numel):
        asked.append(numel)
        return [numel, LARGEST]

    def updater(rule, cpu_path, facts, mixes, agree):
        found.append(facts.numel)

    monkeypatch.setattr(executors, "cpu_updater", updater)
    monkeypatch.setattr("optim.step.executors.CpuStep", lambda *_: None)
    param = torch.nn.Parameter(torch.zeros(1))
    rule = HybridAdam([param]).rule_for([])
    sharding = SimpleNamespace(
        layout=ChunkLayout.build([ParamSpec("weight", (MINE,), "bfloat16")], 1024),
        precision_settings=SimpleNamespace(master_weights=True, rounding_seed=0),
        backend=SimpleNamespace(updates_by_triton=False),
        comm=SimpleNamespace(gather_objects=gathered),
        links=dict.fromkeys(links),
    )
    plan = SimpleNamespace(off_device=UpdatePath.STREAM)
    executors.make_shard_executor(
        sharding, plan, None, rule, rule.layout, [0], [], "auto", is_stage=is_stage
    )
    return found, asked


@pytest.mark.parametrize(
    "how", [{"links": ("world", "tp")}, {"links": ("tp",)}, {"is_stage": True}]
)
def test_ranks_with_other_parts_go_by_the_largest(how, monkeypatch):
    """Else one rank would build, and vote on it, and another would not hear of the vote."""
    assert elements_decided_by(monkeypatch, **how) == ([LARGEST], [MINE])


def test_ranks_with_the_same_model_ask_nobody(monkeypatch):
    assert elements_decided_by(monkeypatch) == ([MINE], [])
