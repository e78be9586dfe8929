"""Shards that are no part of a payload hold the upper half of their masters: 14 bytes a parameter,
and the bits of whole masters. One group of processes for all cases."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam, HybridLion, NvmeConfig
from optim.rules.state_layout import StateLayout

pytestmark = pytest.mark.ci

ZERO3, ZERO2 = StaticPlacement(1.0), StaticPlacement(0.0)
HOST = StaticPlacement(1.0, offload_optim_frac=1.0)
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}


def wrapped(
    rank, *, device="cpu", fraction=0.0, folder=None, make=HybridAdam, placement=ZERO3,
    state="fp32", **how
):  # fmt: skip
    kernels = device == "sim, kernels"
    backend = SimBackend(rank, updates_by_triton=kernels) if "sim" in device else device
    module = Tower()
    for param in module.parameters():  # every third master is a tie that is rounded down
        param.data.view(torch.int32).flatten()[::3].bitwise_and_(~0x1FFFF).bitwise_or_(0x8000)
    model = GeminiDDP(module, backend, placement_policy=placement, min_chunk_size_m=0.004, **how)
    options = {**ADAM, "state": state} if make is HybridAdam else {"lr": 1e-3}
    optimizer = make(
        model.parameters(), **options, nvme_offload_fraction=fraction, nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=2048),
    )  # fmt: skip
    optimizer.bind()
    return model, optimizer


def train(rank, model, optimizer, batches):
    for parts in batches:
        token_loss(model, parts[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """This rank's state as it is shown, and all weights."""
    runs = {}
    optimizer.visit_state(
        lambda run: runs.update({(run.name, run.plane, run.start): run.values.clone()})
    )
    with model.summon_full_params(writeback=False):
        weights = flat(list(model.parameters())).clone()
    return runs, weights


def assert_same(found, want):
    assert found[0].keys() == want[0].keys()
    assert {plane for _, plane, _ in found[0]} == {"master", "exp_avg", "exp_avg_sq"}
    for key, values in found[0].items():
        assert torch.equal(values.view(torch.int32), want[0][key].view(torch.int32)), key
    assert torch.equal(found[1], want[1])


def in_memory(optimizer):
    """Bytes of state in memory, its elements, and its first planes."""
    tiers = optimizer.targets[0].tiered_state
    slabs = (*tiers.device_slabs, *tiers.host_slabs)
    numel = sum(next(iter(slab.tensors.values())).numel() for slab in slabs)
    return sum(slab.nbytes for slab in slabs), numel, {next(iter(s.tensors)) for s in slabs}


def keeps_one(name, module):
    return name == "layers.1.1"


def run_of(rank, folder, is_split, **how):
    """Some steps, with what a loop may do between them."""
    batches = token_batches(5, dist.get_world_size())
    model, optimizer = wrapped(rank, folder=folder, max_norm=0.3, **how)
    first = in_memory(optimizer)[2]
    assert "remainder" in first if is_split else first <= {"master"}
    train(rank, model, optimizer, batches[:2])
    handle = model.layers[1][3].weight.register_hook(lambda grad: grad * float("nan"))
    train(rank, model, optimizer, batches[2:3])
    assert optimizer.last_report.skipped
    handle.remove()
    with torch.no_grad():  # what a user writes, to one element and to all of a parameter
        model.layers[0][1].weight[0, 0] = 2.0
        model.layers[2][1].weight.mul_(0.5)
        model.layers[3][1].weight.zero_()
    train(rank, model, optimizer, batches[3:4])
    saved = model.state_dict(), optimizer.state_dict()
    found = [everything(model, optimizer)]
    train(rank, model, optimizer, batches[4:])
    found.append(everything(model, optimizer))
    given = [saved] if rank == 0 else [None]
    dist.broadcast_object_list(given)
    model.load_state_dict(given[0][0])
    optimizer.load_state_dict(given[0][1])
    assert_same(everything(model, optimizer), found[0])
    train(rank, model, optimizer, batches[4:])
    assert_same(everything(model, optimizer), found[1])
    optimizer.close()
    return [*found, model.state_dict()]  # masters were given back


CASES = {  # how masters may lie
    "resident": {},
    "device": {"device": "sim"},
    "host": {"device": "sim", "placement": HOST},
    "a part on disk": {"fraction": 0.4},
    "a part on disk, with a tail": {"fraction": 0.4, "update": "tail"},
    "fp32 beside it": {"keep_fp32": keeps_one},
    "host, 8 bits": {"device": "sim", "placement": HOST, "state": "8bit"},
    "a part on disk, 8 bits, with a tail": {"fraction": 0.4, "state": "8bit", "update": "tail"},
}


def all_cases(rank, folder):
    torch.set_num_threads(1)
    for name, how in CASES.items():
        print(name, flush=True)
        with mock.patch.object(StateLayout, "splits", lambda self, dtype: False):
            whole = run_of(rank, folder, False, **{**how, "update": "serial"})
        split = run_of(rank, folder, True, **how)
        for found, want in zip(split[:2], whole[:2], strict=True):
            assert_same(found, want)
        assert split[2].keys() == whole[2].keys()
        assert all(torch.equal(values, whole[2][key]) for key, values in split[2].items()), name
    return True


def test_split_masters_have_the_bits_of_whole_ones_wherever_they_are(tmp_path):
    assert run_ranks(all_cases, 2, str(tmp_path), processes=True) == [True, True]


def sizes(rank):
    """Of state in memory; of a rule that keeps masters whole; of what is part of a payload."""
    found = [in_memory(wrapped(rank)[1])]
    found.append(in_memory(wrapped(rank, make=HybridLion)[1]))
    found.append(in_memory(wrapped(rank, placement=ZERO2)[1]))
    found.append(in_memory(wrapped(rank, precision="fp16")[1]))
    model, _ = wrapped(rank)
    planned = sum(chunk.state_bytes for chunk in model.engine.planning.plan.chunks)
    return found, sum(chunk.shard.nbytes for chunk in model.engine.chunks), planned


def test_state_takes_10_bytes_a_parameter_where_shards_are_apart():
    for found, shards, planned in run_ranks(sizes, 2, processes=True):
        each = [nbytes // numel for nbytes, numel, _ in found]
        assert each == [10, 8, 12, 12]
        assert [first for *_, first in found] == [{"remainder"}, *[{"master"}] * 3]
        assert planned == found[0][0] and shards == 2 * found[0][1]


def on_the_link(rank):
    """Of 8-bit state in host memory, updated by kernels: what it comes to with split and with whole
    masters, bytes of it an element, and whether a step moves these each way."""
    found, batches = [], token_batches(2, dist.get_world_size())
    for splits in (StateLayout.splits, lambda self, dtype: False):
        with mock.patch.object(StateLayout, "splits", splits):
            model, optimizer = wrapped(rank, device="sim, kernels", placement=HOST, state="8bit")
        nbytes, numel, _ = in_memory(optimizer)
        train(rank, model, optimizer, batches)
        moved = optimizer.last_report.traffic
        same = moved.host_to_device == moved.device_to_host == nbytes
        found.append((everything(model, optimizer), nbytes / numel, same))
        optimizer.close()
    return found


def test_8_bit_state_with_split_masters_has_4_bytes_an_element_on_the_link():
    for split, whole in run_ranks(on_the_link, 2, processes=True):
        assert_same(split[0], whole[0])
        assert [split[1:], whole[1:]] == [(4.125, True), (6.125, True)]
