"""Ranks of a test that are threads: how they fail, and what is left of them."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from triton.runtime.interpreter import GridExecutor

from bench.shared.interpreter import one_kernel_at_a_time
from bench.shared.models import Tower, seeded, token_batches, token_loss
from bench.shared.threads import one_object_an_operator
from bench.shared.workers import run_ranks
from gemini import GeminiDDP

pytestmark = pytest.mark.one_process("the claims are of threads")


def state():
    """What ranks share while they run."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    return (
        threads, GridExecutor.__call__, threading.Thread.start, os.environ.get("LOCAL_WORLD_SIZE"),
        dist.is_initialized(), torch.get_num_threads(), torch.is_grad_enabled(),
    )  # fmt: skip


def waits(rank, where):
    """Rank 1 fails; the others wait for it."""
    model = GeminiDDP(Tower(), min_chunk_size_m=0.004)
    model.engine.comm.deadline_seconds = 0.05  # then they ask who has left
    (parts,) = token_batches(1, dist.get_world_size())
    if rank == 1:
        raise KeyError("the culprit")
    if where == "a collective":
        token_loss(model, parts[rank]).backward()
    else:
        model.digest()


@pytest.mark.ci
@pytest.mark.parametrize("where", ["a collective", "a meeting"])
def test_a_rank_that_fails_is_named_and_ends_the_others(where):
    one_kernel_at_a_time()  # the first world makes it so, for the process
    before = state()
    with pytest.raises(AssertionError) as raised:
        run_ranks(waits, 3, where)
    said = str(raised.value)
    assert said.startswith("of threads:\nrank 1: Traceback") and "KeyError: 'the culprit'" in said
    assert "did not end" not in said
    assert state() == before
    assert run_ranks(lambda rank: rank, 2) == [0, 1]


def stays(rank, left):
    if rank == 1:
        raise KeyError("the culprit")
    left.wait()


def test_where_a_rank_is_that_does_not_end_is_said(monkeypatch):
    monkeypatch.setattr("bench.shared.threads.GRACE_SECONDS", 0.05)
    left = threading.Event()
    with pytest.raises(AssertionError) as raised:
        run_ranks(stays, 2, left)
    left.set()
    said = str(raised.value)
    assert "did not end: rank 0\nrank 0 is at:\n" in said
    assert "in stays\n    left.wait()" in said


def draws(rank, seeds):
    if not seeds:
        return torch.rand(3)
    with seeded(rank):
        return torch.rand(3)


def test_a_rank_that_draws_from_the_generator_of_all_is_told_so():
    before = torch.get_rng_state()
    with pytest.raises(AssertionError, match="torch's own generator, which all threads share"):
        run_ranks(draws, 2, False)
    one, other = run_ranks(draws, 2, True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), other) and not torch.equal(one, other)


def started_by_a_rank(rank):
    """A rank's own threads are in its world."""
    found = []
    thread = threading.Thread(target=lambda: found.append(dist.get_rank()))
    thread.start()
    thread.join()
    return found


def test_threads_that_a_rank_starts_are_of_its_world():
    assert run_ranks(started_by_a_rank, 2) == [[0], [1]]


def test_threads_that_ask_for_an_operator_at_once_get_one_object():
    """Of two objects torch keeps the address of one, and a reference to the other."""
    one_object_an_operator()
    packet, namespace = torch.ops.aten.acosh, torch.ops.aten
    ask_packet, ask_namespace = type(packet).__getattr__, type(namespace).__getattr__
    assert ask_packet(packet, "default") is packet.default  # as a thread that found none yet
    assert ask_namespace(namespace, "acosh") is packet
