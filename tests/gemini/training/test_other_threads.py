"""What another thread does with a model after a step of the main thread, which may have a tail."""

import errno
import signal
import threading

import pytest
import torch

from bench.shared.models import token_loss
from optim.state.deferred_signals import TailSignals
from tests.support.disks.faults import failing
from tests.support.loops.tails import batches, differences, everything, wrapped


def in_a_thread(work):
    """What `work` returns in a thread of its own. Raises what it raises."""
    found = []

    def run():
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def evaluates(model, batch):
    with torch.no_grad():
        return token_loss(model, batch)


def saves(model, batch):
    return model.state_dict()


def goes_backward(model, batch):
    token_loss(model, batch).backward()


def told(work, found):
    try:
        work()
        found.append("")
    except Exception as error:
        found.append(type(error).__name__)


def here(work):
    return work()


def handlers_now():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def trained(update, work, where):
    """Three steps, `work` after each; then handlers of signals are those of before."""
    handlers = handlers_now()
    torch.manual_seed(0)
    model, optimizer = wrapped(update)
    for batch in batches(3):
        token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        where(lambda batch=batch: work(model, batch))
        optimizer.zero_grad()
    optimizer.targets[0].settle()  # which holds no signals itself, where no tail is under way
    assert handlers_now() == handlers
    found = everything(model, optimizer)
    optimizer.close()
    return found


@pytest.mark.parametrize("work", [evaluates, saves, goes_backward])
@pytest.mark.parametrize("update", ["tail", "both"])
def test_a_thread_that_waits_for_a_tail_sees_and_leaves_the_bits_of_a_serial_run(update, work):
    before = handlers_now()
    want = trained("serial", work, here)
    assert differences(trained(update, work, in_a_thread), want) == []
    assert handlers_now() == before


def test_of_two_threads_that_wait_for_a_tail_that_failed_one_is_told_and_both_see_it_undone():
    model, optimizer = wrapped("tail")
    first, second = batches(2)
    token_loss(model, first).backward()
    optimizer.step()
    before = everything(model, optimizer)
    optimizer.zero_grad()
    token_loss(model, second).backward()
    name, found = optimizer.targets[0].tiered_state.nvme.store.paths[0].name, []
    settle = optimizer.targets[0].settle
    with failing("pwritev", errno.EIO, name, after=5, times=1):
        optimizer.step()
        optimizer.zero_grad()
        threads = [threading.Thread(target=told, args=(settle, found)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == ["", "TransferError"]
    assert differences(everything(model, optimizer), before) == []
    optimizer.close()


def test_a_signal_after_a_tail_that_another_thread_waited_for_is_the_users():
    came, before = [], signal.signal(signal.SIGINT, lambda *_: came.append("users"))
    try:
        signals = TailSignals()
        signals.hold()
        signals.release()
        in_a_thread(signals.put_back)
        signal.raise_signal(signal.SIGINT)
        assert came == ["users"]
        assert signal.getsignal(signal.SIGINT).__name__ == "<lambda>"
    finally:
        signal.signal(signal.SIGINT, before)
