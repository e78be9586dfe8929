"""Parameters go down to files where the host is full, and come up again: no bit changes by that."""

import errno
import warnings

import pytest
import torch

import nvme
from bench.shared.models import Tower
from bench.shared.simulated import SimBackend
from gemini import BudgetWarning
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.memory.shard_storage import ShardStorage
from optim import NvmeConfig
from tests.support.disks.faults import failing
from tests.support.loops.lengths import KIB, Loop, assert_same

S, L = 4, 16  # 0.1 and 0.42 MiB of activations; 0.34 MiB of model data
ALL = (1 << 20, None)
FULL = (460, "100KiB")  # which leaves the host staging alone
SIZES = [  # split masters; none, and fp32 parameters; none, and bf16 parameters
    pytest.param(FULL, {}, id="bf16"),
    pytest.param((735, "92KiB"), {"precision": "fp32"}, id="fp32"),
    pytest.param((420, "92KiB"), {"precision": "bf16", "master_weights": False}, id="rounded"),
]


def pair(budgets, **options):
    return Loop(*budgets, released=True, **options), Loop(*ALL, **options)


def train(loops, *lengths):
    for loop in loops:
        loop.train(*lengths)


def in_files(loop):
    return {chunk.spec.id for chunk in loop.model.engine.chunks if chunk.files is not None}


def homes(loop):
    return [shard.param_home for shard in loop.model.engine.plan.shards]


@pytest.fixture
def moved(monkeypatch):
    """Bytes that each move of parameters to files was given, and wrote."""
    found, take_in = [], ShardStorage.take_in

    def counted(storage, shards, step):
        before = storage.traffic().nvme_write
        take_in(storage, shards, step)
        if shards:
            found.append((shards, storage.traffic().nvme_write - before))

    monkeypatch.setattr(ShardStorage, "take_in", counted)
    return found


@pytest.mark.parametrize(("budgets", "options"), SIZES)
def test_they_go_where_the_host_is_full_and_rise_again_and_no_bit_changes(budgets, options, moved):
    """Only what goes is written."""
    loops = loop, _ = pair(budgets, **options)
    train(loops, S, S)
    assert not in_files(loop)
    train(loops, 10, L, L)
    assert in_files(loop) == {i for i, home in enumerate(homes(loop)) if home is Tier.NVME} != set()
    page = nvme.BlockStore.__init__ and 4096
    for shards, written in moved:
        sizes = [shard.nbytes for shard in shards.values()]
        assert sum(sizes) <= written < sum(sizes) + len(sizes) * page * 4
    assert loop.peaks[-1] <= budgets[0] * KIB
    assert loop.model.engine.ledger.totals()[Tier.HOST] <= int(budgets[1][:-3]) * KIB
    train(loops, *[S] * 7)
    assert not in_files(loop)
    train(loops, L)
    assert in_files(loop)
    assert_same(*loops)
    assert moved
