"""LowLevelZeroPlugin: ZeRO-1 and 2 over this project's engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.integrations.options import FP16, ZERO_SCALE, option
from gemini.integrations.parts import precision_of
from gemini.placement.policy import StaticPlacement

from .engine_plugin import EnginePlugin
from .float8 import FLOAT8
from .lora import add_lora_params

_REDUCED = ("once a step, when gradients are asked for", "always while a backward runs")


@dataclass(frozen=True)
class LowLevelZeroPlugin(EnginePlugin):
    """ZeRO-1 and ZeRO-2: parameters whole on every rank, optimizer state sharded.

    stage: 1 reduces gradients once a step, when they are asked for; 2 reduces in every backward,
        and keeps this rank's part.
    cpu_offload: reduced gradients, fp32 masters and state live in host memory.
    reduce_bucket_size_in_m: what is reduced at once, in 2**20 elements: a chunk's capacity.
    communication_dtype: in which gradients travel between ranks; None is the one that they have.
    overlap_allgather: a step's new weights are gathered while the next forward runs.
    master_weights, cast_inputs, max_norm, norm_type: as in `GeminiDDP`.
    verbose: print every step that is skipped.
    """

    stage: int = option(
        1, valid=lambda stage: stage in (1, 2),
        expected="1 or 2. TorchDDPPlugin shards nothing, GeminiPlugin is ZeRO-3",
    )  # fmt: skip
    precision: str = "fp16"
    initial_scale: float = option(ZERO_SCALE.initial_scale, only=FP16)
    min_scale: float = option(ZERO_SCALE.min_scale, only=FP16)
    growth_factor: float = option(ZERO_SCALE.growth_factor, only=FP16)
    backoff_factor: float = option(ZERO_SCALE.backoff_factor, only=FP16)
    growth_interval: int = option(ZERO_SCALE.growth_interval, only=FP16)
    hysteresis: int = option(ZERO_SCALE.hysteresis, only=FP16)
    max_scale: float = option(ZERO_SCALE.max_scale, only=FP16)
    max_norm: float = 0.0
    norm_type: float = 2.0
    reduce_bucket_size_in_m: int = option(
        12, valid=lambda size: size > 0, expected="a positive number"
    )
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = option(
        True, ignored=lambda own: f"reductions are {_REDUCED[own.stage - 1]}"
    )
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    verbose: bool = False
    cast_inputs: bool = True
    fp8_communication: bool = False
    use_fp8: bool = option(False, only=FLOAT8)

    def check_together(self) -> None:
        super().check_together()
        self._travels_as()

    def _travels_as(self) -> str | None:
        dtype = self.communication_dtype
        return None if dtype is None else precision_of("communication_dtype", dtype)

    def options(self, device: torch.device) -> dict[str, Any]:
        return super().options(device) | {
            "placement_policy": StaticPlacement.zero(self.stage, cpu_offload=self.cpu_offload),
            "search_range_m": 0,
            "min_chunk_size_m": self.reduce_bucket_size_in_m,
            "communication_dtype": self._travels_as(),
        }

    def add_lora_params_to_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Put every LoRA parameter into the group of the parameter that it is beside.

        After `booster.enable_lora`, before `booster.boost`. Raises ValueError behind it, and for a
        parameter whose base is in no group.
        """
        add_lora_params(model, optimizer)
