"""What a tail is predicted to hide: worked out by hand, and held within what none can pass."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.memtracer.trace import TraceMoment, sequential_trace
from gemini.placement.plan import UpdatePath
from gemini.placement.planner import make_plan
from gemini.placement.policy import AutoPlacement, StaticPlacement
from gemini.placement.sizes import Bandwidths, Budgets, StateBytes
from gemini.placement.tiers import Tier
from gemini.placement.timetable import clock
from gemini.placement.timetable.allowed import (
    NO_BUFFERS,
    NO_ROOM,
    against_tail,
    facts_of,
    kept_for_updates,
)
from gemini.placement.timetable.updates import EARLY_WINDOW, SERIAL, best_update, priced_in_words
from gemini.units import ChunkId, ParamId
from tests.support.priced import BLOCK, DISK, READ, TEN, WRITE, asked


def priced(*args, policy=AutoPlacement(), **options):  # noqa: B008
    return make_plan(asked(*args, **options), policy).overlapped.get("tail")


# The first two of ten blocks are read ahead, or in their buffers: eight are read, and ten written
UPDATE = 8 * READ + 10 * WRITE


@pytest.mark.parametrize("forward", [0.1, 2.0, 4.5, 5.0, 40.0])
def test_a_tail_hides_the_shorter_of_forward_and_update(forward):
    planned = make_plan(asked(TEN, forward))
    tail = planned.overlapped["tail"]
    assert tail.update_seconds == pytest.approx(UPDATE)
    assert planned.cost.seconds == pytest.approx(10 * forward + UPDATE + 100)
    assert tail.seconds == pytest.approx(max(10 * forward, UPDATE) + 100)
    assert tail.waited_seconds == pytest.approx(max(0, UPDATE - 10 * forward))
    hidden = tail.update_seconds - tail.waited_seconds
    assert hidden == pytest.approx(min(10 * forward, UPDATE))


def test_a_forward_waits_for_what_it_begins_with():
    """The first of three modules has eight of ten blocks."""
    tail = priced([8 * BLOCK, BLOCK, BLOCK], 200.0)
    until_the_eighth = 6 * READ + 6 * WRITE  # which is read when a write has given a buffer back
    assert tail.waited_seconds == pytest.approx(until_the_eighth)
    assert tail.seconds == pytest.approx(until_the_eighth + 600 + 100)
    late = priced([BLOCK, BLOCK, 8 * BLOCK], 200.0)
    assert late.waited_seconds == pytest.approx(0)


def test_what_computes_has_one_processor_for_updates_and_forward():
    """A disk that takes no time: nothing is hidden."""
    updates = Bandwidths(device_memory=28 * BLOCK / 1.5)  # 1.5 s a block
    tail = priced(TEN, 4.0, bandwidths=updates)
    assert tail.update_seconds == pytest.approx(15)
    assert tail.seconds == pytest.approx(40 + 15 + 100)  # as serial
    assert tail.waited_seconds == pytest.approx(tail.update_seconds)
    slow_disk = replace(updates, nvme_read=DISK.nvme_read, nvme_write=DISK.nvme_write)
    tail = priced(TEN, 0.5, bandwidths=slow_disk)  # which leaves time for all of it
    assert tail.waited_seconds == pytest.approx(tail.update_seconds - 5)


def test_gradients_live_until_their_blocks_are_updated():
    """Of one block each, of which two are updated when the forward begins."""
    gradient = 2 * BLOCK
    late = priced(TEN, 0.1).kept_bytes
    assert late[0] == 8 * gradient and late[-1] == 0 and len(late) == 20
    assert list(late) == sorted(late, reverse=True)
    assert set(priced(TEN, 200.0).kept_bytes[2:]) == {0}


def test_a_chunk_with_state_in_memory_is_waited_for_to_the_end():
    part = make_plan(asked([4 * BLOCK] * 3, 1.0, nvme_state_frac=0.5))
    homes = [[home.value for home in shard.state_homes] for shard in part.plan.shards]
    assert homes == [["nvme"] * 4, ["nvme"] * 2 + ["device"] * 2, ["device"] * 4]
    tail = part.overlapped["tail"]
    assert tail.waited_seconds == pytest.approx(tail.update_seconds - 1)  # of chunk 0


def test_reads_that_a_short_backward_does_not_hide_are_in_the_tail():
    tail = priced(TEN, 4.0, backward=1.0)
    assert tail.update_seconds == pytest.approx(UPDATE + 2 * READ - 1)


def test_a_trace_of_the_root_module_alone_is_priced_by_its_chunks():
    everything = tuple(ParamId(i) for i in range(10))
    for forward in (0.1, 4.5, 40.0):
        fine = asked(TEN, forward)
        moments = (
            TraceMoment("forward", "enter", "", everything, 0, 10 * forward),
            TraceMoment("forward", "leave", "", everything, 0),
            TraceMoment("backward", "enter", "", everything, 0, 100.0),
            TraceMoment("backward", "leave", "", everything, 0),
        )
        coarse = replace(fine, trace=replace(fine.trace, moments=moments))
        want, got = make_plan(fine).seconds_by_update, make_plan(coarse).seconds_by_update
        assert got == pytest.approx(want)


def test_a_gather_over_ranks_waits_for_its_chunk():
    """Of four blocks each, 10 s over the network, and computed with for 1 s."""
    links = replace(DISK, collective=8 * BLOCK / 10)  # bytes of a half in bf16
    numels = [8 * BLOCK] * 3
    tail = priced(numels, 1.0, world_size=2, bandwidths=links, max_prefetch=0)
    third_is_updated = 10 * READ + 10 * WRITE
    assert tail.update_seconds == pytest.approx(third_is_updated + 2 * WRITE)
    assert tail.waited_seconds == pytest.approx(third_is_updated + 11 - 3 * 11)


REASONS = {
    "all state is on the device": {"nvme_state_frac": 0.0},
}


@pytest.mark.parametrize("reason", REASONS)
def test_homes_that_are_against_a_tail_have_no_price(reason):
    numels = [4 * BLOCK] * 12
    planned = make_plan(asked(numels, 1.0, **REASONS[reason]))
    assert planned.against_tail == reason and not planned.overlapped


def test_there_is_no_price_where_nobody_knows_how_long_a_forward_takes_nor_of_an_evaluation():
    assert priced(TEN, 0.0) is None
    specs = asked(TEN, 1.0).layout.params
    assert priced(TEN, 1.0, trace=sequential_trace(specs, kind="eval")) is None
    by_operations = asked(TEN, 0.0, backward=0.0, flops=3.0, bandwidths=replace(DISK, flops=1.0))
    assert make_plan(by_operations).cost.seconds == pytest.approx(3 + UPDATE)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_tail_passes_its_bounds(data):
    """At least the pass and at least what the disk leaves of it; at most one behind the other."""
    numels = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
    forward = data.draw(st.lists(st.floats(0.1, 30), min_size=len(numels), max_size=len(numels)))
    inputs = asked(
        numels, forward, backward=data.draw(st.floats(0, 60)),
        world_size=data.draw(st.integers(1, 3)),
        nvme_state_frac=data.draw(st.sampled_from([0.3, 1.0])),
        bandwidths=replace(
            DISK, device_memory=data.draw(st.sampled_from([1e2, 1e4, 1e9])),
            collective=data.draw(st.sampled_from([1e3, 1e9])),
        ),
    )  # fmt: skip
    planned = make_plan(inputs, StaticPlacement())
    tail = planned.overlapped.get("tail")
    assert (tail is None) == (planned.against_tail is not None)
    if tail is None:
        return
    calls = inputs.trace.calls(inputs.layout.chunk_of())
    most = kept_for_updates(planned.plan, calls, inputs.backward)
    assert all(kept <= bound for kept, bound in zip(tail.kept_bytes, most, strict=True))
    bare = tail.seconds - tail.waited_seconds
    assert tail.waited_seconds >= -1e-9 and tail.waited_seconds <= tail.update_seconds + 1e-9
    assert bare >= sum(m.seconds for m in inputs.trace.moments) - 1e-9
    computed = sum(m.seconds for m in inputs.trace.moments) + planned.cost.busy["update"]
    assert tail.seconds >= computed * (1 - 1e-9)


# -- state in host memory beside a device --

# seconds of a block's state to the device and back; a kernel takes no time
LINK = Bandwidths(host_to_device=12 * BLOCK / READ, device_to_host=12 * BLOCK / WRITE)
ON_HOST = {"has_host_tier": True, "nvme_state_frac": 0.0, "bandwidths": LINK}


def priced_on_host(numels, forward, **options):
    policy = StaticPlacement(offload_optim_frac=options.pop("on_host", 1.0))
    return make_plan(asked(numels, forward, **ON_HOST | options), policy)


@pytest.mark.parametrize("forward", [0.1, 2.0, 3.0, 40.0])
def test_a_tail_hides_the_link_to_host_memory(forward):
    """Both ways at once, and the way back takes longer; a serial step's first came in backward."""
    planned = priced_on_host(TEN, forward)
    tail = planned.overlapped["tail"]
    assert tail.update_seconds == pytest.approx(READ + 10 * WRITE)
    assert tail.seconds == pytest.approx(READ + max(10 * forward, 10 * WRITE) + 100)
    assert planned.cost.seconds == pytest.approx(10 * forward + 10 * WRITE + 100)


def test_updates_by_the_host_leave_the_device_to_the_forward():
    """3 s a block, on the host; kernels that took as long would take the forward's time."""
    slow = Bandwidths(device_memory=28 * BLOCK / 3.0, host_memory=28 * BLOCK / 3.0)
    by_host = priced_on_host(TEN, 3.0, bandwidths=slow, off_device=UpdatePath.CPU).overlapped[
        "tail"
    ]
    assert by_host.update_seconds == pytest.approx(30)
    assert by_host.waited_seconds == pytest.approx(3)  # for the first block, and then for none
    by_kernels = priced_on_host(TEN, 3.0, bandwidths=slow).overlapped["tail"]
    measured = 10 * 3.0 * 2 / 28  # gradients are read for their norm, before the step
    assert by_kernels.waited_seconds == pytest.approx(30 + measured)


def test_what_is_on_the_device_is_updated_before_what_is_beside_it():
    """The last chunks' state is there: nobody waits for the others to the end."""
    planned = priced_on_host(TEN, 3.0, on_host=0.5)
    homes = [shard.state_homes[0].value for shard in planned.plan.shards]
    assert homes == ["host"] * 5 + ["device"] * 5
    tail = planned.overlapped["tail"]
    assert tail.update_seconds == pytest.approx(READ + 5 * WRITE)
    assert tail.waited_seconds == pytest.approx(READ)  # for the first block


def test_a_disk_is_hidden_beside_a_device_too():
    """Blocks on it are updated first, and the first call waits for one of those alone."""
    disk = replace(LINK, nvme_read=DISK.nvme_read, nvme_write=DISK.nvme_write)
    tail = priced_on_host(TEN, 40.0, nvme_state_frac=0.4, bandwidths=disk).overlapped["tail"]
    on_disk = 2 * READ + 4 * WRITE  # two were read in the backward before
    assert tail.update_seconds >= on_disk + 6 * WRITE
    assert tail.waited_seconds < on_disk


@pytest.mark.parametrize("on", [{}, ON_HOST], ids=["disk", "host"])
@pytest.mark.parametrize("lacks", [False, True])
def test_a_plan_without_room_for_gradients_that_live_into_a_forward_has_no_tail(lacks, on):
    """At the end of forward activations are most, and the last gradient is still held."""
    numels, gradient, activations = TEN, 2 * BLOCK, 1 << 20
    planned = priced_on_host(numels, 1.0) if on else make_plan(asked(numels, 1.0))
    calls = asked(numels, 1.0).trace.calls({ParamId(i): ChunkId(i) for i in range(10)})
    most = max(planned.profile.total(Tier.DEVICE)[:20]) + activations
    totals = [0] * 18 + [most] * 2  # at the last call
    plan = replace(planned.plan, budgets=Budgets(most + gradient - lacks))
    facts = facts_of(plan, totals, calls, 20, has_buffers=False)
    assert against_tail(facts) == (NO_ROOM if lacks else None)


def test_a_budget_is_no_reason_where_the_plan_has_room():
    """All state on the host; the device holds the rest, with as much again."""
    policy = AutoPlacement(device_budget=400 * BLOCK, warmup_non_model_data_ratio=0.0)
    planned = make_plan(asked(TEN, 1.0, **ON_HOST, budgets=Budgets(150 * BLOCK)), policy)
    assert planned.plan.blocks_on(Tier.HOST)
    assert planned.against_tail is None and "tail" in planned.overlapped


# -- parameters in files --

PARAM_READ, PARAM_WRITE = READ / 6, WRITE / 6  # of a block: 2 bytes of 12


@pytest.mark.parametrize("forward", [40.0, 4.0])
def test_the_disk_brings_parameters_beside_what_a_tail_writes(forward):
    """All blocks but the two of the backward before are read, and all are written with their
    parameters; every call of a forward reads its own."""
    planned = make_plan(asked(TEN, forward, fixed_params=(Tier.NVME,) * 10))
    tail = planned.overlapped["tail"]
    update = 8 * READ + 10 * (WRITE + PARAM_WRITE)
    assert update <= tail.update_seconds <= update + 10 * PARAM_READ  # on the same disk
    assert planned.cost.seconds == pytest.approx(PARAM_READ + 10 * forward + 100 + update)
    if forward == 40.0:
        assert tail.seconds == pytest.approx(PARAM_READ + 400 + 100)
    else:  # the last call waits for its parameter, which the disk reads among its writes
        assert update <= tail.seconds - 104 + 1e-9 <= update + 10 * PARAM_READ


@pytest.mark.parametrize("forward", [0.1, 10.0])
def test_a_parameter_is_read_ahead_behind_its_update(forward):
    """The last one, which a forward asks for as soon as it begins: nothing waits but its call."""
    homes = (*[Tier.DEVICE] * 9, Tier.NVME)
    tail = priced(TEN, [forward] * 9 + [40.0], fixed_params=homes)
    ready = 8 * READ + 9 * WRITE + PARAM_READ  # the last write comes after it
    assert tail.seconds == pytest.approx(max(9 * forward, ready) + 40 + 100)


def test_parameters_in_files_beside_a_device_need_buffers_for_a_tail():
    planned = make_plan(asked(TEN, 1.0, **ON_HOST), StaticPlacement(offload_optim_frac=1.0))
    assert planned.against_tail is None
    for home in ({"param_home": Tier.NVME}, {"grad_home": Tier.NVME}):
        shards = tuple(replace(shard, **home) for shard in planned.plan.shards)
        in_files = replace(planned.plan, shards=shards)
        for has_buffers in (True, False):
            facts = facts_of(in_files, [], [], 0, has_buffers=has_buffers)
            assert against_tail(facts) == (None if has_buffers else NO_BUFFERS)


def test_there_is_no_price_where_nothing_is_off_the_device():
    assert priced(TEN, 1.0, nvme_state_frac=0.0) is None
    assert priced(TEN, 1.0, state=StateBytes(8, False)) is not None  # without masters
    assert priced_on_host(TEN, 1.0).overlapped.keys() == {"tail", "speculate", "both"}


@pytest.mark.parametrize(("forward", "best"), [(40.0, "tail"), (1.0, "tail"), (1e-6, "serial")])
def test_the_simplest_of_the_fastest_is_chosen(forward, best):
    """A short forward hides nothing that a prediction could tell."""
    seconds = make_plan(asked(TEN, forward)).seconds_by_update
    assert list(seconds) == ["serial", "tail"]
    assert best_update(seconds) == best
    assert seconds[best] <= 1.02 * min(seconds.values())


@pytest.mark.parametrize("numels", [TEN, [BLOCK], [BLOCK] * 3, [5 * BLOCK, 900, 3 * BLOCK]])
@pytest.mark.parametrize("forward, backward", [(1.0, 100.0), (0.001, 0.001)])
@pytest.mark.parametrize("on", [{}, ON_HOST], ids=["disk", "host"])
def test_one_serial_iteration_costs_what_every_later_one_does(
    numels, on, forward, backward, monkeypatch
):
    """Of two, as the order of blocks alternates; also of passes that hide no read."""
    make = priced_on_host if on else lambda *given, **options: make_plan(asked(*given, **options))
    planned = make(numels, forward, backward=backward)
    work = clock.Work(planned.plan, planned.inputs)
    once = clock.price(work, SERIAL)
    monkeypatch.setitem(clock.ITERATIONS, SERIAL, 3)
    later = clock.price(work, SERIAL)
    assert later.seconds == pytest.approx(once.seconds, rel=1e-12)
    assert later.busy == pytest.approx(once.busy, rel=1e-12)


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_a_serial_step_reads_no_further_ahead_than_a_step_does(seconds):
    """The disk waits for the first update: two blocks are in buffers, and the third is read when
    one of them is updated."""
    links = replace(DISK, device_memory=28 * BLOCK / seconds)
    cost = make_plan(asked(TEN, 4.0, bandwidths=links)).cost
    assert cost.update_seconds == cost.waited_seconds == pytest.approx(UPDATE + seconds)
    assert cost.busy["nvme"] == pytest.approx(UPDATE)


def test_what_is_never_released_is_gathered_behind_the_step():
    """Three payloads, each 10 s over the network in its reduction and in its gather."""
    links = replace(DISK, collective=8 * BLOCK / 10)  # bytes of a half in bf16
    options = {"world_size": 2, "bandwidths": links, "nvme_state_frac": 0.0}
    cost = make_plan(asked([8 * BLOCK] * 3, 1.0, **options), StaticPlacement(0.0)).cost
    assert cost.update_seconds == cost.waited_seconds == pytest.approx(30)
    assert cost.busy["collective"] == pytest.approx(60)


@pytest.mark.parametrize("update", ["serial", "tail"])
def test_inputs_of_blocks_on_the_device_take_their_link(update):
    """Parameters and gradients live on the host, the state does not: a step brings a block's
    gradient, and takes its parameter back beside the next one."""
    links = Bandwidths(host_to_device=2 * BLOCK / READ, device_to_host=2 * BLOCK / WRITE)
    policy = StaticPlacement(offload_param_frac=1.0)
    options = {**ON_HOST, "bandwidths": links, "max_prefetch": 0}
    planned = make_plan(asked(TEN, 1.0, **options), policy)
    assert {home for shard in planned.plan.shards for home in shard.state_homes} == {Tier.DEVICE}
    cost = clock.price(clock.Work(planned.plan, planned.inputs), update)
    alone = READ + 10 * WRITE
    if update == SERIAL:
        assert cost.update_seconds == pytest.approx(alone)
    else:  # the forward beside it gathers by the same link
        assert alone <= cost.update_seconds <= alone + 10 * READ


@pytest.mark.parametrize("params_on_host", [True, False])
def test_what_is_brought_to_a_block_on_the_device_comes_beside_the_update_before_it(params_on_host):
    """To its own buffers, if its parameter has left them. If only gradients come nothing leaves,
    and each comes when the block before is updated."""
    links = Bandwidths(
        host_to_device=2 * BLOCK / READ, device_to_host=2e6 * BLOCK, device_memory=28 * BLOCK / 3.0
    )
    options = {**ON_HOST, "bandwidths": links, "max_prefetch": 0}
    problem = asked(TEN, 1.0, **options)
    planned = make_plan(problem, StaticPlacement(offload_param_frac=1.0))
    work = clock.Work(planned.plan, planned.inputs)
    if not params_on_host:
        work.results.clear()
    run = clock.StepClock(work, SERIAL)
    run.run()
    seconds = work.measured_bytes / links.device_memory + READ + 10 * 3.0
    seconds += 0 if params_on_host else 9 * READ
    assert READ < 3.0 and run.update_seconds == pytest.approx(seconds, rel=1e-4)


# -- in backward --

BOTH_WAYS = {"host_to_device": 12 * BLOCK / READ, "device_to_host": 12 * BLOCK / READ}
LEAVES = READ * 14 / 12  # of state and new weights


def priced_early(forward, backward, **options):
    links = Bandwidths(**BOTH_WAYS)
    return priced_on_host(TEN, forward, backward=backward, bandwidths=links, **options)


def test_a_long_backward_hides_all_blocks_but_those_of_its_last_call():
    """Of which the gradient is final as backward ends; then all weights come from the host."""
    cost = priced_early(1.0, 100.0).overlapped["speculate"]
    weights = 10 * READ / 6
    assert cost.seconds == pytest.approx(10 + 100 + READ + LEAVES + weights)
    assert cost.waited_seconds == pytest.approx(READ + LEAVES + weights)
    assert cost.seconds < priced_early(1.0, 100.0).cost.seconds


def test_a_short_backward_leaves_blocks_to_the_step():
    """Sixteen are given to streams: of ten all are, and their copies are waited for."""
    early = priced_early(1.0, 0.1)
    cost = early.overlapped["speculate"]
    assert cost.update_seconds == pytest.approx(READ + 10 * LEAVES + 10 * READ / 6, rel=0.05)
    assert cost.seconds > early.cost.seconds  # what leaves is more, and comes back


def test_no_more_blocks_are_given_in_backward_than_the_window_has():
    """Of forty, the other 24 are updated by the step, without weights of their own."""
    links, numels = Bandwidths(**BOTH_WAYS), [BLOCK] * 40
    cost = priced_on_host(numels, 1.0, backward=0.1, bandwidths=links).overlapped["speculate"]
    early = READ + EARLY_WINDOW * LEAVES
    assert cost.update_seconds == pytest.approx(early + 24 * READ + 16 * READ / 6, rel=0.06)


def test_what_is_left_by_backward_goes_on_in_a_tail():
    early = priced_early(0.5, 15.0).overlapped
    speculate, both = early["speculate"], early["both"]
    assert both.seconds < min(speculate.seconds, early["tail"].seconds)
    assert both.seconds >= 5 + 15
    assert both.waited_seconds < speculate.waited_seconds


def test_nothing_chooses_updates_in_backward_but_words_have_their_price():
    """A clip that bites would have them done again."""
    seconds = {"serial": 3.0, "tail": 2.0, "speculate": 1.0, "both": 0.5}
    assert best_update(seconds) == "tail"
    assert "speculate 1 s, both 0.5 s; best" in priced_in_words(seconds)


def test_updates_in_backward_have_no_price_without_kernels_masters_or_host_state():
    for options in ({"state": StateBytes(8, False)}, {"off_device": UpdatePath.CPU}):
        assert not {"speculate", "both"} & priced_on_host(TEN, 1.0, **options).overlapped.keys()
    assert not {"speculate", "both"} & make_plan(asked(TEN, 1.0)).overlapped.keys()
    disk = replace(LINK, nvme_read=1e9, nvme_write=1e9)
    on_disk = priced_on_host(TEN, 1.0, nvme_state_frac=1.0, bandwidths=disk)
    assert on_disk.overlapped.keys() == {"tail"}
