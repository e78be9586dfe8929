"""The runs of `boosted` where ranks split layers, or have replicas of shards; and of pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.shared.models import Block, Splittable, seeded
from gemini.integrations import GeminiPlugin, HybridParallelPlugin
from tests.integrations.cases.boosted import ADAM, MICRO, SMALL, Kit, Run, all_runs, averaged, part

PLAN = {
    **dict.fromkeys((f"blocks.*.{name}" for name in "qkv"), "colwise"),
    "blocks.*.gate": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
Made = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def ranks(size: int) -> int:
    """So many, or as many as there are."""
    return min(size, dist.get_world_size())


def hybrid(**options: Any) -> HybridParallelPlugin:
    given = {"tp_size": ranks(2), "pp_size": 1, "precision": "fp32"}
    return HybridParallelPlugin(**(given | options))


def gemini(**options: Any) -> GeminiPlugin:
    return GeminiPlugin(precision="fp32", min_chunk_size_m=SMALL, **options)


SPLIT: dict[str, Callable[[], Any]] = {
    "replicas": lambda: gemini(extra_dp_size=ranks(2)),
    "tp": lambda: gemini(tp_size=ranks(2)),
    "tp-replicas": lambda: gemini(tp_size=ranks(2), extra_dp_size=max(1, ranks(4) // 2)),
    "tp-sequence": lambda: gemini(tp_size=ranks(2), enable_sequence_parallelism=ranks(2) > 1),
    "hybrid-tp": hybrid,
    "hybrid-tp-zero1": lambda: hybrid(zero_stage=1),
    "hybrid-tp-zero2": lambda: hybrid(zero_stage=2, cpu_offload=True),
}


def splittable(name: str) -> Made:
    """A tied head: its embedding is split by rows, though the plan names the head alone."""
    model = Splittable(tied=True)
    model.tp_plan = PLAN  # type: ignore[assignment]
    return _with_optimizer(model)


def _with_optimizer(model: nn.Module) -> Made:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def split_runs(rank: int, names: list[str], here: str, before: str | None) -> Any:
    return all_runs(rank, names, here, before, Kit(splittable, SPLIT))


# -- pipelines --

CUT: dict[str, Callable[[], Any]] = {
    "1f1b": lambda: pipeline(zero_stage=1, num_microbatches=2),
    "interleaved": lambda: pipeline(
        pp_style="interleaved", num_model_chunks=2, microbatch_size=1, dp_outside=False
    ),
    "zbv": lambda: pipeline(
        pp_style="zbv", num_model_chunks=2, num_microbatches=2, zero_stage=1,
        num_layers_per_stage=[1, 3, 1, 1],
    ),
}  # fmt: skip


def pipeline(**options: Any) -> HybridParallelPlugin:
    """On one rank what a pipeline's checkpoint loads into, beside it."""
    if ranks(2) == 1:
        return hybrid(zero_stage=1)
    small = {"zero_bucket_size_in_m": SMALL} if options.get("zero_stage") else {}
    return hybrid(tp_size=1, pp_size=2, **small, **options)


def sequential(name: str) -> Made:
    with seeded():
        layers = [nn.Embedding(97, 32), *(Block(True) for _ in range(4)), nn.Linear(32, 97)]
    return _with_optimizer(nn.Sequential(*layers))


def criterion(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / MICRO


class PipelineRun(Run):
    """Two calls of the schedule before each step."""

    def loss(self, ids: Tensor) -> Tensor:
        """Of this place's rows, on the ranks of the last stage; 0 elsewhere."""
        if self.booster.plugin.pp_size == 1:
            loss = criterion(self.model(ids), ids)
            self.booster.backward(loss, self.optimizer)
            return loss.detach()
        found = self.booster.execute_pipeline(iter([ids]), self.model, criterion, self.optimizer)
        assert found["outputs"] is None
        return torch.zeros(()) if found["loss"] is None else found["loss"]

    def backwards(self, step: int) -> float:
        total = torch.zeros(())
        for micro in range(MICRO):
            with self.booster.no_sync(self.model):
                total += self.loss(part(step, micro, self.place))
        return averaged(total, self.place[1])

    def save(self, folder: Path, shard: bool, one_file: bool = False) -> None:
        super().save(folder, shard, one_file)

    def evaluated(self) -> Any:
        """What the last stage gives, without a backward."""
        if self.booster.plugin.pp_size == 1:
            return None
        ids = part(0, 0, self.place)
        with torch.no_grad():
            return self.booster.execute_pipeline(
                iter([ids]), self.model, criterion, return_outputs=True
            )


def pipeline_runs(rank: int, here: str, before: str | None) -> Any:
    return all_runs(rank, list(CUT), here, before, Kit(sequential, CUT, PipelineRun))
