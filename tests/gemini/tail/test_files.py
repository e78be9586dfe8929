"""Tails where parameters and gradients are in files: under budgets of RAM."""

import errno
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nvme
from bench.shared.models import token_loss
from bench.shared.workers import run_ranks
from gemini import BudgetWarning
from gemini.memtracer.monitor import ProcessMonitor
from gemini.placement.tiers import Tier
from nvme import BlockStore
from tests.support.disks.faults import failing
from tests.support.loops.budgets import MIXED, MOST_IN_FILES, SHARED, in_files, stores, within
from tests.support.loops.early import BETWEEN, Iteration, interrupted, iterations, program
from tests.support.loops.endings import check_told, one_step, serially
from tests.support.loops.tails import (
    SCHEDULES,
    batches,
    differences,
    everything,
    has_tail,
    held_updates,
    late_updates,
    run,
    wrapped,
)


@pytest.fixture(autouse=True)
def model_data_alone(monkeypatch):
    """What libraries allocate once in a process does not decide what is in files."""
    monkeypatch.setattr(ProcessMonitor, "period", lambda monitor: 0)


def same(schedule, update="tail", *, serially=None, **options):
    """Whether each of its steps had a tail; the bits are those of serial steps.

    serially: the schedule of these, where nothing is held that is done in `step()`.
    """
    with run(serially or schedule, "serial", **options) as (model, optimizer, _):
        want = everything(model, optimizer)
    with run(schedule, update, **options) as (model, optimizer, tails):
        assert differences(everything(model, optimizer), want) == []
    return tails


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("budget", [MOST_IN_FILES, MIXED])
def test_every_schedule_has_the_bits_of_serial_steps(name, budget):
    tails = same(SCHEDULES[name], **within(budget))
    skipped = [name == "skips" and step % 3 == 1 for step in range(len(tails))]
    assert tails == [not skips for skips in skipped]


def test_a_forward_waits_for_what_it_reads_of_a_file():
    """Updates begin when a forward that does not wait has ended."""

    def late(model, optimizer):
        return late_updates(model, optimizer, 4)

    assert same(late, serially=SCHEDULES["plain"], **within()) == [True] * 4
    with run(SCHEDULES["plain"], "tail", **within()) as (model, *_):
        assert in_files(model) == (6, 2)


def asked_for_early(model):
    """The last chunk in a file that a forward begins to gather before a module uses it."""
    plan = model.engine.planning.plan
    early = [gather for gather in plan.gathers if gather.begin < gather.use]
    return max(g.chunk for g in early if plan.shards[g.chunk].param_home is Tier.NVME)


def owner_of(model, chunk):
    """The module that is called with its parameters."""
    param = model.engine.params[model.engine.chunks[chunk].spec.slots[0].param]
    return next(m for m in model.modules() if any(p is param for p in m.parameters(recurse=False)))


def test_a_forward_goes_on_while_what_it_reads_ahead_is_updated():
    """Its update does not begin before the module is called that needs it."""

    def ahead(model, optimizer):
        handle = None
        with held_updates() as held:
            held.go_on()
            for batch in batches(4):
                token_loss(model, batch).backward()
                if handle is not None:
                    handle.remove()
                chunk = asked_for_early(model)  # all are trained, so it is a shard's number, too
                held.hold()
                held.go_on(but=chunk)
                owner = owner_of(model, chunk)
                handle = owner.register_forward_pre_hook(lambda *_: held.go_on(), prepend=True)
                optimizer.step()
                optimizer.zero_grad()
                yield

    assert same(ahead, serially=SCHEDULES["plain"], **within()) == [True] * 4


@pytest.mark.parametrize("name", BETWEEN)
def test_what_a_user_does_between_backward_and_step_counts(name):
    same(interrupted(BETWEEN[name]), **within())


def last_weight(model):
    return model.module.get_parameter("layers.3.3.weight")


def drops_and_assigns(model):
    model.zero_grad()
    last_weight(model).grad = torch.full_like(last_weight(model), 0.01)


BEHIND = {
    "scales one": lambda m: last_weight(m).grad.mul_(0.5),
    "drops one": lambda m: setattr(last_weight(m), "grad", None),
    "reads one": lambda m: last_weight(m).grad.sum().item(),
    "drops all": lambda m: m.zero_grad(),
    "drops all and assigns one": drops_and_assigns,
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_a_user_does_to_gradients_behind_a_step_is_not_in_it(name):
    """The step reads them from their files later; what is kept is added to."""

    def at_once(model, optimizer):
        for batch in batches(4):
            token_loss(model, batch).backward()
            optimizer.step()
            BEHIND[name](model)
            yield
        optimizer.zero_grad()

    def late(model, optimizer):
        with held_updates() as held:
            for batch in batches(4):
                token_loss(model, batch).backward()
                assert model.engine.chunks[-1].gradient.offloaded_dtype is not None
                held.hold()
                optimizer.step()
                timer = threading.Timer(0.05, held.go_on)
                timer.start()
                BEHIND[name](model)
                timer.join()
                yield
            optimizer.zero_grad()

    assert same(late, serially=at_once, **within()) == [True] * 4


def test_a_gradient_that_is_dropped_behind_a_step_is_gone_when_that_has_ended():
    """Its file takes the next one only then, and no older one comes back."""
    model, optimizer = wrapped("tail", **within())
    first, second = batches(2)
    token_loss(model, first).backward()
    store = stores(model, optimizer)["gradients"]
    with held_updates() as held, mock.patch.object(store, "rollback") as forgotten:
        optimizer.step()
        optimizer.zero_grad()
        assert not forgotten.called and not optimizer.last_report.committed
        held.go_on()
        loss = token_loss(model, second)
        assert not forgotten.called
        model.state_dict()
        assert forgotten.called
    del loss
    assert all(param.grad is None for param in model.parameters())
    optimizer.close()


@given(st.lists(iterations, min_size=3, max_size=7), st.sampled_from(["tail", "both"]))
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
def test_every_program_has_the_bits_of_serial_steps(drawn, update):
    same(program([Iteration(), *drawn]), update, **within())


@pytest.mark.ci
@given(st.lists(iterations, min_size=3, max_size=9), st.sampled_from(["tail", "both"]),
       st.sampled_from(["245KiB", MOST_IN_FILES, MIXED]))  # fmt: skip
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_very_many_programs_have_the_bits_of_serial_steps(drawn, update, budget):
    same(program([Iteration(), *drawn]), update, **within(budget))


# -- memory --


def test_its_buffers_are_in_the_plan_and_pass_no_budget():
    model, optimizer = wrapped("tail", **within())
    storage, ledger = model.engine.storage, model.engine.manager.ledger
    plan, most = model.engine.planning, 0

    def beside():
        return storage.staging_bytes - sum(files.staging_bytes for files in storage.files)

    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for batch in batches(5):
            token_loss(model, batch).backward()
            with held_updates() as held:
                optimizer.step()
                most = max(most, beside())
                assert ledger.totals()[Tier.DEVICE] <= plan.plan.budgets.device
                held.go_on()
            optimizer.zero_grad()
    planned = plan.plan.device_staging
    assert most == plan.inputs.num_ahead * (planned.param_bytes + planned.grad_bytes) > 0
    model.state_dict()
    assert beside() == 0
    optimizer.close()


def test_a_step_writes_each_parameter_once_and_reads_each_gradient_once():
    with run(SCHEDULES["plain"], "tail", **within()) as (model, optimizer, tails):
        model.state_dict()
        found = stores(model, optimizer)
        written = model.engine.storage.params.written_bytes_per_step
        gradients = found["gradients"].traffic
    assert found["parameters"].traffic.written_bytes == (len(tails) + 1) * written
    assert gradients.read_bytes == gradients.written_bytes > 0


# -- faults --


def faults(options, guilty, every=1):
    """Transfers of a tail fail, on each rank in turn: what was said, and what was wrong then.

    guilty: of a fault's number, whether it is here.
    """
    first, second, third = batches(3)
    before, after = serially([first, second], **options)
    model, optimizer = wrapped("tail", **options)
    one_step(model, optimizer, first)
    wrong = differences(everything(model, optimizer), before)
    named = stores(model, optimizer)
    ahead = optimizer.targets[0].tiered_state.nvme.num_reads_begun
    cases = [
        ("parameters", "pwritev"), ("parameters", "fdatasync"), ("gradients", "preadv"),
        ("state", "pwritev"), ("state", "preadv"), ("state", "fdatasync"),
    ]  # fmt: skip
    faulty = []
    for kind, call in [case for case in cases if case[0] in named]:
        blocks = named[kind].layout.num_blocks - (ahead if call == "preadv" else 0)
        if kind == "gradients":  # one is read before the step returns
            blocks = 2
        count = 1 if call == "fdatasync" else blocks
        faulty += [(kind, call, at) for at in range(0, count, every)]
    said = []
    for number, (kind, call, at) in enumerate(faulty):
        part = named[kind].paths[0].name if guilty(number) else "of no file"
        token_loss(model, second).backward()
        with failing(call, errno.EIO, part, after=at, times=1) as failed:
            try:
                optimizer.step()
                optimizer.zero_grad()
                token_loss(model, third).backward()
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        if len(failed) != guilty(number):
            wrong.append(f"{kind} {call} {at}: {len(failed)} failed")
        optimizer.zero_grad()
        wrong += [f"{kind} {call} {at}: {name}" for name in
                  differences(everything(model, optimizer), before)]  # fmt: skip
    one_step(model, optimizer, second)
    wrong += differences(everything(model, optimizer), after)
    optimizer.close()
    return said, wrong


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.ci)])
def test_a_transfer_that_fails_undoes_the_step_and_who_asks_next_is_told(every):
    said, wrong = faults(within(), lambda number: True, every)
    assert wrong == [] and len(said) > 8
    assert all(text.startswith("TransferError:") and "EIO" in text for text in said)


def test_a_parameter_that_could_not_be_written_is_read_as_it_was():
    """The pass goes on, as others are in it; what comes behind it is told."""
    model, optimizer = wrapped("tail", **within())
    first, second = batches(2)
    one_step(model, optimizer, first)
    before = everything(model, optimizer)
    token_loss(model, second).backward()
    with failing("pwritev", errno.EIO, stores(model, optimizer)["parameters"].paths[0].name):
        optimizer.step()
        optimizer.zero_grad()
        loss = token_loss(model, first)
        with pytest.raises(nvme.TransferError, match="EIO"):
            loss.backward()
    optimizer.zero_grad()
    assert differences(everything(model, optimizer), before) == []
    optimizer.close()


# -- ranks --


def on_ranks(rank):
    found = {}
    cases = {**SCHEDULES, "scales one": interrupted(BETWEEN["scales one"])}
    for name, schedule in cases.items():
        with run(schedule, "serial", **within(SHARED)) as (model, optimizer, _):
            serial, there = everything(model, optimizer), in_files(model)
        with run(schedule, "tail", **within(SHARED)) as (model, optimizer, tails):
            found[name] = differences(everything(model, optimizer), serial), any(tails), there
    return found


@pytest.mark.ci
def test_two_ranks_have_the_bits_of_serial_steps():
    for found in run_ranks(on_ranks, 2):
        assert {name: different for name, (different, *_) in found.items() if different} == {}
        assert all(has for _, has, _ in found.values()) and found["plain"][2][0] > 0


def on_ranks_with_faults(rank, budget):
    return faults(within(budget), lambda number: number % 2 == rank, every=2)


@pytest.mark.ci
@pytest.mark.parametrize("budget", [SHARED, "420KiB"])
def test_a_disk_that_fails_on_one_rank_undoes_the_step_on_all(budget):
    check_told(run_ranks(on_ranks_with_faults, 2, budget, processes=True))


# -- what is read while it is written --


def test_a_gather_reads_what_the_step_wrote_while_that_does_not_count_yet():
    model, optimizer = wrapped("tail", **within())
    first, second = batches(2)
    one_step(model, optimizer, first)
    everything(model, optimizer)
    token_loss(model, second).backward()
    flushed, flush = threading.Event(), BlockStore.flush

    def late(store):
        assert flushed.wait(60)
        flush(store)

    with mock.patch.object(BlockStore, "flush", late):
        optimizer.step()
        assert has_tail(optimizer)
        optimizer.zero_grad()
        with torch.no_grad():
            inside = [chunk for chunk in model.engine.chunks if chunk.files is not None]
            for chunk in inside:
                chunk.gather()
                chunk.wait_gathered()
            early = [chunk.payload.clone() for chunk in inside]
        assert not optimizer.last_report.committed
        flushed.set()
        while not optimizer.last_report.committed:
            time.sleep(0.01)
    model.state_dict()
    for chunk, values in zip(inside, early, strict=True):
        assert torch.equal(chunk.load_shard(), values)
    optimizer.close()
