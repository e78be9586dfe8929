"""GeminiPlugin: ZeRO-3 in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gemini.chunk.sizing.search import ChunkConfiguration
from gemini.integrations.parallel.plans import TensorParallel
from gemini.integrations.parallel.sizes import MeshSizes
from gemini.integrations.parts import accept, check_sizes, refuse_absent, refuse_others
from gemini.memtracer.trace import Trace
from gemini.placement.policy import AutoPlacement, Placement, StaticPlacement

from .engine_plugin import KERNELS, EnginePlugin, parse_named

SEARCH_RANGE_M = 32  # the seeds' default, which here means: search freely


@dataclass(frozen=True)
class GeminiPlugin(EnginePlugin):
    """`GeminiDDP`: ZeRO-3 in chunks, with model data where it fits.

    Options are those of `GeminiDDP` and of the placement policies, where they are not listed here.
    What belongs to another policy, and what is not there yet, is refused by name.

    chunk_config_dict: a `gemini.search_chunk_configuration(...)` that was found before.
    placement_policy: `"static"` with the three fractions, `"auto"` with its two ratios, `"cuda"`,
        `"cpu"`, or a placement dataclass.
    search_range_m: 32 searches freely (`GeminiDDP`'s None); another one is taken as it is.
    extra_dp_size: replicas of shards, see docs/meshes.md.
    tp_size: ranks that split layers between them, by the plan that a model of transformers has, or
        by `model.tp_plan`; see docs/meshes.md. All of them see the same data.
    enable_sequence_parallelism: between split layers each of those ranks has a part of the
        sequence.
    memstats: a trace, of `gemini.trace` or `model.memory_stats`.
    gpu_margin_mem_ratio: for `"auto"` alone, which fills what the first iteration leaves whatever
        it is.
    verbose: print what the search for chunks found, and every step that is skipped.
    """

    chunk_config_dict: ChunkConfiguration | None = None
    chunk_init_device: torch.device | None = None
    placement_policy: str | Placement = "static"
    enable_gradient_accumulation: bool = False
    max_prefetch: int = 0
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = 0.8
    steady_cuda_cap_ratio: float = 0.9
    precision: str = "fp16"
    master_weights: bool = True
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    search_range_m: int = SEARCH_RANGE_M
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    memstats: Trace | None = None
    gpu_margin_mem_ratio: float = 0.0
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    tp_size: int = 1
    extra_dp_size: int = 1
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_sequence_parallelism: bool = False
    enable_jit_fused: bool = False
    enable_sequence_overlap: bool = False
    enable_async_reduce: bool = True
    use_fp8: bool = False
    verbose: bool = False
    fp8_communication: bool = False

    def __post_init__(self) -> None:
        check_sizes("", extra_dp_size=self.extra_dp_size)
        check_sizes(self.precision, tp_size=self.tp_size)
        if self.tp_size == 1:
            refuse_others(
                {"enable_sequence_parallelism": self.enable_sequence_parallelism},
                {"enable_sequence_parallelism": False}, "it is for tp_size above 1",
            )  # fmt: skip
        elif self.memstats is not None:
            raise ValueError(
                f"memstats with tp_size={self.tp_size}, of which a trace says nothing; expected "
                "None, or tp_size=1"
            )
        refuse_absent(
            enable_sequence_overlap=self.enable_sequence_overlap,
            use_fp8=self.use_fp8,
            fp8_communication=self.fp8_communication,
        )
        if self.strict_ddp_mode and self.tp_size > 1:
            raise ValueError(
                f"strict_ddp_mode=True with tp_size={self.tp_size}; expected one of the two: it "
                "says that there is data parallelism alone"
            )
        self.placement()
        self.loss_scale()
        if self.chunk_config_dict is not None and not isinstance(
            self.chunk_config_dict, ChunkConfiguration
        ):
            raise ValueError(
                f"chunk_config_dict is a {type(self.chunk_config_dict).__name__}; expected what "
                "gemini.search_chunk_configuration returned"
            )
        if self.memstats is not None and not isinstance(self.memstats, Trace):
            raise ValueError(
                f"memstats is a {type(self.memstats).__name__}; expected a trace of gemini.trace"
            )
        self._say_what_is_accepted()

    def _say_what_is_accepted(self) -> None:
        said = (
            ("chunk_init_device", self.chunk_init_device is not None,
             "chunks are filled one by one where they are computed with"),
            ("enable_gradient_accumulation", self.enable_gradient_accumulation,
             "gradients of several backwards add up without it"),
            ("pin_memory", self.pin_memory, "what is staged is always pinned"),
            ("strict_ddp_mode", self.strict_ddp_mode and self.tp_size == 1,
             "there is data parallelism alone"),
            ("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio != 0,
             "placement_policy='auto' fills what the first iteration leaves"),
            ("enable_async_reduce=False", not self.enable_async_reduce,
             "reductions always overlap the backward"),
            *((name, getattr(self, name), why) for name, why in KERNELS.items()),
        )  # fmt: skip
        accept({name: why for name, set_, why in said if set_})

    def placement(self) -> Placement:
        """The policy that the options say. Raises ValueError for those of another one."""
        policy = self.placement_policy
        fractions = {
            "shard_param_frac": self.shard_param_frac,
            "offload_optim_frac": self.offload_optim_frac,
            "offload_param_frac": self.offload_param_frac,
        }
        ratios = {
            "warmup_non_model_data_ratio": self.warmup_non_model_data_ratio,
            "steady_cuda_cap_ratio": self.steady_cuda_cap_ratio,
            "gpu_margin_mem_ratio": self.gpu_margin_mem_ratio,
        }
        if not 0 <= self.gpu_margin_mem_ratio <= 1:
            raise ValueError(f"gpu_margin_mem_ratio={self.gpu_margin_mem_ratio} is outside [0, 1]")
        if policy != "static":
            usual = dict.fromkeys(fractions, 0.0) | {"shard_param_frac": 1.0}
            refuse_others(fractions, usual, "it is for placement_policy='static'")
        if policy != "auto":
            usual = {
                "warmup_non_model_data_ratio": 0.8,
                "steady_cuda_cap_ratio": 0.9,
                "gpu_margin_mem_ratio": 0.0,
            }
            refuse_others(ratios, usual, "it is for placement_policy='auto'")
        if policy == "static":
            return StaticPlacement(
                self.shard_param_frac, self.offload_optim_frac, self.offload_param_frac
            )
        if policy == "auto":
            return AutoPlacement(
                warmup_non_model_data_ratio=self.warmup_non_model_data_ratio,
                steady_cap_ratio=self.steady_cuda_cap_ratio,
            )
        return parse_named(policy)

    @property
    def sizes(self) -> MeshSizes:  # type: ignore[override]
        return MeshSizes(tp=self.tp_size, replicas=self.extra_dp_size)

    def _tensor_parallel(self) -> TensorParallel | None:
        if self.tp_size == 1:
            return None
        return TensorParallel(sequence=self.enable_sequence_parallelism)

    def options(self, device: torch.device) -> dict[str, Any]:
        searches_freely = self.search_range_m == SEARCH_RANGE_M
        return {
            "mesh": self.sizes.mesh(device),
            "tensor_parallel": self._tensor_parallel(),
            "placement_policy": self.placement(),
            "chunks": self.chunk_config_dict,
            "search_range_m": None if searches_freely else self.search_range_m,
            "hidden_dim": self.hidden_dim,
            "min_chunk_size_m": self.min_chunk_size_m,
            "max_prefetch": self.max_prefetch,
            "force_outputs_fp32": self.force_outputs_fp32,
            "norm_type": self.norm_type,
            "trace": self.memstats,
        }
