"""What a run will take, before it begins: where everything lives, seconds, and what is cheaper."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import nn

from gemini import nvme
from gemini.chunk.layout import training_layout
from gemini.chunk.sizing.search import search_chunk_configuration
from gemini.memtracer.collector import trace
from gemini.memtracer.trace import Trace
from gemini.placement.planner import PlanResult, plan_within
from gemini.placement.policy import AutoPlacement
from gemini.placement.sizes import UNLIMITED, Bandwidths, BudgetError, Budgets
from gemini.placement.tiers import Tier
from gemini.plan.question import format_bytes_up
from gemini.runtime.comm.communicator import Communicator
from gemini.runtime.memory.backend import make_backend
from gemini.runtime.schedule.planning import USUAL, begin_planning
from gemini.units import format_bytes, parse_bytes

from .config import TrainConfig
from .models import empty_model

WORTH_SAYING = 0.93  # of the seconds: what saves less is not named
_PROBE_SECONDS = 1.0
_MAX_TRIES = 8
_WIDTH = {"cpu": 256, "cuda": 8192}  # of a layer that is timed, and rows that it is given


@dataclass(frozen=True)
class Prediction:
    """A run as planned.

    seconds: of an optimizer step, with all its forwards and backwards.
    """

    config: TrainConfig
    trace: Trace
    result: PlanResult
    budgets: Budgets  # of one rank
    seconds: float
    bound_by: str
    num_params: int
    num_trained: int

    @property
    def on_disk(self) -> int:
        """Bytes of a rank in files."""
        return int(self.result.profile.peak(Tier.NVME))

    def lines(self, world_size: int, device: str) -> Iterator[str]:
        """For a person."""
        config = self.config
        kept = "computed again in backward" if config.checkpointing else "kept for backward"
        trained = "all trained" if self.num_trained == self.num_params else (
            f"{self.num_trained / 1e6:.4g} M of them trained"
        )  # fmt: skip
        yield f"{self.num_params / 1e6:.4g} M parameters, {trained}; {world_size} x {device}"
        yield (
            f"a step: {config.accumulate} x {config.batch} sequences of {config.seq} tokens; "
            f"activations are {kept}"
        )
        yield f"{'a rank':8} {'peak':>11} {'budget':>11}   of it"
        for tier in Tier:
            parts = self.result.profile.peaks()[tier.value]
            listed = [f"{k} {format_bytes(n)}" for k, n in parts.items() if n and k != "total"]
            if not listed:
                continue
            limit = self.budgets.of(tier)
            budget = "-" if limit >= UNLIMITED else format_bytes(limit)
            total = format_bytes(parts["total"])
            yield f"{tier.value:8} {total:>11} {budget:>11}   {', '.join(listed)}"
        yield f"about {self.seconds:.3g} s a step, bound by {self.bound_by}"


Change = tuple[str, dict[str, Any]]  # in words, and fields of a config


class Planner:
    """Asks what runs of one model would take here. All ranks ask the same."""

    def __init__(self, folder: str, comm: Communicator, device: torch.device) -> None:
        self._folder, self._comm, self._device = folder, comm, device
        self.predict = cache(self._predict)
        self._traced = cache(self._trace)
        self._speeds = cache(self._measure)

    def _predict(self, config: TrainConfig) -> Prediction:
        """Raises BudgetError where it does not fit, ValueError for a batch that ranks cannot share.

        Homes are those that wrapping chooses; seconds are from speeds that are measured here.
        """
        world_size = self._comm.world_size
        batch = config.batch_of_rank(world_size)
        key = replace(
            KEY, batch=batch, seq=config.seq, lora=config.lora,
            checkpointing=config.checkpointing,
        )  # fmt: skip
        model, found = self._traced(key)
        chunks = search_chunk_configuration(model, world_size=world_size)
        specs = chunks.layout.params
        order = found.param_order(specs)
        layout = training_layout(specs, chunks.capacities, world_size, order)
        policy = placement_of(config)
        planning = begin_planning(
            layout, policy, make_backend(self._device), self._comm, has_master=True,
            with_originals=frozenset(), max_prefetch=1, trace=found,
        )  # fmt: skip
        trained = sum(spec.numel for spec in specs if spec.trainable)
        num_params = sum(spec.numel for spec in specs)
        passes = 2 * (2 + config.checkpointing) * num_params + 2 * trained
        tokens = batch * config.seq
        has_files = planning.result.profile.peak(Tier.NVME) > 0
        inputs = replace(
            planning.inputs,
            flops=float(passes * tokens),
            bandwidths=self._speeds(config.nvme if has_files else None),
        )
        priced = plan_within(planning.plan, inputs, policy)
        seconds = priced.cost.seconds + (config.accumulate - 1) * priced.cost.busy["compute"]
        return Prediction(
            config, found, planning.result, planning.inputs.budgets, seconds,
            priced.cost.bound_by.replace("_", " "), num_params, trained,
        )  # fmt: skip

    def _trace(self, config: TrainConfig) -> tuple[nn.Module, Trace]:
        """With the loss that trl computes, which never has all logits."""
        from trl.trainer.utils import add_fused_lm_head

        model = empty_model(self._folder, config)
        inner: Any = model.get_base_model() if config.lora else model  # type: ignore[operator]
        add_fused_lm_head(inner, outputs=("log_probs", "entropy", "is_top1"))
        ids = torch.empty(config.batch, config.seq, dtype=torch.int64, device="meta")
        inputs = {"input_ids": ids, "labels": ids, "attention_mask": ids}
        return model, trace(model, {**inputs, "use_cache": False, "fused_lm_head": True})

    def _measure(self, folder: str | None) -> Bandwidths:
        """Rank 0's speeds, on all ranks."""
        speeds = replace(USUAL, flops=_flops(self._device))
        if folder is not None and self._comm.rank == 0:
            best = nvme.probe(folder, seconds=_PROBE_SECONDS).best
            speeds = replace(speeds, nvme_read=best.read, nvme_write=best.write)
        first: Bandwidths = self._comm.gather_objects(speeds)[0]
        return first

    def cheaper(self, base: Prediction) -> Iterator[str]:
        """What would take less time in the same memory, and what a little more would buy."""
        config = base.config
        for words, changes in _faster(config):
            found = self._try(replace(config, **changes))
            if found is not None and found.seconds < WORTH_SAYING * base.seconds:
                yield f"with {words} a step takes about {found.seconds:.3g} s"
        if base.on_disk and config.host_mem is not None:
            more = parse_bytes(config.host_mem) + base.on_disk * self._comm.world_size
            words = f"--host-mem {format_bytes_up(more)}"
            found = self._try(replace(config, host_mem=format_bytes_up(more)))
            if found is not None and found.seconds < WORTH_SAYING * base.seconds:
                yield f"with {words} a step takes about {found.seconds:.3g} s"

    def _try(self, config: TrainConfig) -> Prediction | None:
        try:
            return self.predict(config)
        except ValueError:
            return None

    def refusal(self, config: TrainConfig, error: BudgetError) -> str:
        """Why it does not fit, and the cheapest change with which it does."""
        assert error.tier is not None
        flag = "--nvme" if error.tier is Tier.NVME else f"--{error.tier.value}-mem"
        given = "" if error.budget_bytes >= UNLIMITED else f" {format_bytes(error.budget_bytes)}"
        changes = (words for words, changed in self._smaller(config) if self._try(changed))
        return (
            f"it does not fit: {flag}{given} lacks {format_bytes(error.missing_bytes)} for "
            f"{error.what}\ncheapest change: {next(changes, None) or self._enough(config)}"
        )

    def _smaller(self, config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
        """What needs less memory, from cheap to dear."""
        switches: list[Change] = []
        if not config.checkpointing:
            switches.append(("--checkpointing", {"checkpointing": True}))
        if config.nvme is None:
            switches.append(("--nvme FOLDER", {"nvme": "."}))
        if not config.lora:
            switches.append(("--lora 16", {"lora": 16}))
        sizes: list[Change] = [("", {})]
        for times in (2, config.batch // self._comm.world_size):
            if times > 1 and config.batch % (times * self._comm.world_size) == 0:
                sizes.append(_batch(config.batch // times, config.accumulate * times))
        for count in range(len(switches) + 1):
            for chosen in combinations(switches, count):
                for size in sizes:
                    parts = [*chosen, size]
                    yield (
                        " ".join(words for words, _ in parts if words),
                        replace(config, **{k: v for _, part in parts for k, v in part.items()}),
                    )

    def _enough(self, config: TrainConfig) -> str:
        """Memory with which it fits: as much more of each tier as it lacks."""
        on_cpu = self._device.type == "cpu"  # where both are its RAM
        for _ in range(_MAX_TRIES):
            try:
                self.predict(config)
                break
            except BudgetError as error:
                of_device = on_cpu or error.tier is Tier.DEVICE
                names = [*(["device_mem"] if of_device else []),
                         *(["host_mem"] if on_cpu or not of_device else [])]  # fmt: skip
                given = {name: getattr(config, name) for name in names}
                more: dict[str, Any] = {
                    name: format_bytes_up(parse_bytes(size) + error.missing_bytes)
                    for name, size in given.items()
                    if size is not None
                }
                if not more:
                    return "a machine with more memory, or more ranks"
                config = replace(config, **more)
        given = {"--device-mem": config.device_mem, "--host-mem": config.host_mem}
        return " ".join(f"{flag} {size}" for flag, size in given.items() if size is not None)


KEY = TrainConfig(model="traced")  # what does not change a trace


def placement_of(config: TrainConfig) -> AutoPlacement:
    return AutoPlacement(
        device_budget=config.device_mem,
        host_budget=config.host_mem,
        nvme_budget=None if config.nvme else 0,
        nvme_dir=config.nvme,
    )


def _faster(config: TrainConfig) -> Iterator[Change]:
    """The same steps."""
    if config.checkpointing:
        yield "--no-checkpointing", {"checkpointing": False}
    if config.accumulate % 2 == 0:
        yield _batch(2 * config.batch, config.accumulate // 2)


def _batch(batch: int, accumulate: int) -> Change:
    words = f"--batch {batch} --accumulate {accumulate}"
    return words, {"batch": batch, "accumulate": accumulate}


def _flops(device: torch.device) -> float:
    """A second, of forward and backward of a layer in bf16; the best of three."""
    size = _WIDTH[device.type]
    layer = torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16, device=device)
    rows = torch.ones(size, size, dtype=torch.bfloat16, device=device, requires_grad=True)
    return 6 * size**3 / min(_pass_seconds(layer, rows) for _ in range(3))


def _pass_seconds(layer: torch.nn.Module, rows: torch.Tensor) -> float:
    started = time.perf_counter()
    layer(rows).sum().backward()
    assert rows.grad is not None
    rows.grad[0, 0].item()  # a device has ended with it
    return time.perf_counter() - started
