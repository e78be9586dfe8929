"""HybridParallelPlugin: data parallelism of any kind, and layers that ranks split or share out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.ddp import GeminiDDP
from gemini.integrations.parallel.pipelined import STYLES, MicrobatchSchedule
from gemini.integrations.parallel.plans import TensorParallel
from gemini.integrations.parallel.sizes import MeshSizes
from gemini.integrations.parts import (
    LOSS_SCALE,
    accept,
    check_sizes,
    refuse_absent,
    refuse_others,
)

from .engine_plugin import KERNELS, EnginePlugin
from .precision import BF16MixedPrecision, MixedPrecision, ScaledFP16
from .stages import wrap_stages
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
_ONLY_PIPELINE: dict[str, Any] = {
    "num_microbatches": None,
    "microbatch_size": None,
    "pp_style": "1f1b",
    "num_model_chunks": 1,
    "num_layers_per_stage": None,
    "enable_metadata_cache": True,
    "dp_outside": True,
    "overlap_p2p": True,
}
_ONLY_TENSOR: dict[str, Any] = {
    "custom_policy": None,
    "parallel_output": True,
    "make_vocab_size_divisible_by": 64,
    "enable_sequence_parallelism": False,
}
_ONLY_SEQUENCE: dict[str, Any] = {"sequence_parallelism_mode": None, "sp_size": None}
_OTHER_SEQUENCE_MODES = ("ring", "all_to_all", "ring_attn")


@dataclass(frozen=True)
class HybridParallelPlugin(EnginePlugin):
    """torch's DDP (`zero_stage=0`) or ZeRO-1 and 2, beside tensor parallelism or a pipeline.

    tp_size: ranks that split layers between them, by the plan that a model of transformers has, or
        by `custom_policy`: torch's styles, or the words of transformers, by names of modules. All
        of them see the same data. Beside it `zero_stage=0` keeps replicas, and shards nothing.
    enable_sequence_parallelism: between split layers each of those ranks has a part of the sequence
        (`sequence_parallelism_mode="split_gather"`, or None; `sp_size` is None or `tp_size`).
    pp_size: places of a pipeline, for `booster.execute_pipeline`. `nn.Sequential` and models of
        transformers are cut into stages of as many layers, or of `num_layers_per_stage`. State is
        sharded over ranks that have the same stage, and gradients are reduced once, at any
        `zero_stage`.
    pp_style: `"1f1b"`, `"interleaved"` with `num_model_chunks` stages a rank, or `"zbv"` with two.
    num_microbatches, microbatch_size: one of the two, for a pipeline.
    dp_outside: ranks of one pipeline are neighbours.
    zero_stage: 0 takes the options of `TorchDDPPlugin`, 1 and 2 those of `LowLevelZeroPlugin`; an
        option of the other is refused.
    precision: at stage 0 by torch's autocast, alone. Tensor parallelism and pipelines take bf16 and
        fp32.
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
        check_sizes("", sp_size=self.sp_size)
        check_sizes(self.precision, tp_size=self.tp_size, pp_size=self.pp_size)
        refuse_absent(fp8_communication=self.fp8_communication, use_fp8=self.use_fp8)
        refuse_absent(enable_sequence_overlap=self.enable_sequence_overlap)
        if self.zero_stage not in (0, 1, 2):
            raise ValueError(f"zero_stage={self.zero_stage}; expected 0, 1 or 2")
        if self.precision not in ("fp16", "bf16", "fp32"):
            raise ValueError(f"precision={self.precision!r}; expected 'fp16', 'bf16' or 'fp32'")
        self._check_tensor_parallel()
        self._check_pipeline()
        self._check_stage()
        self.loss_scale()
        accept({name: why for name, why in KERNELS.items() if getattr(self, name)})

    def _check_tensor_parallel(self) -> None:
        if self.tp_size > 1 and self.pp_size > 1:
            raise NotImplementedError(
                f"tp_size={self.tp_size} with pp_size={self.pp_size} is not there: the layers of a "
                "stage are not split. Take one of the two, and ZeRO beside it"
            )
        if self.tp_size == 1:
            refuse_others(self._given(_ONLY_TENSOR), _ONLY_TENSOR, "it is for tp_size above 1")
        if self.custom_policy is not None and not isinstance(self.custom_policy, Mapping):
            raise ValueError(
                f"custom_policy is a {type(self.custom_policy).__name__}; expected a plan: "
                "{'layers.*.up': ColwiseParallel(), ...}, or such words as 'colwise'"
            )
        if not self.enable_sequence_parallelism:
            usual = _ONLY_SEQUENCE | {"sp_size": None if self.sp_size is None else 1}
            refuse_others(
                self._given(_ONLY_SEQUENCE), usual, "it is for enable_sequence_parallelism=True"
            )
        elif self.sequence_parallelism_mode in _OTHER_SEQUENCE_MODES:
            raise NotImplementedError(
                f"sequence_parallelism_mode={self.sequence_parallelism_mode!r} is not there; take "
                "'split_gather', over the ranks of tp_size"
            )
        elif self.sequence_parallelism_mode not in (None, "split_gather"):
            raise ValueError(
                f"sequence_parallelism_mode={self.sequence_parallelism_mode!r}; expected "
                "'split_gather'"
            )
        elif self.sp_size not in (None, 1, self.tp_size):
            raise ValueError(
                f"sp_size={self.sp_size} with tp_size={self.tp_size}; expected None: a sequence is "
                "split over the ranks of tp_size"
            )
        elif self.custom_policy is not None:
            raise ValueError(
                "enable_sequence_parallelism=True with custom_policy; expected False, and torch's "
                "SequenceParallel in the plan"
            )
        if self.gradient_checkpoint_config is not None:
            raise ValueError(
                "gradient_checkpoint_config; expected None: call "
                "model.gradient_checkpointing_enable() before boost"
            )
        if self.inner_ring_size is not None:
            raise ValueError(
                f"inner_ring_size={self.inner_ring_size}; expected None: ring attention is not "
                "there"
            )
        if not self.parallel_output:
            accept({"parallel_output=False": "outputs are whole where the plan gathers them"})
        if self.make_vocab_size_divisible_by != 64:
            accept({"make_vocab_size_divisible_by": "a vocabulary is split as it is, unevenly"})

    def _check_pipeline(self) -> None:
        if self.pp_size == 1:
            refuse_others(self._given(_ONLY_PIPELINE), _ONLY_PIPELINE, "it is for pp_size above 1")
            return
        cuts = {"num_microbatches": self.num_microbatches, "microbatch_size": self.microbatch_size}
        given = [size for size in cuts.values() if size is not None]
        if len(given) != 1 or given[0] < 1:
            raise ValueError(
                f"pp_size={self.pp_size} with {cuts}; expected one of the two, 1 or more"
            )
        chunks = {"1f1b": self.num_model_chunks == 1, "zbv": self.num_model_chunks == 2}
        if self.pp_style not in STYLES or not chunks.get(self.pp_style, self.num_model_chunks > 1):
            raise ValueError(
                f"pp_style={self.pp_style!r} with num_model_chunks={self.num_model_chunks}; "
                "expected '1f1b' with 1, 'interleaved' with 2 or more, or 'zbv' with 2"
            )
        if self.overlap_allgather:
            raise ValueError(
                f"overlap_allgather=True with pp_size={self.pp_size}; expected False: a stage is "
                "gathered once for all micro-batches"
            )
        if self.zero_stage == 0:
            why = "updates are those of zero_stage=1, whose state is sharded"
            accept({f"zero_stage=0 with pp_size={self.pp_size}": why})
        if not self.enable_metadata_cache:
            accept({"enable_metadata_cache=False": "shapes are found when they change"})
        if not self.overlap_p2p:
            accept({"overlap_p2p=False": "torch's schedules wait for a message when they need it"})

    def _check_stage(self) -> None:
        is_ddp = self.zero_stage == 0 and not self._is_engines
        if not is_ddp:
            alone = "zero_stage=0, tp_size=1 and pp_size=1"
            refuse_others(self._given(_ONLY_DDP), _ONLY_DDP, f"it is for {alone}")
        if self.zero_stage == 0:
            refuse_others(self._given(_ONLY_ZERO), _ONLY_ZERO, "it is for zero_stage=1 or 2")
        if not is_ddp:
            self._zero()

    @property
    def _is_engines(self) -> bool:
        """Whether ranks do more than data parallelism, which this project's engine carries out."""
        return self.tp_size > 1 or self.pp_size > 1

    def _given(self, names: Mapping[str, Any]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _zero(self) -> LowLevelZeroPlugin:
        fp16 = self.precision == "fp16"
        scale = {name: getattr(self, name) for name in LOSS_SCALE} if fp16 else {}
        return LowLevelZeroPlugin(
            # reduces while a backward runs, as DDP does; a pipeline reduces once, whatever it is
            stage=2 if self.zero_stage == 0 or self.pp_size > 1 else self.zero_stage,
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
        if self.pp_size > 1:
            schedule = MicrobatchSchedule(
                self.pp_style, self.num_model_chunks, self.num_microbatches, self.microbatch_size
            )
            options = {"precision": self.precision, "max_norm": self.max_norm}
            options |= self.options(device)
            return wrap_stages(model, optimizer, schedule, self.num_layers_per_stage, options)
        if self.tp_size > 1:
            return super().wrap(model, optimizer, None, device)
        if self.zero_stage:
            return self._zero().wrap(model, optimizer, None, device)
        scale = self.loss_scale()
        own: MixedPrecision | None = None if scale is None else ScaledFP16(scale)
        if self.precision == "bf16":
            own = BF16MixedPrecision()
        return self._ddp().wrap_clipped(model, optimizer, own, device, max_norm=self.max_norm)

    @property
    def sizes(self) -> MeshSizes:  # type: ignore[override]
        shards = self.zero_stage > 0 or self.tp_size == 1
        return MeshSizes(self.tp_size, self.pp_size, shards=shards, pp_inside=self.dp_outside)

    def options(self, device: torch.device) -> dict[str, Any]:
        """Of `GeminiDDP`, beside tensor parallelism or as a stage."""
        options = {**self._zero().options(device), "mesh": self.sizes.mesh(device)}
        if self.tp_size > 1:
            sequence = self.enable_sequence_parallelism
            options["tensor_parallel"] = TensorParallel(self.custom_policy, sequence)
        return options

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        if self.pp_size > 1:
            return nullcontext()  # gradients are reduced once a call of the schedule
        return (self._zero() if isinstance(model, GeminiDDP) else self._ddp()).no_sync(model)
