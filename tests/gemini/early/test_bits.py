"""Blocks that are updated in backward have the bits of serial steps, whatever the step comes to."""

import weakref
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.shared.models import Tower, token_loss
from gemini import GeminiDDP
from gemini.placement.tiers import Tier
from optim import HybridAdam, NvmeConfig
from tests.support.loops.early import (
    BETWEEN,
    HELD_BY,
    HOMES,
    UPDATES,
    Iteration,
    Sometimes,
    interrupted,
    iterations,
    num_early,
    patient,
    program,
    same,
    second_backwards,
)
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    one_step,
    run,
    wrapped,
)

CI = pytest.mark.ci


def test_all_blocks_but_those_that_were_read_ahead_are_updated_in_backward():
    for update, home in (*((update, "disk") for update in UPDATES), ("speculate", "files")):
        with patient(), run(SCHEDULES["plain"], update, **HOMES[home]()) as (_, optimizer, _):
            found = optimizer.last_report.speculation
            assert found.speculated == found.held == num_early(optimizer) > 10
            assert found.quiet_steps == 8


@pytest.mark.parametrize("update", UPDATES)
def test_parameters_without_a_gradient_keep_their_bits_and_counts(update):
    """One is absent where it was there in the step before: it was updated, and is not."""
    assert same(absent, update, module=Sometimes).redone > 0


@pytest.mark.parametrize(
    "update, home",
    [("both", "disk"), ("speculate", "files"), pytest.param("speculate", "disk", marks=CI),
     pytest.param("both", "some files", marks=CI)],
)  # fmt: skip
def test_what_a_user_does_between_backward_and_step_counts(update, home):
    found = same(interrupted(*BETWEEN), update, home).early
    for number, name in enumerate(BETWEEN):
        report = found[2 * number + 1]
        if name in HELD_BY:
            assert report.redone == 0 < report.held, name
        else:
            assert report.redone > 0, name


def test_only_the_chunk_whose_gradient_was_changed_is_done_again():
    found = same(interrupted("zeroes one", "drops one", "assigns one"), "speculate").early
    assert all(0 < report.redone < report.held for report in found[1::2])


@pytest.mark.parametrize("update", UPDATES)
def test_a_second_backward_adds_to_what_was_taken_for_final(update):
    assert same(second_backwards, update).early[1].redone > 0


def test_a_backward_that_was_taken_for_the_last_is_taken_back():
    """It follows `no_sync`; the one behind it is that which was learned."""

    def accumulates(model, optimizer):
        for step, batch in enumerate(batches(9)):
            with model.no_sync() if step % 3 == 0 else nullcontext():
                token_loss(model, batch).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
                yield

    for update in UPDATES:
        found = same(accumulates, update).early
        assert found[1].redone == found[1].held > 10


def test_the_number_of_backwards_is_learned():
    def accumulates(model, optimizer):
        for step, batch in enumerate(batches(6)):
            token_loss(model, batch).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                yield

    for update in UPDATES:
        found = same(accumulates, update).early
        assert [report.redone for report in found] == [0] * 3 and found[-1].held > 0


def test_a_backward_that_no_step_takes_does_not_count():
    turns = program([Iteration(), Iteration(), Iteration(stepless=True), Iteration()])
    for update in UPDATES:
        assert same(turns, update).early[-1].held > 10


def grows(model, optimizer):
    """A param group is added between backward and step."""
    for step, batch in enumerate(batches(4)):
        token_loss(model, batch).backward()
        if step == 2:
            optimizer.add_param_group({"params": [model.module.embed.weight], "lr": 1e-3})
        optimizer.step()
        optimizer.zero_grad()


def test_a_group_that_is_added_between_backward_and_step_is_updated():
    found = []
    for update in ("serial", *UPDATES):
        model = GeminiDDP(Tower(), update=update, min_chunk_size_m=0.004)
        rest = [p for name, p in model.named_parameters() if "embed" not in name]
        nvme = NvmeConfig(block_numel=1024)
        optimizer = HybridAdam(rest, lr=1e-2, nvme_offload_fraction=1.0, nvme=nvme)
        optimizer.bind()
        with patient():
            grows(model, optimizer)
        found.append(everything(model, optimizer))
        optimizer.close()
    assert differences(found[1], found[0]) == differences(found[2], found[0]) == []


EVERYWHERE = ["disk", "files", "some files"]


@pytest.mark.ci  # `deep` draws new ones
@given(st.lists(iterations, min_size=3, max_size=9), st.sampled_from(["tail", *UPDATES]),
       st.sampled_from(EVERYWHERE), st.booleans())  # fmt: skip
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_every_program_has_the_bits_of_serial_steps(drawn, update, home, hurried):
    same(program([Iteration(), *drawn]), update, home, hurried=hurried)


# -- rules --

FP32 = {"precision": "fp32"}
ROUNDED = {"master_weights": False}


@pytest.mark.parametrize("options", [FP32, ROUNDED], ids=["fp32", "rounded"])
def test_without_masters_no_block_is_updated_in_backward(options):
    """New weights would have nowhere to wait."""
    found = same(SCHEDULES["plain"], "both", **options)
    assert [report.speculated for report in found.early] == [0] * 4 and all(found.tails)
    with run(SCHEDULES["plain"], "both", **options) as (model, _, _):
        said = model.explain("layers.0.1.weight")
    assert "behind the next forward, and none in backward, as weights have no fp32 masters" in said


@pytest.mark.parametrize(
    "update, said",
    [
        ("speculate", "update: in backward, and the rest in step()"),
        ("both", "update: in backward, and the rest behind the next forward"),
    ],
)
def test_explain_says_when_blocks_are_updated(update, said):
    with run(SCHEDULES["plain"], update) as (model, optimizer, _):
        lines = model.explain("layers.0.1.weight").splitlines()
        planning = model.engine.planning
        cost = planning.result.overlapped[update]
        num_blocks = len(planning.plan.blocks_on(Tier.NVME))
        held = optimizer.last_report.speculation.held  # as many as the thread came to
        assert said in lines
        of_all = f"of {num_blocks} blocks on NVMe"
        assert f"predicted in backward: {cost.num_early} {of_all}" in lines
        assert f"held by the last step: {held} {of_all}" in lines
        assert (f"predicted of the update: {cost}" in lines) == (update == "both")
        assert 0 < cost.num_early <= num_blocks


@pytest.mark.parametrize("update", ["speculate", "both"])
def test_gradients_are_gone_when_their_step_is_done(update):
    """What was assumed of them is not kept until the next backward."""
    model, optimizer = wrapped(update)
    with patient():
        for batch in batches(4):
            token_loss(model, batch).backward()
            shards = [chunk.gradient.shard for chunk in model.engine.chunks]
            alive = [weakref.ref(shard) for shard in shards if shard is not None]
            del shards
            assert alive and all(shard() is not None for shard in alive)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.last_report.behind.wait()
            assert [shard() for shard in alive] == [None] * len(alive)
    assert optimizer.last_report.speculation.held > 0
    optimizer.close()


def test_a_write_budget_has_room_for_what_is_done_twice():
    """With room for less than two steps nothing is written that the step might write again."""
    model, optimizer = wrapped("both")
    with patient():
        for step, batch in enumerate(batches(4)):
            token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            state = optimizer.targets[0].tiered_state.nvme
            one = state.written_bytes_per_step
            if step == 0:
                state.store.meter.budget = state.store.meter.written_bytes + 3 * one
            early = optimizer.last_report.speculation.speculated
            assert (early > 0) == (step in (1, 2))
    optimizer.close()


def test_what_was_moved_in_backward_is_in_the_report():
    model, optimizer = wrapped("both")
    with patient():
        for batch in batches(2):
            one_step(model, optimizer, batch)
    report = optimizer.last_report
    state = optimizer.targets[0].tiered_state.nvme
    assert report.speculation.held > 10
    written = report.traffic.nvme_write + report.behind.wait().traffic.nvme_write
    assert report.traffic.nvme_write > report.behind.wait().traffic.nvme_write > 0
    assert written == state.written_bytes_per_step
    optimizer.close()
