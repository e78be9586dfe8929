import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemini
from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.chunk.sizing.packing import COLLECTIVE_BYTES, Sizes, exact_fits, pack
from gemini.chunk.sizing.search import cut, repeated_blocks, search_chunk_configuration
from tests.support.counting import LINEAR, growth, lines, python_bytes

MIB = 1 << 20


def flat(numels):
    return [ParamSpec(f"m{i // 3}.p{i}", (n,), "bfloat16") for i, n in enumerate(numels)]


def stack(num_blocks, shapes, outside=(), trainable=True):
    """A stack of equal blocks, between parameters of no block."""
    specs = [ParamSpec(f"outer{i}.w", (n,), "bfloat16", trainable) for i, n in enumerate(outside)]
    for block in range(num_blocks):
        specs += [
            ParamSpec(f"layers.{block}.linear{i}.w", (n,), "bfloat16", trainable)
            for i, n in enumerate(shapes)
        ]
    return specs


numels = st.lists(st.integers(0, 5000), min_size=1, max_size=40).filter(any)


@given(numels, st.lists(st.integers(1, 9000), min_size=1, max_size=8))
def test_packing_makes_the_chunks_that_the_layout_makes(numels, capacities):
    specs = flat(numels)
    packings = pack(Sizes.of(specs), np.array(sorted(capacities)), 1, 1)
    layouts = {ChunkLayout.build(specs, c).chunks for c in capacities}
    assert {ChunkLayout.build(specs, p.capacity).chunks for p in packings} == layouts
    for packing in packings:
        chunks = ChunkLayout.build(specs, packing.capacity).chunks
        used = [chunk.used_numel for chunk in chunks]
        assert packing.num_chunks == len(chunks)
        assert packing.gathered_waste_numel == sum(max(packing.capacity - n, 0) for n in used)
        assert packing.traffic_bytes == (
            2 * (3 * sum(used) - used[-1]) + (3 * len(used) - 1) * COLLECTIVE_BYTES
        )


@given(numels, st.sampled_from([None, 64, 5000]))
def test_chunks_are_cut_by_half_or_more_each_time_until_each_has_one_parameter(numels, hidden_dim):
    specs = flat(numels)
    found = search_chunk_configuration(specs, None, hidden_dim)
    first, *others = cut(found, hidden_dim)
    assert first == found
    for larger, smaller in pairwise([first, *others]):
        (before,), (after,) = larger.groups, smaller.groups
        assert after.capacity <= before.capacity // 2
        assert smaller.layout == ChunkLayout.build(specs, smaller.capacities)
    last = [first, *others][-1]
    assert last.num_chunks == len(specs) or last.groups[0].capacity == 1


@given(numels, st.integers(1, 9000), st.integers(0, 3))
def test_peak_is_that_of_every_module_with_what_is_prefetched(numels, capacity, max_prefetch):
    specs = flat(numels)
    (packing,) = pack(Sizes.of(specs), np.array([capacity]), 1, max_prefetch)
    layout = ChunkLayout.build(specs, packing.capacity)
    chunk_of = layout.chunk_of()
    modules = {}
    for i, spec in enumerate(specs):
        modules.setdefault(spec.name.split(".")[0], []).append(chunk_of[i])
    expected = max(
        sum(2 * c.used_numel for c in layout.chunks[min(used) : max(used) + 1 + max_prefetch])
        for used in modules.values()
    )
    assert packing.peak_gathered_bytes == expected


def test_a_tied_parameter_is_counted_once_and_gathered_again_at_the_end():
    specs = stack(4, [64] * 2, outside=[640])
    tied = [ParamSpec("outer0.w", (640,), "bfloat16", aliases=("head.w",)), *specs[1:]]
    (once,), (again,) = (pack(Sizes.of(s), np.array([128]), 1, 1) for s in (specs, tied))
    assert search_chunk_configuration(tied).used_numel == 640 + 4 * 128
    # two gathers more of 640 elements; what stays for backward is it, and not the last chunk
    extra = 2 * 2 * 640 + 2 * COLLECTIVE_BYTES - 2 * (640 - 128)
    assert again.traffic_bytes - once.traffic_bytes == extra


@given(numels, st.integers(1, 4000), st.integers(0, 6000))
def test_exact_fits_are_the_lengths_of_all_runs_in_range(numels, low, more):
    specs = flat(numels)
    starts = Sizes.of(specs).starts
    runs = {
        int(starts[j] + numels[j] - starts[i])
        for i in range(len(numels))
        for j in range(i, len(numels))
    }
    expected = sorted(n for n in runs if low <= n <= low + more)
    assert exact_fits(Sizes.of(specs), low, low + more).tolist() == expected


shapes = st.lists(st.integers(1, 3000), min_size=1, max_size=5)


@given(
    shapes,
    st.integers(2, 20),
    st.lists(st.integers(1, 20000), max_size=3),
    st.floats(0.0005, 0.05),
    st.integers(1, 5),
)
def test_search_keeps_its_bounds(shapes, num_blocks, outside, min_chunk_size_m, world_size):
    specs = stack(num_blocks, shapes, outside)
    found = search_chunk_configuration(
        specs, min_chunk_size_m=min_chunk_size_m, world_size=world_size
    )
    (group,) = found.groups
    used = sum(spec.numel for spec in specs)
    assert found.used_numel == used
    assert found.layout == ChunkLayout.build(specs, found.capacities, world_size)
    if used < round(min_chunk_size_m * MIB):
        assert found.num_chunks == 1 and found.gathered_waste_numel == 0
    else:
        block = repeated_blocks(specs)
        assert block.count == num_blocks and block.largest_numel == sum(shapes)
        assert group.capacity <= max(sum(shapes), *shapes, *outside, 1)
        assert found.num_chunks >= min(num_blocks, 8)
    capacities = dict(found.layout.capacities)  # a larger parameter fills a chunk of its own
    left_over = sum(max(0, capacities[c.key] - c.used_numel) for c in found.layout.chunks)
    assert found.gathered_waste_numel == left_over
    # at most 63 elements a parameter, and 256 a shard
    most = 63 * len(specs) + 256 * world_size * found.num_chunks
    assert 0 <= found.persistent_waste_numel <= most
    assert group.tight.gathered_waste_numel <= 0.01 * used
    best = min(p.cost_bytes for p in group.candidates)
    assert group.chosen.cost_bytes <= 1.01 * best or group.waste_fraction(group.chosen) <= 0.01


@given(shapes, st.integers(2, 20), st.floats(0.0005, 0.05), st.floats(0, 0.02))
def test_an_explicit_range_is_kept_to(shapes, num_blocks, min_chunk_size_m, search_range_m):
    specs = stack(num_blocks, shapes)
    found = search_chunk_configuration(
        specs, search_range_m=search_range_m, min_chunk_size_m=min_chunk_size_m
    )
    least = round(min_chunk_size_m * MIB)
    if found.used_numel >= least:
        for packing in found.groups[0].candidates:
            assert least <= packing.capacity <= least + round(search_range_m * MIB)


@given(shapes, st.integers(2, 12))
def test_the_choice_depends_neither_on_world_size_nor_on_the_run(shapes, num_blocks):
    specs = stack(num_blocks, shapes)
    found = [
        search_chunk_configuration(specs, min_chunk_size_m=0.002, world_size=w) for w in (1, 1, 3)
    ]
    assert found[0] == found[1]
    assert found[0].groups == found[2].groups


def test_small_models_give_way_to_sixteen_mib_and_to_blocks():
    large = search_chunk_configuration(stack(20, [5 * MIB] * 4)).groups[0]
    assert 32 * MIB > large.capacity >= 8 * MIB  # no more than the block: 20 Mi
    small = search_chunk_configuration(stack(12, [MIB] * 3)).groups[0]
    assert small.capacity == 3 * MIB and small.chosen.num_chunks == 12
    two = search_chunk_configuration(stack(2, [10 * MIB] * 4)).groups[0]
    assert two.capacity >= 32 * MIB


def test_waste_is_avoided_where_the_peak_hardly_rises():
    specs = stack(12, [10 * MIB, 23 * MIB, 4 * MIB], outside=[90 * MIB])
    (found,) = search_chunk_configuration(specs).groups
    best = min(found.candidates, key=lambda packing: packing.cost_bytes)
    assert found.waste_fraction(best) > 0.01 >= found.waste_fraction(found.chosen)
    assert found.chosen.peak_gathered_bytes <= 1.1 * best.peak_gathered_bytes


def test_what_less_waste_would_cost_is_said_where_it_costs_much():
    found = search_chunk_configuration(stack(9, [10 * MIB, 23 * MIB, 4 * MIB])).groups[0]
    assert found.waste_fraction(found.chosen) > 0.01 >= found.waste_fraction(found.tight)
    assert found.tight.peak_gathered_bytes > 1.1 * found.chosen.peak_gathered_bytes


def test_trainable_and_frozen_parameters_have_capacities_of_their_own():
    frozen = stack(16, [8 * MIB, 12 * MIB], trainable=False)
    adapters = [ParamSpec(f"layers.{i}.lora.w", (64 * 1024 + 64,), "bfloat16") for i in range(16)]
    mixed = [spec for i in range(16) for spec in (*frozen[2 * i : 2 * i + 2], adapters[i])]
    found = search_chunk_configuration(mixed)
    assert found.capacities[("world", "bfloat16", True)] == sum(s.numel for s in adapters)
    assert found.capacities[("world", "bfloat16", False)] >= 8 * MIB
    assert {chunk.trainable for chunk in found.layout.chunks} == {False, True}
    assert found.gathered_waste_fraction <= 0.01


def test_hidden_dim_thins_the_candidates():
    specs = stack(12, [3 * MIB + 64 * i for i in range(9)])
    all_of_them = search_chunk_configuration(specs, search_range_m=16, min_chunk_size_m=8)
    some = search_chunk_configuration(specs, search_range_m=16, min_chunk_size_m=8, hidden_dim=MIB)
    assert 0 < len(some.groups[0].candidates) <= 18 < len(all_of_them.groups[0].candidates)


def test_blocks_are_items_that_look_alike_and_the_outermost_of_nested_lists():
    def blocks(*names):
        return repeated_blocks([ParamSpec(name, (10,), "bfloat16") for name in names])

    assert blocks("h.0.a.w", "h.0.a.b", "h.1.a.w", "h.1.a.b", "f.w").largest_numel == 20
    assert blocks("h.0.x.0.w", "h.0.x.1.w", "h.1.x.0.w", "h.1.x.1.w").count == 2
    backbone_and_head = blocks("0.layers.0.fc.w", "0.layers.1.fc.w", "0.layers.2.fc.w", "1.weight")
    assert (backbone_and_head.count, backbone_and_head.largest_numel) == (3, 10)
    assert blocks("a.w", "b.w", "w").count == 0


def test_a_model_is_taken_by_its_named_parameters():
    class Parameter:
        shape, requires_grad = (3, 5), True

    class Model:
        def named_parameters(self, *, remove_duplicate):
            assert not remove_duplicate
            shared = Parameter()
            return [("a.w", shared), ("b.w", Parameter()), ("c.w", shared)]

    found = gemini.search_chunk_configuration(Model(), dtype="float32")
    assert [(spec.name, spec.aliases) for spec in found.layout.params] == [
        ("a.w", ("c.w",)),
        ("b.w", ()),
    ]
    assert found.used_bytes == 2 * 15 * 4


def test_the_public_name_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import gemini;"
        "from gemini.chunk.layout import ParamSpec;"
        "print(gemini.search_chunk_configuration([ParamSpec('w', (7,), 'float32')]).used_numel)"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert out.stdout == "7\n"


def test_the_three_lines_name_their_units():
    found = search_chunk_configuration(stack(8, [4 * MIB] * 3))
    first, second, third = found.summary().splitlines()
    assert first == f"searching chunk configuration is completed in {found.seconds:.2f} s."
    assert second == "used number: 96.00 Mi elements, wasted number: 0.00 Mi elements"
    assert third == "total wasted percentage is 0.00%"


def experts(num_blocks):
    return stack(num_blocks, [2 * MIB + 64 * i for i in range(96)])


def test_thousands_of_parameters_are_searched():
    found = search_chunk_configuration(experts(48))
    assert found.num_chunks >= 8 and found.gathered_waste_fraction <= 0.01


@pytest.mark.ci
@pytest.mark.parametrize("count", [lines, python_bytes])
def test_a_search_costs_no_more_than_twice_for_twice_the_parameters(count):
    def search(num_blocks):
        specs = experts(num_blocks)
        return lambda: search_chunk_configuration(specs)

    assert growth(search, 2, count) < LINEAR


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_chunk_size_m": 0}, "min_chunk_size_m=0 must be positive"),
        ({"search_range_m": -1}, "search_range_m=-1 is negative"),
        ({"hidden_dim": 0}, "hidden_dim=0 must be positive"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        search_chunk_configuration(flat([10]), **options)


def test_no_parameters_are_refused():
    with pytest.raises(ValueError, match="no parameters"):
        search_chunk_configuration([])
