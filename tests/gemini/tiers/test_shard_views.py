"""ShardViews by itself: what a step sees of shards, without an engine and without ranks."""

from types import SimpleNamespace

import pytest
import torch

from gemini.runtime.step.views import ShardViews
from optim.state.space import Segment, StateSpace

# two shards: one of three parameters with gaps to multiples of 64, and one of a large one
SEGMENTS = [
    Segment(param=0, param_offset=0, numel=100, offset=0),
    Segment(param=1, param_offset=0, numel=64, offset=128),
    Segment(param=2, param_offset=7, numel=50, offset=192),
    Segment(param=3, param_offset=0, numel=300, offset=256),
]
SPACE = StateSpace.build(SEGMENTS, [256, 320], block_numel=256)
GROUP, OTHER = "a group", "another"


def chunk_of(index, numel):
    grad = torch.arange(numel, dtype=torch.float32) + 1000 * index
    gradient = SimpleNamespace(exists=True, shard=grad, offloaded_dtype=None)
    shard = torch.arange(numel, dtype=torch.float32)
    return SimpleNamespace(
        spec=SimpleNamespace(id=index), gradient=gradient, files=None, shard_on_host=False,
        shard=shard, shard_memory=shard,
    )  # fmt: skip


@pytest.fixture
def chunks():
    return [chunk_of(0, 256), chunk_of(1, 320)]


def views_of(chunks, hyper=(GROUP,) * 4, steps=(1,) * 4, merges=True):
    return ShardViews(chunks, hyper, steps, None, None, staging=None, merges=merges)


def ends(pieces):
    return [(p.counter, p.first, p.param.numel(), p.hyper, p.step) for p in pieces]


def test_neighbours_of_one_group_and_step_are_one_piece_with_their_gaps(chunks):
    views = views_of(chunks)
    found = [views.pieces(block, {}) for block in SPACE.blocks]
    assert ends(found[0]) == [(0, 0, 256, GROUP, 1)]
    assert [ends(pieces) for pieces in found[1:]] == [[(3, 0, 256, GROUP, 1)],
                                                      [(3, 256, 64, GROUP, 1)]]  # fmt: skip


def test_another_group_or_step_count_begins_a_piece(chunks):
    block = SPACE.blocks[0]
    found = views_of(chunks, (GROUP, OTHER, OTHER, GROUP)).pieces(block, {})
    assert ends(found) == [(0, 0, 128, GROUP, 1), (1, 0, 128, OTHER, 1)]
    found = views_of(chunks, steps=(1, 1, 5, 1)).pieces(block, {})
    assert ends(found) == [(0, 0, 192, GROUP, 1), (2, 7, 64, GROUP, 5)]
    found = views_of(chunks, merges=False).pieces(block, {})
    assert ends(found) == [
        (0, 0, 128, GROUP, 1), (1, 0, 64, GROUP, 1), (2, 7, 64, GROUP, 1)
    ]  # fmt: skip


def test_what_the_step_leaves_alone_is_in_no_piece(chunks):
    block = SPACE.blocks[0]
    views = views_of(chunks, (GROUP, None, GROUP, None))
    assert ends(views.pieces(block, {})) == [(0, 0, 128, GROUP, 1), (2, 7, 64, GROUP, 1)]
    assert views.touches(block) and not views.touches(SPACE.blocks[1])
    chunks[0].gradient.exists = False
    assert views.pieces(block, {}) == [] and not views.touches(block)


def test_pieces_are_views_of_the_shard_the_gradient_and_the_planes(chunks):
    block = SPACE.blocks[2]  # the last 64 elements of the second shard
    planes = {"master": torch.zeros(64), "exp_avg": torch.ones(64), "exp_avg_sq": torch.ones(64)}
    (piece,) = views_of(chunks).pieces(block, planes)
    assert piece.grad[0] == 1256 and piece.param[0] == 256
    piece.param.fill_(-1)
    assert (chunks[1].shard[256:] == -1).all() and (chunks[1].shard[:256] >= 0).all()
    assert piece.master.data_ptr() == planes["master"].data_ptr()
    assert [p.data_ptr() for p in piece.planes] == [
        planes[name].data_ptr() for name in ("exp_avg", "exp_avg_sq")
    ]


def test_the_signature_changes_with_addresses_and_with_what_is_updated(chunks):
    first = views_of(chunks).signature()
    assert views_of(chunks).signature() == first
    assert views_of(chunks, (GROUP, None, GROUP, GROUP)).signature() != first
    chunks[1].gradient.shard = chunks[1].gradient.shard.clone()
    assert views_of(chunks).signature() != first
