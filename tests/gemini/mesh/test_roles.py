"""What the dimensions of a mesh are for."""

from itertools import product
from math import prod

import pytest

from gemini.mesh.roles import Place, roles_of


def roles(names, sizes, split=(), world_size=None):
    count = prod(sizes)
    return roles_of(names, sizes, range(count), split, world_size or count)


@pytest.mark.parametrize(
    ("names", "sizes", "split", "counts"),
    [
        (("replicate", "shard"), (4, 8), (), (8, 4, 1)),
        (None, (4, 8), (), (8, 4, 1)),
        (("dp_replicate", "fsdp"), (64, 8), (), (8, 64, 1)),
        (("dp", "tp"), (32, 8), ("tp",), (32, 1, 8)),
        (("replicate", "shard", "tp"), (8, 8, 8), ("tp",), (8, 8, 8)),
        (("dp", "cp", "tp"), (4, 3, 2), ("tp",), (12, 1, 2)),
        (("efsdp", "ep"), (4, 2), ("ep",), (8, 1, 1)),
        (("ep",), (4,), ("ep",), (4, 1, 1)),
        (("dp_replicate", "efsdp", "ep", "tp"), (2, 3, 4, 2), ("ep", "tp"), (12, 2, 2)),
    ],
)
def test_dimensions_have_roles_by_their_names(names, sizes, split, counts):
    found = roles(names, sizes, split)
    assert (found.num_shards, found.num_replicas, found.num_split) == counts
    places = [found.place(rank) for rank in range(prod(sizes))]
    assert set(places) == {Place(*at) for at in product(*map(range, counts))}  # each once
    assert places[0] == Place(0, 0, 0)


def test_ranks_that_have_the_same_shard_are_replicas():
    found = roles(("replicate", "shard", "tp"), (3, 2, 2), ("tp",)).replicas()
    assert found == ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))
    assert roles(("dp", "tp"), (2, 2), ("tp",)).replicas() == ()


def test_experts_are_sharded_over_what_does_not_split_them_and_are_means_over_all_data():
    names = ("dp_replicate", "efsdp", "ep", "tp")
    found = roles(names, (2, 3, 4, 2), ("ep", "tp"))
    assert found.num_means == 24
    groups = {name: found.group(name) for name in ("world", "ep", "tp", "ep+tp")}
    assert {name: (g.shard, g.split, g.copies) for name, g in groups.items()} == {
        "world": (("efsdp", "ep"), (), ("tp",)),
        "ep": (("efsdp",), ("ep",), ("tp",)),
        "tp": (("efsdp", "ep"), ("tp",), ()),
        "ep+tp": (("efsdp",), ("ep", "tp"), ()),
    }


@pytest.mark.parametrize(
    ("names", "sizes", "split", "world_size", "message"),
    [
        (("replicate", "shard"), (2, 2), (), 8, "has 4 of 8 ranks"),
        (("shard", "replicate"), (2, 2), (), 4, "order that cannot be carried out"),
        (("tp", "dp"), (2, 2), ("tp",), 4, "order that cannot be carried out"),
        (("dp", "tp"), (2, 2), (), 4, "no parameter is split over dimension tp"),
        (("dp", "fsdp"), (2, 2), (), 4, "several dimensions of one role"),
        (("dp", "efsdp", "ep"), (2, 2, 2), ("ep",), 8, "several dimensions of one role"),
        (("tp", "ep"), (2, 2), ("tp", "ep"), 4, "order that cannot be carried out"),
        (("efsdp", "ep"), (2, 2), (), 4, "no parameter is split over dimension ep"),
        (("dp", "tp"), (2, 2), ("dp",), 4, "mesh dimension dp, which is one of data parallel"),
        (("dp",), (4,), ("tp",), 4, "mesh dimension tp, and mesh=.dp=4. has none"),
        (None, (2, 2, 2), (), 8, "3 dimensions without names"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(names, sizes, split, world_size, message):
    with pytest.raises(ValueError, match=message):
        roles(names, sizes, split, world_size)


def test_a_mesh_begins_with_the_rank_whose_parameters_count():
    with pytest.raises(ValueError, match="begins with rank 3; expected rank 0"):
        roles_of(("replicate", "shard"), (2, 2), (3, 2, 1, 0), (), 4)
