"""State in host memory beside a device: a step goes on behind the next forward, with the same bits.

By a thread, whoever updates: the host, or the kernels of the device.
"""

import gc
import weakref
from functools import partial
from itertools import islice

import pytest
import torch

import gemini
from bench.shared.models import token_batches, token_loss
from tests.support.disks.waiting import when_waited
from tests.support.loops.schedules import (
    HOMES,
    Little,
    Narrow,
    Sometimes,
    outcome,
    same,
    serial,
    short,
)
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    held_updates,
    late_updates,
    on_host,
    run,
    wrapped,
)
from tests.support.loops.tails import stepped as behind

DEVICES = ["host", "kernels"]  # who updates: the host, or the kernels of the device


def sometimes(home):
    """One whose parameters are not all used in every call."""
    return {**HOMES[home](), "module": Narrow if home == "kernels" else Sometimes}


@pytest.mark.ci
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_waits_for_parameters_that_are_there_beside_others_that_come(device):
    """Nothing is gathered for those on the device."""
    plain = short(SCHEDULES["plain"], 3)
    found = same(short(late_updates, 3), "tail", f"{device}, some parameters", serially=plain)
    assert found.tails == [True] * 3


# -- who waits, and for what --


def stepped(update, home):
    """One step has ended; the second is begun, and nothing of it is done, where it has a tail."""
    where = HOMES[home]()
    if home.startswith("kernels"):
        where["module"] = partial(Little, 1)
    model, optimizer = behind(update, 1, **where)
    token_loss(model, batches(2)[1]).backward()
    return model, optimizer


@pytest.mark.parametrize(
    "home",
    ["host", "host, parameters", "kernels, parameters",
     pytest.param("kernels", marks=pytest.mark.ci)],
)  # fmt: skip
def test_a_forward_waits_for_what_it_reads_and_for_no_more(home):
    losses = []
    for update in ("serial", "tail"):
        model, optimizer = stepped(update, home)
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


def check_looks(home, names):
    """Each behind a step of its own."""
    pairs = [stepped(update, home) for update in ("serial", "tail")]
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
        for want, got in zip(*seen, strict=True):
            assert torch.equal(want, got) if torch.is_tensor(want) else want == got, name
    for _, optimizer in pairs:
        optimizer.close()


def test_who_looks_behind_a_step_sees_what_it_made():
    check_looks("host", LOOKS)


@pytest.mark.ci
def test_who_looks_at_what_kernels_update_sees_what_the_step_made():
    check_looks("kernels", ["gradients"])


@pytest.mark.ci
def test_whoever_looks_at_what_kernels_update():
    check_looks("kernels", ["data", "optimizer's", "evaluation"])


@pytest.mark.ci
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_live_until_their_blocks_are_updated_and_are_counted(device):
    model, optimizer = stepped("tail", device)
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
    model, optimizer = stepped("tail", "kernels")
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
    found = outcome(short(SCHEDULES["plain"]), "tail", "kernels, all", apart=True)
    assert found.tails == [True] * 2


def test_what_was_moved_behind_a_step_is_in_its_report():
    reports = []
    for update in ("serial", "tail"):
        with run(short(absent, 2), update, **sometimes("kernels")) as (_, o, _):
            reports.append((o.last_report, o.last_report.behind.wait()))
    (serial, _), (tail, behind) = reports
    assert serial.traffic.host_to_device == behind.traffic.host_to_device > 0
    assert serial.traffic == tail.traffic + behind.traffic
    assert behind.committed and behind.seconds > 0  # whoever waits may wake up later than it ends


# -- what goes wrong in memory, where nothing can be undone --


@pytest.mark.parametrize(
    "device, update",
    [("host", "serial"), ("host", "tail"), ("kernels", "tail"),
     pytest.param("kernels", "serial", marks=pytest.mark.ci)],
)  # fmt: skip
def test_an_update_that_ends_in_its_middle_is_told_and_no_step_follows_it(device, update, tmp_path):
    """Out of memory, say: of that a checkpoint helps."""
    model, optimizer = wrapped(update, **sometimes(device))
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
    want = serial(short(absent, 2), device, module=sometimes(device)["module"])
    assert differences(everything(model, optimizer), want.values) == []
    optimizer.close()


def test_a_tail_is_said_where_there_is_one():
    for device in DEVICES:
        with run(short(absent, 1), "tail", **sometimes(device)) as (model, optimizer, _):
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
