"""A policy of one's own, by the steps of docs/extending.md and nothing else."""

from dataclasses import dataclass

import pytest
import torch

from bench.shared.models import Tower, token_batches
from gemini import GeminiDDP
from gemini.placement import draft, policy
from gemini.placement.sizes import Budgets
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import train


@dataclass(frozen=True, slots=True)
class StateOnDisk:
    """All state of the optimizer on NVMe, everything else on the device."""

    def budgets(self):
        """No limits."""
        return Budgets()


@pytest.fixture
def added(monkeypatch):
    """Steps 1 and 2: the union and the names, the homes."""
    monkeypatch.setattr(policy, "Placement", policy.Placement | StateOnDisk)
    monkeypatch.setitem(policy.NAMED, "state-on-disk", StateOnDisk())
    homes_of_others = draft.Draft.choose_homes

    def choose_homes(made):
        if not isinstance(made.policy, StateOnDisk):
            return homes_of_others(made)
        homes = made.problem.lowest(Tier.DEVICE)
        homes.state = [[Tier.NVME for _ in blocks] for blocks in homes.state]
        homes.device_staging, homes.host_staging = made.problem.staging(homes)
        return homes

    monkeypatch.setattr(draft.Draft, "choose_homes", choose_homes)


def trained(placement_policy, folder):
    model = GeminiDDP(Tower(), "cpu", placement_policy, precision="fp32", min_chunk_size_m=0.004)
    nvme = NvmeConfig((str(folder),), block_numel=1024)
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=nvme)
    train(model, optimizer, token_batches(3, 1))
    on_disk, weights = optimizer.nvme_bytes, model.state_dict()
    optimizer.close()
    return on_disk, weights


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("given", [StateOnDisk(), "state-on-disk"], ids=str)
def test_it_places_what_it_says_and_changes_no_bit(given, tmp_path):
    on_disk, weights = trained(given, tmp_path)
    assert on_disk >= 2 * 8 * sum(p.numel() for p in Tower().parameters())
    nothing, want = trained("static", tmp_path)
    assert nothing == 0 and all(torch.equal(weights[name], want[name]) for name in want)


def test_a_policy_that_was_not_added_is_refused():
    with pytest.raises(ValueError, match=r"placement_policy=StateOnDisk\(\) is unknown"):
        GeminiDDP(Tower(), "cpu", StateOnDisk())
    with pytest.raises(ValueError, match="'state-on-disk' is unknown"):
        GeminiDDP(Tower(), "cpu", "state-on-disk")
