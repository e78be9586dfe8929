"""Meshes where kernels update: what each rank speaks for is measured on the simulated device."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from bench.shared.models import Mixture, Splittable, token_batches, token_loss
from bench.shared.reference import relative_error
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from gemini.placement.tiers import Tier
from optim import HybridAdam
from tests.support.meshes import ADAM

pytestmark = pytest.mark.ci
SHAPES = {
    "replicas": ("replicate", "shard"),
    "split": ("dp", "tp"),
    "experts": ("efsdp", "ep"),
}
MODULES = {"replicas": Splittable, "split": Splittable, "experts": Mixture}
# sums in fp32 in another order: norms, of all ranks' parts, differ in their last bits
BOUND = 2e-6


def split(module, mesh):
    layers = {}
    for block in ("blocks.0", "blocks.1"):
        for name in ("q", "k", "v", "gate", "up"):
            layers[f"{block}.{name}"] = ColwiseParallel()
        for name in ("out", "down"):
            layers[f"{block}.{name}"] = RowwiseParallel()
    parallelize_module(module, mesh, layers)


def trained(rank, kind, by_kernels, grads_leave):
    """Norms of three steps, of which one rank makes the second skip; and weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=SHAPES[kind])
    module = MODULES[kind](0)
    if kind == "split":
        split(module, mesh["tp"])
    for layer in (*module.layers, module.rare) if kind == "experts" else ():
        layer.experts.split(mesh["ep"])
    backend = SimBackend(rank, updates_by_triton=by_kernels)
    backend.shards_start_on_host = False
    model = GeminiDDP(
        module, backend, StaticPlacement(1.0), precision="fp32", max_norm=0.3, mesh=mesh,
        min_chunk_size_m=0.004,
    )  # fmt: skip
    optimizer = HybridAdam(model.parameters(), **ADAM)
    if grads_leave:
        plan = model.engine.planning.plan
        shards = tuple(replace(shard, grad_home=Tier.HOST) for shard in plan.shards)
        model.engine.storage.place_gradients(replace(plan, shards=shards), model.engine.chunks)
    said = []
    for step, parts in enumerate(token_batches(3, dist.get_world_size(), seed=1)):
        part = parts[rank // 2 if kind == "split" else rank][:, :8]
        factor = float("nan") if step == 1 and rank // 2 == 1 else 1.0
        (token_loss(model, part) * factor).backward()
        optimizer.step()
        report = optimizer.last_report
        said.append((report.skipped, report.grad_norm))
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    digest, path = model.digest(), report.update_path
    optimizer.close()
    return found, said, digest, path


# by kernels, gradients leave: replicas are summed before a gradient leaves
WAYS = {kind: [(False, False), (True, False)] for kind in SHAPES}
WAYS["replicas"].append((True, True))


def settings(rank):
    return {kind: [trained(rank, kind, *way) for way in ways] for kind, ways in WAYS.items()}


def test_kernels_come_to_what_the_host_comes_to_on_every_mesh():
    results = run_ranks(settings, 4)
    for kind in SHAPES:
        (want, said, *_), *on_device = results[0][kind]
        assert [skipped for skipped, _ in said] == [False, True, False]
        for i, (got, same_said, _, path) in enumerate(on_device):
            assert "triton" in path.lower(), path
            assert [skipped for skipped, _ in same_said] == [False, True, False], (kind, i)
            for step in (0, 2):
                assert abs(same_said[step][1] / said[step][1] - 1) < BOUND, (kind, i)
            for name, value in got.items():
                start = dict(MODULES[kind](0).named_parameters())[name].detach()
                assert relative_error(value - start, want[name] - start) < 1e-5, (kind, i, name)
            assert len({found[kind][i + 1][2] for found in results}) == 1
        assert all(torch.equal(got[name], on_device[0][0][name]) for got, *_ in on_device
                   for name in want), "gradients that leave have the same bits"  # fmt: skip
