"""Rules over whole parameters in stages of a pipeline, beside tensor parallel, with replicas."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench.shared.models import seeded
from bench.shared.threads import run_threads
from gemini import GeminiDDP
from optim import HybridLamb, HybridMuon, NvmeConfig
from tests.support import pipelines
from tests.support.pipelines import (
    MAX_NORM,
    MICROBATCHES,
    VOCABULARY,
    Whole,
    batches,
    loss_of,
    update_error,
)

pytestmark = pytest.mark.ci
ON_DISK = {"nvme_offload_fraction": 1.0, "nvme": NvmeConfig(block_numel=1024)}


def _muon(params, **places):
    """Iterations in fp32: bf16 makes 1 % of the last bit of a norm."""
    params = list(params)
    matrices = [p for p in params if p.dim() == 2 and VOCABULARY not in p.shape]
    known = {id(p) for p in matrices}
    others = [p for p in params if id(p) not in known]
    groups = [{"params": matrices}, {"params": others, "use_muon": False}]
    return HybridMuon(groups, lr=1e-2, ns_dtype="fp32", **places)


def _lamb(params, **places):
    return HybridLamb(list(params), lr=1e-2, weight_decay=0.1, **places)


@pytest.mark.parametrize(
    ("make", "kind", "num_ranks", "places"),
    [
        (_muon, "1F1B", 2, ON_DISK),
        (_muon, "ZBVZeroBubble", 4, {}),
        (_lamb, "ZBVZeroBubble", 2, {}),
        (_lamb, "1F1B", 4, ON_DISK),
    ],
)
def test_updates_are_those_of_one_process(make, kind, num_ranks, places, monkeypatch):
    """A matrix, and a norm, is of the ranks that share a stage."""
    monkeypatch.setattr(pipelines, "HybridAdam", lambda params, **_: make(params, **places))
    data = batches(MICROBATCHES * max(1, num_ranks // 2))

    def work(rank):
        model = pipelines.pipeline(kind)
        for parts in data:
            model.run(parts)
            model.step()
        found = model.weights()
        model.close()
        return found

    got = {}
    for weights in run_threads(work, num_ranks, backend="gloo"):
        got |= weights
    whole = Whole()
    optimizer = make(whole.parameters())
    for parts in data:
        (sum(loss_of(whole(ids), ids) for ids in parts) / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    want = {name: param.detach() for name, param in whole.named_parameters()}
    assert update_error(got, want) < 1.5e-6


# -- meshes --------------------------------------------------------------------------------------


def _layers():
    with seeded():
        return nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 24)
        )


def _split(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module, said = _layers(), []
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for make in (HybridMuon, lambda model: HybridLamb(model.parameters())):
        model = GeminiDDP(module, mesh=mesh)
        with pytest.raises(ValueError) as refused:
            make(model)
        said.append(str(refused.value))
        model.unwrap()
    model = GeminiDDP(module, mesh=mesh, precision="fp32")
    *others, whole, bias = model.parameters()
    groups = [{"params": [whole]}, {"params": [*others, bias], "use_muon": False}]
    optimizer = HybridMuon(groups, lr=1e-2, ns_dtype="fp32")
    model(torch.ones(2, 8)).sin().sum().backward()
    optimizer.step()
    return said, model.state_dict().get("4.weight")


def test_what_torch_has_split_is_named_and_what_is_whole_is_updated():
    (muon, lamb), got = run_threads(_split, 2, backend="gloo")[0]
    assert muon.startswith("0.weight is split by torch, so no rank has all of its matrix")
    assert lamb.startswith("0.weight is split by torch, so no norm over these ranks")
    module = _layers()
    optimizer = HybridMuon([module[4].weight], lr=1e-2, ns_dtype="fp32")
    module(torch.ones(2, 8)).sin().sum().backward()
    optimizer.step()
    moved = module[4].weight - _layers()[4].weight
    assert torch.allclose(got - _layers()[4].weight, moved, atol=1e-6)


def _replicated(rank, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = GeminiDDP(_layers(), mesh=mesh, precision="fp32")
    optimizer = HybridMuon(model, lr=1e-2, **ON_DISK)
    for _ in range(2):
        model(torch.ones(2, 8)).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = model.digest()
    optimizer.close()
    return found


def test_replicas_of_shards_come_to_the_same():
    four = run_threads(lambda rank: _replicated(rank, (2, 2)), 4, backend="gloo")
    two = run_threads(lambda rank: _replicated(rank, (1, 2)), 2, backend="gloo")
    assert set(four) == set(two) and len(set(four)) == 1
