"""Chunks over ranks: order of collectives, accumulation, whole state, and what ranks may differ in.

World size 3 pads every shard.
"""

import os
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
from bench.shared.models import Tower, seeded, token_batches, token_loss
from bench.shared.reference import flat, relative_error, train_reference
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP, StaticPlacement
from gemini.comm.collective_log import SequenceError
from optim import HybridAdam, HybridSGD
from tests.support.said import said

pytestmark = pytest.mark.ci

SMALL = {"min_chunk_size_m": 0.004}
SOON = 0.05  # s until ranks compare what they do; one that is late is still waited for
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}
ZERO_3, ZERO_2 = StaticPlacement(1.0), StaticPlacement(0.0)
ZERO_1 = StaticPlacement(0.0, shard_grads=False)


def flat_state(state):
    """None on the ranks that have no state."""
    return flat(list(state.values())) if state else None


def whole(model):
    with model.summon_full_params(writeback=False):
        return flat(list(model.parameters()))


# -- updates ---------------------------------------------------------------------------------


def accumulate(rank, placement, precision, how, steps):
    """Every step takes 3 parts a rank: with a reduction each, or one, or none before it."""
    world_size = dist.get_world_size()
    model = GeminiDDP(
        Tower(), placement_policy=placement, precision=precision, max_norm=0.3, **SMALL
    )
    optimizer = HybridAdam(model.parameters(), **ADAM)
    for parts in token_batches(steps, 3 * world_size):
        mine = parts[3 * rank : 3 * rank + 3]
        if how == "sync":
            for part in mine:
                (token_loss(model, part) / 3).backward()
        else:
            with model.no_sync():
                for part in mine[:2]:
                    (token_loss(model, part) / 3).backward()
                if how == "step reduces":
                    (token_loss(model, mine[2]) / 3).backward()
            if how == "no_sync":
                (token_loss(model, mine[2]) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat_state(model.state_dict()), whole(model), optimizer.last_report.grad_norm


@pytest.mark.parametrize(
    "how", ["sync", pytest.param("no_sync", marks=pytest.mark.unlike), "step reduces"]
)
@pytest.mark.parametrize("placement", [ZERO_3, ZERO_2, ZERO_1], ids=["zero3", "zero2", "zero1"])
def test_accumulation_equals_one_process_over_all_parts(placement, how):
    start = flat(list(Tower().state_dict().values()))
    for world_size, precision in ((2, "fp32"), (3, "bf16")):
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        want = train_reference(
            Tower(),
            lambda ps: torch.optim.AdamW(ps, **ADAM),
            token_batches(3, 3 * world_size),
            token_loss,
            dtype,
            0.3,
        )
        results = run_ranks(accumulate, world_size, placement, precision, how, 3)
        got = results[0][0]
        tied = want[: 97 * 33]
        want = torch.cat([want, tied])  # the state dict has the head under its own name too
        bound = 1e-6 if precision == "fp32" else 5e-3
        assert relative_error(got - start, want - start) < bound
        for _, seen, norm in results:
            assert torch.equal(seen, results[0][1]) and norm == results[0][2]


# -- what is on the wire ---------------------------------------------------------------------


def count_collectives(rank, placement):
    model = GeminiDDP(Tower(), placement_policy=placement, max_prefetch=0, **SMALL)
    optimizer = HybridAdam(model.parameters())
    found = []
    for (part,) in token_batches(4, 1):
        before = model.engine.comm.chunk_bytes
        kinds = count_calls()
        with kinds:
            token_loss(model, part).backward()
            optimizer.step()
        optimizer.zero_grad()
        found.append((model.engine.comm.chunk_bytes - before, dict(kinds.count)))
    sizes = [chunk.payload.nbytes for chunk in model.engine.chunks]
    return found, sizes


class count_calls:
    """Counts what goes to torch.distributed, by kind. gloo's reduce-scatter is an all-reduce."""

    def __enter__(self):
        from gemini.comm import communicator as comm

        self.count = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
        self._comm = comm
        self._inside = False
        kind = comm.Communicator
        self._saved = comm.all_gather_tensor, kind.reduce_scatter, dist.all_reduce
        comm.all_gather_tensor = self._counted("all_gather", comm.all_gather_tensor)
        kind.reduce_scatter = self._counted("reduce_scatter", kind.reduce_scatter)
        dist.all_reduce = self._counted("all_reduce", dist.all_reduce)

    def _counted(self, kind, function):
        def call(*args, **kwargs):
            if self._inside:
                return function(*args, **kwargs)
            self.count[kind] += 1
            self._inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return call

    def __exit__(self, *_):
        kind = self._comm.Communicator
        self._comm.all_gather_tensor, kind.reduce_scatter, dist.all_reduce = self._saved


def test_nothing_but_the_formula_is_on_the_wire():
    """Reduce-scatter 2 B an element, all-gather 2 B a use, and two small all-reduces: who has a
    gradient, behind a backward, and the vote of a step."""
    for placement in (ZERO_3, ZERO_2):
        (found, sizes), *_ = run_ranks(count_collectives, 2, placement, processes=True)
        for nbytes, kinds in found[1:]:
            assert kinds["reduce_scatter"] == len(sizes)
            assert kinds["all_reduce"] == 2
            # ZeRO-2 gathers each chunk once after the step; ZeRO-3 at most for forward and backward
            uses = kinds["all_gather"] / len(sizes)
            assert uses == 1 if placement is ZERO_2 else 1 < uses <= 2
            if placement is ZERO_2:
                assert nbytes == 2 * sum(sizes)
        assert all(kinds == found[1][1] for *_, kinds in found[1:])


# -- ranks that differ -----------------------------------------------------------------------


class Experts(nn.Module):
    """Top-1 routing by the token's first number; some experts see nothing."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16)) for _ in range(4)
        )

    def forward(self, x):
        weights = torch.softmax(self.router(x), -1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if bool(mine.any()):
                out[mine] = expert(x[mine]) * weights[mine][:, i : i + 1]
        return out


class Mixture(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        with seeded(seed):
            self.first = nn.Linear(16, 16)
            self.blocks = nn.ModuleList(Experts() for _ in range(3))
            self.last = nn.Linear(16, 16)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def parts_of(world_size, step):
    """Few rows, so that ranks use different experts."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, 16, generator=generator) for _ in range(world_size)]


def square(module, x):
    return module(x).pow(2).mean()


def mixture(rank, placement):
    model = GeminiDDP(Mixture(), placement_policy=placement, precision="fp32",
                      min_chunk_size_m=0.0006, search_range_m=0)  # fmt: skip
    assert len(model.engine.chunks) > 3 * 4  # experts of a block have chunks of their own
    optimizer = HybridSGD(model.parameters(), lr=0.3)
    used = []
    for step in range(8):
        x = parts_of(dist.get_world_size(), step)[rank]
        square(model, x).backward()
        used.append(tuple(model.engine.reducer.present))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), used, model.engine.manager.gathers_of.total()


@pytest.mark.parametrize("world_size", [2, 3])
def test_experts_may_run_on_some_ranks_only(world_size):
    start = flat(list(Mixture().parameters()))
    want = train_reference(
        Mixture(),
        lambda ps: torch.optim.SGD(ps, lr=0.3),
        [parts_of(world_size, step) for step in range(8)],
        square,
    )
    for placement in (ZERO_3, ZERO_2):
        results = run_ranks(mixture, world_size, placement)
        assert len({tuple(used) for _, used, _ in results}) > 1  # ranks did use other experts
        for seen, _, gathers in results:
            assert torch.equal(seen, results[0][0])
            assert relative_error(seen - start, want - start) < 1e-6
            assert (gathers > 16) == (placement is ZERO_3)


class TwoPaths(nn.Module):
    """Ranks that take different paths run different modules, below nothing gathered whole."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x, first):
        return (self.a(self.b(x)) if first else self.b(self.a(x))).sum()


def different_modules(rank):
    model = GeminiDDP(TwoPaths(), precision="fp32", min_chunk_size_m=0.001)
    assert len(model.engine.chunks) > 1
    model.engine.comm.deadline_seconds = SOON
    optimizer = HybridSGD(model.parameters(), lr=0.1)
    before = [chunk.shard.clone() for chunk in model.engine.chunks]

    def step():
        model(torch.ones(2, 40), rank == 0).backward()
        optimizer.step()

    text = said(step, error=SequenceError)
    shards = [chunk.shard for chunk in model.engine.chunks]
    return text, all(torch.equal(a, b) for a, b in zip(shards, before, strict=True))


def test_different_modules_on_ranks_are_an_error_with_names():
    """Equal sizes: without the watch this is swapped data, and no error."""
    for text, same in run_ranks(different_modules, 2):
        assert "rank 0 asks to gather chunk" in text and "rank 1 asks to gather chunk" in text
        assert "a.weight" in text and "b.weight" in text
        assert same


def one_rank_evaluates(rank, budget):
    policy = "auto" if budget is None else AutoPlacement(budget)
    model = GeminiDDP(Tower(), placement_policy=policy, **SMALL)
    model.engine.comm.deadline_seconds = SOON
    optimizer = HybridAdam(model.parameters())
    (part,) = token_batches(1, 1)[0]
    try:
        for step in range(3):
            if rank == 0 and step == 1:
                with torch.no_grad():
                    model(part)
            token_loss(model, part).backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("budget", [None, "64MiB"])  # with one, ranks agree on a trace too
def test_an_evaluation_on_one_rank_alone_does_not_hang(budget):
    results = run_ranks(one_rank_evaluates, 2, budget)
    assert any(name == "SequenceError" and "rank 1" in text for name, text in results), results
    assert all(name for name, _ in results)


def late_rank(rank, compared):
    model = GeminiDDP(Tower(), **SMALL)
    comm = model.engine.comm
    comm.deadline_seconds = SOON
    published = comm.published_logs
    comm.published_logs = lambda: (compared.set(), published())[1]
    optimizer = HybridAdam(model.parameters())
    for step, parts in enumerate(token_batches(3, 2)):
        if rank == 1 and step == 1:
            compared.clear()
            compared.wait()  # the other's deadline has passed
        token_loss(model, parts[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.one_process("an event of this process says when one is late")
def test_a_rank_that_is_late_is_waited_for():
    first, second = run_ranks(late_rank, 2, threading.Event())
    assert torch.equal(first, second)


def other_options(rank):
    return [
        said(lambda options=options: GeminiDDP(Tower(), **{**SMALL, **options}))
        for options in ({"max_norm": float(rank)}, {"min_chunk_size_m": 0.004 + 0.01 * rank})
    ]


def test_ranks_with_other_options_are_told_so():
    for texts in run_ranks(other_options, 2):
        assert all("the same everywhere" in text for text in texts)


def other_world(rank):
    model = GeminiDDP(Tower(), **SMALL)
    (part,) = token_batches(1, 1)[0]
    model(part)
    dist.destroy_process_group()
    gone = said(model, part, error=RuntimeError)
    alone = GeminiDDP(Tower(), **SMALL)
    alone(part)
    dist.init_process_group("gloo", init_method=os.environ["STORE"] + "2", rank=rank, world_size=2)
    late = said(alone, part, error=RuntimeError)
    dist.barrier()  # the new group ends when both have it
    return gone, late


def test_a_world_that_changes_under_us_is_an_error():
    for gone, late in run_ranks(other_world, 2, processes=True):
        assert "world size of 2, and now it is 1" in gone
        assert "world size of 1, and now it is 2" in late


def no_gradient_anywhere(rank):
    model = GeminiDDP(Tower(), **SMALL)
    return said(HybridAdam(model.parameters()).step)


def test_step_without_backward_is_refused_on_every_rank():
    assert all("without a gradient" in text for text in run_ranks(no_gradient_anywhere, 2))


# -- whole state -----------------------------------------------------------------------------


def whole_state(rank, placement):
    model = GeminiDDP(Tower(seed=rank), placement_policy=placement, **SMALL)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    (parts,) = token_batches(1, dist.get_world_size())
    token_loss(model, parts[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = model.state_dict()
    sizes = len(state)
    model.load_state_dict(Tower(seed=9).state_dict())
    other = flat_state(model.state_dict())
    model.state_dict()
    model.load_state_dict(state)  # rank 0's counts, the others have none
    back = model.state_dict()
    same = all(torch.equal(back[k], v) for k, v in state.items())
    before = whole(model)
    with torch.no_grad(), model.summon_full_params():
        for p in model.parameters():
            p.mul_(0.5)
    return sizes, other, same, torch.equal(whole(model), 0.5 * before), flat_state(state)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("placement", [ZERO_3, ZERO_2], ids=["zero3", "zero2"])
def test_state_is_whole_on_rank_0_and_loads_everywhere(world_size, placement):
    results = run_ranks(whole_state, world_size, placement)
    assert [sizes for sizes, *_ in results] == [len(Tower().state_dict())] + [0] * (world_size - 1)
    assert torch.equal(results[0][1], flat(list(Tower(seed=9).state_dict().values())))
    assert all(same and halved for _, _, same, halved, _ in results)
    assert not torch.equal(results[0][4], flat(list(Tower().state_dict().values())))


def from_nothing(rank):
    torch.manual_seed(3 + rank)  # rank 0's values count
    with gemini.init_empty():
        module = nn.Sequential(nn.Embedding(33, 16), nn.Linear(16, 40), nn.LayerNorm(40))
    model = GeminiDDP(module, precision="fp32", min_chunk_size_m=0.0005)
    return whole(model)


def test_empty_modules_get_rank_0s_values():
    torch.manual_seed(3)
    want = flat(list(nn.Sequential(
        nn.Embedding(33, 16), nn.Linear(16, 40), nn.LayerNorm(40)).parameters()))  # fmt: skip
    assert all(torch.equal(got, want) for got in run_ranks(from_nothing, 3, processes=True))


def with_a_frozen_bias():
    """The bias is made with its weight, before the other weight of the weight's chunk."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False))
    module[0].bias.requires_grad_(False)
    return module


def partly_from_nothing(rank):
    with gemini.init_empty() if rank else nullcontext():
        module = with_a_frozen_bias()
    return whole(GeminiDDP(module, precision="fp32"))


def test_a_rank_with_values_gives_them_to_one_that_makes_its_own():
    want = flat(list(with_a_frozen_bias().parameters()))
    assert all(torch.equal(got, want) for got in run_ranks(partly_from_nothing, 2, processes=True))
