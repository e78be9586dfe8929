"""A program whose bits follow from elementwise IEEE operations, so that all machines have the same.

Gradients are 2 c w of every weight w. The program has steps that clip, accumulate, skip, leave
parameters out and change rates, and goes on from a checkpoint; what it comes to depends on the
precision and on the rule, and not on where state lives, when blocks are updated, or on the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gemini
from gemini import AutoPlacement, GeminiDDP
from gemini.chunk.layout import specs_of
from gemini.memtracer.trace import sequential_trace
from optim import HybridAdam, HybridLion, HybridSGD, LossScale, NvmeConfig
from tests.support.loops.tails import PRECISIONS, SMALL, on_host
from tests.support.rules import CASES

SHAPES = ((37, 190), (61,), (8, 1290), (1,), (93, 93), (257,), (5, 2100))
BLOCK = 2048
RULES: dict[str, Callable[..., Any]] = {
    "adam": lambda params, **kw: HybridAdam(params, lr=1e-2, eps=1e-3, weight_decay=0.01, **kw),
    "sgd": lambda params, **kw: HybridSGD(params, lr=1e-2, momentum=0.9, nesterov=True, **kw),
    "lion": lambda params, **kw: HybridLion(params, lr=1e-3, weight_decay=0.1, **kw),
}
OTHERS = (
    "amsgrad", "adagrad, begun", "rmsprop, centered", "adamax", "nadam", "radam", "adadelta",
    "schedule-free", "adamw, bf16 state", "adamw, 8-bit state",
)  # fmt: skip
RULES |= {name: CASES[name].make for name in OTHERS}
KINDS = {name: ("adam", name) for name in ("bf16", "fp32", "rounded", "fp16")} | {
    "sgd": ("sgd", "bf16"),
    "lion": ("lion", "bf16"),
    **{name: (name, "bf16") for name in OTHERS},
    "schedule-free, fp32": ("schedule-free", "fp32"),
}


class Square(nn.Module):
    """A weight [shape] of values in [-0.5, 0.5); adds the sum of its squares."""

    def __init__(self, shape: Sequence[int], number: int) -> None:
        super().__init__()
        index = torch.arange(number, number + torch.Size(shape).numel(), dtype=torch.int64)
        values = (index * 7919 % 1000).double() / 1000 - 0.5
        self.weight = nn.Parameter(values.float().view(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.weight * self.weight).float().sum()


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Square(shape, 31 * i) for i, shape in enumerate(SHAPES))

    def forward(self, x: Tensor, without: int | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i != without:
                x = layer(x)
        return x


def _in_files() -> dict[str, Any]:
    """A budget that leaves some parameters and gradients on the device, and others not."""
    budget = "440KiB" if dist.is_initialized() else "330KiB"
    trace = sequential_trace(specs_of(Squares(), "bfloat16"))
    return {"placement_policy": AutoPlacement(budget), "trace": trace}


# Where model data is: options of GeminiDDP, and `fraction`, the share of state on disk
HOMES: dict[str, Callable[[], dict[str, Any]]] = {
    "resident": lambda: {"fraction": 0.0},
    "disk": dict,
    "partly on disk": lambda: {"fraction": 0.4},
    "files": _in_files,
    "host": lambda: on_host("cpu"),
    "host, parameters and gradients": lambda: on_host("cpu", params=0.5, grads=True),
    "host and disk": lambda: on_host("cpu", state=0.8, disk=0.4),
}
UPDATES = ("serial", "tail")


def made(kind: str, home: str, update: str) -> tuple[Any, Any]:
    rule, precision = KINDS[kind]
    options = {**PRECISIONS[precision], **HOMES[home]()}
    if precision == "fp16":  # another scale after every second step, and no overflow
        options["loss_scale"] = LossScale(initial_scale=2.0**10, growth_interval=2)
    fraction = options.pop("fraction", 1.0)
    model = GeminiDDP(Squares(), update=update, **SMALL, **options)
    optimizer = RULES[rule](
        model.parameters(),
        nvme=NvmeConfig(block_numel=BLOCK),
        nvme_offload_fraction=fraction,
        # the bits of the formula, on any machine; there is one path for rounding at random
        cpu_path="eager" if precision == "rounded" else "compile",
    )
    return model, optimizer


def backward(model: Any, optimizer: Any, factor: float, without: int | None = None) -> None:
    loss = model(torch.zeros(()), without).float() * factor
    optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()


def _step(model: Any, optimizer: Any, factor: float, without: int | None = None) -> None:
    backward(model, optimizer, factor, without)
    optimizer.step()


def _clips(model: Any, optimizer: Any) -> None:
    backward(model, optimizer, 0.75)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()


def _accumulates(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        backward(model, optimizer, 0.5)
    backward(model, optimizer, 0.625)
    optimizer.step()


def _changes_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] /= 2
    _step(model, optimizer, 0.5)


STEPS: tuple[Callable[[Any, Any], None], ...] = (
    lambda m, o: _step(m, o, 0.5),
    lambda m, o: _step(m, o, 0.25),
    _clips,
    lambda m, o: _step(m, o, 0.5),
    lambda m, o: _step(m, o, float("inf")),  # is skipped
    lambda m, o: _step(m, o, 0.375),
    _accumulates,
    lambda m, o: _step(m, o, 0.5, without=2),
    _changes_rate,
)


def bits(kind: str, home: str, update: str, folder: Path) -> list[str]:
    """Digests of the program, and of what two steps more come to from its checkpoint."""
    model, optimizer = made(kind, home, update)
    for number, step in enumerate(STEPS):
        step(model, optimizer)
        assert bool(optimizer.last_report.skipped) == (number == 4)
        optimizer.zero_grad()
    found = [digest(model, optimizer)]
    gemini.save_checkpoint(folder / "saved", model, optimizer)
    optimizer.close()
    model, optimizer = made(kind, home, update)
    gemini.load_checkpoint(folder / "saved", model, optimizer)
    for factor in (0.5, 0.25):
        _step(model, optimizer, factor)
        optimizer.zero_grad()
    found.append(digest(model, optimizer))
    optimizer.close()
    return found


def digest(model: Any, optimizer: Any) -> str:
    """Of all ranks' weights, state and counts, by parameter and plane. Collective."""
    runs: list[tuple[str, int, bytes]] = []

    def keep(run: Any) -> None:
        runs.append((f"{run.name}/{run.plane}", run.start, _bytes_of(run.values)))

    optimizer.visit_state(keep)
    everywhere = [runs]
    if dist.is_initialized():
        everywhere = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, runs)
    planes: dict[str, bytes] = {}
    for name, _, values in sorted(run for rank in everywhere for run in rank):
        planes[name] = planes.get(name, b"") + values  # a rank has a part of it
    said = hashlib.sha256()
    for name, values in planes.items():
        said.update(name.encode() + values)
    with model.summon_full_params(writeback=False):
        for name, param in model.module.named_parameters():
            said.update(name.encode() + _bytes_of(param))
    target = optimizer.targets[0]
    said.update(repr([int(count) for count in target.step_counts]).encode())
    said.update(repr(sorted(target.counters.state_dict().items())).encode())
    return said.hexdigest()[:16]


def _bytes_of(values: Tensor) -> bytes:
    return values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
