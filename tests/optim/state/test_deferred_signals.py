"""Signals that are deferred: each is delivered once, behind what it may not cut off."""

import signal
import threading

import pytest

from optim.state import deferred_signals
from optim.state.deferred_signals import DeferredSignals, TailSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD)


class Told(Exception):
    """What a handler raises."""


@pytest.fixture
def came():
    """Signals that a handler was told of; it raises nothing."""
    found = []
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        signal.signal(number, lambda n, frame: found.append(n))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def raises(number, error):
    def handler(n, frame):
        raise error

    signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in NUMBERS]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_is_delivered_behind_the_body_and_its_handler_stays(number, came):
    before = handlers()
    with DeferredSignals() as signals:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert came == []
        assert signals.pending == (number in (signal.SIGINT, signal.SIGTERM))
    assert came == [number]
    assert handlers() == before


def test_a_signal_without_a_handler_in_python_is_left_alone(came):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with DeferredSignals():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_all_that_came_are_delivered_though_a_handler_raises_and_ctrl_c_is_raised_last(came):
    raises(signal.SIGINT, KeyboardInterrupt)
    raises(signal.SIGALRM, Told)
    with pytest.raises(KeyboardInterrupt) as raised, DeferredSignals():
        for number in NUMBERS:
            signal.raise_signal(number)
    assert isinstance(raised.value.__context__, Told)
    assert came == [signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM]


def test_deferrals_inside_each_other_deliver_behind_the_outer_one(came):
    with DeferredSignals():
        with DeferredSignals():
            signal.raise_signal(signal.SIGALRM)
        assert came == []
    assert came == [signal.SIGALRM]


@pytest.mark.parametrize("at", range(len(NUMBERS)))
@pytest.mark.parametrize("way", ["in", "out"])
def test_a_handler_that_raises_on_the_way_in_or_out_leaves_all_handlers_in_force(
    way, at, came, monkeypatch
):
    """Between two of them, as they are set."""
    raises(signal.SIGALRM, Told)
    setsignal, count = deferred_signals.setsignal, []

    def interrupted(number, handler):
        if len(count) == at + (len(NUMBERS) if way == "out" else 0):
            count.append(number)
            signal.raise_signal(signal.SIGALRM)
        count.append(number)
        setsignal(number, handler)

    monkeypatch.setattr(deferred_signals, "setsignal", interrupted)
    with pytest.raises(Told), DeferredSignals():
        pass
    monkeypatch.undo()
    for number in NUMBERS:
        if number != signal.SIGALRM:
            signal.raise_signal(number)
    assert came == [number for number in NUMBERS if number != signal.SIGALRM]
    with pytest.raises(Told):
        signal.raise_signal(signal.SIGALRM)


def test_a_tail_defers_them_from_its_begin_to_its_end_in_another_thread(came):
    before, signals = handlers(), TailSignals()
    signals.hold()
    for number in NUMBERS:
        signal.raise_signal(number)
    assert came == []
    thread = threading.Thread(target=signals.release)
    thread.start()
    thread.join()
    assert sorted(came) == sorted(NUMBERS)
    assert signals.put_back() and handlers() == before


def test_a_time_out_whose_handler_was_taken_off_meanwhile_ends_no_process(came):
    """As `finally: signal.signal(SIGALRM, old)` does beside a step that has not ended."""
    signals = TailSignals()
    signals.hold()
    signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signals.release()
    assert signals.put_back() and came == []
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_nothing_is_deferred_in_another_thread(came):
    def work():
        with DeferredSignals():
            found.append(handlers())

    found = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [handlers()]
