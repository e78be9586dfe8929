"""Several simulated ranks in one process: what they found goes from device to device.

Where no disk has a say the host reads nothing of a step, and the bits are those of ranks whose
hosts read it and agree.
"""

import copy

import pytest
import torch

from bench.shared.reference import everything, same
from bench.shared.simulated import SimBackend
from bench.shared.threads import run_threads
from gemini import GeminiDDP, StaticPlacement
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig
from tests.support.apart import Apart
from tests.support.device.placed import Forked, place_gradients

HOMES = [(False, False, False), (False, True, False), (True, True, True)]
pytestmark = pytest.mark.ci  # the interpreter on every rank


START = Forked(17, 61)  # threads have one generator of random numbers


def wrapped(backend, homes, sharded, **options):
    params, grads, state = homes
    model = GeminiDDP(
        copy.deepcopy(START), backend, StaticPlacement(sharded, float(state), float(params)),
        min_chunk_size_m=1500 / 2**20, precision="bf16", **options,
    )  # fmt: skip
    optimizer = HybridAdam(model.parameters(), lr=1e-2, eps=1e-3,
                           nvme=NvmeConfig(block_numel=1024))  # fmt: skip
    place_gradients(model, Tier.HOST if grads else Tier.DEVICE)
    return model, optimizer


def train(rank, world_size, homes, setting, sharded):
    """Steps that clip, that leave a parameter alone, and that one rank makes all skip.

    Where parameters are whole one rank alone may leave one alone.
    """
    backend = SimBackend(rank, updates_by_triton=True)
    backend.shards_start_on_host = False
    with Apart(backend):
        model, optimizer = wrapped(backend, homes, sharded, max_norm=0.1)
        model.engine.comm.reaches_host = setting != "store"
        model.engine.target.device_may_decide = setting != "agreed"
        said = []
        for step in range(4):
            hook = None
            if step == 2 and rank == world_size - 1:
                hook = model.module.second.weight.register_hook(lambda g: g * float("nan"))
            seed = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(5, 17, generator=seed)
            alone = step == 1 or (not sharded and (step, rank) == (3, 0))
            model(x, not alone).float().pow(2).mean().backward()
            optimizer.step()
            if hook is not None:
                hook.remove()
            report = optimizer.last_report
            said.append((report.skipped, report.nonfinite, report.grad_norm))
            optimizer.zero_grad()
    return everything(model, optimizer), said


def ranks(world_size, homes, setting, sharded=1.0):
    found = run_threads(lambda rank: train(rank, world_size, homes, setting, sharded), world_size)
    assert all(repr(said) == repr(found[0][1]) for _, said in found)
    return found[0]


def check(world_size, sharded, every_home, settings):
    want, said = ranks(world_size, HOMES[0], "agreed", sharded)
    assert [skipped for skipped, *_ in said] == [False, False, True, False]
    assert said[2][1].startswith("second.weight on rank ")
    for homes in every_home:
        for setting in settings:
            got, same_said = ranks(world_size, homes, setting, sharded)
            assert same(got, want), (homes, setting)
            assert repr(same_said) == repr(said)


@pytest.mark.parametrize("homes", HOMES, ids=str)
def test_what_devices_tell_each_other_gives_the_bits_of_hosts_that_agree(homes):
    check(2, 1.0, [homes], ["device"])


def test_three_ranks_tell_each_other_through_the_store():
    check(3, 1.0, HOMES[:1], ["device", "store"])


def test_one_rank_may_have_no_gradient_of_a_parameter():
    check(2, 0.0, HOMES[:1], ["device", "store"])
