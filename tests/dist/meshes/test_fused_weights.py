"""Fused matrices that ranks split one by one: what is saved is whole, and loads as it was."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import gemini
from bench.shared.models import seeded
from bench.shared.reference import everything, relative_error, same
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from gemini.parallel.styles import FusedColwise
from optim import HybridAdam
from tests.support.meshes import (
    ADAM,
    MAX_NORM,
    PARTS,
    STAGES,
    STEPS,
    Kit,
    SplitCase,
    check_checkpoint,
    reference,
)

WIDTH = 24
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Gated(nn.Module):
    """Gate and up as one matrix, as `gate_up_proj` is; ranks have 20 of each one's 40 rows."""

    def __init__(self, seed=0):
        super().__init__()
        with seeded(seed):
            self.gate_up, self.down = nn.Linear(WIDTH, 80), nn.Linear(40, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def loss_of(module, x):
    return (module(x) - x.roll(1, -1)).square().mean()


def batches(count, num_parts):
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(3, WIDTH, generator=draw) for _ in range(num_parts)] for _ in range(count)]


def wrapped(case, seed=0):
    mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=("dp", "tp"))
    plan = {"gate_up": FusedColwise(2), "down": RowwiseParallel()}
    module = parallelize_module(Gated(seed), mesh["tp"], plan)
    model = GeminiDDP(
        module, placement_policy=STAGES[case.stage], precision="fp32", max_norm=MAX_NORM, mesh=mesh
    )
    return model, HybridAdam(model.parameters(), **ADAM)


def given_back(rank, path):
    """What state_dict gives is taken back."""
    model, optimizer = wrapped(SplitCase())
    gemini.load_checkpoint(path, model, optimizer)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    found = everything(model, optimizer)
    optimizer.close()
    return found


@pytest.mark.unlike
def test_fused_matrices_train_save_and_load_as_whole_ones(tmp_path):
    path = str(tmp_path / "saved")
    kit = Kit(Gated, wrapped, batches, loss_of)
    saved = check_checkpoint(kit, SplitCase(), {2: [SplitCase((1, 2), stage=2)]}, path)
    names, start = [n for n, _ in Gated().named_parameters()], Gated().state_dict()
    flat = [torch.cat([state[n].flatten() for n in names]) for state in (saved, start)]
    want = reference(Gated(), batches(STEPS, 2 * PARTS), loss_of=loss_of)
    assert relative_error(flat[0] - flat[1], want - flat[1]) < 1.5e-6
    assert same(run_ranks(given_back, 4, path)[0], saved)  # without a change
