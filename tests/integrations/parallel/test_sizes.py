"""Which mesh sizes make, and which ranks see the same data."""

import pytest
import torch
from torch.utils.data import TensorDataset

from gemini.integrations import GeminiPlugin, HybridParallelPlugin
from gemini.integrations.plugins import plugin as plugins
from gemini.parallel.sizes import MeshSizes

HYBRID = {"precision": "fp32"}
SHARING = {
    "tp_size": 1, "pp_size": 1, "sp_size": 2, "enable_sequence_parallelism": True,
    "sequence_parallelism_mode": "ring_attn",
}  # fmt: skip
PIPELINE = {**HYBRID, "tp_size": 1, "pp_size": 2, "num_microbatches": 2}


@pytest.mark.parametrize(
    ("sizes", "ranks", "dims"),
    [
        (MeshSizes(), 4, ()),
        (MeshSizes(replicas=2), 4, (("replicate", 2), ("shard", 2))),
        (MeshSizes(tp=2), 4, (("shard", 2), ("tp", 2))),
        (MeshSizes(tp=2), 2, (("tp", 2),)),
        (MeshSizes(tp=2, replicas=2), 8, (("replicate", 2), ("shard", 2), ("tp", 2))),
        (MeshSizes(tp=2, shards=False), 8, (("replicate", 4), ("shard", 1), ("tp", 2))),
        (MeshSizes(tp=2, shards=False), 2, (("tp", 2),)),
        (MeshSizes(tp=2, cp=2), 8, (("shard", 2), ("cp", 2), ("tp", 2))),
        (
            MeshSizes(cp=2, ep=2, replicas=2), 8,
            (("replicate", 2), ("shard", 1), ("cp", 2), ("ep", 2)),
        ),
        (MeshSizes(ep=2), 8, (("shard", 4), ("ep", 2))),
        (MeshSizes(cp=4, replicas=2), 8, (("replicate", 2), ("shard", 1), ("cp", 4))),
        (MeshSizes(pp=2), 2, (("pp", 2),)),
        (MeshSizes(pp=2), 6, (("shard", 3), ("pp", 2))),
        (MeshSizes(pp=2, pp_inside=False), 6, (("pp", 2), ("shard", 3))),
        (
            MeshSizes(tp=2, pp=3, replicas=2), 24,
            (("replicate", 2), ("shard", 2), ("pp", 3), ("tp", 2)),
        ),
        (MeshSizes(tp=2, pp=2, pp_inside=False), 8, (("pp", 2), ("shard", 2), ("tp", 2))),
    ],
)  # fmt: skip
def test_a_mesh_has_a_dimension_for_what_there_is(sizes, ranks, dims):
    assert sizes.dims(ranks) == dims


def test_sizes_that_do_not_divide_the_ranks_are_refused_by_name():
    with pytest.raises(ValueError, match="tp_size=2 and extra_dp_size=3 for 8 ranks; expected"):
        MeshSizes(tp=2, replicas=3).dims(8)
    with pytest.raises(ValueError, match="pp_size=2 for 1 ranks; expected"):
        MeshSizes(pp=2).mesh(torch.device("cpu"))


SAME_DATA = [
    (GeminiPlugin(), [0, 1, 2, 3]),
    (GeminiPlugin(extra_dp_size=2), [0, 1, 2, 3]),
    (GeminiPlugin(tp_size=2, precision="bf16"), [0, 0, 1, 1]),
    (GeminiPlugin(tp_size=4, precision="bf16"), [0, 0, 0, 0]),
    (HybridParallelPlugin(tp_size=2, pp_size=1, **HYBRID), [0, 0, 1, 1]),
    (HybridParallelPlugin(**PIPELINE), [0, 0, 1, 1]),
    (HybridParallelPlugin(dp_outside=False, **PIPELINE), [0, 1, 0, 1]),
    (HybridParallelPlugin(tp_size=2, pp_size=2), [0, 0, 0, 0]),
    (HybridParallelPlugin(**HYBRID, **SHARING), [0, 0, 1, 1]),
    (GeminiPlugin(ep_size=2, precision="bf16"), [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("plugin", "parts"), SAME_DATA)
def test_peers_of_a_split_or_a_pipeline_see_the_same_batches(plugin, parts, monkeypatch):
    monkeypatch.setattr(plugins, "world_size", lambda: 4)
    data, seen, drawn = TensorDataset(torch.arange(24)), {}, {}
    for rank, part in enumerate(parts):
        monkeypatch.setattr(plugins, "rank", lambda rank=rank: rank)
        loader = plugin.prepare_dataloader(data, batch_size=3, shuffle=True, num_workers=0)
        mine = [int(i) for (batch,) in loader for i in batch]
        assert seen.setdefault(part, mine) == mine
        loader.worker_init_fn(0)
        first = float(torch.rand(()))
        assert drawn.setdefault(part, first) == first
    assert sorted(i for mine in seen.values() for i in mine) == list(range(24))
    assert len(set(drawn.values())) == len(seen) == len(set(parts))
