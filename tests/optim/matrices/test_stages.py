"""Rules over whole parameters in the stages of a pipeline, against one process."""

import pytest
import torch

from bench.shared.threads import run_threads
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
