"""What a plan says of the step is what runs: block by block and link by link, on a device whose
memory is not the host's."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from bench.shared.simulated import SimBackend
from gemini import AutoPlacement, ConstPlacement, GeminiDDP, StaticPlacement
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement import draft
from gemini.placement.plan import MoveKind, UpdatePath
from gemini.placement.tiers import Tier
from gemini.units import PAGE_BYTES, align_up
from optim import HybridAdam, NvmeConfig
from tests.support.apart import Apart

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
HOMES = list(itertools.product((D, H), repeat=3))  # of parameters, gradients, state
BLOCK = 1024


class Watched(SimBackend):
    """Knows of every copy its two ends."""

    def __init__(self):
        super().__init__(3, updates_by_triton=True)
        self.shards_start_on_host = False
        self.copies = []

    def copy(self, dst, src, behind=()):
        self._note([(dst, src)])
        return super().copy(dst, src, behind)

    def copy_all(self, pairs, after=()):
        self._note(pairs)
        return super().copy_all(pairs, after)

    def _note(self, pairs):
        self.copies += [(dst.data_ptr(), src.data_ptr(), src.nbytes) for dst, src in pairs]


def made(placement, precision="bf16"):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(33, 77), nn.Tanh(), nn.Linear(77, 33))
    trace = sequential_trace(specs_of(module, {"bf16": "bfloat16", "fp32": "float32"}[precision]))
    model = GeminiDDP(
        module,
        Watched(),
        placement,
        precision=precision,
        min_chunk_size_m=1500 / 2**20,
        trace=trace,
    )
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=BLOCK))
    return model, optimizer


def iterate(model, optimizer):
    torch.manual_seed(1)
    model(torch.randn(5, 33)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def host_memory(model):
    """(kind, chunk, first block there or None, address, bytes a block, bytes) of what the host has.

    Blocks are numbered in their chunk.
    """
    engine = model.engine
    state = engine.target.tiered_state
    for slab in state.host_slabs:
        for block in slab.blocks:
            chunk = engine.target.trained[block.shard].spec.id
            for plane in slab.planes(block).values():
                index = block.shard_offset // BLOCK
                yield MoveKind.STATE, chunk, index, plane.data_ptr(), plane.nbytes, plane.nbytes
    for chunk in engine.chunks:
        if chunk.files is None and chunk.shard_on_host:
            shard, each = chunk.shard_memory, BLOCK * chunk.dtype.itemsize
            yield MoveKind.PARAM, chunk.spec.id, 0, shard.data_ptr(), each, shard.nbytes
    home = engine.storage.host_gradients
    for chunk, grad in {} if home is None else home.tensors.items():
        each = BLOCK * grad.itemsize
        yield MoveKind.GRAD, chunk, 0, grad.data_ptr(), each, grad.nbytes


def found(model):
    """Bytes of every (kind, chunk, block or None for the whole, from, to) that were copied."""
    places = list(host_memory(model))
    counts = Counter()
    for dst, src, nbytes in model.engine.backend.copies:
        for kind, chunk, first, start, each, size in places:
            for end, link in ((src, (H, D)), (dst, (D, H))):
                if start <= end < start + size:
                    whole = nbytes == size and size > each
                    block = None if whole else first + (end - start) // each
                    counts[kind, chunk, block, *link] += nbytes
    return counts


def planned(model):
    """The same, of the plan; what goes to files or comes from there passes the host."""
    plan, counts = model.engine.planning.plan, Counter()
    first = {chunk.id: chunk.blocks[0].id for chunk in plan.chunks if chunk.blocks}
    for move in plan.forecast.moves:
        chunk = plan.chunks[move.chunk]
        block = None if move.block is None else move.block - first[move.chunk]
        if block is None and len(chunk.blocks) == 1:  # a chunk of one block is that block
            block = 0
        if N not in (move.src, move.dst):
            counts[move.kind, move.chunk, block, move.src, move.dst] += move.nbytes
    return counts


def some_homes():
    """All, in one precision or the other."""
    for number, homes in enumerate(HOMES):
        name = "".join(home.value[0] for home in homes)
        marks = [] if name in ("hhh", "dhd") else [pytest.mark.ci]
        yield pytest.param(homes, ("bf16", "fp32")[number % 2], marks=marks, id=name)


def written(model):
    """Pages of state that a step writes to files, by the plan."""
    moves = [m for m in model.engine.planning.plan.forecast.moves if m.dst is N]
    kinds = (MoveKind.STATE, MoveKind.UNDO)
    return sum(align_up(m.nbytes, PAGE_BYTES) for m in moves if m.kind in kinds)


def check(model, optimizer):
    """Two steady iterations: what moves, how blocks are updated, and what that takes."""
    plan, backend = model.engine.planning.plan, model.engine.backend
    streamed, resident = set(), set()

    updater = model.engine.target.executor.updater
    one_block, in_slab = updater.update_block, updater.update_resident
    updater.update_block = lambda block, planes, views: (
        streamed.add(block.id), one_block(block, planes, views)
    )[1]  # fmt: skip
    updater.update_resident = lambda slab, views: (
        resident.update(block.id for block in slab.blocks), in_slab(slab, views)
    )  # fmt: skip
    with Apart(backend):
        iterate(model, optimizer)
        for _ in range(2):
            backend.copies.clear()
            streamed.clear(), resident.clear()
            before = model.engine.target.tiered_state.nvme_written_total
            iterate(model, optimizer)
            assert model.engine.target.tiered_state.nvme_written_total - before == written(model)
            assert found(model) == planned(model)
            ways = {UpdatePath.STREAM: streamed, UpdatePath.RESIDENT: resident}
            assert {plan.path_of(tier) for tier in (D, H, N)} == set(ways)
            for tier in (D, H, N):
                assert plan.blocks_on(tier) <= ways[plan.path_of(tier)]
            assert len(streamed) + len(resident) == sum(len(c.blocks) for c in plan.chunks)
    in_use = model.engine.manager.ledger.bytes_in_use()
    assert in_use.get((D, "staging"), 0) == plan.device_staging.nbytes
    assert optimizer.last_report.update_path == "triton"


@pytest.mark.parametrize(("homes", "precision"), list(some_homes()))
def test_of_all_homes(homes, precision, monkeypatch):
    def choose_homes(self):
        chosen = self.problem.lowest(D)
        chosen.param, chosen.grad = ([home] * len(chosen.param) for home in homes[:2])
        chosen.state = [[homes[2]] * len(blocks) for blocks in chosen.state]
        chosen.device_staging, chosen.host_staging = self.problem.staging(chosen)
        return chosen

    monkeypatch.setattr(draft.Draft, "choose_homes", choose_homes)
    model, optimizer = made(StaticPlacement(), precision)
    plan = model.engine.planning.plan
    assert {(s.param_home, s.grad_home, *set(s.state_homes)) for s in plan.shards} == {homes}
    check(model, optimizer)
    assert bool(plan.device_staging.nbytes) == (homes != (D, D, D))


@pytest.mark.parametrize(
    "placement",
    [
        StaticPlacement(0.5, 0.5, 0.5), AutoPlacement("72KiB", "64KiB"),
        *(pytest.param(placement, marks=pytest.mark.ci) for placement in (
            "cuda", "cpu", "zero1", "zero2", "zero3", StaticPlacement.zero(2, cpu_offload=True),
            ConstPlacement("80KiB"), AutoPlacement("80KiB", "1MiB"), AutoPlacement("1MiB"),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_of_every_policy(placement):
    model, optimizer = made(placement)
    plan = model.engine.planning.plan
    tight = plan.budgets.host < 1 << 20
    assert bool(plan.blocks_on(N)) == tight
    check(model, optimizer)
