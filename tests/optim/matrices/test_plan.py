"""Which rank owns which matrix, in which buckets. Pure."""

import itertools
import random

import pytest

from optim.matrices.plan import WholeParam, blocks_waiting, buckets_of
from optim.state.space import StateSpace


def _whole_params(shapes, num_ranks, group=""):
    """Each cut over ranks where a random cut falls."""
    rng, found = random.Random(0), []
    for i, shape in enumerate(shapes):
        numel = shape[0] * shape[1]
        cuts = sorted(rng.randrange(numel + 1) for _ in range(num_ranks - 1))
        edges = [0, *cuts, numel]
        runs = tuple((a, b - a) for a, b in itertools.pairwise(edges))
        found.append(WholeParam(i, shape, (shape[1], 1), runs, group))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_matrix_is_in_one_bucket_in_order_and_has_one_owner(num_ranks):
    shapes = [(64, 64), (16, 256), (300, 8), (64, 64), (10, 10), (128, 96)] * 5
    whole_params = _whole_params(shapes, num_ranks)
    buckets = buckets_of(whole_params)
    assert [whole for bucket in buckets for whole in bucket.whole_params] == whole_params
    limit = num_ranks * max(whole.numel for whole in whole_params)
    for bucket in buckets:
        assert sum(whole.numel for whole in bucket.whole_params) <= limit
        owned = [whole for rank in range(num_ranks) for whole in bucket.owned_by(rank)]
        assert sorted(owned, key=lambda w: w.param) == list(bucket.whole_params)


def test_owners_are_balanced_by_work():
    """Of 32 equal ones each of 8 ranks has 4; a large one has an owner of its own."""
    alike = buckets_of(_whole_params([(64, 64)] * 32, 8))
    assert [[bucket.owners.count(rank) for rank in range(8)] for bucket in alike] == [[1] * 8] * 4
    (mixed,) = buckets_of(_whole_params([(64, 64), (8, 8), (8, 8), (8, 8)], 2))
    assert mixed.owners == (0, 1, 1, 1)


def test_work_is_of_the_smaller_side_and_of_every_matrix_of_a_stack():
    wide = WholeParam(0, (64, 512), (512, 1), ((0, 64 * 512),))
    tall = WholeParam(0, (512, 64), (64, 1), ((0, 64 * 512),))
    stack = WholeParam(0, (4, 64, 512), (64 * 512, 512, 1), ((0, 4 * 64 * 512),))
    assert wide.work == tall.work == 20 * 64**2 * 512 + 10 * 64**3
    assert stack.work == 4 * wide.work


def test_groups_do_not_share_a_bucket():
    two = _whole_params([(8, 8)] * 2, 2) + _whole_params([(8, 8)] * 3, 4, "ep")
    assert [bucket.group for bucket in buckets_of(two)] == ["", "ep"]


def test_as_many_blocks_wait_as_the_largest_matrix_has():
    space = StateSpace.pack([128 * 96, 64, 10 * 64], 1024)
    whole_params = [
        WholeParam(0, (128, 96), (96, 1), ((0, 128 * 96),)),
        WholeParam(2, (10, 64), (64, 1), ((0, 640),)),
    ]
    assert blocks_waiting(buckets_of(whole_params), space.blocks) == 12
    assert blocks_waiting([], space.blocks) == 0
