"""Features together over ranks: pairs and triples against one torch process, on updates."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from bench.numerics import BOUNDS, Case, update_errors
from bench.shared.models import Choosy, Tower, token_batches, token_loss
from bench.shared.reference import everything, flat, same
from bench.shared.workers import run_ranks
from gemini import GeminiDDP
from optim import HybridAdam, HybridSGD, LossScale

pytestmark = pytest.mark.ci
SMALL = {"min_chunk_size_m": 0.004}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_clipping_accumulation_and_placement_together(precision, world_size):
    """K = 1..4, with and without no_sync, in four placements, ZeRO-2 and -3; always clipped."""
    base = Case(precision, clip=True, world_size=world_size)
    cases = [
        base,
        replace(base, parts=2, placement="nvme"),
        replace(base, parts=3, no_sync=True, placement="host"),
        replace(base, parts=4, placement="mixed", shard_param_frac=0.0),
        replace(base, parts=4, no_sync=True, shard_param_frac=0.0),
    ]
    for case, error in zip(cases, update_errors(cases, steps=4), strict=True):
        assert error < BOUNDS[precision], case


def overflow_in_the_middle(rank, precision, value):
    options = {"loss_scale": LossScale(hysteresis=1)} if precision == "fp16" else {}
    model = GeminiDDP(Tower(), precision=precision, **SMALL, **options)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    seen = []
    for step, parts in enumerate(token_batches(4, dist.get_world_size())):
        before = everything(model, optimizer)
        handle = None
        if step == 2 and rank == 1:
            weight = model.layers[1][3].weight
            handle = weight.register_hook(lambda grad: grad * value)
        token_loss(model, parts[rank]).backward()
        if handle is not None:
            handle.remove()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        report = optimizer.last_report
        unchanged = same(before, everything(model, optimizer))
        seen.append((report.skipped, report.nonfinite, unchanged, report.loss_scale))
    return seen, optimizer.skipped_steps


@pytest.mark.parametrize(
    ("precision", "value"), [("fp32", math.nan), ("bf16", math.inf), ("fp16", -math.inf)]
)
def test_an_overflow_on_one_rank_at_one_step_skips_it_on_all(precision, value):
    """The rank that owns the shard in which the sum overflows is named, the same on all."""
    results = run_ranks(overflow_in_the_middle, 2, precision, value)
    for seen, skipped_steps in results:
        assert [skipped for skipped, *_ in seen] == [False, False, True, False]
        assert seen[2][1].startswith("layers.1.3.weight on rank ")
        assert seen[2][1] == results[0][0][2][1] and skipped_steps == 1
    unchanged = [entry[2] for entry in results[0][0]]  # rank 0 has the whole state
    assert unchanged == [False, False, True, False]
    scales = [entry[3] for entry in results[0][0]]
    assert scales == ([2.0**16] * 3 + [2.0**15] if precision == "fp16" else [1.0] * 4)


def norms(rank, precision):
    found = []
    for norm_type in (1, 2, math.inf):
        model = GeminiDDP(Tower(), precision=precision, **SMALL)
        optimizer = HybridSGD(model.parameters(), lr=0.1)
        (parts,) = token_batches(1, dist.get_world_size())
        token_loss(model, parts[rank]).backward()
        whole = flat([grad for _, grad in model.named_gradients()])
        local = sum(grad.numel() for _, grad in model.named_gradients(full=False))
        want = float(torch.linalg.vector_norm(whole, norm_type))
        read = torch.stack([p.grad.norm(norm_type).double() for p in model.parameters()])
        assert float(torch.linalg.vector_norm(read, norm_type)) == pytest.approx(want, rel=1e-6)
        found.append((float(optimizer.clip_grad_norm_(0.5, norm_type)), want, local))
        optimizer.step()
        assert optimizer.last_report.grad_norm == found[-1][0]
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_norm_over_ranks_is_that_of_the_whole_gradients(precision):
    results = run_ranks(norms, 3, precision)
    total = sum(p.numel() for p in Tower().parameters())
    for found in zip(*results, strict=True):
        assert {entry[:2] for entry in found} == {found[0][:2]}
        got, want, _ = found[0]
        assert abs(got / want - 1) < 1e-6
        assert sum(entry[2] for entry in found) == total


def square(output):
    return output.float().pow(2).sum()


def accumulates_unused(rank, no_sync):
    """Head 0 everywhere, head 1 on rank 1 in the first part only, head 2 nowhere.

    One chunk: ranks that run different modules must not gather different chunks.
    """
    model = GeminiDDP(Choosy(), precision="fp32", min_chunk_size_m=1)
    optimizer = HybridSGD(model.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.arange(10.0).reshape(2, 5) / (rank + 2)
    before = model.state_dict()
    for part, head in enumerate((rank, 0)):
        if no_sync and part == 0:
            with model.no_sync():
                square(model(x, head)).backward()
        else:
            square(model(x, head)).backward()
    optimizer.step()
    return before, model.state_dict()


@pytest.mark.parametrize("no_sync", [False, True])
def test_accumulation_over_parameters_that_some_ranks_and_parts_do_not_use(no_sync):
    before, after = run_ranks(accumulates_unused, 2, no_sync)[0]
    plain = Choosy()
    for rank in (0, 1):
        x = torch.arange(10.0).reshape(2, 5) / (rank + 2)
        for head in (rank, 0):
            (square(plain(x, head)) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1).step()
    for name, param in plain.named_parameters():
        update = (after[name] - before[name]).double()
        want = (param.detach() - before[name]).double()
        if name.startswith("heads.2"):
            assert torch.equal(after[name], before[name])
        else:
            assert float((update - want).norm() / want.norm()) < 1e-6, name
