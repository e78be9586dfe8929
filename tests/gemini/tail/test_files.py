"""Tails where parameters and gradients are in files: under budgets of RAM."""

import errno
import threading
import warnings
from unittest import mock

import pytest
import torch

import nvme
from bench.shared.models import token_loss
from gemini import AutoPlacement, BudgetWarning
from gemini.placement.tiers import Tier
from nvme import BlockStore
from tests.support.disks.faults import failing
from tests.support.disks.waiting import when_waited
from tests.support.loops.budgets import stores, within
from tests.support.loops.schedules import ENOUGH, RISING, same
from tests.support.loops.tails import (
    SCHEDULES,
    batches,
    differences,
    everything,
    has_tail,
    held_updates,
    late_updates,
    one_step,
    run,
    stepped,
    wrapped,
)
from tests.support.until import until


def test_a_forward_waits_for_what_it_reads_of_a_file():
    """Updates begin when it waits for them."""
    found = same(late_updates, "tail", "files", serially=SCHEDULES["plain"])
    assert found.tails == [True] * 4 and found.in_files == (5, 2)


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

    assert same(ahead, "tail", "files", serially=SCHEDULES["plain"]).tails == [True] * 4


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


def test_what_a_user_does_to_gradients_behind_a_step_is_not_in_it():
    """The step reads them from their files later; what is kept is added to."""

    def at_once(model, optimizer):
        for does, batch in zip(BEHIND.values(), batches(len(BEHIND)), strict=True):
            token_loss(model, batch).backward()
            optimizer.step()
            does(model)
            yield
            optimizer.zero_grad()

    def late(model, optimizer):
        with held_updates() as held:
            for does, batch in zip(BEHIND.values(), batches(len(BEHIND)), strict=True):
                token_loss(model, batch).backward()
                assert model.engine.chunks[-1].gradient.offloaded_dtype is not None
                held.hold()
                optimizer.step()
                with when_waited(held.go_on):
                    does(model)
                held.go_on()
                yield
                optimizer.zero_grad()

    assert same(late, "tail", "files", serially=at_once).tails == [True] * len(BEHIND)


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


# -- memory --


def one_set(staging):
    return staging.param_bytes + staging.grad_bytes


def test_its_buffers_are_in_the_plan_and_pass_no_budget():
    model, optimizer = wrapped("tail", **within())
    storage, ledger = model.engine.storage, model.engine.manager.ledger
    plan = model.engine.planning
    planned = plan.plan.device_staging
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for batch in batches(5):
            token_loss(model, batch).backward()
            with held_updates() as held:
                optimizer.step()
                assert storage.staging_bytes == planned.count * one_set(planned) > 0
                assert ledger.totals()[Tier.DEVICE] <= plan.plan.budgets.device
                held.go_on()
            optimizer.zero_grad()
    optimizer.close()
    model, optimizer = wrapped("serial", **within("252KiB"))  # which reads nothing ahead
    one_step(model, optimizer, batches(1)[0])
    serial = model.engine.planning.plan.device_staging
    assert serial.count == planned.count - plan.inputs.num_ahead
    assert model.engine.storage.staging_bytes == serial.count * one_set(serial) > 0
    optimizer.close()


@pytest.mark.parametrize("budget", [RISING, ENOUGH])
def test_held_gradients_count_and_pass_no_budget(budget):
    """No block is updated before a forward waits for the first."""
    model, optimizer = wrapped("tail", placement_policy=AutoPlacement(budget))
    ledger, budget_bytes = model.engine.manager.ledger, model.engine.planning.plan.budgets.device
    gradient_bytes = sum(chunk.spec.payload_bytes for chunk in model.engine.chunks)
    held = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)  # in forward, too
        for _ in late_updates(model, optimizer):
            held.append(ledger.kept_bytes)
            assert ledger.totals()[Tier.DEVICE] <= budget_bytes
    assert held[1:] == [gradient_bytes] * 3
    assert optimizer.last_report.behind.wait().committed
    optimizer.close()


def test_a_step_writes_each_parameter_once_and_reads_each_gradient_once():
    with run(SCHEDULES["plain"], "tail", **within()) as (model, optimizer, tails):
        model.state_dict()
        found = stores(model, optimizer)
        written = model.engine.storage.params.written_bytes_per_step
        gradients = found["gradients"].traffic
    assert found["parameters"].traffic.written_bytes == (len(tails) + 1) * written
    assert gradients.read_bytes == gradients.written_bytes > 0


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


# -- what is read while it is written --


def test_a_gather_reads_what_the_step_wrote_while_that_does_not_count_yet():
    model, optimizer = stepped("tail", 1, **within())
    token_loss(model, batches(2)[1]).backward()
    flushed, flush = threading.Event(), BlockStore.flush

    def late(store):
        flushed.wait()
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
        until(lambda: optimizer.last_report.committed)
    model.state_dict()
    for chunk, values in zip(inside, early, strict=True):
        assert torch.equal(chunk.load_shard(), values)
    optimizer.close()
