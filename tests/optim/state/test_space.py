from hypothesis import given
from hypothesis import strategies as st

from optim.state.space import StateSpace, blocks_on_nvme

sizes = st.lists(st.integers(0, 3000), min_size=1, max_size=30)


@given(sizes, st.sampled_from([64, 128, 1024]))
def test_blocks_hold_every_element_once(numels, block_numel):
    space = StateSpace.pack(numels, block_numel)
    seen = [0] * len(numels)
    end = 0
    for block in space.blocks:
        assert block.offset == end and 0 < block.numel <= block_numel and block.numel % 64 == 0
        end += block.numel
        inside = 0
        for part in block.segments:
            assert part.offset % 64 == 0 and part.offset >= inside
            assert part.param_offset == seen[part.param]
            inside = part.offset + part.numel
            seen[part.param] += part.numel
        assert inside <= block.numel
    assert seen == numels and end == space.numel


@given(st.lists(st.integers(1, 20), min_size=1, max_size=50), st.floats(0, 1))
def test_fraction_on_nvme_is_met_within_one_block(tiles, fraction):
    blocks = StateSpace.pack([64 * t for t in tiles], 256).blocks
    chosen = blocks_on_nvme(blocks, fraction)
    share = sum(b.numel for b in blocks if b.id in chosen)
    total = sum(b.numel for b in blocks)
    assert abs(share - fraction * total) <= max(b.numel for b in blocks)
    assert blocks_on_nvme(blocks, 0.0) == frozenset()
    assert len(blocks_on_nvme(blocks, 1.0)) == len(blocks)
