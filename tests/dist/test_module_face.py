"""The wrapper as torch sees it, over ranks: buffers, copies, parents, freezing, and the way out."""

import copy
import io
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from gemini.runtime.memory import machine
from optim import HybridAdam
from tests.support.loops.sides import (
    ADAM,
    SMALL,
    Net,
    batch,
    difference,
    loss_of,
    plain,
    wrapped,
)
from tests.support.loops.sides import full_step as step
from tests.support.said import said

# -- buffers ---------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        with seeded():
            self.body = nn.Linear(24, 24)
            self.norm = nn.BatchNorm1d(24)

    def forward(self, x):
        return self.norm(self.body(x))


def statistics(model):
    return torch.cat([b.detach().double().flatten() for b in model.buffers()])


def buffers(rank):
    """What every rank has: at the start, after steps of its own, and after a load."""
    module = Normed()
    with torch.no_grad():
        module.norm.running_mean += rank
    model = GeminiDDP(module, precision="fp32", **SMALL)
    seen = [statistics(model)]
    for seed in range(2):
        model(batch(seed + 10 * rank)[0])
    seen.append(statistics(model))
    model.load_state_dict(model.state_dict())
    seen.append(statistics(model))
    parent = nn.Sequential(model)
    for seed in range(2):
        model(batch(seed + 10 * rank)[0])
    parent.load_state_dict(parent.state_dict())
    seen.append(statistics(model))
    return seen


@pytest.mark.unlike
def test_buffers_are_rank_0s_at_the_start_and_after_a_load_and_each_ranks_own_between():
    (first, own, loaded, nested), (start, other, again, parents) = run_ranks(buffers, 2)
    assert torch.equal(first, start) and not torch.equal(own, other)
    assert torch.equal(loaded, own) and torch.equal(again, own)
    assert torch.equal(nested, parents)


def broadcast(rank, wraps):
    """A few steps of training, each rank with batches of its own; weights and buffers then."""
    module = Normed()
    if wraps:
        model = GeminiDDP(module, precision="fp32", broadcast_buffers=True, **SMALL)
        optimizer = HybridAdam(model.parameters(), **ADAM)
    else:
        model = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAM)
    for seed in range(4):
        step(model, optimizer, seed + 10 * rank)
    model.eval()
    with torch.no_grad():
        return model(batch(0)[0]), statistics(model)


def in_another_order(rank):
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Module())
    for name in ("mean", "var")[:: 1 - 2 * rank]:
        module[1].register_buffer(name, torch.zeros(len(name)))
    return module


def refuse_buffers(rank):
    with seeded():
        module = in_another_order(rank)
    return said(GeminiDDP, module)


def test_buffers_in_another_order_are_refused_before_one_is_sent():
    for text in run_ranks(refuse_buffers, 2):
        assert "rank 1 has the buffer ('1.var', (3,), 'torch.float32') where rank 0 has" in text


@pytest.mark.unlike
def test_buffers_that_are_broadcast_are_those_of_ddp():
    for ours, theirs in zip(
        run_ranks(broadcast, 2, True), run_ranks(broadcast, 2, False), strict=True
    ):
        for mine, want in zip(ours, theirs, strict=True):
            assert torch.allclose(mine.double(), want.double(), rtol=1e-5, atol=1e-6)


# -- copies, and what may not be -------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def copies(rank):
    model, optimizer = wrapped()
    step(model, optimizer)
    found = [through_a_file(model.module.state_dict()), copy.deepcopy(model.module.state_dict())]
    found.append({n: pickle.loads(pickle.dumps(p)).detach() for n, p in model.named_parameters()})
    found.append(through_a_file({n: p.detach().cpu() for n, p in model.named_parameters()}))
    want = dict(model.unwrap().state_dict())
    return [name for other in found for name in want if not torch.equal(other[name], want[name])]


def inside_ddp(rank):
    model = GeminiDDP(Net(), precision="fp32", **SMALL)
    with seeded():
        parent = nn.Sequential(nn.Linear(24, 24), nn.ModuleList([model]))
    for module in (model, parent):
        for around in (DistributedDataParallel, FullyShardedDataParallel, replicate, fully_shard):
            with pytest.raises(RuntimeError, match=around.__name__):
                around(module)
    loss_of(model, 0)
    replicate(model.module.layers[1])
    with pytest.raises(RuntimeError, match=r"torch's replicate\(\)"):
        loss_of(model, 0)


def inside_fsdp(rank):
    model = GeminiDDP(Net(), precision="fp32", **SMALL)
    fully_shard(model.module)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight is another"):
        loss_of(model, 0)


def test_a_wrapped_module_inside_torchs_own_wrappers_is_refused():
    run_ranks(inside_ddp, 2)
    run_ranks(inside_fsdp, 2)


# -- the way out, and what changes after wrapping --------------------------------------------


def unwrapped(rank, precision, poor):
    model, optimizer = wrapped(precision=precision)
    for seed in range(2):
        step(model, optimizer, seed)
    saved = model.state_dict()
    poor.add(threading.get_ident() if rank == 1 else None)
    with pytest.raises(MemoryError, match="expected room"):  # on both
        model.unwrap()
    poor.discard(threading.get_ident())
    module = model.unwrap()
    same = [n for n, v in saved.items() if torch.equal(v, module.state_dict()[n])]
    whole = {type(p) for p in module.parameters()} == {nn.Parameter}
    again = GeminiDDP(module, precision="fp32", **SMALL)
    step(again, HybridAdam(again.parameters()))
    return (
        len(same) == len(saved),
        whole,
        torch.cat([p.flatten() for p in module.state_dict().values()]).sum(),
    )


@pytest.mark.one_process("the memory that is left is patched in this process")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_unwrap_gives_every_rank_the_plain_module(precision, monkeypatch):
    left, poor = machine.memory_left, set()  # threads that have no memory left
    monkeypatch.setattr(
        machine, "memory_left", lambda: 0 if threading.get_ident() in poor else left()
    )
    (same, whole, total), (_, other_whole, other) = run_ranks(unwrapped, 2, precision, poor)
    assert same and whole and other_whole and torch.equal(total, other)


def taken_out(model, optimizer):
    for seed in range(3):
        x = batch(seed)[0].requires_grad_()
        loss = model(x).pow(2).mean()
        (grad,) = torch.autograd.grad(loss, [x], retain_graph=True)
        (loss + model(x + 0.1 * grad.sign().detach()).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def of_parameters(rank):
    model, _ = wrapped()
    torch_model, _ = plain()
    worst = 0.0
    for module in (torch_model, model):
        grads = torch.autograd.grad(loss_of(module, 0), list(module.parameters()))
        if module is torch_model:
            want = grads
        else:
            worst = max(float((a - b).norm() / b.norm()) for a, b in zip(grads, want, strict=True))
    return worst


def loop(rank):
    return difference(taken_out)


@pytest.mark.parametrize("world_size", [2, 3])
def test_autograd_grad_leaves_the_updates_of_torch(world_size):
    assert max(run_ranks(loop, world_size)) < 2e-6  # a third is no fp32 number


def test_gradients_of_parameters_that_autograd_takes_out_are_this_ranks():
    assert max(run_ranks(of_parameters, 2)) < 1e-6


def bypass(rank):
    """A leaf's node found through a view of it, as torch's own data parallel does."""
    model, optimizer = wrapped()
    seen = []
    for param in model.parameters():
        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: seen.append(1))
        model._kept_nodes = [*getattr(model, "_kept_nodes", []), node]
    step(model, optimizer)
    return len(seen), len(list(model.parameters()))


def test_hooks_on_a_leafs_node_are_called():
    for seen, params in run_ranks(bypass, 2):
        assert seen == params


def grads(rank, what):
    """`.grad` between micro-batches: this rank's own under no_sync, as in DDP; then the mean."""
    if what == "ours":
        model, _ = wrapped()
    else:
        model = DistributedDataParallel(Net())
    found = []
    for sync in (False, True):
        with nullcontext() if sync else model.no_sync():
            loss_of(model, 10 * rank + sync).backward()
        found.append(torch.cat([p.grad.clone().flatten() for p in model.parameters()]))
        found.append(torch.tensor([float(p.grad.norm()) for p in model.parameters()]))
    return found


def test_gradients_between_micro_batches_are_those_of_ddp():
    for ours, theirs in zip(run_ranks(grads, 2, "ours"), run_ranks(grads, 2, "ddp"), strict=True):
        for mine, want in zip(ours[:1] + ours[2:], theirs[:1] + theirs[2:], strict=True):
            assert torch.allclose(mine, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("what", ["drop", "scale", "assign"])
def test_ranks_that_change_gradients_differently_are_told_so(what):
    for text in run_ranks(changed_by_one, 2, what):
        assert "gradient" in text and "rank 0" in text and "rank 1" in text, text


def changed_by_one(rank, what):
    model, optimizer = wrapped()
    loss_of(model, 0).backward()
    for param in model.parameters():
        if what == "drop" and rank == 0:
            param.grad = None
        elif what == "scale":
            param.grad *= 0.5 + rank
        elif what == "assign":
            param.grad = torch.full_like(param.grad.clone(), float(rank))
    return said(optimizer.step)
