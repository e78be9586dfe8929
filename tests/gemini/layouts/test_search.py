"""Search of layouts: what is priced, what it costs, and what wins."""

from dataclasses import replace

import pytest

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.layouts.cluster import Cluster, Link
from gemini.layouts.layout import (
    PLANNED,
    RING,
    ULYSSES,
    GlobalBatch,
    ParallelLayout,
    meshes_of,
    runs_of,
)
from gemini.layouts.price import STATE_BYTES, Pricing
from gemini.layouts.search import search
from gemini.layouts.shape import decoder
from gemini.memtracer.trace import sequential_trace
from gemini.optim.adam import AdamRule
from gemini.optim.rules.state_layout import KINDS, StateLayout
from gemini.placement.planner import PlanInputs, make_plan
from gemini.placement.sizes import Bandwidths, StateBytes
from gemini.units import GIB

SHAPE = decoder("", hidden=1024, layers=8, heads=16, kv_heads=8, mlp=4096, vocab=32000)
INSIDE, ACROSS = Link(1e-5, 300e9), Link(2e-5, 25e9)
SPEEDS = Bandwidths(flops=3e14, device_memory=2e12, host_to_device=24e9, device_to_host=24e9)
CARDS = Cluster(16, 8, 64 * GIB, 64 * GIB, SPEEDS, 1e14, 2e13, 2e12, INSIDE, ACROSS)
STEP = GlobalBatch(32, 2048)


def price(layout, cluster=CARDS, shape=SHAPE, step=STEP):
    return Pricing(shape, cluster, step, layout).price()


def test_a_ring_takes_all_bytes_but_a_ranks_own():
    assert CARDS.gather(8e9, 8, 1) == pytest.approx(7 / 8 * 8e9 / 300e9 + 3e-5)
    assert CARDS.reduce(8e9, 8, 1) == pytest.approx(2 * CARDS.gather(8e9, 8, 1))
    assert CARDS.gather(8e9, 1, 1) == 0


def test_a_group_across_nodes_has_a_link_of_each_of_its_ranks_there():
    neighbours, apart = CARDS.gather(8e9, 16, 1), CARDS.gather(8e9, 2, 8)
    assert neighbours == pytest.approx(15 / 16 * 8e9 / (8 * 25e9) + 3e-5 + 2e-5)
    assert apart == pytest.approx(1 / 2 * 8e9 / 25e9 + 2e-5)


def test_an_all_to_all_sends_what_leaves_a_node_over_one_link():
    assert CARDS.exchange(1e9, 16, 1) == pytest.approx(8 / 16 * 1e9 / 25e9 + 3e-5 + 2e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 16])
def test_every_mesh_has_all_ranks_and_sequences(ranks):
    cluster = replace(CARDS, ranks=ranks)
    found = [
        run
        for mesh in meshes_of(SHAPE, cluster, GlobalBatch(48, 2048))
        for run in runs_of(mesh, SHAPE)
    ]
    assert len(found) == len(set(found))
    for layout in found:
        assert layout.ranks == ranks
        assert layout.data * layout.batch * layout.micro_batches == 48
        assert layout.data % layout.replicas == 0
        heads = SHAPE.heads // layout.tp
        assert layout.sp_mode == RING or heads % layout.sp == 0
        assert 2048 % (layout.sp * (2 if layout.sp_mode == RING and layout.sp > 1 else 1)) == 0
        assert layout.pp * layout.chunks <= SHAPE.layers


def test_what_a_model_cannot_do_is_in_no_layout():
    shape = replace(SHAPE, can=frozenset())
    for one in search(shape, CARDS, STEP).ranked:
        assert one.layout.tp == one.layout.pp == one.layout.sp == one.layout.ep == 1
        assert not one.layout.recompute


def test_experts_are_shared_if_there_are_some():
    shape = replace(SHAPE, experts=8, experts_used=2, expert_numel=10**8, can=SHAPE.can | {"ep"})
    sizes = {one.layout.ep for one in search(shape, CARDS, STEP).ranked}
    assert sizes == {1, 2, 4, 8}


def test_parameters_and_state_by_stage():
    own = SHAPE.numel / 16
    whole = SHAPE.numel * 2
    found = {z: price(ParallelLayout(data=16, zero=z, batch=2)).nbytes for z in ("1", "2", "3")}
    assert all(one["state"] == pytest.approx(12 * own) for one in found.values())
    assert found["1"]["parameters"] == found["1"]["gradients"] == pytest.approx(whole)
    assert found["2"]["parameters"] == pytest.approx(whole)
    assert found["2"]["gradients"] < whole / 3
    assert found["3"]["parameters"] < whole / 3
    assert found["3"]["gradients"] == pytest.approx(2 * own)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_state_are_those_of_the_optimizer(kind):
    planes = StateLayout(AdamRule.layout.planes, kind)
    assert STATE_BYTES[kind] == pytest.approx(planes.bytes_per_element, rel=0.02)
    with pytest.raises(ValueError, match="state='4bit'; expected one of"):
        search(SHAPE, CARDS, STEP, state="4bit")


@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_frozen_weights_have_no_state_and_no_gradients(zero):
    """Nor what reduces these, or gathers what a step has changed."""
    layout = ParallelLayout(data=16, zero=zero, batch=1, micro_batches=2)
    whole, half, none = (
        price(layout, shape=replace(SHAPE, trained=share)) for share in (1.0, 0.5, 0.0)
    )
    for name in ("state", "gradients", "sums"):
        assert half.nbytes[name] == pytest.approx(whole.nbytes[name] / 2) and none.nbytes[name] == 0
    assert half.nbytes["parameters"] == whole.nbytes["parameters"] == none.nbytes["parameters"]
    assert half.seconds["update"] == pytest.approx(whole.seconds["update"] / 2)
    assert none.seconds["update"] == 0
    # in each of two micro-batches of 2048 tokens, gradients of the weights of layers and head
    flops = 2048 * (8 * SHAPE.layer_flops(2048)[0] + SHAPE.head_flops)
    read = 2 * (8 * SHAPE.layer_numel + SHAPE.hidden * SHAPE.vocab) / CARDS.weights
    more = whole.seconds["compute"] - none.seconds["compute"]
    assert more == pytest.approx(2 * (flops / 3e14 + read))
    assert (none.seconds["shards"] == 0) == (zero != "3")


def test_an_update_has_the_price_that_the_planner_gives_it():
    spec = ParamSpec("weights", (SHAPE.numel,), "bfloat16", trainable=True)
    inputs = PlanInputs(
        layout=ChunkLayout.build([spec], SHAPE.numel), trace=sequential_trace([spec]),
        state=StateBytes(per_element=12, has_master=True), bandwidths=SPEEDS,
    )  # fmt: skip
    planned, one = make_plan(inputs).cost, replace(CARDS, ranks=1, per_node=1)
    found = Pricing(SHAPE, one, STEP, ParallelLayout(batch=32))
    assert planned.busy["update"] > 0
    updated = found.price().seconds["update"]
    assert updated == pytest.approx(planned.busy["update"], rel=1e-9)
    # below the device, state goes both ways at once, and parameters come twice
    state = 12 * SHAPE.numel
    assert found.away(state) == pytest.approx(state / 24e9)
    assert found.away(state + 24e9) == pytest.approx(state / 24e9 + 2)


def test_layers_that_are_split_send_four_reductions_a_layer():
    layout = ParallelLayout(data=2, tp=8, batch=16)
    nbytes = 16 * 2048 * 1024 * 2
    one = CARDS.reduce(nbytes, 8, 1)
    assert price(layout).seconds["tensor"] == pytest.approx(8 * 4 * one)
    again = replace(layout, recompute=True)
    assert price(again).seconds["tensor"] == pytest.approx(8 * 6 * one)


def test_a_ring_sends_keys_and_heads_go_round_whole():
    tokens = 2048 // 4 * 8
    ring, whole = (
        price(ParallelLayout(data=4, sp=4, sp_mode=mode, batch=8)).seconds["sequence"]
        for mode in (RING, ULYSSES)
    )
    keys = 2 * 8 * 64 * 2 * tokens
    assert ring == pytest.approx(8 * (6 * CARDS.send(keys, 1) + 4 * CARDS.send(2 * keys, 1)))
    sent = [CARDS.exchange(heads * 64 * 2 * tokens, 4, 1) for heads in (16, 8)]
    assert whole == pytest.approx(8 * 2 * (2 * sent[0] + 2 * sent[1]))


def test_what_does_not_fit_leaves_the_device_by_a_plan_or_is_left_out():
    small = replace(CARDS, ranks=1, per_node=1, device_bytes=int(2.5 * GIB))
    planned = ParallelLayout(zero=PLANNED, batch=1, micro_batches=32, recompute=True)
    found = price(planned, small)
    assert found.left > 0 and found.peak == pytest.approx(small.device_bytes)
    assert found.seconds["homes"] > 0
    assert price(replace(planned, zero="1"), small) is None
    assert price(planned, replace(small, host_bytes=1)) is None
    assert price(planned) is None  # it all fits: nothing is to be planned
    won = search(SHAPE, small, STEP)
    assert won.best.layout.zero == PLANNED and won.too_large > 0


def test_an_error_says_what_the_smallest_layout_needs():
    tiny = replace(CARDS, device_bytes=GIB // 8, host_bytes=0)
    with pytest.raises(ValueError, match=r"fits in no layout of 16 ranks .* the smallest needs"):
        search(SHAPE, tiny, STEP).best  # noqa: B018


def test_faster_links_and_products_are_never_slower():
    for layout in [one.layout for one in search(SHAPE, CARDS, STEP).distinct(40)]:
        now = price(layout).total
        for name, better in (
            ("speeds", replace(SPEEDS, flops=6e14)),
            ("speeds", replace(SPEEDS, device_memory=4e12)),
            ("attention", 2e14), ("exact_attention", 4e13), ("weights", 4e12),
            ("inside", Link(1e-6, 600e9)), ("across", Link(1e-6, 50e9)),
        ):  # fmt: skip
            assert price(layout, replace(CARDS, **{name: better})).total <= now * (1 + 1e-12)


def test_ranks_that_share_cores_wait_less_in_a_pipeline():
    layout = ParallelLayout(data=4, pp=4, batch=1, micro_batches=8)
    alone, shared = (price(layout, replace(CARDS, burst=burst)) for burst in (1.0, 2.0))
    assert shared.seconds["bubble"] < alone.seconds["bubble"]
    assert shared.seconds["compute"] == alone.seconds["compute"]


def test_what_is_told_adds_up_and_says_why_others_lose():
    found = search(SHAPE, CARDS, STEP)
    lines = found.explain().splitlines()
    assert lines[0] == found.best.in_words()
    assert len(lines) == 3 + 5
    assert all(
        (line.startswith("+") and " more " in line) or "as fast" in line for line in lines[3:]
    )
    times = [one.price.total for one in found.ranked]
    assert times == sorted(times)
    assert f"{len(found.ranked)} layouts fit, {found.too_large} do not" in lines


def test_slow_links_between_nodes_keep_splits_inside():
    slow = replace(CARDS, across=Link(1e-3, 1e9), device_bytes=16 * GIB)
    best = search(SHAPE, slow, STEP).best.layout
    assert best.tp * best.sp <= slow.per_node


def test_seconds_are_the_sum_of_their_parts_and_scale_with_steps():
    layout = ParallelLayout(data=16, batch=1, micro_batches=2)
    twice = replace(layout, micro_batches=4)
    one, two = price(layout), price(twice, step=GlobalBatch(64, 2048))
    assert two.seconds["compute"] == pytest.approx(2 * one.seconds["compute"])
    assert one.total == pytest.approx(sum(one.seconds.values()))
