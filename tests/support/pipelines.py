"""A tiny model that is cut into the stages of a pipeline, under every schedule of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from bench.shared.models import seeded
from bench.shared.reference import flat, train_reference
from gemini import GeminiDDP, StaticPlacement
from gemini.pipeline import GeminiStage
from optim import HybridAdam
from tests.support.meshes import ADAM

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
MAX_NORM, STEPS, MICROBATCHES, LAYERS, WIDTH, VOCABULARY = 0.3, 3, 4, 4, 33, 97


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 61), nn.Linear(61, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Whole(nn.Module):
    """Names of parameters are what a stage's part has, too."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Part(nn.Module):
    """Stage `index` of `count`: its layers, with the ends at the ends."""

    def __init__(self, whole: Whole, index: int, count: int) -> None:
        super().__init__()
        per = LAYERS // count
        mine = range(index * per, (index + 1) * per)
        self.embed = whole.embed if index == 0 else None
        self.layers = nn.ModuleDict({str(i): whole.layers[str(i)] for i in mine})
        last = index == count - 1
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def batches(parts: int, steps: int = STEPS) -> list[list[Tensor]]:
    """By step its micro-batches, of all ranks."""
    draw = torch.Generator().manual_seed(1)
    return [
        [torch.randint(VOCABULARY, (2, 9), generator=draw) for _ in range(parts)]
        for _ in range(steps)
    ]


def reference(
    data: Sequence[Sequence[Tensor]],
    divisor: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """By name the weights of one plain process that computes in `dtype`."""
    whole = Whole()
    found = train_reference(
        whole,
        lambda params: torch.optim.AdamW(params, **ADAM),
        data,
        lambda module, ids: loss_of(module(ids), ids),
        dtype,
        max_norm=MAX_NORM,
        divisor=divisor,
    )
    sizes = [param.numel() for param in whole.parameters()]
    parts = zip(whole.named_parameters(), found.split(sizes), strict=True)
    return {name: values.view(param.shape) for (name, param), values in parts}


def update_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Relative, of the update of the whole model."""
    start = Whole().state_dict()
    assert got.keys() == want.keys() == start.keys()
    names = sorted(want)
    moved = flat([got[name] for name in names]) - flat([want[name] for name in names])
    update = flat([want[name] for name in names]) - flat([start[name] for name in names])
    return float(moved.norm() / update.norm())


def mesh_of_pipelines() -> Any:
    """Two places in a pipeline, and what ranks are left over as data parallel."""
    ranks = dist.get_world_size()
    if ranks == 2:
        return init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))


@dataclass
class Trained:
    """What one rank has of a pipeline."""

    mesh: Any
    parts: list[GeminiDDP]
    optimizer: HybridAdam
    stages: list[GeminiStage]
    schedule: Any
    losses: list[Tensor]

    @property
    def dp(self) -> int:
        return self.mesh.get_local_rank("dp") if "dp" in self.mesh.mesh_dim_names else 0

    def batch(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's, of all micro-batches."""
        return torch.cat(list(parts[self.dp * MICROBATCHES : (self.dp + 1) * MICROBATCHES]))

    def run(self, parts: Sequence[Tensor]) -> None:
        """One call of the schedule."""
        ids = self.batch(parts)
        first, last = (any(getattr(s, end) for s in self.stages) for end in ("is_first", "is_last"))
        inputs = (ids,) if first else ()
        targets = {"target": ids, "losses": self.losses} if last else {}
        self.schedule.step(*inputs, **targets)

    def step(self) -> float | None:
        self.optimizer.step()
        norm = self.optimizer.last_report.grad_norm  # type: ignore[union-attr]
        self.optimizer.zero_grad()
        return norm

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self.parts:
            found |= {name: value.clone() for name, value in part.state_dict().items()}
        return found

    def gathers(self) -> list[tuple[int, int]]:
        """By part: gathers so far, and chunks that are gathered."""
        engines = [part.engine for part in self.parts]
        return [
            (e.manager.gathers_of.total(), sum(not c.is_unsharded for c in e.chunks))
            for e in engines
        ]

    def close(self) -> None:
        self.optimizer.close()


def pipeline(
    kind: str, shard_frac: float = 1.0, *, adam: dict[str, Any] | None = None, **options: Any
) -> Trained:
    """This rank's stages of the model under a schedule."""
    mesh = mesh_of_pipelines()
    whole, pp = Whole(), mesh.get_local_rank("pp")
    count = 2 if kind in ("GPipe", "1F1B") else 4
    mine = {"GPipe": [pp], "1F1B": [pp], "ZBVZeroBubble": [pp, 3 - pp], "DualPipeV": [pp, 3 - pp]}
    indices = mine.get(kind, [pp, pp + 2])
    options = {
        "max_norm": MAX_NORM,
        "precision": "fp32",
        "placement_policy": StaticPlacement(shard_frac),
    } | options
    parts = [
        GeminiDDP(Part(whole, i, count), mesh=mesh, min_chunk_size_m=0.004, **options)
        for i in indices
    ]
    params: Iterator[nn.Parameter] = (p for part in parts for p in part.parameters())
    optimizer = HybridAdam(params, **(ADAM | (adam or {})))  # type: ignore[arg-type]
    stages = [
        GeminiStage(part, i, count, torch.device("cpu"), group=mesh.get_group("pp"))
        for part, i in zip(parts, indices, strict=True)
    ]
    given = stages if count == 4 else stages[0]
    schedule = SCHEDULES[kind](given, MICROBATCHES, loss_fn=loss_of)
    return Trained(mesh, parts, optimizer, stages, schedule, [])
