"""Budgets over ranks: one plan, and the numbers of no budget."""

import random
import warnings
from contextlib import nullcontext

import pytest
import torch

from bench.shared.models import Tower, seeded, token_batches, token_loss
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, ConstPlacement, GeminiDDP
from gemini.chunk.layout import specs_of
from gemini.comm.collective_log import SequenceError
from gemini.memtracer import monitor
from gemini.memtracer.trace import sequential_trace
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.memory import machine
from optim import HybridAdam, NvmeConfig
from tests.support.spilled import BLOCKS, SMALL, homes, wrapped

pytestmark = pytest.mark.ci

N = Tier.NVME


def trained(rank, world_size, placement, device=None):
    """Three steps, the last of which adds up two backwards: digest, homes, weights, norm."""
    model, optimizer = wrapped(placement, device=device, max_norm=0.5)
    for step, parts in enumerate(token_batches(3, 2 * world_size)):
        for part in parts[rank::world_size][: 1 + (step == 2)]:
            token_loss(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()
    digest = model.engine.planning.plan.digest()
    tiers = set.union(*homes(model))
    return digest, tiers, model.state_dict(), optimizer.last_report.grad_norm


def work(rank, budgets, world_size):
    return [
        trained(rank, world_size, "cuda" if kib is None else AutoPlacement(world_size * kib << 10))
        for kib in budgets
    ]


def settled(rank, mib):
    """Two ranks, homes for an assumption and then for what was measured: plans, homes, weights."""
    with seeded():
        layers = [torch.nn.Linear(512, 512) for _ in range(12)]
    policy = "cuda" if mib is None else AutoPlacement(2 * mib << 20)
    model = GeminiDDP(torch.nn.Sequential(*layers), None, policy, min_chunk_size_m=0.3)
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=1 << 16))
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        found.append((model.engine.planning.plan.digest(), set.union(*homes(model))))
        model(torch.randn(4, 512, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found, model.state_dict()


def test_homes_rise_on_all_ranks_at_once_with_what_was_measured():
    free = run_ranks(settled, 2, None)
    limited = run_ranks(settled, 2, 60)
    plans = [found for found, _ in limited]
    assert plans[0] == plans[1]
    assert N in plans[0][0][1] and plans[0][1][1] == {Tier.DEVICE}
    for (_, one), (_, other) in zip(free, limited, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def on_a_simulated_device(rank, world_size):
    limited = AutoPlacement(world_size * (90 << 10), world_size * (100 << 10))
    return [trained(rank, world_size, limited, SimBackend(rank)), trained(rank, world_size, "cuda")]


def assert_equal(results):
    """Over budgets: the same norms and weights. Over ranks: the same plans."""
    for runs in zip(*results, strict=True):
        assert len({digest for digest, *_ in runs}) == 1
    *limited, free = results[0]
    for run in limited:
        assert run[3] == free[3]
        assert all(torch.equal(value, free[2][name]) for name, value in run[2].items())


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_the_same_bits_within_every_budget(world_size):
    """A node's budget, divided; beside 80 KiB for staging there are 408 KiB of model data."""
    budgets = [250, 190, 165, None]
    results = run_ranks(work, world_size, budgets, world_size)
    assert_equal(results)
    assert N in results[0][2][1] and N not in results[0][3][1]


def test_ranks_on_a_simulated_device_spill_to_host_and_disk():
    results = run_ranks(on_a_simulated_device, 2, 2)
    assert_equal(results)
    assert results[0][0][1] >= {Tier.HOST, N}


def measured(rank, world_size):
    """No trace is given: what all ranks measured in the first iteration is planned with."""
    found = []
    for placement in (AutoPlacement(f"{world_size * 256}MiB"), "cuda"):
        model = GeminiDDP(Tower(), placement_policy=placement, **SMALL)
        optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)
        for parts in token_batches(4, world_size):
            before = model.engine.manager.gathers_of.total()
            token_loss(model, parts[rank][: 4 - rank]).backward()  # other inputs on every rank
            optimizer.step()
            optimizer.zero_grad()
        planning, manager = model.engine.planning, model.engine.manager
        found.append(
            (
                planning.plan.digest(),
                planning.has_trace,
                manager.deviated,
                manager.gathers_of.total() - before,
                len(planning.plan.gathers),
                model.state_dict(),
            )
        )
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_plan_with_what_all_of_them_measured(world_size):
    results = run_ranks(measured, world_size, world_size)
    auto, cuda = results[0]
    assert {run[0][0] for run in results} == {auto[0]}
    for (_, has_trace, deviated, gathers, planned, _), _ in results:
        assert has_trace and not deviated and gathers == planned > 0
    assert not cuda[1]
    assert all(torch.equal(value, cuda[5][name]) for name, value in auto[5].items())


def gathers_of(rank, placement):
    """Gathers of four iterations of twelve layers, a chunk each, and the weights after them."""
    with seeded():
        layers = [torch.nn.Linear(32, 32) for _ in range(12)]
    model = GeminiDDP(torch.nn.Sequential(*layers), None, placement, min_chunk_size_m=0.001)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    found = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        before = model.engine.manager.gathers_of.total()
        model(torch.randn(4, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.engine.manager.gathers_of.total() - before)
    return found, model.state_dict()


def test_the_default_gathers_once_where_the_machine_has_room(monkeypatch):
    """Of what is left of the machine; ZeRO-3 by name gathers again for backward."""
    monkeypatch.setattr(machine, "memory_left", lambda: 1 << 30)
    twice = run_ranks(gathers_of, 2, "zero3")
    once = run_ranks(gathers_of, 2, "auto")
    for (gathers, weights), (fewer, same) in zip(twice, once, strict=True):
        assert gathers == [22] * 4 and fewer[1:] == [12] * 3
        assert all(torch.equal(value, same[name]) for name, value in weights.items())


def held(rank, kib):
    """The most model data of one rank, of two that share the bytes of a CPU."""
    model, optimizer = wrapped(ConstPlacement(kib << 10))
    ledger, most = model.engine.manager.ledger, 0
    for (ids,) in token_batches(3, 1):
        ledger.watched = True
        token_loss(model, ids).backward()
        ledger.watched = True
        optimizer.step()
        optimizer.zero_grad()
        most = max(most, sum(ledger.peaks[Tier.DEVICE].values()))
    return most


def test_a_const_budget_is_shared_by_the_ranks_of_a_cpu():
    assert all(most <= 150 << 10 for most in run_ranks(held, 2, 300))


def refused(rank, kib):
    """What two ranks are said to lack together, and whether they have enough with it."""
    try:
        wrapped(AutoPlacement(kib << 10))
    except BudgetError as error:
        wrapped(AutoPlacement((kib << 10) + error.missing_bytes))
        try:
            wrapped(AutoPlacement((kib << 10) + error.missing_bytes - 1))
        except BudgetError as again:
            return str(error), again.missing_bytes
    return None


def test_what_ranks_that_share_a_device_lack_is_said_for_all_of_them():
    found = run_ranks(refused, 2, 150)
    assert found[0] == found[1]
    message, still_missing = found[0]
    assert message.startswith("device_budget of 150.00 KiB is") and "each of 2 ranks" in message
    assert still_missing == 1


def measured_twice(rank, _):
    """The notes of two ranks whose iterations need more than there is."""
    monitor.ProcessMonitor.period = lambda self: 300 << 20
    model, optimizer = wrapped_without_a_trace(AutoPlacement("200MiB"))
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for parts in token_batches(3, 2):
            token_loss(model, parts[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(len(caught))
    return found, model.memory_report().overruns


def wrapped_without_a_trace(placement):
    model = GeminiDDP(Tower(), placement_policy=placement, **SMALL)
    return model, HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)


def test_ranks_say_together_that_an_iteration_fits_nowhere():
    for counts, lines in run_ranks(measured_twice, 2, None, processes=True):
        assert counts == [0, 0, 1]
        (line,) = lines
        assert "device_budget of 200.00 MiB" in line and "each of 2 ranks" in line


def traced_by_one(rank, _):
    module = Tower()
    given = sequential_trace(specs_of(module, "bfloat16")) if rank == 0 else None
    with pytest.raises(ValueError, match=r"ranks \[1\] have no trace= and others do"):
        GeminiDDP(module, trace=given, **SMALL)
    return True


def test_a_trace_is_given_on_all_ranks_or_on_none():
    assert run_ranks(traced_by_one, 2, None) == [True, True]


def counted_largest(comm):
    """Bytes of every agreement on the largest of a number, as they come, in a group of its own."""
    sent, for_thread = [], comm.for_thread

    def opened():
        own = for_thread()
        send = own.all_reduce

        def all_reduce(tensor, largest=False):
            sent.append(tensor.nbytes)
            return send(tensor, largest)

        own.all_reduce = all_reduce
        return own

    comm.for_thread = opened
    return sent


def lengths_apart(rank, kib, steps, counts_all=True):
    """Peaks of one of two ranks that share a device, with lengths of its own, of which negative
    ones are evaluated; plans, moves, bytes that forwards agreed by, and the weights in the end.

    counts_all: what operators make counts too, in peaks.
    """
    sim = SimBackend(rank)
    model = GeminiDDP(Tower(), sim, AutoPlacement(f"{2 * kib}KiB"), max_norm=0.5, **SMALL)
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)
    generator = torch.Generator().manual_seed(rank)
    peaks, plans, sent, agreed = [], [], counted_largest(model.engine.comm), []
    with sim.running() if counts_all else nullcontext():
        for lengths in steps:
            ids = torch.randint(97, (abs(lengths[rank]), 9), generator=generator)
            sim.pages.peak_device_bytes = 0
            sent.clear()
            if lengths[rank] < 0:
                with torch.no_grad():
                    model(ids)
                agreed.append(list(sent))
            else:
                loss = token_loss(model, ids)
                agreed.append(list(sent))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(sim.peak_device_bytes)
            plans.append(model.engine.planning.plan.digest())
    sim.check()
    moves = model.engine.planning.moves
    return peaks, plans, (moves.num_down, moves.num_up), agreed, model.state_dict()


def test_homes_of_all_ranks_follow_the_largest_of_their_batches():
    """Of evaluations too."""
    generator = random.Random(0)
    drawn = [[generator.choice((4, 8, 40)) for _ in range(2)] for _ in range(3)]
    steps = [(4, 4), (4, 8), (-4, -300), (-300, -4), (40, 4), (4, 40), (4, 4), *drawn]
    kib = 1150
    limited, free = (run_ranks(lengths_apart, 2, budget, steps) for budget in (kib, 1 << 20))
    assert max(max(peaks) for peaks, *_ in free) > kib << 10
    assert all(max(peaks[1:]) <= kib << 10 for peaks, *_ in limited)
    assert limited[0][1] == limited[1][1]  # plans
    assert limited[0][2] == limited[1][2] != (0, 0)  # moves
    for (*_, weights), (*_, expected) in zip(limited, free, strict=True):
        assert all(torch.equal(values, expected[name]) for name, values in weights.items())


@pytest.mark.parametrize("num_steps", [60, pytest.param(200, marks=pytest.mark.deep)])
def test_ranks_with_lengths_of_their_own_have_one_plan_and_agree_by_one_number_a_forward(num_steps):
    generator = random.Random(1)
    lengths = [
        [min(48, max(2, int(generator.lognormvariate(2, 0.9)))) for _ in range(2)]
        for _ in range(num_steps)
    ]
    steps = [(-a, -b) if i % 20 == 19 else (a, b) for i, (a, b) in enumerate(lengths)]
    ranks = run_ranks(lengths_apart, 2, 400, steps, False, processes=True)
    (_, plans, moves, agreed, _), (_, other_plans, other_moves, other_agreed, _) = ranks
    assert plans == other_plans and len(set(plans)) > 2
    assert moves == other_moves and min(moves) > 0
    assert agreed == other_agreed == [[], *[[8]] * (len(steps) - 1)]


def evaluates_apart(rank, _):
    model = GeminiDDP(Tower(), SimBackend(rank), AutoPlacement("4MiB"), **SMALL)
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)
    ids = torch.zeros(4, 9, dtype=torch.int64)
    token_loss(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.engine.comm.deadline_seconds = 0.2
    with torch.no_grad():
        for _ in range(2 - rank):
            model(ids)
    with pytest.raises(SequenceError, match=r"to evaluate, and rank 1 .* to train"):
        token_loss(model, ids)
    return True


def test_ranks_that_evaluate_other_numbers_of_batches_are_told_so():
    assert run_ranks(evaluates_apart, 2, None) == [True, True]
