"""Whatever goes on behind the next forward, the bits are those of serial steps on the device.

One matrix: what a loop does, where model data is, who updates it, and its precision. Updates in
backward: test_early.py; several ranks: test_two_ranks.py.
"""

from itertools import cycle, islice, product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bench.shared.models import Tower, token_loss
from gemini import AutoPlacement, trace
from gemini.placement.timetable.allowed import NO_BUFFERS
from gemini.placement.timetable.updates import priced_in_words, said
from optim.rules.state_layout import KINDS
from tests.support.loops.schedules import (
    BEHIND,
    BETWEEN,
    KERNELS,
    MEMORY,
    ON_HOST,
    Iteration,
    Narrow,
    Sometimes,
    interrupted,
    iterations,
    program,
    same,
    second_backwards,
    short,
)
from tests.support.loops.tails import (
    PRECISIONS,
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    held_updates,
    run,
    stepped,
    wrapped,
)
from tests.support.priced import given_clock, late_for
from tests.support.until import until

WHAT = {
    **SCHEDULES,
    "second backwards": second_backwards,
    "absent": absent,
    "interrupted": interrupted(*BETWEEN),
}


IN_TURN = ("bf16", "clipped", "bf16", "fp32", "bf16", "rounded", "fp16")


class Row(NamedTuple):
    what: str
    home: str
    precision: str


def is_possible(row):
    if row.precision == "clipped" and row.what in ("clips", "interrupted"):
        return False  # the engine clips, and refuses to clip twice
    if "files" in row.home:  # budgets of a `Tower` in two bytes
        return row.what != "absent" and row.precision != "fp32"
    return True


def rows():
    """Every schedule everywhere, and precisions so that there are all pairs of two."""
    for i, what in enumerate(WHAT):
        for j, home in enumerate(MEMORY):
            tried = (Row(what, home, IN_TURN[(i + 2 * j + k) % 7]) for k in range(7))
            yield from islice(filter(is_possible, tried), 1)
    yield from (Row("clips", "disk", "fp16"), Row("plain", "files", "rounded"))
    yield Row("evaluates", "disk", "fp32")


def rows_of_kernels():
    """In the interpreter: one schedule everywhere, and every other one somewhere."""
    yield from (Row("absent", home, "bf16") for home in KERNELS)
    for what, home, precision in zip(SCHEDULES, cycle(KERNELS), cycle(PRECISIONS), strict=False):
        yield Row(what, home, precision)


ROWS, BY_KERNELS = list(rows()), list(rows_of_kernels())
FEW = ROWS[::7]
FEW_BY_KERNELS = [BY_KERNELS[i] for i in (1, 6, 7)]  # parameters, and on disk


def each(rows, few):
    """A case of each row; of all but a few at `make ci` alone."""
    for row in rows:
        name = f"{row.what}, {row.precision}, {row.home}"
        yield pytest.param(row, id=name, marks=[pytest.mark.ci] * (row not in few))


def check(row):
    options, schedule = dict(PRECISIONS[row.precision]), WHAT[row.what]
    if row.what == "absent":
        options["module"] = Narrow if row.home in KERNELS else Sometimes
    if row.home in KERNELS:  # what is kept is added to
        schedule = short(schedule, 3 if row.what in ("absent", "keeps_gradients") else 2)
    found = same(schedule, "tail", row.home, **options)
    if row.home == "rising":  # steps change with their plan; gradients in files have no tail
        assert any(found.tails) or row.what not in ("clips", "skips", "accumulates")
        return
    # where the host updates, a step that is skipped has none
    skipped = 0 if row.home in KERNELS else found.skipped_steps
    assert sum(found.tails) == (row.home in BEHIND) * (len(found.tails) - skipped)


@pytest.mark.parametrize("row", list(each(ROWS, FEW)))
def test_loops(row):
    check(row)


@pytest.mark.parametrize("row", list(each(BY_KERNELS, FEW_BY_KERNELS)))
def test_loops_by_kernels(row):
    check(row)


def drawn_programs(max_examples, homes, most=9, **options):
    """`deep` draws new ones."""

    def drawn(test):
        programs = st.lists(iterations, min_size=2, max_size=most)
        drawing = given(drawn=programs, home=st.sampled_from(sorted(homes)), **options)
        return settings(max_examples=max_examples)(drawing(test))

    return drawn


@drawn_programs(6, ON_HOST, most=5)
def test_drawn_programs_beside_a_device(drawn, home):
    same(program([Iteration(), *drawn]), "tail", home)


@pytest.mark.ci
@drawn_programs(15, ("disk", "files", "some files"))
def test_drawn_programs_on_disk(drawn, home):
    same(program([Iteration(), *drawn]), "tail", home)


@pytest.mark.ci
@drawn_programs(2, KERNELS, most=3, state=st.sampled_from(KINDS))
def test_drawn_programs_by_kernels(drawn, home, state):
    same(program([Iteration(), *drawn]), "tail", home, state=state)


def test_the_rows_have_all_pairs_and_a_few_of_them_every_value():
    factors = [WHAT, MEMORY, PRECISIONS]
    for i, values in enumerate(factors):
        assert {row[i] for row in FEW} == set(values)
        for j in range(i):
            missing = set(product(factors[j], values)) - {(row[j], row[i]) for row in ROWS}
            impossible = {("clips", "clipped"), ("interrupted", "clipped")}
            impossible |= {("absent", home) for home in MEMORY if "files" in home}
            impossible |= {(home, "fp32") for home in MEMORY if "files" in home}
            assert missing <= impossible


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


SERIAL = {
    "all state is on the device": lambda: {"fraction": 0.0},
    NO_BUFFERS: lambda: {"fraction": 0.0, "placement_policy": AutoPlacement("130KiB")},
}


@pytest.mark.parametrize("reason", SERIAL)
def test_steps_are_serial_where_a_tail_would_not_be_safe_or_of_use(reason):
    found = []
    for update in ("tail", "serial"):
        with run(SCHEDULES["plain"], update, **SERIAL[reason]()) as (model, optimizer, tails):
            assert tails == [False] * 4 and optimizer.last_report.committed
            if update == "tail":
                assert f"update: serial, as {reason}" in model.explain("layers.0.1.weight")
            found.append(everything(model, optimizer))
    assert differences(*found) == []


def test_a_tail_is_said_where_there_is_one_and_what_it_hides():
    """As it is predicted beside what the last one, which has ended, took."""
    with run(SCHEDULES["plain"], "tail") as (model, optimizer, _):
        last, planned = optimizer.last_report.behind.wait(), model.engine.planning.result
        cost, prices = planned.overlapped["tail"], priced_in_words(planned.seconds_by_update)
        assert model.explain("layers.0.1.weight").splitlines()[-5:] == [
            "update: behind the next forward",
            prices,
            "speeds of predictions: usual ones",
            f"predicted of the update: {cost}",
            f"measured of the last update: {said(last.seconds, last.waited_seconds)}",
        ]
        assert cost.update_seconds > 0 and "s hidden during the next forward" in str(cost)
    with run(SCHEDULES["plain"], "serial") as (model, _, _):
        cost = model.engine.planning.result.overlapped["tail"]
        assert model.explain("layers.0.1.weight").splitlines()[-3:] == [
            f'update: serial; with update="tail" it would be predicted to take {cost}',
            priced_in_words(model.engine.planning.result.seconds_by_update),
            "speeds of predictions: usual ones",
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


def test_what_a_pass_waits_for_is_in_the_report_of_its_tail():
    """A forward that waits for 3 s; and one that comes when a tail of 2 s has ended."""
    with given_clock() as clock, held_updates() as held:
        held.go_on()
        model, optimizer = stepped("tail", 1)
        for waited in (3.0, 0.0):
            token_loss(model, batches(1)[0]).backward()
            held.hold()
            optimizer.step()
            optimizer.zero_grad()
            if not waited:
                clock.seconds += 2.0
                held.go_on()
                until(lambda: optimizer.last_report.committed)
            with late_for(clock, held, waited):
                token_loss(model, batches(1)[0])
            behind = optimizer.last_report.behind.wait()
            assert (behind.waited_seconds, behind.seconds) == (waited, waited or 2.0)
            held.go_on()
    optimizer.close()


def test_another_word_for_the_update_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        wrapped("late", module=nn.Linear(3, 3))
