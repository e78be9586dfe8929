"""Asynchronous saves: training goes on, and what is saved is what was there when the save began."""

import threading
from types import SimpleNamespace

import pytest
import torch

import gemini
import nvme
from tests.support.checkpoints import assert_same, batches, make, train, whole
from tests.support.until import until


def test_a_step_waits_for_the_block_that_it_would_overwrite(tmp_path, monkeypatch):
    """The saved version of every block stays until it was read, however far training goes."""
    blocked, done = threading.Event(), []

    class Watched(threading.Condition):
        def wait(self, timeout=None):
            blocked.set()
            return super().wait(timeout)

    monkeypatch.setattr(nvme.pinned, "threading", SimpleNamespace(Condition=Watched))
    model, optimizer = make("nvme")
    train(model, optimizer, batches(0, 2))
    want = whole(model, optimizer)
    target = model.engine.target
    (stream,) = target.streams(target.names)
    pin = stream.pin()
    thread = threading.Thread(
        target=lambda: (train(model, optimizer, batches(2, 5)), done.append(True))
    )
    thread.start()
    until(lambda: blocked.is_set() or not thread.is_alive())
    assert not done and max(target.step_counts) == 3  # one step went by, the next one waits
    got = {}

    def keep(run):
        got.setdefault(f"{run.name}/{run.plane}", {})[run.start] = run.values.clone()

    stream.visit(keep, pin)
    pin.close()
    thread.join()
    assert done and target.pinned_seconds
    for key, runs in got.items():
        name, plane = key.split("/")
        values = torch.cat([runs[start] for start in sorted(runs)])
        key = f"model.{name}" if plane == "master" else f"{name}.{plane}"
        assert torch.equal(values, want[key].reshape(-1)), key


@pytest.mark.parametrize("placement", ["resident", "nvme"])
def test_a_save_in_the_background_holds_what_was_there_when_it_began(placement, tmp_path, held):
    model, optimizer = make(placement)
    train(model, optimizer, batches(0, 1))
    want = dict(model.state_dict())
    ticket = gemini.save_checkpoint(tmp_path / "a", model, optimizer, async_save=True)
    train(model, optimizer, batches(1, 2))  # both versions of a block on disk have their place
    held.set()
    ticket.wait()
    assert any(not torch.equal(want[name], value) for name, value in model.state_dict().items())
    gemini.load_checkpoint(tmp_path / "a", model, optimizer)
    assert_same(dict(model.state_dict()), want)


def test_a_second_save_while_one_is_under_way_is_refused(tmp_path, held):
    model, optimizer = make("nvme")
    ticket = gemini.save_checkpoint(tmp_path / "a", model, optimizer, async_save=True)
    with pytest.raises(gemini.checkpoint.CheckpointError, match="is under way; wait"):
        gemini.save_checkpoint(tmp_path / "b", model, optimizer)
    held.set()
    ticket.wait()
    gemini.save_checkpoint(tmp_path / "b", model, optimizer)
