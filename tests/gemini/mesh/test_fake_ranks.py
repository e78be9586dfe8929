"""8 to 512 ranks without ranks: layouts, plans, and the collectives of one rank, by goldens.

A fake process group does nothing; what is sent to whom is recorded. `REMAKE_GOLDENS=1` writes the
goldens anew: look at the difference before it is committed.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.shared.models import Experts, Mixture, Splittable, token_loss
from gemini import GeminiDDP, StaticPlacement
from gemini.comm import communicator as module
from optim import HybridAdam
from tests.support.alike import one_of_many

GOLDENS = Path(__file__).parent / "goldens"
MESHES = {
    "8-ranks-zero3": (("replicate", "shard"), (1, 8), 3, 3),
    "64-ranks-replicas": (("replicate", "shard"), (8, 8), 21, 3),
    "512-ranks-plain": (("replicate", "shard"), (512, 1), 7, 2),
    "512-ranks-replicas-zero2": (("replicate", "shard"), (64, 8), 511, 2),
    "64-ranks-tp": (("dp", "tp"), (16, 4), 6, 3),
    "512-ranks-replicas-tp": (("replicate", "shard", "tp"), (16, 8, 4), 257, 3),
    "64-ranks-sequences": (("dp", "cp"), (8, 8), 21, 3),
    "8-ranks-experts-zero2": (("ep",), (8,), 5, 2),
    "64-ranks-experts": (("efsdp", "ep"), (8, 8), 21, 3),
    "512-ranks-replicas-experts": (("dp_replicate", "efsdp", "ep"), (8, 8, 8), 300, 3),
}


@pytest.fixture
def ranks():
    """Begins as one rank of many; every rank says what this one says."""
    with ExitStack() as stack:
        yield lambda world_size, rank: stack.enter_context(one_of_many(world_size, rank))


@pytest.fixture
def sent(monkeypatch):
    """(what, bytes given, first ranks of the group and their number) of collectives."""
    found = []

    def recorded(name, call, which):
        def record(*args, **kwargs):
            group = kwargs.get("group")
            ranks = dist.get_process_group_ranks(group)
            found.append([name, args[which].nbytes, [*ranks[:3], len(ranks)]])
            return call(*args, **kwargs)

        return record

    gather = recorded("gather", module.all_gather_tensor, 0)
    scatter = recorded("reduce-scatter", module.reduce_scatter_tensor, 1)
    monkeypatch.setattr(module, "all_gather_tensor", gather)
    monkeypatch.setattr(module, "reduce_scatter_tensor", scatter)
    monkeypatch.setattr(module.dist, "all_reduce", recorded("all-reduce", dist.all_reduce, 0))
    return found


def own_experts_only(self, x, chosen):
    """No rank sends anything: tokens go to one of those that are here."""
    up, down = self.up.to_local(), self.down.to_local()
    return self._computed(x, chosen % up.shape[0], up, down)


def split(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, mesh, plan)


@pytest.mark.parametrize("name", MESHES)
def test_layout_plan_and_collectives_are_those_of_the_golden(name, ranks, sent, monkeypatch):
    names, shape, rank, stage = MESHES[name]
    ranks(torch.Size(shape).numel(), rank)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    inner = Mixture(count=8) if "ep" in names else Splittable()
    monkeypatch.setattr(Experts, "forward", own_experts_only)
    if "tp" in names:
        split(inner, mesh["tp"])
    for layer in (*inner.layers, inner.rare) if "ep" in names else ():
        layer.experts.split(mesh["ep"])
    policy = StaticPlacement(1.0 if stage == 3 else 0.0)
    model = GeminiDDP(inner, placement_policy=policy, mesh=mesh, min_chunk_size_m=0.004)
    HybridAdam(model.parameters())
    sent.clear()
    for _ in range(2):
        token_loss(model, torch.zeros(2, 8, dtype=torch.long)).backward()
    model.engine.shards_changed()
    layout, plan = model.engine.layout, model.engine.planning.plan
    of_tp = [dist.get_process_group_ranks(mesh["tp"].get_group())] if "tp" in names else []
    ours = [one for one in sent if one[2][:-1] not in [r[:3] for r in of_tp]]
    found = {
        "chunks": [[c.group, c.num_shards, c.shard_numel, len(c.slots)] for c in layout.chunks],
        "replicas": layout.num_replicas,
        "homes": sorted({shard.param_home.value for shard in plan.shards}),
        "gathers": [[g.chunk, g.begin, g.use, g.release] for g in plan.gathers],
        "collectives": [f"{what} {nbytes} over {group}" for what, nbytes, group in ours],
    }
    sharded = [c for c in plan.chunks if c.num_shards > 1]
    reduced = [n for what, n, _ in ours if what == "reduce-scatter"]
    assert sum(reduced) == 2 * sum(c.payload_bytes for c in sharded)  # each once a backward
    if layout.num_replicas > 1 and sharded:  # and behind it its shard, once
        group = dist.get_process_group_ranks(mesh.get_group(names[0]))
        across = [n for what, n, of in ours if of == [*group[:3], len(group)]]
        assert sum(across) == 2 * sum(c.shard_bytes for c in sharded)
    path = GOLDENS / f"{name}.json"
    if os.environ.get("REMAKE_GOLDENS"):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(path.read_text(encoding="utf-8"))
