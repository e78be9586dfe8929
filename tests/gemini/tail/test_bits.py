"""A step that goes on behind the next forward has the bits of one that does not."""

import threading
import time

import pytest
import torch
from torch import nn

from bench.shared.models import Choosy, Tower, token_loss
from gemini import AutoPlacement, trace
from gemini.placement.timetable.tail import NO_BUFFERS, said
from gemini.placement.timetable.updates import priced_in_words
from gemini.runtime.memory.backend import SimBackend
from optim import LossScale
from optim.step.driver import Stage, TargetStep
from optim.step.tail import Gate
from tests.support.loops.endings import one_step, resumed
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    has_tail,
    run,
    wrapped,
)

SCALE = LossScale(initial_scale=2.0**10, growth_interval=1)  # another one behind every step
PRECISIONS = {
    "bf16": {"precision": "bf16"},
    "clipped": {"precision": "bf16", "max_norm": 0.1},
    "fp32": {"precision": "fp32"},  # no masters: what undoes a step goes to disk with it
    "rounded": {"precision": "bf16", "master_weights": False},
    "fp16": {
        "precision": "fp16",
        "loss_scale": LossScale(initial_scale=2.0**10, growth_interval=1),
    },
}


def both(schedule, **options):
    found = []
    for update in ("serial", "tail"):
        with run(schedule, update, **options) as (model, optimizer, tails):
            skipped = optimizer.skipped_steps
            assert sum(tails) == (len(tails) - skipped if update == "tail" else 0)
            found.append(everything(model, optimizer))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_the_bits_of_serial_steps(name):
    serial, tail = both(SCHEDULES[name])
    assert differences(tail, serial) == []


@pytest.mark.parametrize("name", ["skips", "writes"])
def test_with_a_part_of_the_state_in_memory(name):
    serial, tail = both(SCHEDULES[name], fraction=0.4)
    assert differences(tail, serial) == []


@pytest.mark.parametrize("options", PRECISIONS.values(), ids=PRECISIONS)
def test_in_every_precision(options):
    serial, tail = both(SCHEDULES["skips"], **options)
    assert differences(tail, serial) == []


@pytest.mark.ci
@pytest.mark.parametrize("options", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("fraction", [1.0, 0.4], ids=["all on disk", "partly"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_in_every_precision_wherever_the_state_is(name, fraction, options):
    if name == "clips" and "max_norm" in options:
        return  # the engine clips, and refuses to clip twice
    serial, tail = both(SCHEDULES[name], fraction=fraction, **options)
    assert differences(tail, serial) == []


def test_parameters_without_a_gradient_keep_their_bits_and_counts():
    found = []
    for update in ("serial", "tail"):
        with run(absent, update, module=Choosy()) as (model, optimizer, _):
            found.append(everything(model, optimizer))
    assert differences(found[1], found[0]) == []
    assert sorted(set(found[0]["steps"])) == [2.0, 6.0]


def test_a_view_that_is_read_behind_a_step_is_that_of_the_step():
    """`.data` of a parameter, and a view of that, taken before the step."""
    found = []
    for update in ("serial", "tail"):
        model, optimizer = wrapped(update)
        view = model.module.head.weight.data[3:5]
        token_loss(model, batches(1)[0]).backward()
        optimizer.step()
        found.append(view.clone())
        optimizer.close()
    assert torch.equal(*found)


def saved_in_the_middle(update, tmp_path):
    """Two steps, a checkpoint, two more in another module that was loaded from it."""
    import gemini

    folder = tmp_path / update
    steps = SCHEDULES["plain"](*(first := wrapped(update)))
    next(steps), next(steps)
    gemini.save_checkpoint(folder, *first)
    first[1].close()
    return resumed(update, folder, batches(4)[2:])


def test_a_run_that_was_saved_and_resumed_in_its_middle_has_the_same_bits(tmp_path):
    with run(SCHEDULES["plain"], "serial") as (model, optimizer, _):
        want = everything(model, optimizer)
    for update in ("serial", "tail"):
        assert differences(saved_in_the_middle(update, tmp_path), want) == []


LEAST = AutoPlacement("130KiB")
SERIAL = {
    "all state is on the device": lambda: {"fraction": 0.0},
    NO_BUFFERS: lambda: {
        "fraction": 0.0,
        "placement_policy": LEAST,
    },
    "the device has memory of its own, and state is only on NVMe": lambda: {"device": SimBackend()},
}


@pytest.mark.parametrize("reason", SERIAL)
def test_steps_are_serial_where_a_tail_would_not_be_safe_or_of_use(reason):
    make = SERIAL[reason]
    with run(SCHEDULES["plain"], "tail", **make()) as (model, optimizer, tails):
        assert tails == [False] * 4
        assert optimizer.last_report.committed
        assert f"update: serial, as {reason}" in model.explain("layers.0.1.weight")
        found = everything(model, optimizer)
    with run(SCHEDULES["plain"], "serial", **make()) as (model, optimizer, _):
        assert differences(found, everything(model, optimizer)) == []


def test_a_tail_is_said_where_there_is_one_and_what_it_hides():
    """As it is predicted beside what the last one, which has ended, took."""
    with run(SCHEDULES["plain"], "tail") as (model, optimizer, _):
        last, cost = optimizer.last_report.behind.wait(), model.engine.planning.result.tail
        prices = priced_in_words(model.engine.planning.result.seconds_by_update)
        assert model.explain("layers.0.1.weight").splitlines()[-4:] == [
            "update: behind the next forward",
            prices,
            f"predicted of the update: {cost}",
            f"measured of the last update: {said(last.seconds, last.waited_seconds)}",
        ]
        assert cost.update_seconds > 0 and "s are hidden behind the next forward" in str(cost)
    with run(SCHEDULES["plain"], "serial") as (model, _, _):
        cost = model.engine.planning.result.tail
        assert model.explain("layers.0.1.weight").splitlines()[-2:] == [
            f'update: serial; with update="tail" it would be predicted to take {cost}',
            priced_in_words(model.engine.planning.result.seconds_by_update),
        ]
    with run(SCHEDULES["plain"], "serial", fraction=0.0) as (model, _, _):
        assert "update:" not in model.explain("layers.0.1.weight")


def test_a_forward_on_fake_tensors_predicts_nothing():
    iteration = trace(Tower(), {"ids": torch.zeros(4, 9, dtype=torch.long)})
    with run(SCHEDULES["plain"], "tail", trace=iteration) as (model, optimizer, tails):
        assert all(tails) and optimizer.last_report.behind.wait().committed
        lines = model.explain("layers.0.1.weight").splitlines()
        assert lines[-2] == "update: behind the next forward"
        assert lines[-1].startswith("measured of the last update: ")


def test_what_a_pass_waits_for_is_in_the_report_of_its_tail(monkeypatch):
    """A tail that begins 0.1 s after it was asked for; and one that had ended before."""
    model, optimizer = wrapped("tail")
    asked, wait, prepare_next = threading.Event(), Gate.wait, TargetStep.prepare_next

    def late(step):
        if asked.wait(60):
            time.sleep(0 if Stage.PREPARED in step.stages.values() else 0.1)
        return prepare_next(step)

    monkeypatch.setattr(Gate, "wait", lambda gate: asked.set() or wait(gate))
    monkeypatch.setattr(TargetStep, "prepare_next", late)
    token_loss(model, batches(1)[0]).backward()
    for is_late in (True, False):
        optimizer.step()
        optimizer.zero_grad()
        while not is_late and not optimizer.last_report.committed:
            time.sleep(0.01)
        token_loss(model, batches(1)[0]).backward()
        behind = optimizer.last_report.behind.wait()
        if is_late:  # it may be late to say when it began to wait
            assert 0.05 < behind.waited_seconds <= behind.seconds
        else:
            assert behind.waited_seconds == 0 < behind.seconds
    optimizer.close()


def test_another_word_for_the_update_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        wrapped("late", module=nn.Linear(3, 3))


def test_what_was_moved_behind_a_step_is_in_its_report():
    model, optimizer = wrapped("tail")
    for batch in batches(2):
        one_step(model, optimizer, batch)
    report = optimizer.last_report
    assert has_tail(optimizer) and report.traffic.nvme_write == 0
    behind = report.behind.wait()
    written = optimizer.targets[0].tiered_state.nvme.written_bytes_per_step
    assert behind.committed and report.committed
    assert behind.traffic.nvme_write == written
    assert 0 < behind.traffic.nvme_read <= written
    optimizer.close()
