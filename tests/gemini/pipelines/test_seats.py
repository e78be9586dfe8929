"""Who votes on a step of a pipeline, without ranks; and weights that halves of backwards lose."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input

from gemini.comm.ballot import Ballot
from gemini.pipeline import WeightLeaf, lost_weights
from gemini.runtime.pipeline.seats import Part, Seats


def part(place, names, stage=None, norm="0.3"):
    return Part(place, names, stage, (("max_norm", norm),))


# stages 0 and 2 on ranks 0 and 1, which shard them; 1 and 3 on ranks 2 and 3
FIRST = [part((0, 0), ("a", "b"), (0, 4)), part((0, 1), ("e",), (2, 4))]
SECOND = [part((1, 0), ("c",), (1, 4)), part((1, 1), ("f", "g", "h"), (3, 4))]
SAID = [FIRST, FIRST, SECOND, SECOND]


def voted(ballots, norm_type=2.0):
    """What each rank knows, from the ballots of all ranks' parts."""
    seats = [Seats.of(SAID, rank) for rank in range(4)]
    vectors = [seats[rank].encode(ballots[rank]) for rank in range(4)]
    total = [math.fsum(column) for column in zip(*vectors, strict=True)]
    return [seats[rank].decode(total, norm_type) for rank in range(4)]


def ballots_of(**changes):
    """Ballots of all parts; `changes` by "rank and part" as r1p0=..."""
    found = []
    for rank, parts in enumerate(SAID):
        own = []
        for i, one in enumerate(parts):
            options = {"power_sum": 1.0 + rank, "present": (rank % 2 == 0,) * len(one.names)}
            own.append(Ballot(**(options | changes.get(f"r{rank}p{i}", {}))))
        found.append(own)
    return found


def test_all_ranks_know_the_sum_of_all_parts():
    agreed = voted(ballots_of())
    assert {part.power_sum for one in agreed for part in one.parts} == {2 * (1 + 2 + 3 + 4.0)}
    largest = voted(ballots_of(r2p1={"power_sum": 9.0}), math.inf)
    assert {part.power_sum for one in largest for part in one.parts} == {9.0}


def test_presence_is_of_each_part_and_of_any_rank_that_shards_it():
    nobody = (False, False, False)
    agreed = voted(
        ballots_of(
            r0p0={"present": (False, True)},
            r2p1={"present": nobody},
            r3p1={"present": (True, False, False)},
        )
    )
    assert agreed[0].parts[0].present == agreed[1].parts[0].present == (False, True)
    assert agreed[2].parts[1].present == agreed[3].parts[1].present == (True, False, False)
    assert agreed[3].parts[0].present == (True,) and agreed[0].any_present


def test_a_gradient_that_is_not_finite_is_named_everywhere():
    changes = {"r3p1": {"power_sum": math.nan, "first_nonfinite": 2}}
    for one in voted(ballots_of(**changes)):
        assert one.nonfinite == "h on rank 3"
        assert all(math.isnan(part.power_sum) for part in one.parts)


def test_ranks_that_went_astray_are_those_of_one_part():
    agreed = voted(ballots_of(r1p1={"sequence": 7}))
    assert [one.strayed for one in agreed] == [("stage 2", "stage 2")] * 4
    assert [p.sequences_differ for p in agreed[0].parts] == [False, True]
    assert [p.sequences_differ for p in agreed[2].parts] == [False, False]
    # other stages issue other collectives, which is no difference
    assert not voted(ballots_of(r2p0={"sequence": 7}, r3p0={"sequence": 7}))[0].strayed


def test_a_replica_that_strays_is_named_by_its_rank():
    both = [
        replace(one, stage=None, replicas=(ranks,))
        for one, ranks in ((FIRST[0], (0, 1)), (SECOND[0], (2, 3)))
    ]
    seats = [Seats.of([[both[0]], [both[0]], [both[1]], [both[1]]], rank) for rank in range(4)]
    for sums, named in (((7, 7, 8, 8), ()), ((7, 7, 8, 9), ((2, (3,)), (3, (2,))))):
        said = [
            seats[rank].encode([Ballot(1.0, (True,) * len(seats[rank].seats[rank].part.names),
                                       checksum=sums[rank])])
            for rank in range(4)
        ]  # fmt: skip
        total = [sum(column) for column in zip(*said, strict=True)]
        assert all(one.decode(total).parts[0].strayed == named for one in seats)


def test_failures_are_of_ranks():
    seats = [Seats.of(SAID, rank) for rank in range(4)]
    said = [
        seats[rank].encode([Ballot(0.0, (), io_failed=rank == 2 and i == 1) for i in range(2)])
        for rank in range(4)
    ]
    total = [sum(column) for column in zip(*said, strict=True)]
    assert all(one.failed(total) == (2,) for one in seats)


@pytest.mark.parametrize(
    "said, expected",
    [
        ([[FIRST[0]], [SECOND[0]]], r"the stages \[\[0\], \[1\]\] of 4; expected every stage once"),
        (
            [[part((0, 0), ("embed",), (0, 2))], [part((1, 0), ("x", "embed"), (1, 2))]],
            "embed of stage 0 and embed of stage 1 have one name",
        ),
        (
            [[part((0, 0), ("a",), (0, 2))], [part((1, 0), ("b",), (1, 2), norm="1.0")]],
            "stage 1 on rank 1 has max_norm=1.0 and stage 0 on rank 0 has max_norm=0.3",
        ),
    ],
)
def test_parts_that_are_no_whole_model_are_refused(said, expected):
    with pytest.raises(ValueError, match=expected):
        Seats.of(said, 0)


class Table(nn.Module):
    """Its second output depends on a weight and on no input."""

    def __init__(self):
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        return x * self.scale * self.frozen, self.table.exp()


@pytest.mark.parametrize("whole, lost", [(True, [1]), (False, [])])
def test_a_weight_that_meets_no_input_is_found(whole, lost):
    module, x = Table(), torch.ones(5, requires_grad=True)
    outputs = list(module(x))[: 2 if whole else 1]
    roots = [output.grad_fn for output in outputs]
    weights = [WeightLeaf(param) for param in module.parameters()]
    grads = [torch.ones(5) for _ in outputs]
    _, groups = stage_backward_input(outputs, grads, [x], iter(weights))
    assert lost_weights(roots, weights, groups) == lost
