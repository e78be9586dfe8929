"""HybridParallelPlugin: data parallelism of any kind, until there are meshes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.integrations.parts import (
    LOSS_SCALE,
    accept,
    refuse_absent,
    refuse_meshes,
    refuse_others,
)

from .engine_plugin import TORCH_DOES, EnginePlugin
from .precision import BF16MixedPrecision, MixedPrecision, ScaledFP16
from .torch_plugins import TorchDDPPlugin
from .zero_plugin import LowLevelZeroPlugin

_ONLY_DDP = {
    "broadcast_buffers": True,
    "ddp_bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}
_ONLY_ZERO: dict[str, Any] = {
    "zero_bucket_size_in_m": 12,
    "cpu_offload": False,
    "communication_dtype": None,
    "overlap_communication": True,
    "overlap_allgather": False,
}
_ONLY_MESHES: dict[str, Any] = {
    "sequence_parallelism_mode": None,
    "enable_sequence_parallelism": False,
    "enable_sequence_overlap": False,
    "parallel_output": True,
    "num_microbatches": None,
    "microbatch_size": None,
    "custom_policy": None,
    "pp_style": "1f1b",
    "num_model_chunks": 1,
    "num_layers_per_stage": None,
    "gradient_checkpoint_config": None,
    "enable_metadata_cache": True,
    "make_vocab_size_divisible_by": 64,
    "dp_outside": True,
    "overlap_p2p": True,
    "inner_ring_size": None,
}


@dataclass(frozen=True)
class HybridParallelPlugin(EnginePlugin):
    """torch's DDP (`zero_stage=0`) or ZeRO-1 and 2, in fp16, bf16 or fp32.

    tp_size, pp_size, sp_size: 1; more is not there yet, and what is for them alone is refused.
    zero_stage: 0 takes the options of `TorchDDPPlugin`, 1 and 2 those of `LowLevelZeroPlugin`; an
        option of the other is refused.
    precision: at stage 0 by torch's autocast.
    max_norm: every step clips gradients to this L2 norm.
    """

    tp_size: int
    pp_size: int
    sp_size: int | None = None
    precision: str = "fp16"
    zero_stage: int = 0
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    enable_sequence_overlap: bool = False
    parallel_output: bool = True
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    initial_scale: float = 2**16
    min_scale: float = 1
    growth_factor: float = 2
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32
    max_norm: float = 0
    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    zero_bucket_size_in_m: int = 12
    cpu_offload: bool = False
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    custom_policy: Any = None
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    num_layers_per_stage: list[int] | None = None
    gradient_checkpoint_config: Any = None
    enable_metadata_cache: bool = True
    make_vocab_size_divisible_by: int = 64
    dp_outside: bool = True
    overlap_p2p: bool = True
    overlap_allgather: bool = False
    fp8_communication: bool = False
    use_fp8: bool = False
    inner_ring_size: int | None = None

    def __post_init__(self) -> None:
        refuse_meshes(tp_size=self.tp_size, pp_size=self.pp_size, sp_size=self.sp_size)
        refuse_absent(fp8_communication=self.fp8_communication, use_fp8=self.use_fp8)
        refuse_others(
            self._given(_ONLY_MESHES), _ONLY_MESHES,
            "it is for tp_size, pp_size or sp_size above 1, which is not there yet",
        )  # fmt: skip
        if self.zero_stage not in (0, 1, 2):
            raise ValueError(f"zero_stage={self.zero_stage}; expected 0, 1 or 2")
        if self.precision not in ("fp16", "bf16", "fp32"):
            raise ValueError(f"precision={self.precision!r}; expected 'fp16', 'bf16' or 'fp32'")
        others = _ONLY_ZERO if self.zero_stage == 0 else _ONLY_DDP
        stage = "1 or 2" if self.zero_stage == 0 else "0"
        refuse_others(self._given(others), others, f"it is for zero_stage={stage}")
        self.loss_scale()
        if self.zero_stage:
            self._zero()
        for name in (
            "enable_all_optimization", "enable_fused_normalization", "enable_flash_attention",
            "enable_jit_fused",
        ):  # fmt: skip
            if getattr(self, name):
                accept(name, TORCH_DOES)

    def _given(self, names: Mapping[str, Any]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _zero(self) -> LowLevelZeroPlugin:
        fp16 = self.precision == "fp16"
        scale = {name: getattr(self, name) for name in LOSS_SCALE} if fp16 else {}
        return LowLevelZeroPlugin(
            stage=self.zero_stage,
            precision=self.precision,
            max_norm=self.max_norm,
            reduce_bucket_size_in_m=self.zero_bucket_size_in_m,
            communication_dtype=self.communication_dtype,
            overlap_communication=self.overlap_communication,
            overlap_allgather=self.overlap_allgather,
            cpu_offload=self.cpu_offload,
            **scale,
        )

    def _ddp(self) -> TorchDDPPlugin:
        return TorchDDPPlugin(
            broadcast_buffers=self.broadcast_buffers,
            bucket_cap_mb=self.ddp_bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            check_reduction=self.check_reduction,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: MixedPrecision | None,
        device: torch.device,
    ) -> nn.Module:
        if self.zero_stage:
            return self._zero().wrap(model, optimizer, None, device)
        scale = self.loss_scale()
        own: MixedPrecision | None = None if scale is None else ScaledFP16(scale)
        if self.precision == "bf16":
            own = BF16MixedPrecision()
        return self._ddp().wrap_clipped(model, optimizer, own, device, max_norm=self.max_norm)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return (self._zero() if self.zero_stage else self._ddp()).no_sync(model)
