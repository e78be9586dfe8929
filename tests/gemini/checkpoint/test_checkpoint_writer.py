"""What a save describes and shares out, beside the planner of torch.distributed.checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import gemini
from gemini.checkpoint.foreign.metadata import read_metadata
from gemini.checkpoint.format.manifest import CheckpointError, read_manifest
from gemini.checkpoint.writer import described, flattened, joined, share_out

ROOT = Path(__file__).parents[3]
TENSOR = torch.arange(6.0).view(2, 3)
LEAVES = strategies.sampled_from([1, "text", None, (1, TENSOR), TENSOR])
NESTED = strategies.recursive(
    LEAVES,
    lambda inner: strategies.one_of(
        strategies.lists(inner, max_size=3),
        strategies.dictionaries(strategies.sampled_from(["a", "b.c", 3]), inner, max_size=3),
    ),
    max_leaves=12,
)


@hypothesis.given(strategies.dictionaries(strategies.sampled_from(["m", "o"]), NESTED))
def test_a_state_is_flattened_as_torch_flattens_it(state):
    try:
        want = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(CheckpointError, match="rename one of them"):
            flattened(state)
        return
    flat, paths = flattened(state)
    assert paths == want[1] and list(paths) == list(want[1])
    assert all(flat[key] is value for key, value in want[0].items()) and len(flat) == len(want[0])


def test_two_values_of_one_key_are_refused():
    with pytest.raises(CheckpointError, match=r"two values of the state are a\.b; rename"):
        flattened({"a": {"b": 1}, "a.b": 2})


def plans_of(states):
    """Local plans of torch's planner, one a rank."""
    found = []
    for rank, state in enumerate(states):
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(state, None, rank == 0)
        found.append(planner.create_local_plan())
    return found


def items_of(plan: SavePlan):
    def item(one: WriteItem):
        offset = one.index.offset
        return one.index.fqn, None if offset is None else tuple(offset)

    return {item(one) for one in plan.items}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_that_several_ranks_have_are_shared_out_as_torch_shares_them(world_size):
    sizes = [7, 1, 64, 0, 5, 5, 33, 2]
    states = [
        {
            "model": {str(i): torch.zeros(n, i + 1) for i, n in enumerate(sizes)},
            "gemini": {"common": 1, "rank": {str(rank): torch.ones(3)}},
        }
        for rank in range(world_size)
    ]
    every = [described(flattened(state)[0]) for state in states]
    own = share_out(every)
    assert sum(map(len, own)) == len(set.union(*own)) == len(sizes) + 1 + world_size
    assert own == [items_of(plan) for plan in dedup_save_plans(plans_of(states))]


def test_metadata_says_what_torchs_planner_says(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    gemini.save_checkpoint(tmp_path / "a", module, optimizer, extra=[1, "two"])
    found = read_metadata(tmp_path / "a", read_manifest(tmp_path / "a"))
    state = {
        "model": module.state_dict(),
        "optim": torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(
            module, optimizer
        ),
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    (plan,), want = planner.create_global_plan([planner.create_local_plan()])
    ours = {k: v for k, v in found.state_dict_metadata.items() if not k.startswith("gemini.")}
    assert list(ours) == list(want.state_dict_metadata)
    for key, entry in want.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            assert isinstance(ours[key], BytesStorageMetadata)
        else:
            assert ours[key] == entry
    assert found.planner_data.items() >= want.planner_data.items()
    assert found.storage_data.keys() >= {item.index for item in plan.items}


def test_parts_of_ranks_are_joined_in_their_order():
    state = {"a": torch.zeros(2), "b": 3}
    index = described(flattened(state)[0])
    twice = joined([index, index, {}])
    assert list(twice) == ["a", "b"]
    assert twice["a"].parts == index["a"].parts * 2 and index["a"].size == torch.Size([2])


LOAD = """
import sys
for name in ("gemini.checkpoint.foreign", "torch.distributed.checkpoint"):
    sys.modules[name] = None
import json, torch, gemini
model = gemini.GeminiDDP(torch.nn.Linear(4, 4), precision="fp32")
optimizer = gemini.HybridAdam(model.parameters())
gemini.load_checkpoint(sys.argv[1], model, optimizer)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(json.dumps([value.tolist() for value in model.state_dict().values()]))
"""


@pytest.mark.ci
def test_a_load_of_our_own_checkpoint_needs_nothing_of_torchs(tmp_path):
    model = gemini.GeminiDDP(torch.nn.Linear(4, 4), precision="fp32")
    optimizer = gemini.HybridAdam(model.parameters())

    def step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    step()
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "a")], check=True, capture_output=True,
        encoding="utf-8", cwd=ROOT,
    )  # fmt: skip
    want = [value.tolist() for value in model.state_dict().values()]
    assert json.loads(done.stdout.splitlines()[-1]) == want
