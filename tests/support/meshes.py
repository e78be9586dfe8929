"""What training on meshes is compared with one process by: its optimizer, ZeRO stages, steps.

And what goes with every kind of mesh: readers, state dicts, disks, checkpoints.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import gemini
from bench.shared.models import token_batches, token_loss
from bench.shared.reference import everything, same, train_reference
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam
from tests.support.plain_training import on_disk as state_on_disk

ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}  # eps: small gradients are no signs
MAX_NORM = 0.3
STAGES = {
    1: StaticPlacement(0.0, shard_grads=False),
    2: StaticPlacement(0.0),
    3: StaticPlacement(1.0),
}
STEPS, PARTS = 3, 3  # parts: backwards that add up to a step
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def reference(
    module: nn.Module,
    batches: Sequence[Sequence[Any]],
    precision: str = "fp32",
    loss_of: Callable[[nn.Module, Any], Tensor] = token_loss,
) -> Tensor:
    """fp32 masters that one process of torch comes to."""
    return train_reference(
        module,
        lambda params: torch.optim.AdamW(params, **ADAM),  # type: ignore[arg-type]
        batches,
        loss_of,
        DTYPES[precision],
        MAX_NORM,
    )


def own_parts(parts: Sequence[Tensor], tp: int = 1) -> Sequence[Tensor]:
    """Of a batch: those of this rank, which ranks that split its layers have, too."""
    place, count = dist.get_rank() // tp, len(parts) * tp // dist.get_world_size()
    return parts[place * count : (place + 1) * count]


def passes(
    model: nn.Module,
    batches: Sequence[Sequence[Any]],
    loss_of: Callable[[nn.Module, Any], Tensor] = token_loss,
    *,
    tp: int = 1,
    no_sync: bool = False,
) -> Iterator[None]:
    """The backwards of this rank's parts of each batch: a caller clips, steps and drops gradients
    behind them. no_sync: the last of them alone reduces."""
    for parts in batches:
        mine = own_parts(parts, tp)
        for left, part in zip(reversed(range(len(mine))), mine, strict=True):
            with model.no_sync() if no_sync and left else nullcontext():
                (loss_of(model, part) / len(mine)).backward()
        yield


@dataclass(frozen=True)
class MeshCase:
    """Mesh of a shape, or none, and how a module is wrapped on it; suites add what theirs differ
    in."""

    shape: Any = (2, 2)
    stage: int = 3
    precision: str = "fp32"
    no_sync: bool = False

    @property
    def tp(self) -> int:
        """Ranks that read the same tokens."""
        return 1


SHARDS = MeshCase()


class SplitCase(MeshCase):
    """`MeshCase` whose last dimension splits layers."""

    @property
    def tp(self) -> int:
        return int(self.shape[-1])


@dataclass(frozen=True)
class Kit:
    """How a suite makes a module of a seed and wraps that of a case, and what it trains on."""

    module: Callable[..., nn.Module]
    wrapped: Callable[..., tuple[Any, Any]]  # (case, seed=, adam=)
    batches: Callable[[int, int], Sequence[Sequence[Any]]] = token_batches  # (steps, parts)
    loss_of: Callable[[nn.Module, Any], Tensor] = token_loss

    def train(
        self,
        model: Any,
        optimizer: Any,
        case: MeshCase = SHARDS,
        steps: int = STEPS,
        stepped: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Norms of so many steps, each of `PARTS` backwards of every rank."""
        norms = []
        batches = self.batches(steps, PARTS * dist.get_world_size() // case.tp)
        for _ in passes(model, batches, self.loss_of, tp=case.tp, no_sync=case.no_sync):
            optimizer.step()
            norms.append(optimizer.last_report.grad_norm)
            optimizer.zero_grad()
            stepped()
        return norms


# -- readers, state dicts, disks --


def reads(kit: Kit, cases: Sequence[Any], split: str, plain: str) -> dict[str, Any]:
    """Whole gradients, parameters and state, of a parameter that is split, too; the state as
    another case loads it; and digests before and after the last rank changed a plain parameter."""
    found: dict[str, Any] = {}
    model, optimizer = kit.wrapped(cases[0])
    kit.train(model, optimizer, cases[0], steps=1)
    token_loss(model, token_batches(1, 4, seed=3)[0][dist.get_rank() // cases[0].tp]).backward()
    found["gradients"] = {name: grad.clone() for name, grad in model.named_gradients()}
    with pytest.raises(RuntimeError, match=rf"{split} is split over \w+, and p.grad would be"):
        print(model.module.get_parameter(split).grad)
    found["plain"] = model.module.get_parameter(plain).grad.clone()
    with model.summon_full_params(writeback=False):
        found["summoned"] = model.module.get_parameter(split).full_tensor().clone()
    found["state"] = everything(model, optimizer)
    saved = model.state_dict(), optimizer.state_dict()
    optimizer.close()

    model, optimizer = kit.wrapped(cases[1], seed=8)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    found["loaded"] = everything(model, optimizer)
    before = model.digest()
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            model.module.get_parameter(plain).add_(1)
    found["digests"] = before, model.digest()
    unwrapped = model.unwrap().get_parameter(split)
    found["unwrapped"] = unwrapped.full_tensor().detach().clone()
    return found


def check_reads(found: Sequence[dict[str, Any]], module: nn.Module, split: str, plain: str) -> None:
    """Of all ranks."""
    first = found[0]
    shapes = {name: p.shape for name, p in module.named_parameters()}
    assert {name: grad.shape for name, grad in first["gradients"].items()} == shapes
    for one in found:
        assert same(one["gradients"], first["gradients"])
        assert torch.equal(one["plain"], first["gradients"][plain])
        assert torch.equal(one["summoned"], first["state"][split])
        assert torch.equal(one["unwrapped"], first["state"][split])
    assert same(first["state"], first["loaded"])
    assert len({one["digests"][0] for one in found}) == 1
    after = [one["digests"][1] for one in found]
    assert after[-1] != after[0] == after[1]


def on_disk(kit: Kit, cases: Sequence[Any], folder: str) -> list[tuple[Any, ...]]:
    """The first case in memory, and the second with its state on NVMe, parked in the middle."""
    found = []
    for fraction, case in zip((0.0, 1.0), cases, strict=True):
        model, optimizer = kit.wrapped(case, adam=ADAM | state_on_disk(folder, fraction))
        kit.train(model, optimizer, case, steps=1)
        if fraction:
            with optimizer.parked("nvme"):
                pass
        kit.train(model, optimizer, case, steps=2)
        assert "total" in str(model.memory_report())
        dist.barrier()
        files = sum("rank" in name for name in os.listdir(folder))
        found.append((everything(model, optimizer), model.digest(), files))
        dist.barrier()
        optimizer.close()
    return found


def check_on_disk(found: Sequence[list[tuple[Any, ...]]]) -> None:
    """Of all ranks: the same bits, and a file of each in one folder."""
    assert same(*(values for values, *_ in found[0]))
    for memory, disk in found:
        assert memory[1] == disk[1] == found[0][0][1]
        assert disk[-1] >= len(found)


# -- checkpoints --


def saves(rank: int, kit: Kit, case: Any, path: str) -> tuple[dict[str, Tensor], ...]:
    """What a checkpoint has, and what one more step comes to."""
    model, optimizer = kit.wrapped(case)
    kit.train(model, optimizer, case)
    gemini.save_checkpoint(path, model, optimizer)
    saved = everything(model, optimizer)
    kit.train(model, optimizer, case, steps=1)
    went_on = everything(model, optimizer)
    optimizer.close()
    return saved, went_on


def loads(rank: int, kit: Kit, cases: Sequence[Any], path: str, steps: int = 0) -> list[Any]:
    found = []
    for case in cases:
        model, optimizer = kit.wrapped(case, seed=5)
        gemini.load_checkpoint(path, model, optimizer)
        if steps:
            kit.train(model, optimizer, case, steps=steps)
        found.append(everything(model, optimizer))
        optimizer.close()
    return found


def check_checkpoint(kit: Kit, case: Any, others: dict[int, Sequence[Any]], path: str) -> Any:
    """A checkpoint of 4 ranks is of whole tensors: it goes on where it was, loads into these cases
    by number of ranks, into a module that is not split, and by torch. Returns what it has."""
    saved, went_on = run_ranks(saves, 4, kit, case, path)[0]
    assert same(run_ranks(loads, 4, kit, [case], path, 1)[0][0], went_on)
    for ranks, cases in others.items():
        found = run_ranks(loads, ranks, kit, cases, path)[0]
        assert all(same(values, saved) for values in found)
    alone = {name: torch.empty_like(value) for name, value in kit.module().state_dict().items()}
    dcp.load({"model": alone}, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(value, saved[name]) for name, value in alone.items())
    model = GeminiDDP(kit.module(4), precision=case.precision)
    optimizer = HybridAdam(model.parameters(), **ADAM)  # type: ignore[arg-type]
    gemini.load_checkpoint(path, model, optimizer)
    assert same(everything(model, optimizer), saved)
    optimizer.close()
    return saved
