"""Checkpoints over ranks: any world size to any other, FSDP2 both ways, errors on every rank."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import gemini
from bench.shared.models import Tower, token_loss
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from gemini.checkpoint import CheckpointError
from optim import HybridAdam
from tests.support.checkpoints import (
    ADAM,
    assert_same,
    batches,
    load_with_dcp,
    make,
    torch_state,
    train,
    whole,
)
from tests.support.until import until

pytestmark = pytest.mark.ci


def save_after(rank, path, steps, options):
    model, optimizer = make(**options)
    train(model, optimizer, batches(0, steps, dist.get_world_size()))
    gemini.save_checkpoint(path, model, optimizer, extra={"rank": rank})
    return whole(model, optimizer)


def load_whole(rank, path, options):
    model, optimizer = make(**options, seed=3)
    extra = gemini.load_checkpoint(path, model, optimizer)
    return whole(model, optimizer), extra


FORMS = [
    {"placement": "resident"},
    {"placement": "nvme", "chunk_size_m": 0.01},
    {"placement": "mixed", "chunk_size_m": 0.002},
    {"placement": "nvme", "precision": "fp32"},
]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.unlike), 3, 4])
def test_what_one_world_size_saved_every_other_loads(world_size, tmp_path):
    """Bit for bit: weights, moments and steps, at other placements, chunk sizes, precisions."""
    form = FORMS[world_size - 1]
    want = run_ranks(save_after, world_size, tmp_path / "a", 2, form)[0]
    assert len(want) > 50
    for other in (1, 2, 3, 4):
        results = run_ranks(load_whole, other, tmp_path, FORMS[(world_size + other) % 4])
        assert_same(results[0][0], want)
        extras = [extra["rank"] for _, extra in results]
        assert extras == (list(range(other)) if other == world_size else [0] * other)


# -- FSDP2 -----------------------------------------------------------------------------------


def fsdp(seed):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = Tower(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.01)


def fsdp_train(module, optimizer, steps):
    for parts in steps:
        token_loss(module, parts[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp_whole(module, optimizer):
    """Weights and state by name, whole on every rank. Collective."""
    state = torch_state(module, optimizer)
    found = {f"model.{k}": v for k, v in state["model"].items()}
    for name, planes in state["optim"]["state"].items():
        found |= {f"{name}.{plane}": value for plane, value in planes.items()}
    return {
        k: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for k, v in found.items()
    }


def save_fsdp(rank, path):
    module, optimizer = fsdp(0)
    fsdp_train(module, optimizer, batches(0, 2, dist.get_world_size()))
    dcp.save(torch_state(module, optimizer), checkpoint_id=path)
    want = fsdp_whole(module, optimizer)
    fsdp_train(module, optimizer, batches(2, 4, dist.get_world_size()))
    return want, fsdp_whole(module, optimizer)


def load_fsdp(rank, path):
    """With DCP's own reader."""
    module, optimizer = fsdp(5)
    load_with_dcp(path, module, optimizer)
    return fsdp_whole(module, optimizer), optimizer.param_groups[0]["lr"]


def load_and_go_on(rank, path, options, first, last):
    model, optimizer = make(**options, seed=3)
    gemini.load_checkpoint(path, model, optimizer)
    there = whole(model, optimizer)
    train(model, optimizer, batches(first, last, dist.get_world_size()))
    return there, whole(model, optimizer)


def test_what_fsdp2_saved_is_loaded_bit_for_bit_and_trained_on(tmp_path):
    want, later = run_ranks(save_fsdp, 3, tmp_path / "fsdp")[0]
    for world_size, form in ((2, FORMS[1]), (3, FORMS[3])):
        there, trained = run_ranks(load_and_go_on, world_size, tmp_path / "fsdp", form, 2, 4)[0]
        assert_same(there, want)
    for name, value in later.items():  # the last one was in fp32 at the same world size
        assert torch.allclose(trained[name], value, rtol=1e-4, atol=1e-6), name


def test_fsdp2_loads_with_dcps_own_reader_what_was_saved_here(tmp_path):
    want = run_ranks(save_after, 2, tmp_path / "a", 2, {"placement": "mixed"})[0]
    # of a process, not of a thread: the reader keeps the version that it tries in a global
    for state, lr in run_ranks(load_fsdp, 3, tmp_path / "a", processes=True):
        assert lr == 1e-2
        assert_same(state, want)


# -- errors, the same on every rank ----------------------------------------------------------


def said(work):
    with pytest.raises(CheckpointError) as raised:
        work()
    return type(raised.value).__name__, str(raised.value)


def bad_calls(rank, folder):
    model, optimizer = make()
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "precious").write_text("mine", encoding="utf-8")
    (folder / "file").write_text("mine", encoding="utf-8")
    dist.barrier()
    save = lambda path, **options: said(  # noqa: E731
        lambda: gemini.save_checkpoint(path, model, optimizer, **options)
    )
    found = {
        "other paths": save(folder / f"r{rank}"),
        "no checkpoint": save(folder / "full"),
        "a file": save(folder / "file"),
        "no place": save("/proc/nowhere/a"),
        "latest": save(folder / "latest"),
        "extra of one rank": save(folder / "b", extra=nn.Linear if rank == 1 else 1),
        "load nothing": said(lambda: gemini.load_checkpoint(folder / "none", model, optimizer)),
        "load a folder": said(lambda: gemini.load_checkpoint(folder / "full", model, optimizer)),
        "load a file": said(lambda: gemini.load_checkpoint(folder / "file", model, optimizer)),
    }
    gemini.save_checkpoint(folder / "c", model, optimizer)  # and all goes on
    dist.barrier()
    return found


def test_bad_input_is_one_error_on_every_rank_and_nothing_is_lost(tmp_path):
    results = run_ranks(bad_calls, 2, tmp_path)
    assert results[0] == results[1]
    found = {name: text for name, (_, text) in results[0].items()}
    assert "rank 0 has" in found["other paths"] and "r1" in found["other paths"]
    assert "is no checkpoint" in found["no checkpoint"]
    assert "it is a file" in found["a file"]
    assert "cannot save to /proc/nowhere/a" in found["no place"]
    assert "newest" in found["latest"]
    assert "rank 1: extra holds" in found["extra of one rank"]
    assert "does not exist" in found["load nothing"]
    assert "is no checkpoint" in found["load a folder"]
    assert "torch.save" in found["load a file"]
    assert (tmp_path / "full" / "precious").read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "file", "full", "latest"]


def full_disk_on_one_rank(rank, folder):
    import resource

    model, optimizer = make("nvme")
    train(model, optimizer, batches(0, 1, 2))
    gemini.save_checkpoint(folder / "good", model, optimizer)
    want = whole(model, optimizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    large = torch.ones(1 << 20)
    found = [said(lambda: gemini.save_checkpoint(folder / "bad", model, optimizer, extra=large))]
    ticket = gemini.save_checkpoint(folder / "bad", model, optimizer, extra=large, async_save=True)
    until(ticket.ready)
    found.append(said(lambda: gemini.save_checkpoint(folder / "next", model, optimizer)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    other, its_optimizer = make(seed=3)
    gemini.load_checkpoint(folder, other, its_optimizer)
    return found, want, whole(other, its_optimizer)


def test_a_full_disk_on_one_rank_is_said_on_all_and_the_last_checkpoint_stays(tmp_path):
    results = run_ranks(full_disk_on_one_rank, 2, tmp_path, processes=True)
    assert results[0][0] == results[1][0]
    for _, text in results[0][0]:
        assert "rank 1" in text and "EFBIG" in text
    assert "the asynchronous save to" in results[0][0][1][1]  # it comes out at the next call
    assert_same(results[0][2], results[0][1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]


# -- replicas --------------------------------------------------------------------------------


def digests(rank):
    found = {}
    for name, policy in (("sharded", "static"), ("whole", StaticPlacement(shard_param_frac=0.0))):
        model = GeminiDDP(Tower(), placement_policy=policy, min_chunk_size_m=0.004)
        optimizer = HybridAdam(model.parameters(), **ADAM)
        train(model, optimizer, batches(0, 2, dist.get_world_size()))
        found[name] = [model.digest()]
        if name == "whole" and rank == 1:
            model.engine.chunks[2].payload[0] += 1  # as a bad memory cell would
        found[name].append(model.digest())
        if rank == 1:
            model.engine.target.state_views()[model.engine.params[3]]["step"].add_(1)
        found[name].append(model.digest())
    return found


@pytest.mark.unlike
def test_one_corrupt_rank_has_another_digest():
    one, other = run_ranks(digests, 2)
    assert one["sharded"][0] == one["whole"][0], "the same weights, wherever they are"
    assert [a == b for a, b in zip(one["sharded"], other["sharded"], strict=True)] == [1, 1, 0]
    assert [a == b for a, b in zip(one["whole"], other["whole"], strict=True)] == [1, 0, 0]
