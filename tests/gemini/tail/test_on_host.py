"""State in host memory beside a device: a step goes on behind the next forward, with the same bits.

By a thread, whoever updates: the host, or the kernels of the device.
"""

import gc
import tempfile
import weakref
from itertools import cycle, islice
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import gemini
from bench.shared.models import token_batches, token_loss
from gemini import StaticPlacement
from optim import NvmeConfig
from optim.rules.state_layout import KINDS
from tests.support.apart import Apart
from tests.support.disks.waiting import when_waited
from tests.support.loops.schedules import BETWEEN, Iteration, Sometimes, program
from tests.support.loops.tails import (
    PRECISIONS,
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    has_tail,
    held_updates,
    late_updates,
    on_host,
    run,
    wrapped,
)
from tests.support.loops.tails import stepped as behind

HOMES = {
    "state": {},
    "state and parameters": {"params": 1.0},
    "state and some parameters": {"params": 0.5},
    "state and gradients": {"grads": True},
    "state, parameters and gradients": {"params": 1.0, "grads": True},
    "a part of the state": {"state": 0.6},
    "and a part on disk": {"state": 0.8, "disk": 0.4},
    "all on disk": {"disk": 1.0},
    "all on disk, and parameters and gradients": {"disk": 1.0, "params": 1.0, "grads": True},
}


class Little(nn.Module):
    """As `Tower`, with a quarter of its elements: for kernels in the interpreter."""

    def __init__(self, depth=1):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(97, 9)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 37), nn.GELU(), nn.Linear(37, 9))
            for _ in range(depth)
        )
        self.head = nn.Linear(9, 97, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Narrow(Sometimes):
    def __init__(self):
        super().__init__(65)


def deep():
    return Little(3)


def placed(path, homes="state", **options):
    """Options of `wrapped`; with kernels a small module in small chunks of a block."""
    found = on_host(path, **HOMES[homes])
    if path == "stream":
        small = {"min_chunk_size_m": 900 / 2**20, "nvme": NvmeConfig(block_numel=1024)}
        found |= {"module": Little, **small}
    return found | options


def sometimes(path):
    """One whose parameters are not all used in every call."""
    return {"module": Narrow if path == "stream" else Sometimes}


def found(schedule, update, path, homes="state", **options):
    """What a schedule comes to; it had tails, and no copy was lost."""
    where = {**placed(path, homes), **options}
    with run(schedule, update, **where) as (model, optimizer, tails):
        # where a device decides, a step that it skips has a tail all the same
        skipped = optimizer.skipped_steps if path == "cpu" else 0
        assert sum(tails) == (len(tails) - skipped if update == "tail" else 0)
        values = everything(model, optimizer)
        where["device"].check()
        return values


def check_bits(schedule, path, homes="state", **options):
    serial = found(schedule, "serial", path, homes, **options)
    assert differences(found(schedule, "tail", path, homes, **options), serial) == []


def short(schedule, count=2):
    return lambda model, optimizer: islice(schedule(model, optimizer), count)


FEW = ["state and parameters", "and a part on disk", "all on disk"]


@pytest.mark.parametrize("homes", [h if h in FEW else pytest.param(h, marks=pytest.mark.ci)
                                   for h in HOMES])  # fmt: skip
def test_updates_by_kernels_have_the_bits_of_serial_steps(homes):
    check_bits(short(absent, 3), "stream", homes, module=Narrow)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name, homes, precision", list(zip(SCHEDULES, cycle(HOMES), cycle(PRECISIONS), strict=False))
)
def test_whatever_happens_between_updates_by_kernels(name, homes, precision):
    count = 3 if name == "keeps_gradients" else 2  # what is kept is added to
    check_bits(short(SCHEDULES[name], count), "stream", homes, module=deep, **PRECISIONS[precision])


@pytest.mark.ci
@pytest.mark.parametrize("path", ["cpu", "stream"])
def test_a_call_waits_for_parameters_that_are_there_beside_others_that_come(path):
    """Nothing is gathered for those on the device."""
    homes = "state and some parameters"
    model, optimizer = wrapped("tail", **placed(path, homes))
    for _ in late_updates(model, optimizer, 3):
        assert has_tail(optimizer)
    got = everything(model, optimizer)
    optimizer.close()
    assert differences(got, found(short(SCHEDULES["plain"], 3), "serial", path, homes)) == []


iterations = st.builds(
    Iteration,
    backwards=st.integers(1, 3),
    synced=st.booleans(),
    between=st.sampled_from([None, "clips", "scales one", "evaluates", "reads masters",
                             "reads state", "writes a weight", "drops one", "changes a rate",
                             "saves"]),
    skipped=st.booleans(),
    stepless=st.booleans(),
    broken=st.sampled_from([None, None, "forward", "backward"]),
)  # fmt: skip


def saves(model, optimizer):
    with tempfile.TemporaryDirectory() as folder:
        gemini.save_checkpoint(Path(folder) / "saved", model, optimizer)


def check_program(drawn, path, homes, state="fp32"):
    """A tail beside serial steps; where kernels update, with all state on the device."""
    got = []
    with mock.patch.dict(BETWEEN, saves=saves):
        for update in ("serial", "tail"):
            where = placed(path, homes, **({"module": deep} if path == "stream" else {}))
            where["state"] = state
            if path == "stream" and update == "serial":
                where |= {"placement_policy": StaticPlacement(), "fraction": 0.0}
            with run(program([Iteration(), *drawn]), update, **where) as (model, optimizer, _):
                got.append(everything(model, optimizer))
    assert differences(got[1], got[0]) == []


@given(st.lists(iterations, min_size=2, max_size=5), st.sampled_from(list(HOMES)))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_drawn_programs_have_the_bits_of_serial_steps(drawn, homes):
    check_program(drawn, "cpu", homes)


@pytest.mark.ci
@given(st.lists(iterations, min_size=2, max_size=3), st.sampled_from(list(HOMES)),
       st.sampled_from(KINDS))  # fmt: skip
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_drawn_programs_on_a_device_whose_kernels_update(drawn, homes, state):
    check_program(drawn, "stream", homes, state)


# -- who waits, and for what --


def stepped(update, path, homes="state"):
    """One step has ended; the second is begun, and nothing of it is done, where it has a tail."""
    where = placed(path, homes)
    model, optimizer = behind(update, 1, **where)
    token_loss(model, batches(2)[1]).backward()
    return model, optimizer


@pytest.mark.parametrize(
    "path, homes",
    [("cpu", "state"), ("cpu", "state and parameters"), ("stream", "state and parameters"),
     pytest.param("stream", "state", marks=pytest.mark.ci)],
)  # fmt: skip
def test_a_forward_waits_for_what_it_reads_and_for_no_more(path, homes):
    losses = []
    for update in ("serial", "tail"):
        model, optimizer = stepped(update, path, homes)
        with held_updates() as updates:
            if update == "serial":
                updates.go_on()
            optimizer.step()
            optimizer.zero_grad()
            last, seen = model.engine.chunks[-1].updating, []
            if update == "tail":
                assert not optimizer.last_report.committed and not last.ready()
                updates.go_on(but=len(model.engine.chunks) - 1)

            def embedded(*_, last=last, seen=seen, updates=updates, update=update):
                seen.append(update == "tail" and last.ready())
                updates.go_on()

            handle = model.module.embed.register_forward_hook(embedded)
            losses.append(token_loss(model, batches(3)[2]))
            handle.remove()
        assert seen == [False]
        losses[-1].backward()
        assert optimizer.last_report.committed
        optimizer.close()
    assert torch.equal(*losses)


def gradients(model, optimizer):
    """Changed behind the step that reads them, and used by another."""
    for place, param in enumerate(model.parameters()):
        param.grad.mul_(0.5) if place % 2 else param.grad.zero_()
    optimizer.step()
    return []


LOOKS = {
    "parameters": lambda m, o: [p.detach().clone() for p in m.parameters()],
    "data": lambda m, o: [p.data.clone() for p in m.parameters()],
    "state_dict": lambda m, o: list(m.state_dict().values()),
    "optimizer's": lambda m, o: [
        value for planes in o.state_dict()["state"].values() for value in planes.values()
    ],
    "evaluation": lambda m, o: [m(torch.arange(36).reshape(4, 9)).detach()],
    "gradients": gradients,
}


def check_looks(path, names):
    """Each behind a step of its own."""
    pairs = [stepped(update, path) for update in ("serial", "tail")]
    for name in names:
        seen = []
        for model, optimizer in pairs:
            with held_updates() as updates, when_waited(updates.go_on):
                if optimizer is pairs[0][1]:
                    updates.go_on()
                optimizer.step()
                found = LOOKS[name](model, optimizer)
                seen.append([*found, *everything(model, optimizer).values()])
            optimizer.zero_grad()
            token_loss(model, batches(1)[0]).backward()
        for serial, tail in zip(*seen, strict=True):
            assert torch.equal(serial, tail) if torch.is_tensor(serial) else serial == tail, name
    for _, optimizer in pairs:
        optimizer.close()


def test_who_looks_behind_a_step_sees_what_it_made():
    check_looks("cpu", LOOKS)


@pytest.mark.ci
def test_who_looks_at_what_kernels_update_sees_what_the_step_made():
    check_looks("stream", ["gradients"])


@pytest.mark.ci
def test_whoever_looks_at_what_kernels_update():
    check_looks("stream", ["data", "optimizer's", "evaluation"])


@pytest.mark.ci
@pytest.mark.parametrize("path", ["cpu", "stream"])
def test_gradients_live_until_their_blocks_are_updated_and_are_counted(path):
    model, optimizer = stepped("tail", path)
    ledger = model.engine.manager.ledger
    with held_updates() as updates:
        optimizer.step()
        before = ledger.totals()
        optimizer.zero_grad()
        gc.collect()
        assert ledger.kept_bytes == sum(2 * c.spec.shard_numel for c in model.engine.chunks)
        assert ledger.totals() == before
        updates.go_on()
    token_loss(model, batches(1)[0])
    assert ledger.kept_bytes == 0  # a forward has waited for all of them
    optimizer.close()


def test_a_report_that_is_kept_keeps_nothing_of_its_step():
    model, optimizer = stepped("tail", "stream")
    optimizer.step()
    report = optimizer.last_report
    everything(model, optimizer)
    shards = [weakref.ref(chunk.shard_memory) for chunk in model.engine.chunks]
    optimizer.close()
    del model, optimizer
    gc.collect()
    assert report.behind.wait().seconds > 0
    assert [shard() for shard in shards] == [None] * len(shards)


def test_host_and_device_are_different_memory_to_a_step_behind_the_next_forward():
    where = placed("stream", "state, parameters and gradients")
    with Apart(where["device"]), run(short(SCHEDULES["plain"]), "tail", **where) as (_, o, tails):
        assert tails == [True] * 2
        o.last_report.behind.wait()
    where["device"].check()


def test_what_was_moved_behind_a_step_is_in_its_report():
    reports = []
    for update in ("serial", "tail"):
        with run(short(absent, 2), update, **placed("stream", module=Narrow)) as (_, o, _):
            reports.append((o.last_report, o.last_report.behind.wait()))
    (serial, _), (tail, behind) = reports
    assert serial.traffic.host_to_device == behind.traffic.host_to_device > 0
    assert serial.traffic == tail.traffic + behind.traffic
    assert behind.committed and behind.seconds > 0  # whoever waits may wake up later than it ends


# -- what goes wrong in memory, where nothing can be undone --


@pytest.mark.parametrize(
    "path, update",
    [("cpu", "serial"), ("cpu", "tail"), ("stream", "tail"),
     pytest.param("stream", "serial", marks=pytest.mark.ci)],
)  # fmt: skip
def test_an_update_that_ends_in_its_middle_is_told_and_no_step_follows_it(path, update, tmp_path):
    """Out of memory, say: of that a checkpoint helps."""
    model, optimizer = wrapped(update, **placed(path, **sometimes(path)))
    list(short(absent, 1)(model, optimizer))
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    before = everything(model, optimizer)
    with held_updates(fails_at=1), pytest.raises(MemoryError, match="no room"):
        list(islice(absent(model, optimizer, first=1), 1))
        everything(model, optimizer)
    assert differences(everything(model, optimizer), before) != []
    model(torch.randn(4, 5), 0).float().mean().backward()
    with pytest.raises(
        RuntimeError, match=r"of two steps; load a checkpoint.*MemoryError: no room"
    ):
        optimizer.step()
    optimizer.zero_grad()
    gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert differences(everything(model, optimizer), before) == []
    list(islice(absent(model, optimizer, first=1), 1))
    want = found(short(absent, 2), "serial", path, **sometimes(path))
    assert differences(everything(model, optimizer), want) == []
    optimizer.close()


def test_a_tail_is_said_where_there_is_one():
    for path in ("cpu", "stream"):
        where = placed(path, **sometimes(path))
        with run(short(absent, 1), "tail", **where) as (model, optimizer, _):
            optimizer.last_report.behind.wait()
            said = model.explain("first.weight")
        assert "update: behind the next forward" in said
        assert "measured of the last update: " in said


def test_gradients_in_host_memory_have_it_before_a_backward():
    """Pinned in a backward, pages would hold up collectives of other ranks."""
    model, optimizer = wrapped("serial", **on_host("stream", params=1.0, grads=True))
    home = model.engine.storage.host_gradients
    reserved = home.nbytes
    assert reserved == sum(chunk.spec.shard_numel * 2 for chunk in model.engine.chunks)
    assert not home.tensors
    token_loss(model, token_batches(1, 1)[0][0]).backward()
    assert home.nbytes == reserved == sum(one.nbytes for one in home.tensors.values())
    optimizer.close()
