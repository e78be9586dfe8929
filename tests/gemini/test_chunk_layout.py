from hypothesis import given
from hypothesis import strategies as st

from gemini.chunk.layout import ChunkLayout, ParamSpec

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
            for part in layout.shard_parts(chunk, rank):
                assert part.param_offset == seen[part.param]  # ranks hold consecutive runs
                assert part.offset % 64 == 0
                seen[part.param] += part.numel
    assert seen == dict(enumerate(numels))


def test_layout_follows_a_traced_order():
    specs = specs_of([100, 100, 100], 7)
    layout = ChunkLayout.build(specs, 256, order=[2, 0, 1])
    assert [[slot.param for slot in chunk.slots] for chunk in layout.chunks] == [[2, 0], [1]]


def test_digest_tells_layouts_apart_and_not_runs():
    specs = specs_of([100, 200], 3)
    assert ChunkLayout.build(specs, 256).digest() == ChunkLayout.build(specs, 256).digest()
    assert ChunkLayout.build(specs, 256).digest() != ChunkLayout.build(specs, 128).digest()
