"""One training run through a Booster with every plugin, and the same with torch's DDP alone.

A run accumulates under `no_sync`, clips by norm and by value, follows a StepLR that was made before
boosting, saves in the middle, and goes on; another one resumes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.models import Tower, token_loss
from gemini.integrations import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from optim import HybridAdam

ROWS, MICRO, STEPS, HALF = 8, 2, 6, 3  # of a micro-batch over all ranks
# eps so large that an update shows the gradient and not its sign alone
ADAM = {"lr": 0.05, "eps": 0.1, "weight_decay": 0.1}
SMALL = 2000 / 2**20  # of a chunk, in 2**20 elements
PLUGINS: dict[str, Callable[[], object]] = {
    "gemini": lambda: GeminiPlugin(precision="fp32", min_chunk_size_m=SMALL),
    "gemini-auto": lambda: GeminiPlugin(
        placement_policy="auto", precision="fp32", min_chunk_size_m=SMALL, max_prefetch=1
    ),
    "zero1": lambda: _zero(1),
    "zero2": lambda: _zero(2),
    "zero1-offloaded": lambda: _zero(1, cpu_offload=True),
    "zero2-late": lambda: _zero(2, overlap_allgather=True, communication_dtype=torch.float32),
    "ddp": TorchDDPPlugin,
    "ddp-ours": TorchDDPPlugin,
    "fsdp": lambda: TorchFSDPPlugin(
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: (
            recurse or isinstance(module, nn.Sequential)
        )
    ),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32"),
    "hybrid-zero": lambda: HybridParallelPlugin(
        tp_size=1, pp_size=1, precision="fp32", zero_stage=2
    ),
}
NAMES = list(PLUGINS)


def _zero(stage: int, **options: Any) -> LowLevelZeroPlugin:
    return LowLevelZeroPlugin(stage=stage, precision="fp32", reduce_bucket_size_in_m=1, **options)


def made(
    name: str,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """What a user has before boosting."""
    model = Tower()
    ours = name in ("gemini-auto", "ddp-ours")
    optimizer = (HybridAdam if ours else torch.optim.AdamW)(model.parameters(), **ADAM)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def part(step: int, micro: int, place: tuple[int, int] | None = None) -> Tensor:
    """The rows of a micro-batch of one of several places; by default this rank's."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    rows = torch.randint(97, (ROWS, 10), generator=generator)
    index, places = place or (dist.get_rank(), dist.get_world_size())
    return rows[index * ROWS // places : (index + 1) * ROWS // places]


def averaged(loss: Tensor, count: int | None = None) -> float:
    """Over so many that have one; by default all ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return float(loss) / (count or dist.get_world_size())


@dataclass(frozen=True)
class Kit:
    """What is trained by a name: (model, optimizer, schedule), and the plugin; how it is run."""

    made: Callable[[str], tuple[nn.Module, torch.optim.Optimizer, Any]]
    plugins: Mapping[str, Callable[[], Any]]
    run: Callable[..., Run] | None = None


PLAIN = Kit(made, PLUGINS)


def references(kit: Kit = PLAIN) -> list[float]:
    """Losses of torch's DDP."""
    module, optimizer, schedule = kit.made("ddp")
    model = nn.parallel.DistributedDataParallel(module)
    losses = []
    for step in range(STEPS):
        with model.no_sync():
            first = token_loss(model, part(step, 0)) / MICRO
            first.backward()
        second = token_loss(model, part(step, 1)) / MICRO
        second.backward()
        if step % 2:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(averaged(first + second))
    return losses


class Run:
    """A boosted module with what belongs to it."""

    def __init__(self, name: str, kit: Kit = PLAIN) -> None:
        module, optimizer, schedule = kit.made(name)
        self.booster = Booster(plugin=kit.plugins[name]())
        self.place = self.booster.plugin.sizes.data_place(dist.get_rank(), dist.get_world_size())
        self.model, self.optimizer, *_, self.schedule = self.booster.boost(
            module, optimizer, lr_scheduler=schedule
        )
        assert self.optimizer is optimizer and self.schedule is schedule

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = self.backwards(step)
            if step % 2:
                self.optimizer.clip_grad_by_value(0.01)
            else:
                self.optimizer.clip_grad_by_norm(max_norm=0.1)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss)
        return losses

    def backwards(self, step: int) -> float:
        """Of a step; the loss, over all ranks."""
        with self.booster.no_sync(self.model, self.optimizer):
            one = token_loss(self.model, part(step, 0, self.place)) / MICRO
            self.booster.backward(one, self.optimizer)
        two = token_loss(self.model, part(step, 1, self.place)) / MICRO
        self.booster.backward(two, self.optimizer)
        return averaged(one + two)

    def evaluated(self) -> Any:
        """What is looked at in the middle."""

    def save(self, folder: Path, shard: bool, one_file: bool = True) -> None:
        """one_file: of the optimizer's state, where it is not in shards."""
        booster = self.booster
        booster.save_model(self.model, folder / "model", shard, True, "", 10, use_safetensors=shard)
        booster.save_optimizer(self.optimizer, folder / "optimizer", shard or not one_file)
        booster.save_lr_scheduler(self.schedule, folder / "schedule")

    def load(self, folder: Path) -> None:
        self.booster.load_model(self.model, folder / "model")
        self.booster.load_optimizer(self.optimizer, folder / "optimizer")
        self.booster.load_lr_scheduler(self.schedule, folder / "schedule")


def all_runs(
    rank: int, names: list[str], here: str, before: str | None, kit: Kit = PLAIN
) -> tuple[list[float], dict[str, list[float]], dict[str, list[float]], dict[str, Any]]:
    """(DDP's losses, those of each plugin, those of each after it has resumed, evaluations).

    here: where checkpoints go, one a plugin. before: where another world size has left such; each
    plugin resumes from what the next one of `names` has saved there; else from its own.
    """
    make = kit.run or Run
    losses, resumed, seen = {}, {}, {}
    for i, name in enumerate(names):
        run = make(name, kit)
        losses[name] = run.steps(0, HALF)
        run.save(Path(here) / name, shard=bool(i % 2))
        seen[name] = run.evaluated()
        losses[name] += run.steps(HALF, STEPS)
    for i, name in enumerate(names):
        other = name if before is None else names[(i + 1) % len(names)]
        run = make(name, kit)
        run.load(Path(before or here) / other)
        resumed[name] = run.steps(HALF, STEPS)
    return references(kit), losses, resumed, seen
