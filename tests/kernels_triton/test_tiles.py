import pytest
import torch

from kernels_triton.launch import choose_launch
from kernels_triton.tiles import tile_table

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.sampled_from([64, 1024]))
def test_tiles_cover_every_segment_once(numels, block):
    tiles = tile_table(numels, block, torch.device("cpu")).tolist()
    want = [[s, t] for s, numel in enumerate(numels) for t in range(-(-numel // block))]
    assert tiles == want


def test_launch_choice_is_a_power_of_two_and_follows_the_segments_in_the_interpreter():
    for interpreted in (True, False):
        for largest in (1, 100, 10**6):
            block = choose_launch(28, interpreted, largest).block
            assert block & (block - 1) == 0
    assert choose_launch(28, True, 100).block == 128
    assert choose_launch(28, False, 100).block == choose_launch(28, False, 10**6).block
