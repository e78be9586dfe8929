"""gemini plan and wrapping give the planner one problem, whatever is trained, and where."""

from dataclasses import fields, replace

import pytest
import torch
import transformers

from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from bench.shared.threads import run_threads
from gemini import GeminiDDP
from gemini.optim import HybridAdam
from gemini.placement.planner import PlanInputs
from gemini.placement.tiers import Tier
from gemini.plan import models
from gemini.plan.ask import ask
from gemini.plan.machine import machine_of
from gemini.plan.training import Training
from gemini.units import GIB

ROOM = {"device_mem": GIB, "host_mem": GIB, "nvme": 4 * GIB}
SIZES = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"device_mem": 800 << 10}  # parameters and buffers, and little of the state
# what of `Training` a run is given, the world size, and the memory of a simulated device
CASES = {
    "all in memory": ({}, 1),
    "half of the state on disk": ({"nvme_fraction": 0.5}, 1),
    "all of it, updated in the step": ({"nvme_fraction": 1.0, "update": "serial"}, 1),
    "8 bits": ({"nvme_fraction": 0.5, "state": "8bit"}, 1),
    "fp32": ({"precision": "fp32"}, 1),
    "adapters": ({"lora": 2}, 1),
    "adapters, originals kept": ({"lora": 2, "keep_originals": True, "nvme_fraction": 1.0}, 1),
    "canonical": ({"canonical": True}, 1),
    "two ranks": ({}, 2),
    "two ranks, half of the state on disk": ({"nvme_fraction": 0.5}, 2),
    "two ranks, 8 bits": ({"nvme_fraction": 1.0, "state": "8bit"}, 2),
    "two ranks, adapters": ({"lora": 2, "keep_originals": True}, 2),
    "a device, state in RAM": ({}, 1, SMALL),
    "a device, early updates and a tail": ({"update": "both"}, 1, SMALL),
    "a device, activations leave": ({"activations": "spill", "nvme_fraction": 0.5}, 1, SMALL),
}


def model(device):
    with torch.device(device):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def differing(mine: PlanInputs, wraps: PlanInputs):
    """Fields that differ; of layouts and traces what tells them apart is compared."""
    assert mine.layout.digest() == wraps.layout.digest()
    assert mine.trace.moments == wraps.trace.moments
    names = [one.name for one in fields(mine) if one.name not in ("layout", "trace")]
    pairs = {name: (getattr(mine, name), getattr(wraps, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def problems_of_run(asked, training, device):
    """Inputs and plans of a run: as its module is wrapped, and as its optimizer has its state."""
    with seeded():
        built = model("cpu")
        if training.lora:
            built = models.adapted(built, training.lora)
    wrapped = GeminiDDP(
        built, device=device, placement_policy=asked.policy, trace=asked.trace,
        update=training.update, precision=training.precision,
        keep_originals=training.keep_originals, canonical=training.canonical,
    )  # fmt: skip
    planning = wrapped.engine.planning
    first = planning.inputs, planning.plan
    optimizer = HybridAdam(
        [param for param in wrapped.parameters() if param.requires_grad],
        nvme_offload_fraction=training.nvme_fraction, state=training.state,
    )  # fmt: skip
    second = planning.inputs, planning.plan
    optimizer.close()
    return first, second


@pytest.mark.parametrize("case", CASES)
def test_plan_and_wrapping_give_the_planner_one_problem(case, tmp_path):
    options, ranks, *less = CASES[case]
    training = Training(seq=8, **options)
    machine = machine_of(
        ROOM | (less[0] if less else {}), device="cuda" if less else "cpu",
        world_size=ranks, ranks_per_node=ranks,
    )  # fmt: skip
    asked = ask(model("meta"), replace(machine, folder=str(tmp_path)), training)

    def run(rank):
        device = SimBackend(updates_by_triton=True) if less else "cpu"
        return problems_of_run(asked, training, device)

    for first, second in run_threads(run, ranks, backend="gloo") if ranks > 1 else [run(0)]:
        pairs = (asked.wrapped(), first), (asked.fitted(), second)
        for (inputs, result), (theirs, plan) in pairs:
            assert differing(inputs, theirs) == {}
            assert result.plan == plan
        homes = {home for shard in plan.shards for home in shard.state_homes}
        assert (Tier.NVME in homes) == (training.nvme_fraction > 0)
        assert (Tier.HOST in homes) == bool(less)
