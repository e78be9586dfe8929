"""Ranges in a profile: which there are, on which threads, and none where nobody profiles."""

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from bench.shared.workers import run_ranks
from gemini.ranges import named
from tests.support.loops.sides import full_step, wrapped


def ranges(work, threads=True):
    """By name the threads, of what is in a profile of it."""
    config = _ExperimentalConfig(profile_all_threads=threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as found:
        work()
    events = [event for event in found.events() if event.name.startswith("gemini: ")]
    return {event.name: {e.thread for e in events if e.name == event.name} for event in events}


def test_a_step_with_everything_in_files_shows_what_moves():
    model, optimizer = wrapped(place="files", update="tail")
    full_step(model, optimizer)

    def steps():
        full_step(model, optimizer)
        model.digest()  # waits for the tail

    found = ranges(steps)
    assert {name.split(" ")[1] for name in found} == {"gather", "read", "update", "write", "wait"}
    last = len(model.engine.chunks) - 1
    for name in (f"gather chunk {last}", f"read chunk {last}", f"write chunk {last}"):
        assert f"gemini: {name}" in found
    for name in ("read block 0", "update block 0", "write block 0", "wait for block 0"):
        assert f"gemini: {name}" in found
    # whole tensors are read by a thread of their own, and blocks of a tail updated by another
    assert found["gemini: read chunk 0"].isdisjoint(found["gemini: gather chunk 0"])
    alone = ranges(steps, threads=False)
    assert "gemini: gather chunk 0" in alone and "gemini: read chunk 0" not in alone
    optimizer.close()


def test_what_is_in_memory_is_one_range():
    model, optimizer = wrapped()
    assert "gemini: update resident blocks from 0" in ranges(lambda: full_step(model, optimizer))


def test_nothing_is_recorded_where_nobody_profiles(monkeypatch):
    def refused(name):
        raise AssertionError(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refused)
    assert named("gather", "chunk", 0) is named("read", "block", 1)
    with pytest.raises(AssertionError, match="gemini: gather chunk 0"), profile():
        named("gather", "chunk", 0)


def reduced(rank):
    model, optimizer = wrapped()
    full_step(model, optimizer)  # alone: ranks as threads share the profiler
    return ranges(lambda: full_step(model, optimizer)) if rank == 0 else full_step(model, optimizer)


@pytest.mark.ci
def test_ranks_show_their_reductions():
    found = run_ranks(reduced, 2)[0]
    assert {"gemini: reduce chunk 0", "gemini: wait for gradient of chunk 0"} <= set(found)
    assert "gemini: wait for chunk 0" in found
