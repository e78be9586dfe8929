"""Gradients that torch makes sparse: they count as its dense sum of them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam

ROWS = [[[1, 2, 2, 9], [1, 0, 0, 0]], [[3, 3, 2, 4], [5, 2, 5, 5]]]  # by rank, of two backwards
CASES = [(1, "fp32", False), (1, "bf16", True), (2, "fp32", True)]


class Words(nn.Module):
    """One table alone in its chunk, one beside a layer."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.large = nn.Embedding(10, 64, sparse=True)
            self.bag = nn.EmbeddingBag(10, 8, mode="sum", sparse=True)
            self.head = nn.Linear(72, 4)

    def forward(self, rows):
        both = torch.cat([self.large(rows).mean(1), self.bag(rows)], 1)
        return self.head(both).float().square().mean()


def gradients(rank, precision, on_host):
    """Ours and torch's dense ones, means over ranks, of two backwards; and what a step moved."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    plain = [Words() for _ in range(world_size)]
    policy = StaticPlacement(offload_param_frac=1.0) if on_host else "static"
    model = GeminiDDP(
        Words(), SimBackend() if on_host else None, policy,
        precision=precision, min_chunk_size_m=5e-4,
    )  # fmt: skip
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    for i in range(2):
        model(torch.tensor([ROWS[rank][i]])).backward()
        for other, rows in zip(plain, ROWS, strict=False):
            other(torch.tensor([rows[i]])).backward()
    named = [dict(one.named_parameters()) for one in plain]
    want = {
        name: torch.stack([params[name].grad.to_dense() for params in named]).mean(0)
        for name in named[0]
    }
    found = dict(model.named_gradients())
    optimizer.step()
    after = model.state_dict()
    return found, want, {n: (after[n] != v).any(1) for n, v in before.items() if v.dim() == 2}


@pytest.mark.parametrize(("world_size", "precision", "on_host"), CASES)
def test_a_sparse_gradient_is_torchs_dense_sum(world_size, precision, on_host):
    if world_size == 1:
        results = [gradients(0, precision, on_host)]
    else:
        results = run_ranks(gradients, world_size, precision, on_host)
    bound = {"fp32": 1e-6, "bf16": 2e-2}[precision]  # sums in another order; rounded values
    for found, want, _ in results:
        assert found.keys() == want.keys()
        for name, value in want.items():
            assert float((found[name] - value).abs().max()) <= bound * float(value.abs().max())
    moved = results[0][2]
    used = {row for rows in ROWS[:world_size] for both in rows for row in both}
    for name in ("large.weight", "bag.weight"):
        assert set(moved[name].nonzero().flatten().tolist()) == used


def test_a_sparse_gradient_may_be_set():
    model = GeminiDDP(nn.Sequential(nn.Embedding(4, 3, sparse=True)), precision="fp32")
    weight = next(model.parameters())
    weight.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (4, 3), check_invariants=True)
    assert weight.grad.tolist() == [[0.0] * 3, [2.0] * 3, [0.0] * 3, [0.0] * 3]
