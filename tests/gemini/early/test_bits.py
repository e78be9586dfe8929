"""Blocks that are updated in backward have the bits of serial steps, whatever the step comes to."""

import weakref
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.shared.models import token_loss
from optim import LossScale
from tests.support.loops.early import (
    BETWEEN,
    HELD_BY,
    UPDATES,
    Iteration,
    Sometimes,
    interrupted,
    iterations,
    num_early,
    patient,
    program,
    same,
    serial,
)
from tests.support.loops.endings import one_step, resumed
from tests.support.loops.tails import (
    SCHEDULES,
    absent,
    batches,
    differences,
    everything,
    run,
    wrapped,
)

PRECISIONS = {
    "bf16": {},
    "clipped": {"max_norm": 0.1},
    "fp16": {
        "precision": "fp16",
        "loss_scale": LossScale(initial_scale=2.0**10, growth_interval=1),
    },
    "partly": {"fraction": 0.4},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_the_bits_of_serial_steps(name):
    for reports in same(SCHEDULES[name]):
        assert reports[0].speculated == 0  # how many backwards a step has is not known yet
        assert (sum(r.speculated for r in reports) > 0) == (name != "clips")


@pytest.mark.parametrize("options", PRECISIONS.values(), ids=PRECISIONS)
def test_in_every_precision(options):
    same(SCHEDULES["skips"], updates=["both"], **options)


@pytest.mark.ci
@pytest.mark.parametrize("options", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_in_every_precision(name, options):
    if name == "clips" and "max_norm" in options:
        return  # the engine clips, and refuses to clip twice
    same(SCHEDULES[name], **options)


def test_all_blocks_but_those_that_were_read_ahead_are_updated_in_backward():
    for update in UPDATES:
        with patient(), run(SCHEDULES["plain"], update) as (_, optimizer, _):
            found = optimizer.last_report.speculation
            assert found.speculated == found.held == num_early(optimizer) > 10
            assert found.quiet_steps == 8


def test_parameters_without_a_gradient_keep_their_bits_and_counts():
    """One is absent where it was there in the step before: it was updated, and is not."""
    found = same(absent, module=Sometimes)
    assert sum(r.redone for reports in found for r in reports) > 0


@pytest.mark.parametrize("name", BETWEEN)
def test_what_a_user_does_between_backward_and_step_counts(name):
    for reports in same(interrupted(BETWEEN[name]), updates=["both"]):
        touched = [r for step, r in enumerate(reports) if step % 2]
        if name in HELD_BY:
            assert [r.redone for r in touched] == [0, 0] and all(r.held for r in touched)
        else:
            assert sum(r.redone for r in touched) > 0


@pytest.mark.ci
@pytest.mark.parametrize("name", BETWEEN)
def test_and_where_the_rest_is_done_in_the_step(name):
    same(interrupted(BETWEEN[name]), updates=["speculate"])


@pytest.mark.parametrize("name", ["zeroes one", "drops one", "assigns one"])
def test_only_the_chunk_whose_gradient_was_changed_is_done_again(name):
    ((_, found, *_),) = same(interrupted(BETWEEN[name]), updates=["speculate"])
    assert 0 < found.redone < found.held


def second_backwards(model, optimizer):
    """Of the same graph, and not in every step."""
    for step, batch in enumerate(batches(6)):
        loss = token_loss(model, batch)
        loss.backward(retain_graph=step % 3 == 1)
        if step % 3 == 1:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def test_a_second_backward_adds_to_what_was_taken_for_final():
    for reports in same(second_backwards):
        assert reports[1].redone > 0


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

    for reports in same(accumulates):
        assert reports[1].redone == reports[1].held > 10


def test_the_number_of_backwards_is_learned():
    def accumulates(model, optimizer):
        for step, batch in enumerate(batches(6)):
            token_loss(model, batch).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
                yield

    for reports in same(accumulates):
        assert [r.redone for r in reports] == [0] * 3 and reports[-1].held > 0


def test_a_backward_that_no_step_takes_does_not_count():
    turns = [Iteration(), Iteration(), Iteration(stepless=True), Iteration()]
    for reports in same(program(turns)):
        assert reports[-1].held > 10


def grows(model, optimizer):
    """A param group is added between backward and step."""
    for step, batch in enumerate(batches(4)):
        token_loss(model, batch).backward()
        if step == 2:
            optimizer.add_param_group({"params": [model.module.embed.weight], "lr": 1e-3})
        optimizer.step()
        optimizer.zero_grad()


def test_a_group_that_is_added_between_backward_and_step_is_updated():
    from bench.shared.models import Tower
    from gemini import GeminiDDP
    from optim import HybridAdam, NvmeConfig

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


def saved_behind_a_backward(update, tmp_path):
    """Two steps, a checkpoint between a backward and its step, and two more elsewhere."""
    import gemini

    folder = tmp_path / update
    model, optimizer = wrapped(update)
    for step, batch in enumerate(batches(3)):
        token_loss(model, batch).backward()
        if step == 2:
            gemini.save_checkpoint(folder, model, optimizer)
            break
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return resumed(update, folder, batches(4)[2:])


def test_a_run_that_was_saved_behind_a_backward_and_resumed_has_the_same_bits(tmp_path):
    want = serial(SCHEDULES["plain"])
    for update in UPDATES:
        with patient():
            assert differences(saved_behind_a_backward(update, tmp_path), want) == []


@given(st.lists(iterations, min_size=3, max_size=7), st.sampled_from(UPDATES),
       st.booleans())  # fmt: skip
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
def test_every_program_has_the_bits_of_serial_steps(drawn, update, hurried):
    same(program([Iteration(), *drawn]), updates=[update], hurried=hurried)


@pytest.mark.ci
@given(st.lists(iterations, min_size=3, max_size=9), st.sampled_from(UPDATES),
       st.booleans())  # fmt: skip
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_very_many_programs_have_the_bits_of_serial_steps(drawn, update, hurried):
    same(program([Iteration(), *drawn]), updates=[update], hurried=hurried)


# -- rules --

FP32 = {"precision": "fp32"}
ROUNDED = {"master_weights": False}


@pytest.mark.parametrize("options", [FP32, ROUNDED], ids=["fp32", "rounded"])
def test_without_masters_no_block_is_updated_in_backward(options):
    """New weights would have nowhere to wait."""
    for reports in same(SCHEDULES["plain"], **options):
        assert [r.speculated for r in reports] == [0] * 4
    with run(SCHEDULES["plain"], "both", **options) as (model, _, tails):
        assert tails == [True] * 4
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
        cost = model.engine.planning.result.speculation
        held = optimizer.last_report.speculation.held
        assert said in lines and f"predicted in backward: {cost}" in lines
        assert f"held by the last step: {held} of {cost.num_blocks} blocks on NVMe" in lines
        assert (f"predicted of the update: {cost.tail}" in lines) == (update == "both")
        assert 0 < cost.num_ahead <= cost.num_blocks and held > 0


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
