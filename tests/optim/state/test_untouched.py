"""State that was not made yet: nothing is made, read or moved for a state dict of it."""

import copy

import pytest
import torch
from torch import nn

from bench.shared.models import Tower
from gemini import GeminiDDP
from gemini.runtime.step.state import full_state
from optim import HybridAdam, HybridSGD, NvmeConfig
from tests.support import checkpoints
from tests.support.plain_training import make_params, train

SMALL = NvmeConfig(block_numel=1024)
SHAPES = [(3,), (65, 33), (1025,)]
KINDS = [HybridAdam, HybridSGD]


def plain(cls=HybridAdam, folder=None, **options):
    params = make_params(shapes=SHAPES)
    if folder is not None:
        options |= {"nvme_offload_fraction": 1.0, "nvme_offload_dir": folder, "nvme": SMALL}
    return params, cls(params, lr=1e-2, **options)


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_state_dict_before_the_first_step_makes_no_state(cls, on_disk, tmp_path):
    """What accelerate asks every optimizer for, and gives back at once."""
    params, optimizer = plain(cls, tmp_path if on_disk else None)
    saved = optimizer.state_dict()
    assert saved["state"] == {} and saved["param_groups"][0]["params"] == [0, 1, 2]
    optimizer.load_state_dict(saved)
    assert optimizer.nvme_bytes == 0 and list(tmp_path.iterdir()) == []
    assert not optimizer.state
    other_params, other = plain(cls, tmp_path if on_disk else None)
    for got, want in zip(train(params, optimizer, 2), train(other_params, other, 2), strict=True):
        assert torch.equal(got, want)


def test_options_of_an_empty_state_dict_are_taken_over():
    _, optimizer = plain()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_that_was_asked_for_is_shown():
    """`gemini.load_checkpoint` makes it by `bind`, to have a place for what it reads."""
    params, optimizer = plain()
    optimizer.bind()
    assert all(optimizer.state_dict()["state"][i]["exp_avg"].shape == p.shape
               for i, p in enumerate(params))  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("cls", KINDS)
def test_torchs_checkpointing_resumes_into_an_optimizer_without_state(cls, on_disk, tmp_path):
    """Its template is what a fresh optimizer shows: torch makes a step of nothing for it."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def pair(seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(5, 33), nn.Linear(33, 3))
        options = {"momentum": 0.9} if cls is HybridSGD else {}
        if on_disk:
            folder = tmp_path / "state"
            folder.mkdir(exist_ok=True)
            options |= {"nvme_offload_fraction": 1.0, "nvme_offload_dir": folder, "nvme": SMALL}
        return module, cls(module.parameters(), lr=1e-2, **options)

    def go_on(module, optimizer):
        for _ in range(2):
            module(torch.ones(1, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in module.parameters()]

    module, optimizer = pair(0)
    go_on(module, optimizer)
    weights, state = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "a", no_dist=True)
    want = go_on(module, optimizer)
    other, its_optimizer = pair(1)
    weights, state = get_state_dict(other, its_optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "a", no_dist=True)
    set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    assert all(torch.equal(a, b) for a, b in zip(go_on(other, its_optimizer), want, strict=True))


# -- shards --------------------------------------------------------------------------------------


def wrapped(seed=0, **options):
    model = GeminiDDP(Tower(seed), "cpu", min_chunk_size_m=0.004)
    return model, HybridAdam(model.parameters(), lr=1e-2, nvme=SMALL, **options)


def steps(model, optimizer, first, last):
    checkpoints.train(model, optimizer, checkpoints.batches(first, last))
    return model.state_dict()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def moves(monkeypatch):
    """Names of what reads or writes all state of shards, as it is called."""
    called = []
    for name in ("gather_state", "scatter_state"):
        inner = getattr(full_state, name)

        def counted(*args, name=name, inner=inner, **options):
            called.append(name)
            return inner(*args, **options)

        monkeypatch.setattr(full_state, name, counted)
    return called


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_shards_that_took_no_step_do_not_travel(moves, fraction, tmp_path):
    model, optimizer = wrapped(nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path)
    moved = optimizer.targets[0].tiered_state.traffic()
    saved = optimizer.state_dict()
    assert saved["state"] == {} and saved["param_groups"][0]["params"][0] == "embed.weight"
    optimizer.load_state_dict(saved)
    assert moves == [] and moved == optimizer.targets[0].tiered_state.traffic()
    assert same(steps(model, optimizer, 0, 2), steps(*wrapped(), 0, 2))


def test_shards_that_took_a_step_or_were_loaded_do(moves):
    model, optimizer = wrapped()
    steps(model, optimizer, 0, 2)
    saved, weights = copy.deepcopy(optimizer.state_dict()), model.state_dict()
    assert moves == ["gather_state"]
    other, its_optimizer = wrapped(seed=1)
    other.load_state_dict(weights)
    its_optimizer.load_state_dict(saved)
    assert its_optimizer.state_dict()["state"].keys() == saved["state"].keys()
    assert moves == ["gather_state", "scatter_state", "gather_state"]
    assert same(steps(other, its_optimizer, 2, 4), steps(model, optimizer, 2, 4))


def test_a_state_that_is_streamed_in_counts_as_loaded():
    model, optimizer = wrapped()
    optimizer.fill_state(lambda run: None)
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_an_empty_state_dict_begins_shards_anew():
    """As torch does: also moments of a run that was under way."""
    model, optimizer = wrapped()
    empty = optimizer.state_dict()
    steps(model, optimizer, 0, 2)
    weights = model.state_dict()
    optimizer.load_state_dict(empty)
    assert same(model.state_dict(), weights)  # masters are no moments
    other, its_optimizer = wrapped()
    other.load_state_dict(weights)
    assert same(steps(model, optimizer, 2, 4), steps(other, its_optimizer, 2, 4))
