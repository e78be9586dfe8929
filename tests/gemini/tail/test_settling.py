"""While a step goes on behind its caller: who looks at weights or state sees it whole."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import gemini
from bench.shared.models import token_loss
from optim import NvmeConfig
from tests.support.disks.waiting import waiting, when_waited
from tests.support.loops.tails import batches, differences, everything, wrapped
from tests.support.loops.tails import stepped as behind
from tests.support.until import until

IDS = torch.arange(36).reshape(4, 9)
HELD = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _leaves_no_handler():
    """Ctrl-C raises, also where a shell has put this into the background: there it does nothing."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in HELD]
    yield
    try:
        assert [signal.getsignal(number) for number in HELD] == before
    finally:
        signal.signal(signal.SIGINT, usual)


def stepped(update, **options):
    """One whole step, and a second one that waits for its disk where it has a tail."""
    model, optimizer = behind(update, 1, **options)
    token_loss(model, batches(2)[1]).backward()
    return model, optimizer


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def saved(model, optimizer, tmp_path, **options):
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer, **options).wait()
    other = wrapped("serial")
    gemini.load_checkpoint(tmp_path / "saved", *other)
    found = everything(*other)
    other[1].close()
    return [found[name] for name in sorted(found) if isinstance(found[name], torch.Tensor)]


def summoned(model):
    with model.summon_full_params():
        return copies(model.module.parameters())


def parked(model, optimizer):
    with optimizer.parked("nvme"):
        pass
    return copies(model.parameters())


def visited(optimizer):
    found = []
    optimizer.visit_state(lambda run: found.append(run.values.clone()))
    return found


def evaluated(model):
    with torch.no_grad():
        return [model(IDS)]


def stepped_again(model, optimizer):
    """With zeros for gradients, which no backward has made."""
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return copies(model.parameters())


def written(model):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return list(model.state_dict().values())


LOOKS = {  # what changes nothing
    "parameters": lambda m, o: copies(m.parameters()),
    "data": lambda m, o: [p.data.clone() for p in m.parameters()],
    "all at once": lambda m, o: torch._foreach_mul(list(m.parameters()), 2.0),
    "elements": lambda m, o: [p[:1].sum() for p in m.parameters()],
    "copies": lambda m, o: copies(copy.deepcopy(p) for p in m.parameters()),
    "pickles": lambda m, o: copies(pickle.loads(pickle.dumps(p)) for p in m.parameters()),
    "state_dict": lambda m, o: list(m.state_dict().values()),
    "optimizer's": lambda m, o: [
        value for planes in o.state_dict()["state"].values() for value in planes.values()
    ],
    "step counts": lambda m, o: [state["step"].clone() for state in o.state.values()],
    "visit_state": lambda m, o: visited(o),
    "salvage": lambda m, o: list(m.salvage().values()),
    "digest": lambda m, o: [m.digest()],
    "evaluation": lambda m, o: evaluated(m),
    "a submodule": lambda m, o: [m.module.layers[3](torch.ones(2, 33, dtype=torch.bfloat16))],
    "gradients": lambda m, o: [grad.clone() for _, grad in m.named_gradients()],
}
DOES = {
    "summon": lambda m, o, t: summoned(m),
    "save": lambda m, o, t: saved(m, o, t),
    "save in the background": lambda m, o, t: saved(m, o, t, async_save=True),
    "parked": lambda m, o, t: parked(m, o),
    "another step": lambda m, o, t: stepped_again(m, o),
    "written in place": lambda m, o, t: written(m),
    "unwrap": lambda m, o, t: list(m.unwrap().state_dict().values()),
    "close": lambda m, o, t: o.close() or list(m.state_dict().values()),
}
WAIT_FOR_NOTHING = ("step counts", "gradients")


def are_same(ones, others):
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same


def test_who_looks_behind_a_step_sees_what_it_made():
    """The disk answers when somebody waits for the step; each look is behind one of its own."""
    serial, tail = behind("serial", 1), behind("tail", 1)
    for (name, look), batch in zip(LOOKS.items(), batches(len(LOOKS)), strict=True):
        for model, optimizer in (serial, tail):
            optimizer.zero_grad()
            token_loss(model, batch).backward()
        serial[1].step()
        with waiting("pwritev", "gemini-") as disk:
            tail[1].step()
            assert not tail[1].last_report.committed
            with when_waited(disk.answer) as waited:
                seen = look(*tail)
            assert waited or name in WAIT_FOR_NOTHING, name
        are_same(look(*serial), seen)
        for model, _ in (serial, tail):
            model.state_dict()  # what may have been written by who looked is in the state
    serial[1].close(), tail[1].close()


@pytest.mark.parametrize("does", DOES.values(), ids=DOES)
def test_who_does_something_behind_a_step_does_it_to_what_that_made(does, tmp_path):
    found = []
    for update in ("serial", "tail"):
        model, optimizer = stepped(update)
        (tmp_path / update).mkdir()
        with waiting("pwritev", "gemini-") as disk, when_waited(disk.answer) as waited:
            if update == "serial":
                disk.answer()
            optimizer.step()
            assert optimizer.last_report.committed == (update == "serial")
            found.append(does(model, optimizer, tmp_path / update))
            assert bool(waited) == (update == "tail")
        optimizer.close()
    are_same(*found)


def test_gradients_live_until_their_blocks_are_updated_whoever_drops_them():
    found = []
    small = NvmeConfig(block_numel=1024)  # no chunk is done without the disk: some blocks were kept
    for update in ("serial", "tail"):
        model, optimizer = stepped(update, nvme=small)
        with waiting("preadv", "gemini-") as disk:
            if update == "serial":
                disk.answer()
            optimizer.step()
            before = model.engine.manager.ledger.totals()
            optimizer.zero_grad()
            gc.collect()
            after = model.engine.manager.ledger.totals()
            if update == "tail":  # what is held is counted
                assert model.engine.manager.ledger.kept_bytes > 0
                assert after == before
            disk.answer()
        found.append(everything(model, optimizer))
        assert model.engine.manager.ledger.kept_bytes == 0
        optimizer.close()
    assert differences(found[1], found[0]) == []


def test_a_gradient_that_is_changed_behind_a_step_waits_for_it():
    """Its last block has not been read when `.grad` is to become zeros."""
    found = []
    for update in ("serial", "tail"):
        model, optimizer = stepped(update)
        with waiting("preadv", "gemini-") as disk:
            if update == "serial":
                disk.answer()
            optimizer.step()
            with when_waited(disk.answer):
                for param in model.parameters():
                    param.grad.zero_()
            disk.answer()
        found.append(everything(model, optimizer))
        optimizer.close()
    assert differences(found[1], found[0]) == []


def test_a_chunk_with_state_in_memory_is_waited_for_to_the_end():
    """What is in memory is updated when the step counts; the last chunk has its state there."""
    model, optimizer = stepped("tail", fraction=0.4)
    serial = stepped("serial", fraction=0.4)
    serial[1].step()
    name = list(dict(model.module.named_parameters()))[-1]
    with waiting("fdatasync", "gemini-") as disk:
        optimizer.step()
        disk.until_asked()  # all blocks on disk are updated
        ticket = model.engine.chunks[-1].updating
        assert ticket is not None and not ticket.ready()
        disk.answer()
        ticket.wait()
        got = dict(model.module.named_parameters())[name].detach().clone()
    assert torch.equal(got, dict(serial[0].module.named_parameters())[name])
    optimizer.close(), serial[1].close()


def test_a_forward_waits_for_what_it_reads_and_for_no_more():
    """The disk answers when the first module has run: that one did not wait for the others."""
    model, optimizer = stepped("tail")
    optimizer.step()  # behind the first step of all, and behind another, the order is the same
    optimizer.zero_grad()
    token_loss(model, batches(2)[0]).backward()
    ran = []
    with waiting("preadv", "gemini-", after=4) as disk:  # the blocks of the first chunk
        optimizer.step()
        optimizer.zero_grad()
        disk.until_asked()

        def embedded(*_):
            ran.append("embed")
            assert not optimizer.last_report.committed
            disk.answer()

        handle = model.module.embed.register_forward_hook(embedded)
        loss = token_loss(model, batches(3)[2])
        handle.remove()
    assert ran == ["embed"]
    loss.backward()
    assert optimizer.last_report.committed
    serial = stepped("serial")
    serial[1].step()
    serial[1].zero_grad()
    token_loss(serial[0], batches(2)[0]).backward()
    serial[1].step()
    serial[1].zero_grad()
    assert torch.equal(token_loss(serial[0], batches(3)[2]), loss)
    optimizer.close(), serial[1].close()


def test_an_update_is_whole_before_the_next_backward_begins():
    model, optimizer = stepped("tail")
    with waiting("pwritev", "gemini-") as disk:
        optimizer.step()
        optimizer.zero_grad()
        with when_waited(disk.answer) as waited:
            token_loss(model, batches(3)[2]).backward()
        assert waited and optimizer.last_report.committed
    optimizer.close()


def test_another_thread_than_the_one_that_trains_updates():
    model, optimizer = stepped("tail")
    names = []
    target = optimizer.targets[0]
    count = target.tiered_state.nvme.commit

    def commit(*args, **kwargs):
        names.append(threading.current_thread().name)
        count(*args, **kwargs)

    target.tiered_state.nvme.commit = commit
    optimizer.step()
    everything(model, optimizer)
    assert names == ["optim-tail"]
    optimizer.close()


def test_a_parameter_is_watched_only_while_it_is_updated():
    model, optimizer = stepped("tail")
    plain = {type(p) for p in model.parameters()}
    with waiting("pwritev", "gemini-") as disk:
        optimizer.step()
        assert plain.isdisjoint(type(p) for p in model.parameters())
        disk.answer()
    everything(model, optimizer)
    assert {type(p) for p in model.parameters()} == plain
    optimizer.close()


# -- signals, forks, ends --


def test_ctrl_c_waits_until_the_tail_has_ended_and_finds_the_step_whole():
    model, optimizer = stepped("tail")
    before = signal.getsignal(signal.SIGINT)
    with waiting("pwritev", "gemini-") as disk:
        optimizer.step()
        signal.raise_signal(signal.SIGINT)
        assert not optimizer.last_report.committed  # and nothing was raised
        with pytest.raises(KeyboardInterrupt):
            disk.answer()
            until(lambda: False)
    assert optimizer.last_report.committed
    assert signal.getsignal(signal.SIGINT) is before
    serial = stepped("serial")
    serial[1].step()
    assert differences(everything(model, optimizer), everything(*serial)) == []
    optimizer.close(), serial[1].close()


def test_ctrl_c_behind_a_tail_is_as_ever():
    model, optimizer = stepped("tail")
    before = signal.getsignal(signal.SIGINT)
    optimizer.step()
    optimizer.last_report.behind.wait()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    everything(model, optimizer)
    assert signal.getsignal(signal.SIGINT) is before
    optimizer.close()


def test_a_handler_that_the_user_sets_meanwhile_stays():
    model, optimizer = stepped("tail")
    before = signal.getsignal(signal.SIGINT)
    try:
        optimizer.step()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        everything(model, optimizer)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    optimizer.close()


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not():
    model, optimizer = stepped("tail")
    reads, writes = os.pipe()
    with waiting("pwritev", "gemini-") as disk:
        optimizer.step()
        child = os.fork()
        if not child:
            said = b"nothing"
            try:
                model.module.head.weight.sum()
            except RuntimeError as error:
                said = str(error).encode()
            finally:
                os.write(writes, said)
                os._exit(0)
        os.close(writes)
        os.waitpid(child, 0)
        disk.answer()
    with os.fdopen(reads, "rb") as pipe:
        assert b"read a parameter before you fork" in pipe.read()
    optimizer.close()


def test_what_is_dropped_with_a_tail_under_way_goes_when_it_has_ended():
    handlers = {number: signal.getsignal(number) for number in HELD}
    model, optimizer = stepped("tail")
    paths = optimizer.targets[0].tiered_state.nvme.store.paths
    optimizer.step()
    behind = optimizer.last_report.behind
    died = weakref.ref(model.engine)
    del model, optimizer
    assert behind.wait().committed
    until(lambda: gc.collect() >= 0 and died() is None)
    assert not any(path.exists() for path in paths)
    for number, handler in handlers.items():
        signal.signal(number, handler)


PROGRAM = """
import torch
from tests.support.loops.tails import wrapped, batches
from bench.shared.models import token_loss

model, optimizer = wrapped("tail", folder={folder!r})
token_loss(model, batches(1)[0]).backward()
optimizer.step()
optimizer.last_report.behind.gate.ready() and print("early")
import atexit
atexit.register(lambda: print("committed", optimizer.last_report.committed))
"""


@pytest.mark.ci
def test_a_program_that_ends_behind_a_step_ends_it_first(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=str(tmp_path))],
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert done.stdout.splitlines()[-1] == "committed True"
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_has_a_parameter_of_another_waits_for_it():
    """It is read by an operator in a forward, where no call of its owner has waited."""

    class Borrows(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(33, 65)
            self.middle = nn.Linear(65, 129)
            self.last = nn.Linear(129, 33)

        def forward(self, x):
            return nn.functional.linear(self.middle(self.first(x)), self.last.weight)

    x = torch.ones(2, 33)
    found = []
    for update in ("serial", "tail"):
        model, optimizer = wrapped(update, module=Borrows(), precision="fp32")
        model(x).sum().backward()
        with waiting("pwritev", "gemini-") as disk:
            if update == "serial":
                disk.answer()
            optimizer.step()
            with when_waited(disk.answer) as waited:
                found.append(model(x).detach())
            assert bool(waited) == (update == "tail")
        optimizer.close()
    assert torch.equal(*found)
