import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.chunk.layout import ChunkLayout, ParamSpec, layout_order

sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


def specs_of(numels, trainable):
    return [
        ParamSpec(f"p{i}", (n,), "bfloat16", trainable=(trainable >> i) & 1 == 1)
        for i, n in enumerate(numels)
    ]


@given(sizes, st.integers(64, 8192), st.integers(1, 4), st.integers(0, 2**40 - 1))
def test_layout_loses_nothing_and_overlaps_nowhere(numels, capacity, world_size, trainable):
    specs = specs_of(numels, trainable)
    layout = ChunkLayout.build(specs, capacity, world_size)
    placed = [slot.param for chunk in layout.chunks for slot in chunk.slots]
    assert sorted(placed) == list(range(len(numels)))
    for chunk in layout.chunks:
        end = 0
        for slot in chunk.slots:
            assert slot.offset % 64 == 0 and slot.offset >= end
            assert specs[slot.param].trainable == chunk.trainable
            end = slot.offset + slot.numel
        assert end <= chunk.payload_numel
        assert chunk.shard_numel % 256 == 0
        assert chunk.payload_numel - end < 256 * world_size
        assert end <= capacity or len(chunk.slots) == 1
        covered = sum(b - a for a, b in chunk.gaps()) + sum(slot.numel for slot in chunk.slots)
        assert covered == chunk.payload_numel


@given(sizes, st.integers(64, 8192), st.integers(1, 4))
def test_shards_of_all_ranks_cover_every_parameter_once(numels, capacity, world_size):
    layout = ChunkLayout.build(specs_of(numels, 2**40 - 1), capacity, world_size)
    seen = dict.fromkeys(range(len(numels)), 0)
    for chunk in layout.chunks:
        for rank in range(world_size):
            for part in layout.shard_segments(chunk, rank):
                assert part.param_offset == seen[part.param]  # ranks hold consecutive runs
                start = next(slot.offset for slot in chunk.slots if slot.param == part.param)
                in_chunk = rank * chunk.shard_numel + part.offset
                assert in_chunk == start + part.param_offset and part.offset % 64 == 0
                seen[part.param] += part.numel
    assert seen == dict(enumerate(numels))


@given(sizes, st.data())
def test_layout_is_the_same_however_often_a_trace_names_a_parameter(numels, data):
    specs = specs_of(numels, 2**40 - 1)
    names = [spec.name for spec in specs]
    once = data.draw(st.permutations(names))
    again = once + data.draw(st.lists(st.sampled_from(names)))
    layout = ChunkLayout.build(specs, 4096, order=once)
    assert [specs[s.param].name for chunk in layout.chunks for s in chunk.slots] == once
    assert ChunkLayout.build(specs, 4096, order=again) == layout


def test_layout_follows_a_traced_order_and_appends_what_was_not_used():
    specs = specs_of([100, 100, 100], 7)
    layout = ChunkLayout.build(specs, 256, order=["p2", "p0"])
    assert [[slot.param for slot in chunk.slots] for chunk in layout.chunks] == [[2, 0], [1]]


def test_a_trace_may_name_a_tied_parameter_by_any_of_its_names():
    specs = [ParamSpec("a", (8,), "bfloat16"), ParamSpec("b", (8,), "bfloat16", aliases=("c",))]
    assert layout_order(specs, ["c", "a", "b"]) == (1, 0)


def test_names_that_are_not_there_or_there_twice_are_refused():
    specs = specs_of([8, 8], 3)
    with pytest.raises(ValueError, match="names p7, which is no parameter"):
        ChunkLayout.build(specs, 64, order=["p7"])
    with pytest.raises(ValueError, match="two parameters are named p0"):
        ChunkLayout.build([specs[0], specs[0]], 64)


def test_every_key_has_chunks_and_a_capacity_of_its_own():
    specs = [
        ParamSpec("a", (64,), "bfloat16", trainable=False),
        ParamSpec("b", (64,), "bfloat16"),
        ParamSpec("c", (64,), "bfloat16", trainable=False),
        ParamSpec("d", (64,), "bfloat16"),
        ParamSpec("e", (64,), "float32"),
        ParamSpec("f", (64,), "bfloat16", group="experts"),
    ]
    capacities = {spec.key: 128 for spec in specs}
    capacities[("world", "bfloat16", True)] = 64
    layout = ChunkLayout.build(specs, capacities, world_size=2)
    names = [[specs[slot.param].name for slot in chunk.slots] for chunk in layout.chunks]
    assert names == [["a", "c"], ["b"], ["d"], ["e"], ["f"]]
    assert [chunk.key for chunk in layout.chunks] == [
        specs[chunk.slots[0].param].key for chunk in layout.chunks
    ]
    del capacities[("experts", "bfloat16", True)]
    with pytest.raises(ValueError, match=r"no capacity .* of group experts"):
        ChunkLayout.build(specs, capacities)


def test_every_sharding_group_has_its_number_of_shards():
    """And where that is 1, large parameters are alone in their chunks."""
    specs = [
        ParamSpec(f"{group}.{numel}", (numel,), "bfloat16", group=group)
        for group in ("world", "ep")
        for numel in (1024, 1000)
    ]
    layout = ChunkLayout.build(specs, 4096, {"world": 4, "ep": 1, "tp": 2}, alone_numel=512)
    assert layout.world_size == 4
    found = [(c.group, c.num_shards, c.shard_numel, len(c.slots)) for c in layout.chunks]
    assert found == [("world", 4, 512, 2), ("ep", 1, 1024, 1), ("ep", 1, 1024, 1)]
    parts = [layout.shard_segments(layout.chunks[2], rank) for rank in (0, 1)]
    assert [part.numel for part in parts[0]] == [1000] and parts[1] == ()
    with pytest.raises(ValueError, match="must be positive"):
        ChunkLayout.build(specs, 4096, {"world": 4, "ep": 0})


def test_a_parameter_larger_than_the_capacity_has_a_chunk_of_its_own():
    layout = ChunkLayout.build(specs_of([10, 1000, 10, 0], 15), 256)
    assert [[slot.param for slot in chunk.slots] for chunk in layout.chunks] == [[0], [1], [2, 3]]


def test_digest_tells_layouts_apart_and_not_runs():
    specs = specs_of([100, 200], 3)
    assert ChunkLayout.build(specs, 256).digest() == ChunkLayout.build(specs, 256).digest()
    assert ChunkLayout.build(specs, 256).digest() != ChunkLayout.build(specs, 128).digest()


def test_digest_does_not_follow_what_a_repr_says_once_a_signal_has_left_it(monkeypatch):
    layout = ChunkLayout.build(specs_of([100, 200], 3), 256)
    before = layout.digest()
    for one in (ChunkLayout, ParamSpec):
        monkeypatch.setattr(one, "__repr__", lambda self: "...")
    assert layout.digest() == before
    assert ChunkLayout.build(specs_of([100, 201], 3), 256).digest() != before
