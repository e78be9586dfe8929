"""The average of sharded weights has torch's bits, wherever it lives, and swaps without loss."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import EMA, AutoPlacement, GeminiDDP, HybridAdam
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.step.state.shard_blocks import HostReader
from tests.support.loops.sides import SMALL, Net, depth_at, full_step, loss_of, wrapped

DECAY = 0.7
STEPS = 3


def averages(model, optimizer, ema, place="resident", steps=range(STEPS)):
    """torch's average of what the model's weights are after every step, as it is on rank 0."""
    plain = Net(depth_at(place))
    want = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in steps:
        full_step(model, optimizer, step)
        ema.update()
        state = model.state_dict()
        if state:
            plain.load_state_dict(state)
            want.update_parameters(plain)
    return want.module


def assert_average(model, ema, want):
    with ema.swapped():
        found = model.state_dict()
    for name, value in found.items():
        assert torch.equal(value, want.state_dict()[name]), name


@pytest.mark.parametrize("place", ["resident", "host", "nvme", "files", "nvme, tail"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_has_the_bits_of_torchs_over_fp32_weights(place, precision):
    model, optimizer = wrapped(place=place, precision=precision)
    ema = EMA(model, DECAY)
    assert (ema.nvme_bytes > 0) == (place in ("nvme", "files", "nvme, tail"))
    want = averages(model, optimizer, ema, place)
    before, digest = model.state_dict(), model.digest()
    assert_average(model, ema, want)
    assert not torch.equal(before["layers.0.weight"], want.layers[0].weight)
    assert model.digest() == digest
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    ema.close()
    optimizer.close()


@pytest.mark.parametrize("place", ["resident", "host"])
def test_an_evaluation_sees_it_and_training_goes_on_as_without_it(place):
    (model, optimizer), (alone, other) = wrapped(place=place), wrapped(place=place)
    ema = EMA(model, DECAY)
    want = averages(model, optimizer, ema)
    loss_of(model, 0).backward()  # gradients wait for their step while it is swapped in
    with ema.swapped(), torch.no_grad():
        assert loss_of(model, 9).equal(loss_of(want, 9))
    optimizer.step()
    for step in (*range(STEPS), 0):
        full_step(alone, other, step)
    assert model.digest() == alone.digest()


def test_the_model_comes_back_when_an_evaluation_raises():
    model, optimizer = wrapped()
    ema = EMA(model, DECAY)
    averages(model, optimizer, ema)
    digest = model.digest()
    with pytest.raises(KeyError), ema.swapped():
        raise KeyError
    assert model.digest() == digest


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_what_was_saved_goes_on(home, tmp_path):
    model, optimizer = wrapped()
    ema = EMA(model, DECAY, home)
    assert bool(ema.nvme_bytes) == (home == "nvme")
    averages(model, optimizer, ema)
    ema.save(tmp_path / "ema")
    again = EMA(model, DECAY)
    torch.rand(1)
    random = torch.get_rng_state()
    digest = model.digest()
    again.load(tmp_path / "ema")
    assert torch.equal(torch.get_rng_state(), random) and model.digest() == digest
    full_step(model, optimizer, STEPS)
    for one in (ema, again):
        one.update()
    with ema.swapped():
        want = copy.deepcopy(model.state_dict())
    with again.swapped():
        for name, value in model.state_dict().items():
            assert torch.equal(value, want[name]), name
    assert again.num_averaged == ema.num_averaged == STEPS + 1


def test_masters_leave_a_device_through_two_pinned_buffers(monkeypatch):
    """A copy fills one, NaN until the host waits, while the last is taken out of the other."""
    device, made = SimBackend(3, updates_by_triton=True), []
    allocate = device.allocate_host
    monkeypatch.setattr(
        device, "allocate_host", lambda *given: made.append(given[0]) or allocate(*given)
    )
    reader, numels = HostReader(device), [33, 7, 64, 64, 1, 50]
    for _ in range(2):
        values = [device.allocate(n, torch.float32).copy_(torch.randn(n)) for n in numels]
        into = [torch.zeros(n) for n in numels]
        for here, there in zip(into, values, strict=True):
            reader.read(here, there)
        reader.end()
        assert all(map(torch.equal, into, values))
    # the buffers grow once each, and are kept
    assert made == [33 * 4, 7 * 4, 64 * 4, 64 * 4]
    device.check()


def sharded(rank, folder):
    model, optimizer = wrapped()
    ema = EMA(model, DECAY)
    assert_average(model, ema, averages(model, optimizer, ema))
    ema.save(folder)
    return model.digest()


@pytest.mark.ci
def test_ranks_average_their_shards_and_one_takes_them_over(tmp_path):
    assert len(set(run_ranks(sharded, 2, tmp_path / "ema"))) == 1
    model, _ = wrapped()
    ema = EMA(model, DECAY)
    ema.load(tmp_path / "ema")
    before = model.state_dict()
    with ema.swapped():
        assert not torch.equal(model.state_dict()["layers.0.weight"], before["layers.0.weight"])


def test_frozen_parameters_have_no_average():
    module = Net()
    module.layers[0].requires_grad_(False)
    model = GeminiDDP(module, precision="fp32", **SMALL)
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    ema = EMA(model, DECAY)
    want = averages(model, optimizer, ema)
    assert_average(model, ema, want)


def test_what_cannot_be_is_refused():
    model, optimizer = wrapped()
    with pytest.raises(ValueError, match=r"expected a GeminiDDP.*AveragedModel"):
        EMA(Net())
    with pytest.raises(ValueError, match="expected 0 to 1"):
        EMA(model, 1.5)
    with pytest.raises(ValueError, match="expected 'auto', 'host' or 'nvme'"):
        EMA(model, home="device")
    ema = EMA(model)
    with ema.swapped():
        for refused in (ema.update, lambda: full_step(model, optimizer)):
            with pytest.raises(RuntimeError, match="leave the context first"):
                refused()
    full_step(model, optimizer)
    model.unwrap()
    with pytest.raises(RuntimeError, match="unwrapped"):
        ema.update()


@pytest.mark.parametrize("inner", [False, True])
def test_torchs_average_of_a_wrapped_module_names_this_one(inner):
    model, _ = wrapped()
    with pytest.raises(TypeError, match=r"gemini\.EMA\(model, decay="):
        AveragedModel(model.module if inner else model)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(model)


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("place", ["resident", "host"])
def test_plans_and_reports_count_it_where_it_lives(place, home):
    """On a CPU its RAM is the device's."""
    model, optimizer = wrapped(place=place, precision="bf16")
    engine = model.engine
    memory = Tier.HOST if place == "host" else Tier.DEVICE
    tier = Tier.NVME if home == "nvme" else memory
    numel = sum(chunk.spec.shard_numel for chunk in engine.chunks)
    before = engine.manager.ledger.totals(), engine.planning.result.profile.peak(tier)
    averages = [EMA(model, DECAY, home) for _ in range(2)]
    for ema in averages:
        ema.update()
    in_use, planned = engine.manager.bytes_in_use(), dict(engine.planning.plan.average)
    counted = in_use[tier, "average"]
    if home == "host":
        assert counted == planned[tier] == 2 * 4 * numel
    else:  # of a header, the plan has the most that it may take
        assert counted == sum(ema.nvme_bytes for ema in averages) <= planned[tier]
        assert planned[tier] - counted < 2 * 65_536
    after = engine.manager.ledger.totals()
    assert {t: after[t] - before[0][t] for t in Tier if after[t] != before[0][t]} == {tier: counted}
    assert engine.planning.result.profile.peak(tier) == before[1] + planned[tier]
    full_step(model, optimizer)
    rows = {(row.tier, row.kind): row for row in model.memory_report().rows}
    said = rows[tier.value, "average"]
    assert (said.predicted_bytes, said.measured_bytes) == (planned[tier], counted)
    for ema in averages:
        ema.close()
    ema.close()
    assert (engine.planning.result.profile.peak(tier), engine.planning.plan.average) == (
        before[1], (),
    )  # fmt: skip
    assert all(kind != "average" for _, kind in engine.manager.bytes_in_use())


def test_it_is_refused_where_a_budget_has_no_room(tmp_path):
    def made(nbytes):
        """In a budget of what all takes, and so many bytes."""
        policy = AutoPlacement(peak + nbytes, nvme_dir=str(tmp_path), steady_cap_ratio=1.0)
        module = Net()
        events = sequential_trace(specs_of(module, "float32"))
        model, optimizer = wrapped(lambda _: module, placement_policy=policy, trace=events)
        assert not optimizer.nvme_bytes
        return model

    peak = 1 << 30
    first = made(0).engine
    peak = first.planning.result.profile.peak(Tier.DEVICE)
    numel = sum(chunk.spec.shard_numel for chunk in first.chunks)
    assert made(4 * numel).engine.planning.result.profile.peak(Tier.DEVICE) == peak
    EMA(made(4 * numel), DECAY)
    model = made(4 * numel - 64)
    with pytest.raises(BudgetError, match=r"device_budget.*is 64 B .*too small"):
        EMA(model, DECAY)
    assert model.engine.planning.plan.average == ()
    EMA(model, DECAY, "nvme").update()


def test_no_average_changes_while_another_one_is_swapped_in():
    model, optimizer = wrapped()
    first, second = EMA(model, DECAY), EMA(model, DECAY)
    averages(model, optimizer, first)
    with first.swapped(), pytest.raises(RuntimeError, match="leave the context first"):
        second.update()
