"""When blocks are updated in backward: what was learned, and what is seen meanwhile."""

import gc
import os
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch

from bench.shared.models import token_loss
from optim.rules.report import QUIET_STEPS, Speculated
from optim.rules.speculation import BlockInputs, Habit, Learned, TailTimes, held
from tests.support.disks.waiting import waiting, when_waited
from tests.support.loops.early import UPDATES, num_early, patient
from tests.support.loops.endings import behind_steps
from tests.support.loops.tails import (
    SCHEDULES,
    batches,
    differences,
    everything,
    held_updates,
    one_step,
    run,
    stepped,
    wrapped,
)
from tests.support.priced import given_clock, late_for
from tests.support.until import until

HELD = Speculated(9, 9, 0)
HIDDEN, EXPOSED = TailTimes(2.0, 1.0), TailTimes(1.0, 2.0)


def with_habit(update, habit, **options):
    model, optimizer = wrapped(update, **options)
    speculation = model.engine.target.speculation
    speculation.learned = replace(speculation.learned, habit=habit)
    return model, optimizer


# -- values --


def test_a_block_is_held_where_all_that_its_bits_follow_from_is_the_same():
    inputs = BlockInputs((1.0, 2.0), (("adam", 3), None), (4, 5))
    others = {
        1: inputs,
        2: replace(inputs, step=(0.5, 2.0)),
        3: replace(inputs, params=(("adam", 4), None)),
        4: replace(inputs, params=(("adam", 3), ("adam", 3))),
        5: replace(inputs, gradient=(4, 6)),
        6: replace(inputs, gradient=None),
    }
    assert held(dict.fromkeys(others, inputs), others) == {1}


def test_nothing_begins_before_the_first_step():
    assert not Learned().begins(1, is_known_last=True, times=None)


def test_the_last_backward_is_the_one_that_was_last_or_that_is_said_to_be():
    learned = Learned().after(3, HELD, was_disturbed=False, max_norm=0.0)
    begins = [learned.begins(i, is_known_last=False, times=None) for i in (1, 2, 3, 4)]
    assert begins == [False, False, True, False]
    assert learned.begins(2, is_known_last=True, times=None)


@pytest.mark.parametrize(
    "found, disturbed",
    [(HELD, True), (Speculated(9, 4, 5), False), (Speculated(9, 0, 9), False)],
)
def test_so_many_quiet_steps_follow_one_that_was_not(found, disturbed):
    learned = Learned().after(1, found, was_disturbed=disturbed, max_norm=0.0)
    for _ in range(QUIET_STEPS):
        assert not learned.begins(1, is_known_last=False, times=None)
        learned = learned.after(1, Speculated(), was_disturbed=False, max_norm=0.0)
    assert learned.begins(1, is_known_last=False, times=None)


def test_where_the_tail_hides_the_disk_nothing_begins():
    learned = Learned().after(1, HELD, was_disturbed=False, max_norm=0.0)
    assert not learned.begins(1, is_known_last=False, times=HIDDEN)
    assert learned.begins(1, is_known_last=False, times=EXPOSED)
    assert replace(learned, habit=Habit(asks_clock=False)).begins(
        1, is_known_last=False, times=HIDDEN
    )


def test_a_tail_that_had_blocks_done_before_is_measured_as_a_whole_one():
    assert TailTimes.measured(1.0, 3.0, blocks=12, num_held=0, held_share=1 / 6).disk == 3.0
    half = TailTimes.measured(1.0, 3.0, blocks=12, num_held=6, held_share=1 / 6)
    assert half.disk == pytest.approx(3 * 12 / 7)
    # two of the six were done, and four moved a sixth of what a block does
    done = TailTimes.measured(1.0, 3.0, blocks=12, num_held=6, num_done=2, held_share=1 / 6)
    assert done.disk == pytest.approx(3.0 * 12 / (6 + 4 / 6))
    every = TailTimes.measured(1.0, 0.0, blocks=12, num_held=12, num_done=12, held_share=1 / 6)
    assert not every.tail_hides_disk
    nothing = TailTimes.measured(1.0, 0.0, blocks=0, num_held=0, held_share=0.0)
    assert not nothing.tail_hides_disk


# -- loops --


@pytest.mark.parametrize("update", UPDATES)
def test_a_step_that_is_clipped_lets_the_next_ones_wait(update):
    model, optimizer = with_habit(update, Habit(asks_clock=False))
    early = []
    with patient():
        for step, batch in enumerate(batches(QUIET_STEPS + 5)):
            token_loss(model, batch).backward()
            if step == 2:
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            found = optimizer.last_report.speculation
            early.append(found.speculated)
            assert found.needed_quiet_steps == QUIET_STEPS
            if step == 2:
                assert found.redone == found.speculated > 0 and found.quiet_steps == 0
            elif step == 5:
                assert found.quiet_steps == 3
    begun = [count > 0 for count in early]
    assert begun == [False, True, True, *[False] * QUIET_STEPS, True, True]
    optimizer.close()


def test_updates_stop_where_the_norm_is_sure_to_be_clipped():
    """The gradients of the last layers alone are below it, all together above."""
    with run(SCHEDULES["plain"], "serial") as (_, optimizer, _):
        norm = optimizer.last_report.grad_norm
    with patient(), run(SCHEDULES["plain"], "both", max_norm=0.8 * norm) as (_, optimizer, _):
        found = optimizer.last_report.speculation
        assert optimizer.last_report.grad_norm > 0.8 * norm
        assert 0 < found.speculated == found.redone < num_early(optimizer)


@pytest.mark.parametrize("waited, forward, hides", [(0.0, 6.0, True), (5.0, 1.0, False)])
def test_a_disk_that_a_forward_waits_for_is_relieved_in_backward(waited, forward, hides):
    """It takes 5 s. A forward of 6 s, which waits for none of them, hides it; one of a second, and
    the 5 that it waits, which are no work of its own, does not."""
    first, second = batches(2)
    with given_clock() as clock, held_updates() as held, patient():
        model, optimizer = with_habit("both", Habit())
        token_loss(model, first).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not waited:
            clock.seconds += 5.0
            held.go_on()
            optimizer.last_report.behind.wait()
        with late_for(clock, held, waited):
            loss = token_loss(model, second)
        clock.seconds += forward - (0.0 if waited else 5.0)
        loss.backward()
        optimizer.step()
        assert (optimizer.last_report.speculation.speculated == 0) == hides
        assert (optimizer.last_report.speculation.held == 0) == hides
    optimizer.close()


def test_without_a_tail_there_is_nothing_that_could_hide_the_disk():
    with given_clock() as clock, patient():
        model, optimizer = with_habit("speculate", Habit())
        for batch in batches(2):
            one_step(model, optimizer, batch)
            clock.seconds += 9.0
    assert optimizer.last_report.speculation.held > 0
    optimizer.close()


# -- meanwhile --


def begun(update):
    """Two steps, and a third backward whose blocks are updated."""
    model, optimizer = stepped(update, 2)
    token_loss(model, batches(3)[2]).backward()
    return model, optimizer


def test_no_weight_changes_before_the_step():
    model, optimizer = wrapped("both")
    seen = []

    def look(*_):
        seen.append([param.detach().clone() for param in model.module.parameters()])

    with patient():
        for step, batch in enumerate(batches(3)):
            handle = model.module.embed.weight.register_post_accumulate_grad_hook(look)
            before = [param.detach().clone() for param in model.module.parameters()]
            token_loss(model, batch).backward()
            handle.remove()
            look()
            for after in seen:
                assert all(map(torch.equal, after, before))
            seen.clear()
            optimizer.step()
            optimizer.zero_grad()
            assert (optimizer.last_report.speculation.held > 10) == (step > 0)
    optimizer.close()


def test_who_saves_between_backward_and_step_has_the_state_of_the_last_step():
    with patient():
        model, optimizer = begun("both")
        found = everything(model, optimizer)
        optimizer.step()
        assert optimizer.last_report.speculation.redone == num_early(optimizer)
        after = everything(model, optimizer)
        optimizer.close()
    assert differences(found, behind_steps(2)) == []
    assert differences(after, behind_steps(3)) == []


def stepped_once():
    """A module and its optimizer when a first step counts, and the batch of the second."""
    return *stepped("both", 1), batches(2)[1]


def test_a_step_does_not_wait_for_what_was_not_begun():
    """One block is under way when it comes; the others are the step's."""
    model, optimizer, second = stepped_once()
    with waiting("pwritev", "gemini-") as disk:
        token_loss(model, second).backward()
        disk.until_asked()
        with when_waited(disk.answer):  # for one block
            optimizer.step()
    assert 0 < optimizer.last_report.speculation.speculated < num_early(optimizer)
    optimizer.close()


def test_what_is_dropped_while_blocks_are_updated_goes_when_they_are():
    model, optimizer, second = stepped_once()
    paths = optimizer.targets[0].tiered_state.nvme.store.paths
    died = weakref.ref(model.engine)
    with waiting("pwritev", "gemini-") as disk:
        token_loss(model, second).backward()
        disk.until_asked()
        del model, optimizer
    until(lambda: gc.collect() >= 0 and died() is None)
    until(lambda: not any(path.exists() for path in paths))


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not():
    model, optimizer, second = stepped_once()
    with waiting("pwritev", "gemini-") as disk:
        token_loss(model, second).backward()
        disk.until_asked()
        child = os.fork()
        if not child:
            optimizer.zero_grad()
            os._exit(7)
        _, status = os.waitpid(child, 0)
        disk.answer()
    assert os.waitstatus_to_exitcode(status) == 7
    optimizer.step()
    optimizer.close()


def test_where_no_thread_can_be_started_the_step_does_it_all():
    model, optimizer = wrapped("speculate")
    with patient():
        for batch in batches(3):
            with mock.patch("threading.Thread.start", side_effect=RuntimeError("no room")):
                token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.last_report.speculation.speculated == 0
    optimizer.close()
