"""Updates in backward, and a tail for what is left, beside files of state that fail."""

import errno
from contextlib import contextmanager
from dataclasses import replace

import pytest

import nvme
from bench.shared.models import token_loss
from bench.shared.workers import run_ranks
from gemini.placement.tiers import Tier
from gemini.placement.timetable.allowed import (
    EARLY_RULES,
    NOT_MADE,
    NOT_MADE_EARLY,
    OverlapFacts,
    against,
    allowed,
)
from gemini.placement.timetable.updates import BOTH, SERIAL, SPECULATE, TAIL, current_update
from gemini.runtime.inspect.reports import when_updated
from tests.support.disks.faults import failing
from tests.support.loops.schedules import Iteration, by_kernels, program, serial
from tests.support.loops.tails import (
    batches,
    differences,
    everything,
    has_tail,
    one_step,
    wrapped,
)

PLAIN = {steps: program((Iteration(),) * steps) for steps in (3, 4)}


@contextmanager
def training(update, disk=0.5, params=0.0):
    """A part of the state is on NVMe, the rest in host memory."""
    where = by_kernels(disk=disk, params=params)
    model, optimizer = wrapped(update, **where)
    yield model, optimizer
    optimizer.close(keep_masters=False)
    where["device"].check()


def begun_in(optimizer):
    """Blocks that have a second version."""
    state = optimizer.targets[0].tiered_state
    return [b for slab in state.host_slabs for b in slab.blocks if slab.has_begun(b)]


def wrong(model, optimizer, steps):
    """What differs from so many serial steps on the device."""
    want = serial(PLAIN[steps], "kernels, resident").values
    return differences(everything(model, optimizer), want)


@pytest.mark.parametrize("params", [0.0, pytest.param(1.0, marks=pytest.mark.ci)])
def test_spans_in_host_memory_are_early_and_those_on_nvme_are_updated_by_the_tail(params):
    with training(BOTH, params=params) as (model, optimizer):
        for number, batch in enumerate(batches(3)):
            token_loss(model, batch).backward()
            assert bool(begun_in(optimizer)) == (number > 0)  # the first step expects nothing
            optimizer.step()
            assert has_tail(optimizer)
            optimizer.zero_grad()
        homes = {home for s in model.engine.planning.plan.shards for home in s.state_homes}
        assert homes == {Tier.HOST, Tier.NVME}
        assert wrong(model, optimizer, 3) == []
        assert begun_in(optimizer) == []


@pytest.mark.parametrize("update", [BOTH, pytest.param(SPECULATE, marks=pytest.mark.ci)])
def test_a_disk_that_fails_undoes_the_step_and_what_was_updated_early_with_it(update):
    first, second, third, last = batches(4)
    with training(update) as (model, optimizer):
        for batch in (first, second):
            one_step(model, optimizer, batch)
        before = everything(model, optimizer)
        name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
        token_loss(model, third).backward()
        assert begun_in(optimizer)
        fails = failing("pwritev", errno.EIO, name, after=3, times=1)
        with fails, pytest.raises(nvme.TransferError):
            optimizer.step()
            model.state_dict()
        assert begun_in(optimizer) == []
        assert differences(everything(model, optimizer), before) == []
        optimizer.step()  # again, with the gradients that are still there
        optimizer.zero_grad()
        one_step(model, optimizer, last)
        assert wrong(model, optimizer, 4) == []


def failing_on_one(rank):
    first, second, third = batches(3)
    with training(BOTH) as (model, optimizer):
        for batch in (first, second):
            one_step(model, optimizer, batch)
        before = everything(model, optimizer)
        name = optimizer.targets[0].tiered_state.nvme.store.paths[0].name
        token_loss(model, third).backward()
        early, said = len(begun_in(optimizer)), ""
        with failing("pwritev", errno.EIO, name if rank else "no file", after=2, times=1):
            try:
                optimizer.step()
                model.state_dict()
            except RuntimeError as error:
                said = type(error).__name__
        undone = differences(everything(model, optimizer), before), len(begun_in(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        return early > 0 and bool(said), undone, wrong(model, optimizer, 3)


@pytest.mark.ci
def test_a_disk_that_fails_on_one_of_two_ranks_undoes_the_step_on_both():
    assert run_ranks(failing_on_one, 2, processes=True) == [(True, ([], 0), [])] * 2


# -- rules --

FACTS = OverlapFacts(
    state_homes=frozenset({Tier.HOST, Tier.NVME}), has_files=False, has_buffers=True,
    has_room=True, by_kernels=True,
)  # fmt: skip


def facts(**changed):
    return replace(FACTS, **changed)


@pytest.mark.parametrize(
    ("changed", "left", "words"),
    [
        ({}, BOTH, None),
        ({"state_homes": frozenset({Tier.NVME})}, TAIL, "no state is in host memory"),
        ({"by_kernels": False}, TAIL, "every element alike"),
        ({"has_masters": False}, TAIL, "no masters"),
        ({"has_room": False}, SPECULATE, "no room"),
        ({"is_gathered": True}, SPECULATE, "kept gathered"),
        ({"is_stage": True}, SERIAL, "pipeline"),
        ({"is_split": True}, SERIAL, "split"),
        ({"is_joint": True}, SERIAL, "several modules"),
        ({"state_homes": frozenset({Tier.DEVICE})}, SERIAL, "all state is on the device"),
    ],
)
def test_a_rule_against_one_part_leaves_the_other(changed, left, words):
    now = facts(**changed)
    assert allowed(BOTH, now) == left
    reason = against(BOTH, now)
    assert reason is None if words is None else words in reason


def test_every_rule_against_updates_in_backward_is_the_reason_of_some_case():
    alone = {"is_stage": True}, {"is_split": True}, {"is_joint": True}, {"has_masters": False}
    cases = *alone, {"by_kernels": False}, {"state_homes": frozenset({Tier.NVME})}
    reasons = {against(SPECULATE, facts(**changed)) for changed in cases}
    assert reasons == {reason for reason, _ in (*EARLY_RULES, *NOT_MADE, *NOT_MADE_EARLY)}


def test_both_on_a_cpu_is_a_tail_and_says_so():
    with pytest.warns(FutureWarning, match='update="both" is no longer offered on a CPU'):
        assert current_update(BOTH, by_kernels=False) == TAIL
    assert current_update(BOTH, by_kernels=True) == BOTH


def test_explain_says_which_part_no_rule_is_against():
    with training(BOTH, disk=1.0) as (model, optimizer):
        one_step(model, optimizer, batches(1)[0])
        assert model.engine.overlap.in_use() == TAIL
        said = when_updated(model.engine.overlap)
    assert said == 'behind the next forward; no update="both", as no state is in host memory'
