"""ReduceScatterBucketer gives what one reduce-scatter a call gives, whatever the calls are."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.shared.workers import run_ranks
from gemini.integrations.classic import ReduceScatterBucketer
from tests.support.said import said

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    numel: int
    dtype: int  # of DTYPES
    follows: int  # calls that its callback makes
    flush: bool  # behind it


CALLS = st.lists(
    st.builds(
        Call, st.integers(0, 40), st.integers(0, 2), st.sampled_from([0, 0, 0, 1, 2]), st.booleans()
    ),
    max_size=12,
)
# of a bucket over all ranks; 0 and less disable
BYTES = st.sampled_from([-1, 0, 64, 200, 1000, 1 << 20])


def tensors(number, call, world_size, rank):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    # small whole numbers: sums are exact in any order and dtype
    return [
        torch.randint(-8, 8, (call.numel,), generator=generator).to(DTYPES[call.dtype])
        for _ in range(world_size)
    ]


def run(rank, cases):
    """Of each case: numbers whose results are wrong, and those that were called back."""
    world_size, found = dist.get_world_size(), []
    for calls, nbytes in cases:
        bucketer = ReduceScatterBucketer(nbytes / 2**20 if nbytes > 0 else nbytes)
        wanted, wrong, back = {}, [], []

        def give(number, call, bucketer=bucketer, wanted=wanted, wrong=wrong, back=back):
            mine = tensors(number, call, world_size, rank)
            total = torch.stack(
                [tensors(number, call, world_size, other)[rank] for other in range(world_size)]
            ).sum(0, dtype=mine[0].dtype)
            wanted[number] = total

            def callback(result):
                back.append(number)
                if not torch.equal(result, wanted[number]):
                    wrong.append(number)
                for i in range(call.follows):
                    small = Call(call.numel // 2, call.dtype, 0, False)
                    give(1000 * (number + 1) + i, small)

            bucketer.reduce_scatter_async(mine, dist.group.WORLD, callback)

        for number, call in enumerate(calls):
            give(number, call)
            if call.flush:
                bucketer.flush()
        bucketer.flush()
        bucketer.free()
        found.append((wrong, sorted(back) == sorted(wanted)))
    return found


def examples(count):
    """What hypothesis draws, to be run in one group of processes."""
    drawn = []

    @settings(
        max_examples=count, database=None, suppress_health_check=list(HealthCheck), deadline=None
    )
    @given(CALLS, BYTES)
    def draw(calls, nbytes):
        drawn.append((calls, nbytes))

    draw()
    return drawn


def check(world_size, cases):
    for results in run_ranks(run, world_size, cases):
        for case, (wrong, all_came) in zip(cases, results, strict=True):
            assert wrong == [] and all_came, case


@pytest.mark.hypothesis
def test_one_rank_gets_what_it_gave():
    check(1, examples(60))


@pytest.mark.ci
@pytest.mark.hypothesis
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_are_those_of_one_reduce_scatter_a_call(world_size):
    check(world_size, examples(60))


def order(rank):
    bucketer, back = ReduceScatterBucketer(bucket_size_mb=1), []
    small, big = [torch.ones(4)], [torch.ones(2**19)]
    bucketer.reduce_scatter_async(small, callback_fn=lambda result: back.append("small"))
    bucketer.reduce_scatter_async(big, callback_fn=lambda result: back.append("big"))
    bucketer.reduce_scatter_async(small, callback_fn=lambda result: back.append("small2"))
    refused = [said(bucketer.free, error=RuntimeError)]
    bucketer.flush()
    bucketer.free()
    wrong = ([], [torch.ones(2)] * 2)
    refused += [said(bucketer.reduce_scatter_async, each, error=ValueError) for each in wrong]
    return back, refused


def test_large_inputs_come_first_and_nothing_that_waits_is_lost():
    ((back, refused),) = run_ranks(order, 1)
    assert back == ["big", "small", "small2"]
    assert "call flush() before free()" in refused[0]
    assert all("expected one for each" in text for text in refused[1:]) and len(refused) == 3


def test_tensors_of_one_call_are_alike(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(ValueError, match="expected tensors that are alike"):
        ReduceScatterBucketer().reduce_scatter_async([torch.ones(2), torch.ones(3)])
