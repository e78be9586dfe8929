"""Plugins over this project's engine: ZeRO-3 in chunks, and ZeRO-1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini import AutoPlacement, StaticPlacement
from gemini.api import ChunkConfiguration, Placement, Trace, by_name
from gemini.integrations.options import FP16, SCALE, ZERO_SCALE, Case, option, size
from gemini.integrations.parts import precision_of
from gemini.parallel.plans import TensorParallel
from gemini.parallel.sizes import MeshSizes

from .engine_plugin import (
    SEQUENCE,
    TENSOR,
    UNSPLIT,
    EnginePlugin,
    Ignored,
    Parallelism,
    parse_named,
)
from .float8 import FLOAT8
from .lora import add_lora_params

SEARCH_RANGE_M = 32  # the seeds' default, which here means: search freely
STATIC = Case(lambda own: own.placement_policy == "static", "it is for placement_policy='static'")
_REDUCED = ("once a step, when gradients are asked for", "always while a backward runs")
AUTO = Case(lambda own: own.placement_policy == "auto", "it is for placement_policy='auto'")


@by_name
@dataclass(frozen=True)
class GeminiPlugin(EnginePlugin):
    """Plugin for `GeminiDDP`: ZeRO-3 in chunks, with model data where it fits.

    Options are those of `GeminiDDP` and of the placement policies, where they are not listed here.
    Options of another policy, and options that do not exist yet, are refused by name.

    chunk_config_dict: a result of `gemini.search_chunk_configuration(...)`.
    placement_policy: `"static"` with the three fractions, `"auto"` with its two ratios, `"cuda"`,
        `"cpu"`, or a placement dataclass.
    search_range_m: 32 searches freely (`GeminiDDP`'s None); another one is taken as it is.
    extra_dp_size: replicas of shards, see docs/meshes.md.
    tp_size: ranks that split layers between them, by the plan that a model of transformers has, or
        by `model.tp_plan`; see docs/meshes.md. All of them see the same data.
    enable_sequence_parallelism: between split layers each of those ranks has a part of the
        sequence.
    ep_size: ranks, of those with other data, over which experts are split; see docs/meshes.md.
    memstats: a trace, of `gemini.trace` or `model.memory_stats`.
    verbose: print what the search for chunks found, and every step that is skipped.
    """

    chunk_config_dict: ChunkConfiguration | None = option(
        None, kind=ChunkConfiguration, expected="what gemini.search_chunk_configuration returned"
    )
    chunk_init_device: torch.device | None = option(
        None, ignored="chunks are filled one by one where they are computed with"
    )
    placement_policy: str | Placement = "static"
    enable_gradient_accumulation: bool = option(
        False, ignored="gradients of several backwards add up without it"
    )
    max_prefetch: int = 0
    shard_param_frac: float = option(1.0, only=STATIC)
    offload_optim_frac: float = option(0.0, only=STATIC)
    offload_param_frac: float = option(0.0, only=STATIC)
    warmup_non_model_data_ratio: float = option(0.8, only=AUTO)
    steady_cuda_cap_ratio: float = option(0.9, only=AUTO)
    precision: str = "fp16"
    master_weights: bool = True
    pin_memory: bool = option(False, ignored=Ignored.PINNED)
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = option(False, ignored=Ignored.DATA)
    search_range_m: int = SEARCH_RANGE_M
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    memstats: Trace | None = option(None, kind=Trace, expected="a trace of gemini.trace")
    gpu_margin_mem_ratio: float = option(
        0.0, only=AUTO, valid=lambda ratio: 0 <= ratio <= 1, expected="0 to 1",
        ignored="placement_policy='auto' fills what the first iteration leaves",
    )  # fmt: skip
    initial_scale: float = option(SCALE.initial_scale, only=FP16)
    min_scale: float = option(SCALE.min_scale, only=FP16)
    growth_factor: float = option(SCALE.growth_factor, only=FP16)
    backoff_factor: float = option(SCALE.backoff_factor, only=FP16)
    growth_interval: int = option(SCALE.growth_interval, only=FP16)
    hysteresis: int = option(SCALE.hysteresis, only=FP16)
    max_scale: float = option(SCALE.max_scale, only=FP16)
    max_norm: float = 0.0
    norm_type: float = 2.0
    tp_size: int = size(1)
    extra_dp_size: int = size(1)
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = option(False, ignored=Ignored.FLASH)
    enable_sequence_parallelism: bool = option(False, only=TENSOR)
    enable_jit_fused: bool = option(False, ignored=Ignored.JIT)
    enable_sequence_overlap: bool = option(False, only=SEQUENCE, ignored=Ignored.OVERLAP)
    enable_async_reduce: bool = option(True, ignored="reductions always overlap the backward")
    use_fp8: bool = option(False, only=FLOAT8)
    verbose: bool = False
    fp8_communication: bool = False
    ep_size: int = size(1, only=UNSPLIT)

    def check_together(self) -> None:
        super().check_together()
        if max(self.tp_size, self.ep_size) > 1 and self.memstats is not None:
            sizes = f"tp_size={self.tp_size} and ep_size={self.ep_size}"
            raise ValueError(
                f"memstats with {sizes}, of which a trace says nothing; expected None, or sizes of "
                "1"
            )
        if self.tp_size > 1 and self.strict_ddp_mode:
            raise ValueError(
                f"strict_ddp_mode=True with tp_size={self.tp_size}; expected one of the two: it "
                "says that there is data parallelism alone"
            )
        self.placement()

    def placement(self) -> Placement:
        """Placement policy by the options. Raises ValueError."""
        if STATIC.holds(self):
            return StaticPlacement(
                self.shard_param_frac, self.offload_optim_frac, self.offload_param_frac
            )
        if AUTO.holds(self):
            return AutoPlacement(
                warmup_non_model_data_ratio=self.warmup_non_model_data_ratio,
                steady_cap_ratio=self.steady_cuda_cap_ratio,
            )
        return parse_named(self.placement_policy)

    @property
    def sizes(self) -> MeshSizes:  # type: ignore[override]
        return MeshSizes(tp=self.tp_size, replicas=self.extra_dp_size, ep=self.ep_size)

    def options(self, device: torch.device) -> dict[str, Any]:
        searches_freely = self.search_range_m == SEARCH_RANGE_M
        layers = TensorParallel(sequence=self.enable_sequence_parallelism)
        return super().options(device) | {
            "mesh": self.sizes.mesh(device),
            "shared": Parallelism(layers if self.tp_size > 1 else None, experts=self.ep_size > 1),
            "placement_policy": self.placement(),
            "chunks": self.chunk_config_dict,
            "search_range_m": None if searches_freely else self.search_range_m,
            "trace": self.memstats,
        }


@by_name
@dataclass(frozen=True)
class LowLevelZeroPlugin(EnginePlugin):
    """Plugin for ZeRO-1 and ZeRO-2: parameters whole on every rank, optimizer state sharded.

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
        """Put every LoRA parameter into the group of its base layer's weight.

        Called after `booster.enable_lora` and before `booster.boost`. Raises ValueError after
        `boost`, and for a parameter whose base is in no group.
        """
        add_lora_params(model, optimizer)
