"""What another thread does with a model while the main thread trains, or after a step of it."""

import errno
import random
import signal
import threading
from contextlib import suppress

import pytest
import torch

from bench.shared.models import token_loss
from gemini.chunk.storage import Chunk
from gemini.nvme import NvmeError
from gemini.ranges import named
from gemini.runtime.step import tail
from optim import HybridAdam, NvmeConfig
from optim.state.deferred_signals import DeferredSignals, TailSignals
from optim.target import free_in_child, new_lock
from tests.support.disks.faults import failing
from tests.support.disks.waiting import waiting
from tests.support.loops import sides
from tests.support.loops.programs import draw, run_program
from tests.support.loops.readers import READS, in_a_thread, values_of
from tests.support.loops.tails import batches, differences, everything, wrapped


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
@pytest.mark.parametrize("update", ["tail"])
def test_a_thread_that_waits_for_a_tail_sees_and_leaves_the_bits_of_a_serial_run(update, work):
    before = handlers_now()
    want = trained("serial", work, here)
    assert differences(trained(update, work, in_a_thread), want) == []
    assert handlers_now() == before


def before_a_second_step():
    """Module, optimizer, what the first step has left, and the name of the store's file."""
    model, optimizer = wrapped("tail")
    first, second = batches(2)
    token_loss(model, first).backward()
    optimizer.step()
    before = everything(model, optimizer)
    optimizer.zero_grad()
    token_loss(model, second).backward()
    return model, optimizer, before, optimizer.targets[0].tiered_state.nvme.store.paths[0].name


class Asked:
    """A lock that says who asks for it."""

    def __init__(self, lock, told):
        self.lock, self.told = lock, told

    def __enter__(self):
        self.told(threading.current_thread())
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


def test_of_two_threads_that_wait_for_a_tail_that_failed_one_is_told_and_both_see_it_undone(
    monkeypatch,
):
    """The first ends the step when the second has asked for the lock, or waits for the tail too."""
    model, optimizer, before, name = before_a_second_step()
    found, here, both = [], set(), threading.Event()
    settle = optimizer.targets[0].settle

    def comes(thread):
        here.add(thread)
        if len(here) == 2:
            both.set()

    def waits(*what):
        comes(threading.current_thread())
        return named(*what)

    def ends():
        both.wait()
        return DeferredSignals()

    with failing("pwritev", errno.EIO, name, after=5, times=1):
        optimizer.step()
        optimizer.zero_grad()
        model.engine.passes.lock = Asked(model.engine.lock, comes)
        monkeypatch.setattr(tail, "named", waits)
        monkeypatch.setattr(tail, "DeferredSignals", ends)
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


# -- reads beside a pass --


def test_a_reader_and_a_forward_that_wait_for_one_chunk_of_a_tail_both_go_on(monkeypatch):
    """The forward comes while the reader is between its wait and its note of the arrival."""
    model, optimizer = wrapped("tail")
    first, second = batches(2)
    token_loss(model, first).backward()
    is_waiting, trainer_asks = threading.Event(), threading.Event()
    main, wait_updated = threading.current_thread(), Chunk.wait_updated

    def waits(chunk):
        if threading.current_thread() is not main:
            is_waiting.set()
            trainer_asks.wait()
        wait_updated(chunk)

    def told(thread):
        if thread is main and is_waiting.is_set():
            trainer_asks.set()

    with waiting("pwritev", "gemini-") as disk:
        optimizer.step()
        optimizer.zero_grad()
        monkeypatch.setattr(Chunk, "wait_updated", waits)
        model.engine.passes.lock, found = Asked(model.engine.lock, told), []
        param = next(model.parameters())
        thread = threading.Thread(target=lambda: found.append(param.detach().float().sum()))
        thread.start()
        disk.answer()
        is_waiting.wait()
        token_loss(model, second).backward()
        thread.join()
    assert torch.equal(found[0], param.detach().float().sum())
    serial = wrapped("serial")
    token_loss(serial[0], first).backward()
    serial[1].step()
    assert differences(everything(model, optimizer), everything(*serial)) == []
    optimizer.close(), serial[1].close()


def test_an_optimizer_is_made_while_no_other_thread_reads():
    model, optimizer = sides.wrapped()
    optimizer.close()
    asked = []
    model.engine.passes.lock = Asked(model.engine.lock, asked.append)
    sides.HybridAdam(model.parameters()).close()
    assert len(asked) >= 2


def in_the_middle(module, work):
    """`work` in a thread, once in the forward of a module and once in its backward."""

    def there(*_):
        in_a_thread(work)

    handles = [module.register_forward_hook(there), module.weight.register_hook(there)]
    return lambda: [handle.remove() for handle in handles]


def losses(model, optimizer, count=3):
    for seed in range(count):
        sides.full_step(model, optimizer, seed)
        yield


@pytest.mark.parametrize("place", ["resident", "host", "nvme, tail", "cpu, tail"])
def test_a_thread_that_reads_in_the_middle_of_a_pass_changes_no_bit(place):
    want = sides.wrapped(place=place)
    for _ in losses(*want):
        pass
    model, optimizer = sides.wrapped(place=place)
    reads = list(READS)
    end = in_the_middle(
        model.module.layers[1], lambda: [READS[what](model, optimizer) for what in reads]
    )
    for _ in losses(model, optimizer):
        pass
    end()
    assert differences(everything(model, optimizer), everything(*want)) == []
    optimizer.close(), want[1].close()


@pytest.mark.parametrize("place", ["resident", "host", "cpu, tail"])
def test_a_thread_reads_the_weights_of_the_last_step_in_the_middle_of_a_pass(place):
    model, optimizer = sides.wrapped(place=place)
    seen, want = [], values_of(model)
    end = in_the_middle(model.module.layers[1], lambda: seen.append(values_of(model)))
    for _ in losses(model, optimizer):
        assert [differences(one, want) for one in seen] == [[], []]
        seen.clear()
        want = values_of(model)
    end()
    optimizer.close()


CHANGES = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "step": lambda model, optimizer: optimizer.step(),
    "load_state_dict": lambda model, optimizer: model.load_state_dict({}, strict=False),
    "summon_full_params": lambda model, optimizer: model.summon_full_params().__enter__(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_changes_weights_or_gradients_is_refused_beside_a_pass(change):
    model, optimizer = sides.wrapped(place="host")
    said = []

    def work():
        with pytest.raises(RuntimeError, match="while another thread runs a forward or a backward"):
            CHANGES[change](model, optimizer)
        said.append(change)

    end = in_the_middle(model.module.layers[1], work)
    for _ in losses(model, optimizer, 1):
        pass
    end()
    assert len(said) == 2
    in_a_thread(optimizer.zero_grad)  # between passes
    optimizer.close()


def test_gradients_are_not_read_in_a_thread_beside_a_backward_and_not_lost():
    model, optimizer = sides.wrapped()
    sides.loss_of(model, 0).backward()
    said = []

    def work():
        with pytest.raises(RuntimeError, match="gradients are read or changed while another"):
            model.module.layers[0].weight.grad.sum()
        said.append(1)

    end = in_the_middle(model.module.layers[1], work)
    sides.loss_of(model, 1).backward()
    end()
    assert said == [1, 1]
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    optimizer.close()


def test_a_tail_that_failed_is_undone_where_the_pass_runs_that_uses_its_weights():
    model, optimizer, before, name = before_a_second_step()
    said = []

    def work():
        with pytest.raises(RuntimeError, match="the last step failed, and is undone where"):
            model.state_dict()
        said.append(1)

    with failing("pwritev", errno.EIO, name, after=5, times=1):
        optimizer.step()
        optimizer.zero_grad()
        handle = model.module.layers[2].register_forward_pre_hook(lambda *_: in_a_thread(work))
        loss = token_loss(model, batches(2)[1])
        with pytest.raises(NvmeError):
            loss.backward()
    handle.remove()
    assert said == [1]
    optimizer.zero_grad()
    assert differences(everything(model, optimizer), before) == []
    optimizer.close()


def test_an_optimizer_of_plain_parameters_is_read_whole_while_it_steps(tmp_path, monkeypatch):
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = HybridAdam(
        [param], nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path,
        nvme=NvmeConfig(block_numel=1024),
    )  # fmt: skip
    param.grad = torch.ones(4096)
    optimizer.step()
    found = []
    with waiting("pwritev", "gemini-") as disk:
        thread = threading.Thread(target=lambda: found.append(optimizer.state_dict()))
        stepping = threading.Thread(target=optimizer.step)
        stepping.start()
        disk.until_asked()
        thread.start()
        disk.answer()
        stepping.join()
        thread.join()
    assert found[0]["state"][0]["step"] == 2
    optimizer.close()


def test_a_forked_child_has_locks_free_that_another_thread_held():
    lock, is_held, ends = new_lock(), threading.Event(), threading.Event()

    def hold():
        with suppress(RuntimeError), lock:  # which is not held any more, as in a child
            is_held.set()
            ends.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    is_held.wait()
    assert not lock.acquire(blocking=False)
    free_in_child()
    assert lock.acquire(blocking=False)  # by this thread, which forks while it holds another
    free_in_child()
    lock.release()
    ends.set()
    thread.join()


@pytest.mark.parametrize("place", ["host", "nvme, tail"])
def test_drawn_programs_beside_readers_have_the_updates_of_torch(place):
    for seed in range(2):
        assert run_program(draw(random.Random(seed)), place, num_readers=2).difference < 1e-4
