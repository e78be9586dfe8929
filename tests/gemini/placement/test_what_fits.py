"""What fits is not refused: not on an assumption; and what is refused lacks what it is said to."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gemini
from bench.shared.models import Tower, seeded, token_batches
from bench.shared.simulated import SimBackend
from bench.shared.threads import run_threads
from gemini import AutoPlacement, ConstPlacement, GeminiDDP, StaticPlacement, trace
from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.placement.fit import StateRequest, assume, fit, fit_state, usual_block_numel
from gemini.placement.homes.budgets import Machine, in_words_of
from gemini.placement.plan import UpdatePath
from gemini.placement.planner import PlanInputs
from gemini.placement.sizes import BudgetError, Budgets, StateBytes
from gemini.placement.tiers import Tier
from gemini.units import BLOCK_NUMEL, MIN_BLOCK_NUMEL, STREAMED_BLOCK_NUMEL
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import train
from tests.support.pairs import pairs
from tests.support.spilled import BLOCKS, SMALL, assert_same, homes, wrapped

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
IDS = torch.zeros(4, 9, dtype=torch.int64)


def made(placement, traced=False, device=None, nvme=BLOCKS, **options):
    module = Tower()
    with_trace = trace(module, (IDS,)) if traced else None
    model = GeminiDDP(module, device, placement, trace=with_trace, **SMALL, **options)
    return model, HybridAdam(model.parameters(), lr=1e-2, nvme=nvme)


@pytest.mark.parametrize("kib", [150, 250, 330])
def test_a_model_that_fits_is_not_refused_for_activations_that_nobody_measured(kib):
    """Four fifths of these budgets would be left to them, and the rest is too small."""
    run, free = made(AutoPlacement(kib << 10), max_norm=0.5), wrapped(max_norm=0.5)
    planning = run[0].engine.planning
    assert N in set.union(*homes(run[0]))
    assert 0 < planning.inputs.trace.peak_non_model_bytes < 0.8 * (kib << 10)
    assert planning.result.profile.peak(D) <= kib << 10
    for each in (run, free):
        train(*each, token_batches(3, 1))
    assert_same(run, free)


def cut_for(budget, module="alike", **options):
    """Chunks, and a digest behind two steps, of a model that is less than one chunk."""
    layers = 8
    with seeded():
        if module == "alike":
            net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
        else:  # no list of layers, and some larger than others
            net = nn.Sequential()
            for i in range(layers):
                net.add_module(f"part_{i}", nn.Linear(*((64, 128), (128, 64))[i % 2]))
    model = GeminiDDP(net, None, AutoPlacement(budget), **options)
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)
    for _ in range(2):
        model(torch.ones(2, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = model.engine.planning.result
    assert plan.profile.peak(D) <= (budget or 1 << 60)
    found = len(model.engine.chunks), model.digest()
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("alike", {}),
        *(pytest.param(*case, marks=pytest.mark.ci) for case in (
            ("unlike", {}), ("alike", {"search_range_m": 8.0}), ("alike", {"hidden_dim": 64}),
        )),
    ],
)  # fmt: skip
def test_a_budget_below_the_chunk_that_the_search_found_has_it_cut(module, options):
    """And no more than it asks for. What is refused in the end is told what does fit."""
    whole, digest = cut_for(None, module, **options)
    nbytes = 2 * 8 * (64 * 64 + 64 if module == "alike" else 64 * 128 + 96)
    room = 80 << 10  # staging
    few = cut_for(2 * nbytes - 1 + room, module, **options)
    many = cut_for(nbytes + room, module, **options)
    assert (whole, digest) == (1, few[1]) == (1, many[1])
    assert 1 < few[0] <= many[0]
    with pytest.raises(BudgetError) as error:
        cut_for(nbytes // 8, module, **options)
    assert "min_chunk_size_m" not in str(error.value)
    assert cut_for(nbytes // 8 + error.value.missing_bytes, module, **options)[1] == digest


@pytest.mark.ci
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_cut_alike(num_ranks):
    budget = num_ranks * ((2 * 8 * (64 * 64 + 64)) + (96 << 10))  # of one node, for all ranks
    found = run_threads(lambda rank: cut_for(budget), num_ranks, backend="gloo")
    assert len(set(found)) == 1 and found[0][0] > 1


def test_chunks_that_were_given_are_not_cut():
    with seeded():
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    given = gemini.search_chunk_configuration(net)
    with pytest.raises(BudgetError, match="lower min_chunk_size_m"):
        GeminiDDP(net, None, AutoPlacement(1 << 16), chunks=given)


CI = pytest.mark.ci


def first(count, rows):
    """The others as slower tests."""
    return [row if i < count else pytest.param(*row, marks=CI) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("kib", "options", "traced"),
    first(4, pairs([1, 20, 100, 118], [{}, {"precision": "fp32"}, {"master_weights": False}],
                   [False, True])),
)  # fmt: skip
def test_a_budget_that_is_refused_lacks_what_it_is_said_to(kib, traced, options):
    with pytest.raises(BudgetError, match=r"device_budget of .* too small") as info:
        made(AutoPlacement(kib << 10), traced, **options)
    enough = (kib << 10) + info.value.missing_bytes
    train(*made(AutoPlacement(enough), traced, **options), token_batches(2, 1))
    with pytest.raises(BudgetError) as info:
        made(AutoPlacement(enough - 1), traced, **options)
    assert info.value.missing_bytes == 1


def test_what_is_refused_names_the_budget_that_was_given():
    cases = [
        (AutoPlacement(host_budget="50KiB"), "host_budget of 50.00 KiB is", "raise host_budget"),
        (AutoPlacement("1GiB", "50KiB"), "host_budget of 50.00 KiB is", "raise host_budget"),
        (AutoPlacement("50KiB", "1GiB"), "device_budget of 50.00 KiB is", "raise device_budget"),
        (ConstPlacement("50KiB"), "device_bytes of 50.00 KiB is", "raise device_bytes"),
    ]
    for policy, name, knob in cases:
        with pytest.raises(BudgetError) as info:
            made(policy)
        assert str(info.value).startswith(name) and knob in str(info.value)


def test_what_ranks_share_is_asked_for_all_of_them():
    machine = Machine(ranks_per_node=3, ranks_per_device=3, has_host_tier=False)
    refused = BudgetError.missing(D, 5, 33, "moment 1", "raise device_budget by as much")
    said = in_words_of(AutoPlacement("100B"), machine, refused)
    assert said.missing_bytes == 14 and (100 + 14) // 3 == 33 + 5
    assert str(said).startswith("device_budget of 100 B is 14 B (14 bytes) too small for moment 1")
    assert ", on each of 3 ranks; raise device_budget" in str(said)


# -- the optimizer --


def test_blocks_that_nobody_chose_are_as_small_as_they_must_be():
    """Staging buffers of the usual block, a whole chunk here, would not fit."""
    placement = AutoPlacement("150KiB")
    with pytest.raises(BudgetError):
        made(replace(placement, block_numel=8192), nvme=NvmeConfig())
    run, free = made(placement, nvme=NvmeConfig()), wrapped(max_norm=0.0)
    assert run[0].engine.planning.block_numel < 8192
    for each in (run, free):
        train(*each, token_batches(3, 1))
    assert_same(run, free)


@pytest.mark.parametrize(
    ("gib", "options", "large"),
    [
        (8, {}, True), (5, {}, True), (4, {}, False), (0, {}, True),
        (8, {"has_host_tier": False}, False), (8, {"off_device": UpdatePath.CPU}, False),
    ],
)  # fmt: skip
def test_blocks_are_large_where_a_device_streams_and_has_room_for_their_staging(
    gib, options, large
):
    """Three buffers of 2^22 elements, 12 bytes each, are a 32nd of 4.5 GiB."""
    specs = [ParamSpec("weight", (64, 64), "bfloat16", trainable=True)]
    inputs = PlanInputs(
        layout=ChunkLayout.build(specs, 4096), trace=sequential_trace(specs),
        state=StateBytes(12, True), budgets=Budgets(device=gib << 30) if gib else Budgets(),
        **options,
    )  # fmt: skip
    assert usual_block_numel(inputs) == (STREAMED_BLOCK_NUMEL if large else BLOCK_NUMEL)


def test_a_device_that_streams_is_given_its_block_by_nobody_but_the_user():
    device = SimBackend(0, updates_by_triton=True)
    device.shards_start_on_host = False
    for nvme, numel in ((NvmeConfig(), 1 << 22), (NvmeConfig(block_numel=1 << 20), 1 << 20)):
        model, _ = made(StaticPlacement(1.0, 1.0), device=device, nvme=nvme)
        assert model.engine.planning.block_numel == numel
    assert made(StaticPlacement(), nvme=NvmeConfig())[0].engine.planning.block_numel == 1 << 20


def test_a_disk_that_is_too_small_is_no_reason_to_assume_activations():
    """With 80 % of the device left to them, the state would not fit the disk."""
    placement = AutoPlacement("600KiB", nvme_budget="400KiB")
    with pytest.raises(BudgetError, match="nvme_budget"):
        made(replace(placement, device_budget="200KiB"))
    model, _ = made(placement)
    assert model.engine.planning.result.profile.peak(N) <= 400 << 10


# -- properties, of random models --


@st.composite
def begun(draw):
    """What a module is wrapped with, before anything is measured."""
    numels = draw(st.lists(st.integers(1, 9000), min_size=1, max_size=8))
    specs = [
        ParamSpec(f"m{i // 2}.p{i}", (n,), "bfloat16", trainable=draw(st.integers(0, 4)) > 0)
        for i, n in enumerate(numels)
    ]
    layout = ChunkLayout.build(specs, draw(st.integers(64, 9000)), draw(st.sampled_from([1, 2])))
    has_host_tier = draw(st.booleans())
    total = sum(numels) * 16 // layout.world_size + 40_000
    device = round(total * draw(st.floats(0.01, 2.0)))
    host = round(total * draw(st.floats(0.5, 2.0))) if has_host_tier else 1 << 62
    inputs = PlanInputs(
        layout=layout,
        trace=sequential_trace(specs),
        state=StateBytes(12, True),
        budgets=Budgets(device, host),
        has_host_tier=has_host_tier,
        max_prefetch=draw(st.integers(0, 2)),
        block_numel=1 << 14,
    )
    policy = AutoPlacement(warmup_non_model_data_ratio=draw(st.sampled_from([0.0, 0.5, 0.8, 0.99])))
    return assume(inputs, policy), policy


def fitted(inputs, policy):
    return fit(inputs, policy, is_measured=False, least_block_numel=MIN_BLOCK_NUMEL)


def test_an_assumption_gives_way_before_there_are_very_many_blocks():
    """Of 32 M elements: tiny ones would leave activations a little more."""
    specs = [ParamSpec(f"m{i}.w", (1 << 18,), "bfloat16") for i in range(128)]
    layout = ChunkLayout.build(specs, 1 << 18, 1)
    inputs = PlanInputs(
        layout=layout, trace=sequential_trace(specs), state=StateBytes(12, True),
        budgets=Budgets(8 << 20), has_host_tier=False, block_numel=BLOCK_NUMEL,
    )  # fmt: skip
    policy = AutoPlacement(warmup_non_model_data_ratio=0.9)
    used, planned = fitted(assume(inputs, policy), policy)
    assert 1 << 15 <= used.block_numel < BLOCK_NUMEL
    assert N in {home for shard in planned.plan.shards for home in shard.state_homes}


@pytest.mark.ci
@settings(max_examples=150, deadline=None)
@given(begun())
def test_an_assumption_refuses_nothing_and_what_is_refused_is_said_exactly(case):
    inputs, policy = case
    no_activations = replace(policy, warmup_non_model_data_ratio=0.0)
    try:
        used, planned = fitted(inputs, policy)
    except BudgetError as error:
        with pytest.raises(BudgetError):
            fitted(assume(inputs, no_activations), no_activations)
        budgets = inputs.budgets.with_more(error.tier, error.missing_bytes)
        try:
            fitted(assume(replace(inputs, budgets=budgets), policy), policy)
        except BudgetError as another:
            assert another.tier is not error.tier
        return
    assumed = used.trace.peak_non_model_bytes
    assert assumed <= inputs.trace.peak_non_model_bytes
    assert planned.profile.peak(D) <= inputs.budgets.device
    if assumed < inputs.trace.peak_non_model_bytes and not inputs.has_host_tier:
        more = replace(used, trace=sequential_trace(inputs.layout.params, assumed + 1))
        with pytest.raises(BudgetError):  # activations are left all that can be left to them
            fit(more, replace(policy, steady_cap_ratio=1.0), is_measured=True,
                least_block_numel=MIN_BLOCK_NUMEL)  # fmt: skip


@pytest.mark.ci
@settings(max_examples=100, deadline=None)
@given(
    begun(), st.sampled_from([1024, 4096, 1 << 14]), st.integers(1, 5), st.sampled_from([0.0, 1.0])
)
def test_an_optimizer_that_is_refused_lacks_what_it_is_said_to(case, block_numel, depth, frac):
    inputs, policy = case
    request = StateRequest(StateBytes(12, True), frac, block_numel, depth)

    def both(inputs):
        now = fitted(inputs, policy)
        return fit_state((inputs, False), now, policy, request, is_measured=False)

    try:
        fitted(inputs, policy)
    except BudgetError:
        return
    try:
        both(inputs)
    except BudgetError as error:
        budgets = inputs.budgets.with_more(error.tier, error.missing_bytes)
        try:
            both(assume(replace(inputs, budgets=budgets), policy))
        except BudgetError as another:
            assert another.tier is not error.tier
