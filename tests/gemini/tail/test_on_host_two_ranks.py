"""State in host memory, at two ranks: a step goes on behind the forward, with the same bits."""

from itertools import islice

import pytest

import gemini
from bench.shared.models import token_loss
from bench.shared.workers import run_ranks
from tests.support.loops.schedules import Sometimes
from tests.support.loops.tails import (
    absent,
    batches,
    differences,
    everything,
    held_updates,
    on_host,
    run,
    stepped,
)

pytestmark = pytest.mark.ci

HOMES = {"state and parameters": {"params": 1.0}, "and a part on disk": {"state": 0.8, "disk": 0.4}}


def every_schedule(rank):
    """By kernels; those by the host are among the others at two ranks."""
    found = {}
    for homes, options in HOMES.items():
        serial_and_tail = []
        for update in ("serial", "tail"):
            placed = on_host("stream", **options)
            steps = lambda m, o: islice(absent(m, o), 3)  # noqa: E731
            with run(steps, update, module=Sometimes, **placed) as (model, optimizer, tails):
                assert any(tails) == (update == "tail"), (homes, tails)
                serial_and_tail.append(everything(model, optimizer))
                placed["device"].check()
        found[homes] = differences(serial_and_tail[1], serial_and_tail[0])
    return found


def test_every_schedule_has_the_bits_of_serial_steps_on_every_rank():
    for found in run_ranks(every_schedule, 2, processes=True):
        assert found == {homes: [] for homes in HOMES}


def tears(rank, folder):
    """An update ends in its middle on rank 0, behind a step of all."""
    first, second = batches(2)
    model, optimizer = stepped("tail", 1, **on_host("cpu"))
    gemini.save_checkpoint(folder, model, optimizer)
    before, said = everything(model, optimizer), []

    def step(batch):
        try:
            token_loss(model, batch).backward()
            optimizer.step()
            said.append("stepped")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    step(second)
    everything(model, optimizer)
    with held_updates(fails_at=3 if rank == 0 else 1000):
        step(first)
        step(second)  # its backward asks first
    step(second)
    optimizer.zero_grad()
    gemini.load_checkpoint(folder, model, optimizer)
    wrong = differences(everything(model, optimizer), before)
    step(second)
    wrong += [] if everything(model, optimizer) else ["nothing"]
    optimizer.close()
    return said, wrong


def test_an_update_that_ends_in_its_middle_is_told_to_all_ranks(tmp_path):
    (torn, wrong), (other, wrong_there) = run_ranks(tears, 2, tmp_path / "saved", processes=True)
    assert wrong == wrong_there == []
    assert [said.split(":")[0] for said in torn] == [
        "stepped", "stepped", "MemoryError", "RuntimeError", "stepped"
    ]  # fmt: skip
    assert [said.split(":")[0] for said in other] == [
        "stepped", "stepped", "RuntimeError", "RuntimeError", "stepped"
    ]  # fmt: skip
    assert "updates on ranks [0] ended in their middle" in other[2] and "no room" in other[2]
    for said in (torn[3], other[3]):
        assert "of two steps; load a checkpoint" in said
