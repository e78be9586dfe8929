"""Experts that ranks share out: each token goes to the rank of its expert, and comes back."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from bench.shared.workers import run_ranks
from gemini.parallel.experts import share_experts
from tests.integrations.cases.hybrid_runs import made
from tests.support.said import said

pytest.importorskip("transformers")
EXPERTS = "model.layers.0.mlp.experts"
# of two ranks' three tokens each: all over; none for the second; none for one rank's own
CHOSEN = [
    [[[0, 3], [1, 2], [3, 0]], [[2, 1], [3, 2], [0, 1]]],
    [[[0, 1], [1, 0], [0, 1]], [[1, 0], [0, 1], [1, 0]]],
    [[[2, 3], [3, 2], [2, 3]], [[1, 0], [0, 1], [1, 0]]],
]


def tokens(rank, trains=True):
    draw = torch.Generator().manual_seed(rank)
    x, weights = torch.randn(3, 32, generator=draw), torch.rand(3, 2, generator=draw)
    return x.requires_grad_(trains), weights.requires_grad_()


def computed(experts, rank, chosen, trains=True):
    x, weights = tokens(rank, trains)
    out = experts(x, torch.tensor(chosen), weights)
    (out.square().sum() / 2).backward()
    return [out.detach(), weights.grad, *([x.grad] if trains else [])]


def shared_out(rank, trains):
    """By choice: what is computed, and gradients of whole stacks (None: nobody came)."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), []
    for chosen in CHOSEN:
        experts = made("Mixtral").get_submodule(EXPERTS)
        share_experts(experts, None, mesh)
        parts = computed(experts, rank, chosen[rank], trains)
        own = {n: p.grad for n, p in experts.named_parameters()}
        found.append((parts, {n: g if g is None else g.to_local() for n, g in own.items()}))
    return found


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.unlike
def test_experts_of_all_ranks_compute_as_those_of_one(trains):
    """Where a rank has no token for its experts, too, and where tokens have no gradients."""
    results = run_ranks(shared_out, 2, trains)
    for i, chosen in enumerate(CHOSEN):
        experts = made("Mixtral").get_submodule(EXPERTS)
        for rank in range(2):
            want = computed(experts, rank, chosen[rank], trains)
            for a, b in zip(results[rank][i][0], want, strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        for name, param in experts.named_parameters():
            for rank, part in enumerate(param.grad.chunk(2)):
                found = results[rank][i][1][name]
                found = torch.zeros_like(part) if found is None else found
                assert torch.allclose(found, part, rtol=1e-5, atol=1e-6)


def test_what_has_no_experts_to_share_is_refused():
    three = SimpleNamespace(size=lambda: 3)  # all that is asked before a module is changed
    text = said(share_experts, made("Llama"), None, three)
    assert "LlamaForCausalLM has no stacked experts; expected a model" in text
    text = said(share_experts, made("Mixtral"), None, three)
    assert "model.layers.0.mlp.experts has 4 experts, which ep_size=3 does not divide" in text
