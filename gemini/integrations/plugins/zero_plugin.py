"""LowLevelZeroPlugin: ZeRO-1 and 2 over this project's engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.integrations.parts import accept, precision_of, refuse_absent
from gemini.optim.rules.loss_scale import LossScale
from gemini.placement.policy import StaticPlacement

from .engine_plugin import EnginePlugin
from .lora import add_lora_params


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

    stage: int = 1
    precision: str = "fp16"
    initial_scale: float = 2**32
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    reduce_bucket_size_in_m: int = 12
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    overlap_allgather: bool = False
    cpu_offload: bool = False
    master_weights: bool = True
    verbose: bool = False
    cast_inputs: bool = True
    fp8_communication: bool = False
    use_fp8: bool = False

    usual_scale = LossScale(initial_scale=2.0**32)

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ValueError(
                f"stage={self.stage}; expected 1 or 2. TorchDDPPlugin shards nothing, GeminiPlugin "
                "is ZeRO-3"
            )
        refuse_absent(fp8_communication=self.fp8_communication, use_fp8=self.use_fp8)
        self._travels_as()
        if not self.reduce_bucket_size_in_m > 0:
            raise ValueError(
                f"reduce_bucket_size_in_m={self.reduce_bucket_size_in_m} must be positive"
            )
        self.loss_scale()
        if not self.overlap_communication:
            when = "once a step, when gradients are asked for", "always while a backward runs"
            accept({"overlap_communication=False": f"reductions are {when[self.stage - 1]}"})

    def _travels_as(self) -> str | None:
        dtype = self.communication_dtype
        return None if dtype is None else precision_of("communication_dtype", dtype)

    def options(self, device: torch.device) -> dict[str, Any]:
        return {
            "placement_policy": StaticPlacement.zero(self.stage, cpu_offload=self.cpu_offload),
            "search_range_m": 0,
            "min_chunk_size_m": self.reduce_bucket_size_in_m,
            "norm_type": self.norm_type,
            "cast_inputs": self.cast_inputs,
            "communication_dtype": self._travels_as(),
            "overlap_allgather": self.overlap_allgather,
        }

    def add_lora_params_to_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Put every LoRA parameter into the group of the parameter that it is beside.

        After `booster.enable_lora`, before `booster.boost`. Raises ValueError behind it, and for a
        parameter whose base is in no group.
        """
        add_lora_params(model, optimizer)
