"""`model.park()` and `model.resume()`: memory is lent to a sampler, and every bit returns."""

import errno
import os
import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import nvme
from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import everything, same
from bench.shared.workers import run_ranks
from gemini import EMA, AutoPlacement, GeminiDDP, save_checkpoint
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from optim import HybridAdam
from optim.state.parking import Parked
from tests.support.disks.faults import file_size_limit
from tests.support.spilled import SMALL
from tests.support.towers import wrapped

pytestmark = pytest.mark.ci
STEPS = 3


def held(model):
    """Bytes of storages of model data in memory."""
    engine = model.engine
    found = [t for chunk in engine.chunks for t in chunk.movable()]
    if engine.target is not None:
        state = engine.target.tiered_state
        slabs = (*state.device_slabs, *state.host_slabs)
        found += [tensor for slab in slabs for tensor in slab.tensors.values()]
    for kept in (engine.originals, *engine.storage.averages):
        found += kept.movable()
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in found)}.values())


def train(model, optimizer, lend=lambda: None, steps=STEPS, **options):
    """`lend` between every two calls of a step, accumulation too."""
    for parts in token_batches(steps, 2):
        for part in parts:
            token_loss(model, part).backward()
            lend()
        optimizer.step()
        lend()
        optimizer.zero_grad()
        lend()


def lending(model, moved):
    """Park and resume, and check that memory goes and comes."""

    def lend():
        before = held(model)
        parked = model.park("nvme")
        moved.append(parked)
        assert parked.ram == parked.to_nvme == before - held(model) > 0 == held(model)
        assert parked.device == parked.to_host == 0  # the CPU computes
        model.resume()
        assert held(model) == before

    return lend


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fraction", [0.0, 0.4])
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_training_goes_on_with_the_same_bits(stage, fraction, precision, tmp_path):
    found, moved = [], []
    for parks in (True, False):
        options = {"placement_policy": stage, "folder": tmp_path, "fraction": fraction}
        model, optimizer = wrapped(precision, **options)
        train(model, optimizer, lending(model, moved) if parks else lambda: None)
        found.append(everything(model, optimizer))
        optimizer.close()
    assert same(*found) and len(moved) == 4 * STEPS
    assert not any("parked" in path.name for path in tmp_path.iterdir())


def test_averages_and_originals_go_too(tmp_path):
    found = []
    for parks in (True, False):
        policy = AutoPlacement(nvme_dir=str(tmp_path))
        model = GeminiDDP(Tower(), placement_policy=policy, keep_originals=True, **SMALL)
        for name, param in model.named_parameters():
            param.requires_grad_("embed" not in name)
        optimizer = HybridAdam(model.parameters(), lr=1e-2)
        ema = EMA(model, decay=0.5)
        moved = []
        lend = lending(model, moved) if parks else lambda: None
        train(model, optimizer, lend, steps=1)
        ema.update()
        lend()
        with ema.swapped():
            averaged = everything(model, optimizer)
        found.append((averaged, everything(model, optimizer)))
        ema.close()
        optimizer.close()
    assert same(found[0][0], found[1][0]) and same(found[0][1], found[1][1])


def test_a_module_without_an_optimizer_is_parked(tmp_path):
    """Before one is made, and after it was closed: masters are originals then."""
    policy = AutoPlacement(nvme_dir=str(tmp_path))
    model = GeminiDDP(Tower(), placement_policy=policy, **SMALL)
    model.park("nvme")
    assert held(model) == 0
    model.resume()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=1)
    before = everything(model, optimizer)
    weights = {name: value for name, value in before.items() if "/" not in name}
    optimizer.close()
    model.park("nvme")
    assert held(model) == 0
    model.resume()
    assert same({k: v for k, v in model.state_dict().items() if k in weights}, weights)
    model.unwrap()
    with pytest.raises(RuntimeError, match="was unwrapped"):
        model.park("nvme")


def uses(model, optimizer, tmp_path):
    ids = token_batches(1, 1)[0][0]
    weight = model.module.head.weight
    return {
        "forward": lambda: model(ids),
        "forward of the inner module": lambda: model.module(ids),
        "forward without gradients": lambda: torch.no_grad()(model.module)(ids),
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(Tower().state_dict()),
        "optimizer.state_dict": optimizer.state_dict,
        "step": optimizer.step,
        "clip": lambda: model.clip_grad_norm_(1.0),
        "zero_grad": optimizer.zero_grad,
        "zeros": lambda: model.zero_grad(set_to_none=False),
        "gradients": lambda: list(model.named_gradients()),
        "a gradient": lambda: weight.grad.clone(),
        "a weight": lambda: weight.sum(),
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
        "weights": lambda: list(model.weights()),
        "digest": model.digest,
        "salvage": model.salvage,
        "unwrap": model.unwrap,
        "save": lambda: save_checkpoint(tmp_path / "saved", model, optimizer),
        "EMA": lambda: EMA(model),
        "park": lambda: model.park("nvme"),
        "optimizer.parked": lambda: optimizer.parked("nvme").__enter__(),
    }


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_whatever_needs_model_data_is_refused_and_changes_nothing(stage, tmp_path):
    found = []
    for parks in (True, False):
        model, optimizer = wrapped(folder=tmp_path, fraction=0.4, placement_policy=stage)
        train(model, optimizer, steps=1)
        token_loss(model, token_batches(1, 1)[0][0]).backward()
        if parks:
            model.park("nvme")
            for name, use in uses(model, optimizer, tmp_path).items():
                with pytest.raises(RuntimeError, match=r"parked; call model.resume\(\) first"):
                    raise AssertionError(f"{name} gave {use()}")
            assert "state" in str(model.memory_report()) and model.explain("head.weight")
            model.resume()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, steps=1)
        found.append(everything(model, optimizer))
        with pytest.raises(RuntimeError, match=r"resume\(\) of a module that is not parked"):
            model.resume()
        optimizer.close()
    assert same(*found)


def test_beside_the_other_verb_and_in_contexts_it_is_refused(tmp_path):
    model, optimizer = wrapped(folder=tmp_path, fraction=0.4)
    with pytest.raises(ValueError, match="expected 'host' or 'nvme'"):
        model.park("moon")
    with optimizer.parked("nvme"), pytest.raises(RuntimeError, match=r"optimizer\.parked"):
        model.park("nvme")
    with model.summon_full_params(), pytest.raises(RuntimeError, match="are summoned"):
        model.park("nvme")
    model.park("nvme")
    model.resume()
    optimizer.close()


def test_an_optimizer_that_is_closed_resumes_first(tmp_path):
    model, optimizer = wrapped("bf16", folder=tmp_path)
    train(model, optimizer, steps=1)
    before = model.state_dict()
    model.park("nvme")
    optimizer.close()
    assert same(model.state_dict(), before)
    assert not any("parked" in path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("limit", [4096, 64 << 10])
def test_a_full_disk_leaves_everything_in_place(limit, tmp_path):
    model, optimizer = wrapped(folder=tmp_path)
    train(model, optimizer, steps=1)
    before, bytes_before = everything(model, optimizer), held(model)
    with file_size_limit(limit), pytest.raises(nvme.DiskFullError, match="cannot hold"):
        model.park("nvme")
    assert held(model) == bytes_before and same(everything(model, optimizer), before)
    lending(model, [])()
    assert same(everything(model, optimizer), before)
    optimizer.close()


def test_what_a_budget_has_no_room_for_stays(tmp_path):
    """State in files takes its part of the budget, and files of what is parked two versions."""

    def made(**budget):
        policy = AutoPlacement(nvme_dir=str(tmp_path), **budget)
        model = GeminiDDP(Tower(), placement_policy=policy, precision="fp32", **SMALL)
        optimizer = HybridAdam(
            model.parameters(), lr=1e-2, nvme_offload_fraction=0.5, nvme_offload_dir=str(tmp_path)
        )
        train(model, optimizer, steps=1)
        return model, optimizer

    model, optimizer = made()
    moved, used = held(model), model.engine.ledger.totals()[Tier.NVME]
    optimizer.close()
    assert used > moved / 2
    model, optimizer = made(nvme_budget=used + moved * 3 // 2)
    before, bytes_before = everything(model, optimizer), held(model)
    with pytest.raises(BudgetError, match=r"parking takes .* of nvme, .* raise nvme_budget"):
        model.park("nvme")
    assert held(model) == bytes_before == moved and same(everything(model, optimizer), before)
    optimizer.close()
    model, optimizer = made(nvme_budget=used + 2 * moved)
    assert model.park("nvme").to_nvme == moved
    optimizer.close()


def test_on_a_cpu_host_memory_is_where_it_is_already():
    model, optimizer = wrapped()
    bytes_before = held(model)
    parked = model.park("host")
    assert (parked.device, parked.ram, parked.to_host, parked.to_nvme) == (0, 0, 0, 0)
    assert held(model) == bytes_before
    with pytest.raises(RuntimeError, match="parked"):
        optimizer.step()
    model.resume()
    train(model, optimizer, steps=1)
    optimizer.close()


# -- ranks --


def of_ranks(rank, folder, fails):
    """Two steps, parked between; fails: the way on which rank 1 fails once."""
    model, optimizer = wrapped(folder=folder, fraction=0.4, precision="bf16")
    part = token_batches(1, dist.get_world_size())[0][rank]
    said = None
    for _ in range(2):
        token_loss(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()
        bytes_before = held(model)
        if fails == "out" and said is None:
            said = refusal(rank, "_write", lambda: model.park("nvme"))
            assert held(model) == bytes_before
        model.park("nvme")
        assert held(model) == 0
        if fails == "back" and said is None:
            said = refusal(rank, "bring_back", model.resume)
            with pytest.raises(RuntimeError, match="parked"):
                model.state_dict()
        model.resume()
        assert held(model) == bytes_before
    found = model.digest()
    optimizer.close()
    return said, found


FAILING = threading.local()  # of a rank: the method of `Parked` that fails


def refusal(rank, name, act):
    """What a rank says when rank 1 fails in a method of `Parked`."""
    FAILING.name = name if rank == 1 else None
    with pytest.raises((OSError, RuntimeError)) as error:
        act()
    FAILING.name = None
    return str(error.value), error.value.__notes__ if rank == 1 else []


def failing(name):
    whole = getattr(Parked, name)

    def broken(self, *args):
        if getattr(FAILING, "name", None) == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(self, *args)

    return patch.object(Parked, name, broken)


STAYS = {
    "out": "model data stays where it is, on all ranks",
    "back": "model data is parked still, on all ranks; resume() may be repeated",
}


@pytest.mark.parametrize("fails", STAYS)
def test_a_failure_of_one_rank_is_one_of_all_and_nothing_is_lost(fails, tmp_path):
    (_, undisturbed), *_ = run_ranks(of_ranks, 2, str(tmp_path), None)
    with failing("_write"), failing("bring_back"):
        (first, digest), (second, other) = run_ranks(of_ranks, 2, str(tmp_path), fails)
    assert digest == other == undisturbed
    assert first[0].startswith("rank 1: ") and first[0].endswith(STAYS[fails])
    assert second == ("[Errno 5] Input/output error", [STAYS[fails]])
