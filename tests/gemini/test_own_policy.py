"""A policy of one's own, by the steps of docs/extending.md and nothing else."""

from dataclasses import dataclass

import pytest
import torch

from gemini import GeminiDDP
from gemini.placement import planner, policy
from gemini.placement.plan import UpdatePath
from gemini.placement.sizes import Budgets
from gemini.placement.tiers import Tier
from gemini.runtime import planning
from optim import HybridAdam, NvmeConfig
from tests.checkpoints import train
from tests.models import Tower, token_batches


@dataclass(frozen=True, slots=True)
class StateOnDisk:
    """All state of the optimizer on NVMe, everything else on the device."""


@pytest.fixture
def added(monkeypatch):
    """Steps 1 to 3: the union and the names, the homes, the budgets."""
    monkeypatch.setattr(policy, "Placement", policy.Placement | StateOnDisk)
    monkeypatch.setitem(policy.NAMED, "state-on-disk", StateOnDisk())
    homes_of_others, budgets_of_others = planner._Draft.choose_homes, planning._budgets

    def choose_homes(draft):
        if not isinstance(draft.policy, StateOnDisk):
            return homes_of_others(draft)
        homes = draft.tiers.lowest(Tier.DEVICE, UpdatePath.STREAM)
        homes.state = [[Tier.NVME for _ in blocks] for blocks in homes.state]
        homes.device_staging, homes.host_staging = draft.tiers.staging(homes)
        return homes

    def budgets(asked, *rest):
        return Budgets() if isinstance(asked, StateOnDisk) else budgets_of_others(asked, *rest)

    monkeypatch.setattr(planner._Draft, "choose_homes", choose_homes)
    monkeypatch.setattr(planning, "_budgets", budgets)


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
