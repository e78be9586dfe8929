"""Ranks whose forwards use different heads of one chunk train as one process over all they see.

As torch's DDP with `find_unused_parameters`: what has no gradient on a rank counts as zero there,
and what has none on any rank stays as it is.
"""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from gemini.comm.collective_log import SequenceError
from optim import HybridAdam

pytestmark = pytest.mark.ci

DEADLINE_SECONDS = 0.05  # then ranks compare what they do; one that is late is still waited for
NUM_STEPS = 5
ONE_CHUNK, TWO_CHUNKS = 3000, 1500  # elements of the smallest chunk
# of updates: fp32 sums in another order; bf16 is off by 0.02, and without a rank's head by 0.3
TOLERANCES = {"fp32": 1e-5, "bf16": 0.1}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATES = {"fp32": 0.1, "bf16": 1.0}  # in bf16 less would not show in weights


class Heads(nn.Module):
    """Heads of several depths behind a trunk: in the chunk of its first layer, or the last chunk is
    theirs alone. `uses`: the heads whose outputs are summed; none: the trunk's is the output."""

    def __init__(self, own_chunk=False):
        super().__init__()
        with seeded():
            trunk = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
            deep = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5))
            heads = nn.ModuleList([nn.Linear(24, 5), deep, nn.Linear(24, 5)])
        self.parts = nn.ModuleList([trunk, heads] if own_chunk else [heads, trunk])
        self.trunk, self.heads = trunk, heads

    def forward(self, x, uses):
        x = self.trunk(x)
        return sum(self.heads[i](x) for i in uses) if uses else x[:, :5]


ROUTES = {  # heads of every micro-batch, by rank and iteration
    "by rank": lambda rank, it: [[rank % 3]],
    "by batch": lambda rank, it: [[(rank + it) % 3], [(rank * it) % 2]],
    "in one micro-batch": lambda rank, it: [[0], [0, 1] if rank == it % 2 else [0]],
    "behind steps of one": lambda rank, it: [[0], [(rank + it) % 3 if it > 2 else 0]],
    "none but on rank 0 once": lambda rank, it: [[0] if it == 3 or not (it or rank) else []],
}


def loss_of(model, rank, it, i, uses):
    x = torch.sin(torch.arange(48.0).view(2, 24) * (1 + rank) + 7 * it + i)
    return (model(x, uses).float() - torch.cos(torch.arange(5.0) + rank)).square().mean()


def routed(route, world_size):
    """[iteration][micro-batch][rank]: heads."""
    by_rank = [[route(rank, it) for rank in range(world_size)] for it in range(NUM_STEPS)]
    return [list(zip(*uses, strict=True)) for uses in by_rank]


def wrapped(module, min_numel, **options):
    options = {"min_chunk_size_m": min_numel / 2**20, "search_range_m": 0, **options}
    model = GeminiDDP(module, **options)
    model.engine.comm.deadline_seconds = DEADLINE_SECONDS
    return model


def train(rank, uses, no_sync, min_numel, options):
    model = wrapped(Heads(), min_numel, **options)
    optimizer = HybridAdam(model.parameters(), lr=RATES[options["precision"]], eps=1.0)
    for it, batches in enumerate(uses):
        for i, heads in enumerate(batches):
            puts_off = no_sync and i + 1 < len(batches)
            with model.no_sync() if puts_off else nullcontext():
                loss_of(model, rank, it, i, heads[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.summon_full_params():
        return {name: p.detach().float().clone() for name, p in model.module.named_parameters()}


def train_plainly(uses, rate):
    model = Heads()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, eps=1.0, foreach=False)
    for it, batches in enumerate(uses):
        for i, heads in enumerate(batches):
            for rank, used in enumerate(heads):
                (loss_of(model, rank, it, i, used) / len(heads)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def same_updates(uses, no_sync=False, min_numel=TWO_CHUNKS, precision="fp32", update="serial"):
    start = dict(Heads().named_parameters())
    want = train_plainly(uses, RATES[precision])
    world_size, options = len(uses[0][0]), {"precision": precision, "update": update}
    for found in run_ranks(train, world_size, uses, no_sync, min_numel, options):
        for name, value in found.items():
            began = start[name].to(DTYPES[precision]).float()
            moved, wanted = value - began, want[name].detach() - start[name]
            assert (moved - wanted).norm() <= TOLERANCES[precision] * wanted.norm(), name


@pytest.mark.parametrize(
    ("world_size", "no_sync", "update", "precision"),
    [
        (2, False, "serial", "bf16"), (2, True, "tail", "fp32"), (3, False, "tail", "fp32"),
        (4, True, "tail", "fp32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("route", ROUTES)
def test_ranks_may_use_other_heads_of_a_chunk(route, world_size, no_sync, update, precision):
    same_updates(routed(ROUTES[route], world_size), no_sync, TWO_CHUNKS, precision, update)


@st.composite
def programs(draw):
    """Every rank uses a head, or more, in every micro-batch."""
    world_size, num_batches = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    heads = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)
    batches = st.lists(
        st.lists(heads, min_size=world_size, max_size=world_size),
        min_size=num_batches, max_size=num_batches,
    )  # fmt: skip
    steps = draw(st.lists(batches, min_size=1, max_size=3))
    times = draw(st.integers(1, 3))
    return (
        steps[:1] * times + steps,
        draw(st.booleans()),
        draw(st.sampled_from([ONE_CHUNK, TWO_CHUNKS])),
        "fp32",
        draw(st.sampled_from(["serial", "tail"])),
    )


@given(programs())
@settings(max_examples=8, deadline=None)
def test_drawn_heads(program):
    same_updates(*program)


@pytest.mark.deep
@given(programs())
@settings(max_examples=1000, deadline=None)
def test_many_drawn_heads(program):
    same_updates(*program)


# -- when ranks meet -------------------------------------------------------------------------


def meetings_of_steps(rank):
    """What ranks meet for in each step, other heads in every one; what the last one did."""
    model = wrapped(Heads(), TWO_CHUNKS, precision="fp32")
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    log, met = model.engine.comm.log, []
    waits = log.wait

    def wait(kind, subject):
        met[-1].append(kind)
        waits(kind, subject)

    log.wait = wait
    for it in range(NUM_STEPS):
        met.append([])
        loss_of(model, rank, it, 0, [(rank + it) % 3]).backward()
        done = log.encode()
        optimizer.step()
        optimizer.zero_grad()
    return met, done


def test_ranks_that_use_other_heads_meet_until_their_steps_are_known():
    for met, done in run_ranks(meetings_of_steps, 2):
        assert met[0].count("asks to gather") == 2 and "asks to reduce" in met[0]
        assert met[-2:] == [[], []]
        assert done.count("reduces") == 2


def leave_the_chunk(rank):
    model = wrapped(Heads(own_chunk=True), TWO_CHUNKS, precision="fp32")
    optimizer = HybridAdam(model.parameters(), lr=0.1)
    try:
        for it in range(NUM_STEPS):
            loss_of(model, rank, it, 0, [1] if it == 4 and rank else [0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    except SequenceError as error:
        return str(error)
    return "nothing"


def test_a_head_in_a_chunk_that_other_ranks_do_not_use_is_an_error_with_names():
    for text in run_ranks(leave_the_chunk, 2):
        assert "rank 1 asks to gather chunk 1 (parts.1.1.0.weight ... parts.1.2.bias)" in text
        assert "having come to chunk 1 (" in text and "where no other chunk was next" in text


def propose(rank):
    """Rank 0 proposes a reduction where rank 1 ends its pass; then they propose different ones."""
    comm = wrapped(Heads(), TWO_CHUNKS).engine.comm
    found = [comm.propose({"a": "a"})] if rank == 0 else []
    said = comm.end_pass(f"of {rank}")
    return [*found, said, comm.propose({"b": "b", f"of {rank}": "own"})]


def test_what_all_ranks_propose_is_reduced_and_who_ends_a_pass_waits_for_the_others():
    said = ["of 0", "of 1"]
    assert run_ranks(propose, 2) == [[set(), said, {"b"}], [said, {"b"}]]
