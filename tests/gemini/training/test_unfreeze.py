"""Weights that were frozen at wrapping and are trained later: updates, masters, budgets, saves.

The loops with them are in test_loops.py, and at several ranks in tests/dist.
"""

import pytest
import torch

import gemini
from gemini import AutoPlacement, GeminiDDP
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig
from tests.support.loops.cases import LOOPS, HalfFrozen
from tests.support.loops.sides import ADAM, FILES_DEPTH, SMALL, Net, full_step, loss_of, wrapped

BLOCKS = NvmeConfig(block_numel=1024)


def budgeted(budget, build=HalfFrozen, **options):
    model = GeminiDDP(
        build(FILES_DEPTH), placement_policy=AutoPlacement(budget), precision="fp32", **SMALL,
        **options,
    )  # fmt: skip
    return model, HybridAdam(model.parameters(), nvme=BLOCKS, **ADAM)


one_by_one = LOOPS["unfrozen one by one"]


def state_homes(model):
    return [set(shard.state_homes) for shard in model.engine.planning.plan.shards]


def test_state_of_unfrozen_weights_goes_where_a_budget_leaves_room():
    """To files, where memory is full; and the updates are those of torch."""
    model, optimizer = budgeted("110KiB")
    before = state_homes(model)
    one_by_one(model, optimizer)
    after = state_homes(model)
    grown = [homes for old, homes in zip(before, after, strict=True) if homes and not old]
    assert len(grown) == 2  # chunks of a layer each
    plain = HalfFrozen(FILES_DEPTH)
    one_by_one(plain, torch.optim.AdamW(plain.parameters(), foreach=False, **ADAM))
    start = Net(FILES_DEPTH)
    got, want = model.state_dict(), plain.state_dict()
    moved = [(got[n] - p.detach(), want[n] - p.detach()) for n, p in start.named_parameters()]
    error = torch.cat([(a - b).flatten() for a, b in moved]).norm()
    assert float(error / torch.cat([b.flatten() for _, b in moved]).norm()) < 1e-6


def test_all_of_a_model_is_unfrozen_under_a_budget_that_sends_it_to_files():
    model, optimizer = budgeted("100KiB")
    full_step(model, optimizer)
    model.module.requires_grad_(True)
    full_step(model, optimizer, 1)
    homes = set().union(*state_homes(model))
    assert Tier.NVME in homes
    plain = HalfFrozen(FILES_DEPTH)
    torch_optimizer = torch.optim.AdamW(plain.parameters(), foreach=False, **ADAM)
    full_step(plain, torch_optimizer)
    plain.requires_grad_(True)
    full_step(plain, torch_optimizer, 1)
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("place", ["resident", "host", "nvme"])
def test_masters_of_unfrozen_weights_start_from_what_they_were_before_wrapping(place):
    model, optimizer = wrapped(HalfFrozen, place, precision="bf16", keep_originals=True)
    full_step(model, optimizer)
    model.module.requires_grad_(True)
    model.layers[0].weight.register_hook(torch.zeros_like)  # no gradient moves it
    full_step(model, optimizer, 1)
    state = model.state_dict()
    assert torch.equal(state["layers.0.weight"], Net().layers[0].weight)
    assert not torch.equal(state["layers.1.weight"], Net().layers[1].weight)


def test_what_fits_nowhere_is_refused_and_changes_nothing():
    model = GeminiDDP(
        HalfFrozen(FILES_DEPTH),
        placement_policy=AutoPlacement("100KiB", nvme_budget="20KiB"),
        precision="fp32",
        **SMALL,
    )
    optimizer = HybridAdam(model.parameters(), nvme=BLOCKS, **ADAM)
    full_step(model, optimizer)
    before = model.state_dict()
    model.module.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(BudgetError):
            full_step(model, optimizer, 1)
    model.layers[:-1].requires_grad_(False)
    after = model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    full_step(model, optimizer, 1)


def test_unfreezing_that_an_error_ends_leaves_the_plan_and_layout_of_before(monkeypatch):
    model = GeminiDDP(HalfFrozen(FILES_DEPTH), precision="fp32", **SMALL)
    engine = model.engine
    planned = engine.planning.inputs, engine.plan, engine.layout
    model.module.requires_grad_(True)

    def fails(chunks):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(engine.storage, "unfreeze", fails)
        model(torch.ones(2, 8))
    assert (engine.planning.inputs, engine.plan, engine.layout) == planned


def test_a_checkpoint_behind_unfreezing_is_read_by_a_module_that_never_froze(tmp_path):
    model, optimizer = wrapped(HalfFrozen, precision="bf16")
    full_step(model, optimizer)
    model.module.requires_grad_(True)
    full_step(model, optimizer, 1)
    gemini.save_checkpoint(tmp_path / "c", model, optimizer)
    other, other_optimizer = wrapped(Net, precision="bf16")
    gemini.load_checkpoint(tmp_path / "c", other, other_optimizer)
    for each, its in ((model, optimizer), (other, other_optimizer)):
        full_step(each, its, 2)
    want = model.state_dict()
    assert all(torch.equal(want[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize("drops", [False, True])
def test_a_gradient_that_comes_before_a_forward_has_unfrozen_it_shows(drops):
    """A layer that is called by itself, and trained from then on; as with torch's own."""
    found = []
    for module in (HalfFrozen(FILES_DEPTH), GeminiDDP(HalfFrozen(FILES_DEPTH), precision="fp32")):
        inner = getattr(module, "module", module)
        optimizer = (torch.optim.AdamW if inner is module else HybridAdam)(
            module.parameters(), **ADAM
        )
        frozen = next(m for m in inner.modules() if isinstance(m, torch.nn.Linear) and not
                      m.weight.requires_grad)  # fmt: skip
        frozen.requires_grad_(True)
        frozen(torch.ones(2, frozen.in_features)).square().sum().backward()
        before = frozen.weight.grad.clone()
        if drops:
            optimizer.zero_grad()
            assert frozen.weight.grad is None
        loss_of(module, 0).backward()
        both = frozen.weight.grad.clone()
        optimizer.step()
        found.append((before, both, dict(module.state_dict())))
    (before, both, want), (got_before, got_both, got) = found
    assert before.norm() > 0
    torch.testing.assert_close(got_before, before)
    torch.testing.assert_close(got_both, both)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)
