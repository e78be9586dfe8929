"""HybridParallelPlugin: data, tensor, sequence, expert and pipeline parallelism together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini import AutoPlacement, ConstPlacement, GeminiDDP, StaticPlacement
from gemini.api import Placement, by_name
from gemini.integrations.options import FP16, SCALE, Case, handed, option, size
from gemini.integrations.parts import accept
from gemini.parallel.cut import copies_tied, shared_by, stages_of
from gemini.parallel.pipelined import STYLES, MicrobatchSchedule, Pipelined
from gemini.parallel.plans import TensorParallel
from gemini.parallel.shared_sequence import MODES, SequenceParallel
from gemini.parallel.sizes import LAYOUTS, MeshSizes, dims_of

from .engine_plugin import (
    SEQUENCE,
    TENSOR,
    UNSPLIT,
    EnginePlugin,
    Ignored,
    Parallelism,
    made_ours,
)
from .float8 import FLOAT8
from .gemini_plugins import LowLevelZeroPlugin
from .plugin import params_of
from .precision import BF16MixedPrecision, MixedPrecision, ScaledFP16
from .torch_plugins import TorchDDPPlugin

DDP = Case(
    lambda own: (
        own.zero_stage == 0 and own.tp_size == own.pp_size == own.sharing == own.ep_size == 1
    ),
    "it is for zero_stage=0 and data parallelism alone",
)
ZERO = Case(lambda own: own.zero_stage > 0, "it is for zero_stage=1 or 2")
SHARDED = Case(
    lambda own: own.zero_stage > 0 or own.pp_size > 1 or own.sharing > 1 or own.ep_size > 1,
    "it is for shards, and zero_stage=0 has replicas alone",
)
PIPELINE = Case(lambda own: own.pp_size > 1, "it is for pp_size above 1")
BY_PLAN = Case(
    lambda own: own.tp_size > 1 and own.tp_mode == "1d",
    "it is for tp_size above 1 and tp_mode='1d'",
)
SPLITS = Case(
    lambda own: BY_PLAN.holds(own) or own.sequence_parallelism_mode in MODES,
    "it is for tp_size above 1, or for sequence_parallelism_mode='all_to_all' or 'ring_attn'",
)
RING = Case(
    lambda own: own.sequence_parallelism_mode == "ring_attn",
    "it is for sequence_parallelism_mode='ring_attn'",
)
DEPTH = Case(lambda own: own.tp_mode == "2.5d", "it is for tp_mode='2.5d'")
_SHARDS = "updates are those of zero_stage=1, whose state is sharded"
_OVER_TP = (None, "split_gather", "ring")


@by_name
@dataclass(frozen=True)
class HybridParallelPlugin(EnginePlugin):
    """Plugin for torch's DDP (`zero_stage=0`) or ZeRO-1 and 2, with tensor parallelism and
    pipelines.

    tp_size: ranks that split layers between them, by the plan that a model of transformers has, or
        by `custom_policy`: torch's styles, or the words of transformers, by names of modules. All
        of them see the same data. With it `zero_stage=0` keeps replicas, and shards nothing.
    tp_mode: `"1d"`, or `"2d"`, `"2.5d"` with `tp_depth`, `"3d"`: the model's layers were made in
        blocks, as `gemini.integrations.classic.blocks` has them, over the mesh of a configuration
        with this mode. Beside data parallelism alone.
    enable_sequence_parallelism: ranks have parts of sequences. With
        `sequence_parallelism_mode="split_gather"` (None, and `"ring"`, which is the same here)
        these are the ranks of `tp_size`, between split layers. With `"all_to_all"` (heads against
        sequence) or `"ring_attn"` (keys go round) they are `sp_size` ranks in a dimension of their
        own, and the model is a causal language model of transformers. They are given the same
        batches, and the loss is the mean over all tokens.
        `inner_ring_size`: keys go round among as many neighbours before they go on.
    parallel_output: if `sp_size` ranks share sequences, a causal language model's logits are of a
        rank's own tokens. With `labels=` and a split head they are a DTensor, of which each rank
        has some words, and are gathered for the first loss alone. In all other cases, for models
        that change logits after their head, and in pipelines they are whole.
    make_vocab_size_divisible_by: a rank of `tp_size` computes logits of a multiple of so many
        words, for faster kernels: each call pads its part of the head with rows of zeros, which are
        in no parameter. A vocabulary that the ranks do not divide is split unevenly.
    pp_size: places of a pipeline, for `booster.execute_pipeline`. `nn.Sequential` and models of
        transformers are cut into stages of as many layers, or of `num_layers_per_stage`. State is
        sharded over ranks that have the same stage, and gradients are reduced once, at
        `zero_stage=0` as at 1. Layers of a stage are split where `tp_size` is above 1.
    extra_dp_size: replicas of shards; ep_size: ranks, of those with other data, over which experts
        are split. See docs/meshes.md.
    pp_style: `"1f1b"`, `"interleaved"` with `num_model_chunks` stages a rank, or `"zbv"` with two.
    num_microbatches, microbatch_size: how a pipeline cuts a batch. If both are given, the first
        counts; with neither there are as many micro-batches as places.
    dp_outside: ranks of one pipeline are neighbours.
    zero_stage: 0 takes the options of `TorchDDPPlugin`, 1 and 2 those of `LowLevelZeroPlugin`; an
        option of the other is refused.
    placement_policy: where model data is, in place of the stage's: `StaticPlacement.zero(3)` shards
        parameters too, `AutoPlacement` plans homes under budgets.
    precision: at stage 0 by torch's autocast, alone.
    max_norm: every step clips gradients to this L2 norm.
    """

    tp_size: int = size()
    pp_size: int = size()
    sp_size: int | None = size(None)
    precision: str = option(
        "fp16",
        valid=lambda name: name in ("fp16", "bf16", "fp32"),
        expected="'fp16', 'bf16' or 'fp32'",
    )
    zero_stage: int = option(0, valid=lambda stage: stage in (0, 1, 2), expected="0, 1 or 2")
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = option(False, ignored=Ignored.FLASH)
    enable_jit_fused: bool = option(False, ignored=Ignored.JIT)
    enable_sequence_parallelism: bool = option(False, only=SPLITS)
    sequence_parallelism_mode: str | None = option(None, only=SEQUENCE)
    enable_sequence_overlap: bool = option(False, only=SEQUENCE, ignored=Ignored.OVERLAP)
    parallel_output: bool = option(True, only=SPLITS)
    num_microbatches: int | None = size(None, only=PIPELINE)
    microbatch_size: int | None = size(None, only=PIPELINE)
    initial_scale: float = option(SCALE.initial_scale, only=FP16)
    min_scale: float = option(SCALE.min_scale, only=FP16)
    growth_factor: float = option(SCALE.growth_factor, only=FP16)
    backoff_factor: float = option(SCALE.backoff_factor, only=FP16)
    growth_interval: int = option(SCALE.growth_interval, only=FP16)
    hysteresis: int = option(SCALE.hysteresis, only=FP16)
    max_scale: float = option(SCALE.max_scale, only=FP16)
    max_norm: float = LowLevelZeroPlugin.max_norm
    broadcast_buffers: bool = option(TorchDDPPlugin.broadcast_buffers, only=DDP)
    ddp_bucket_cap_mb: int = option(TorchDDPPlugin.bucket_cap_mb, only=DDP, name="bucket_cap_mb")
    find_unused_parameters: bool = option(TorchDDPPlugin.find_unused_parameters, only=DDP)
    check_reduction: bool = option(TorchDDPPlugin.check_reduction, only=DDP)
    gradient_as_bucket_view: bool = option(TorchDDPPlugin.gradient_as_bucket_view, only=DDP)
    static_graph: bool = option(TorchDDPPlugin.static_graph, only=DDP)
    zero_bucket_size_in_m: int = option(
        LowLevelZeroPlugin.reduce_bucket_size_in_m, only=ZERO, name="reduce_bucket_size_in_m"
    )
    cpu_offload: bool = option(LowLevelZeroPlugin.cpu_offload, only=ZERO)
    communication_dtype: torch.dtype | None = option(
        LowLevelZeroPlugin.communication_dtype, only=ZERO
    )
    overlap_communication: bool = option(LowLevelZeroPlugin.overlap_communication, only=ZERO)
    custom_policy: Any = option(
        None, only=BY_PLAN, kind=Mapping,
        expected="a plan: {'layers.*.up': ColwiseParallel(), ...}, or such words as 'colwise'",
    )  # fmt: skip
    pp_style: str = option("1f1b", only=PIPELINE)
    num_model_chunks: int = option(1, only=PIPELINE)
    num_layers_per_stage: list[int] | None = option(None, only=PIPELINE)
    gradient_checkpoint_config: Any = option(
        None, valid=lambda config: config is None,
        expected="None: call model.gradient_checkpointing_enable() before boost",
    )  # fmt: skip
    enable_metadata_cache: bool = option(
        True, only=PIPELINE, ignored="shapes are found when they change"
    )
    make_vocab_size_divisible_by: int = size(64, only=BY_PLAN)
    dp_outside: bool = option(True, only=PIPELINE)
    overlap_p2p: bool = option(
        True, only=PIPELINE, ignored="torch's schedules wait for a message when they need it"
    )
    overlap_allgather: bool = option(LowLevelZeroPlugin.overlap_allgather, only=ZERO)
    fp8_communication: bool = option(False, only=SHARDED)
    use_fp8: bool = option(False, only=FLOAT8)
    inner_ring_size: int | None = size(None, only=RING)
    placement_policy: Placement | None = option(
        None, only=SHARDED, kind=(StaticPlacement, ConstPlacement, AutoPlacement),
        expected="None, or a placement dataclass",
    )  # fmt: skip
    extra_dp_size: int = size(1, only=SHARDED)
    ep_size: int = size(1, only=UNSPLIT)
    tp_mode: str = option(
        "1d",
        only=TENSOR,
        valid=lambda mode: mode == "1d" or mode in LAYOUTS,
        expected="'1d', '2d', '2.5d' or '3d'",
    )
    tp_depth: int = size(1, only=DEPTH)

    def check_together(self) -> None:
        super().check_together()
        self._check_sequence()
        self._check_blocks()
        if self.pp_size > 1:
            self._check_pipeline()
        if self.ep_size > 1 and self.zero_stage == 0:
            accept({f"zero_stage=0 with ep_size={self.ep_size}": _SHARDS})
        if self.placement_policy is not None and self.cpu_offload:
            raise ValueError(
                "cpu_offload=True with placement_policy; expected one: a policy says what is in "
                "host memory"
            )
        if not DDP.holds(self):
            self._zero()

    @property
    def sharing(self) -> int:
        """Number of ranks that share sequences in a dimension of their own; 1 if none do."""
        asked = self.enable_sequence_parallelism and self.sequence_parallelism_mode in MODES
        return (self.sp_size or 1) if asked else 1

    def _check_sequence(self) -> None:
        mode = self.sequence_parallelism_mode
        if not self.enable_sequence_parallelism:
            if self.sp_size not in (None, 1):
                raise ValueError(f"sp_size={self.sp_size}; expected 1: {SEQUENCE.remedy}")
        elif mode in MODES:
            self._check_shared_sequence()
        elif mode not in _OVER_TP:
            raise ValueError(
                f"sequence_parallelism_mode={mode!r}; expected 'split_gather', 'ring', "
                f"{' or '.join(map(repr, MODES))}"
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
        elif mode == "ring":
            why = "it is 'split_gather', whose collectives torch chooses"
            accept({"sequence_parallelism_mode='ring'": why})

    def _check_shared_sequence(self) -> None:
        mode, inner = self.sequence_parallelism_mode, self.inner_ring_size
        if self.sharing == 1:
            raise ValueError(
                f"sp_size={self.sp_size} with sequence_parallelism_mode={mode!r}; expected the "
                "number of ranks that share a sequence, 2 or more"
            )
        if inner is not None and self.sharing % inner:
            raise ValueError(
                f"inner_ring_size={inner} with sp_size={self.sharing}; expected a divisor of it"
            )
        if self.zero_stage == 0 and self.pp_size == 1:
            accept({f"zero_stage=0 with sp_size={self.sharing}": _SHARDS})

    def _check_blocks(self) -> None:
        if self.tp_mode == "1d":
            return
        dims_of(self.tp_mode, self.tp_size, self.tp_depth)
        for name, ranks in (("pp_size", self.pp_size), ("sp_size", self.sharing)):
            if ranks > 1:
                raise ValueError(
                    f"{name}={ranks} with tp_mode={self.tp_mode!r}; expected data parallelism "
                    "alone beside layers in blocks, or tp_mode='1d'"
                )

    def _check_pipeline(self) -> None:
        if self.zero_stage == 2:
            raise ValueError(
                f"zero_stage=2 with pp_size={self.pp_size}; expected 0 or 1: gradients of all "
                "micro-batches are reduced once, and stay whole until then"
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
            accept({f"zero_stage=0 with pp_size={self.pp_size}": _SHARDS})

    def _zero(self) -> LowLevelZeroPlugin:
        return LowLevelZeroPlugin(
            # reduces while a backward runs, as DDP does; a pipeline reduces once, whatever it is
            stage=2 if self.zero_stage == 0 or self.pp_size > 1 else self.zero_stage,
            precision=self.precision, max_norm=self.max_norm,
            fp8_communication=self.fp8_communication, **handed(self, ZERO), **handed(self, FP16),
        )  # fmt: skip

    def _ddp(self) -> TorchDDPPlugin:
        return TorchDDPPlugin(**handed(self, DDP))

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: MixedPrecision | None,
        device: torch.device,
    ) -> nn.Module:
        self.prepare(model, device)
        if self.pp_size > 1:
            by_size = self.num_microbatches is None and self.microbatch_size is not None
            schedule = MicrobatchSchedule(
                self.pp_style,
                self.num_model_chunks,
                None if by_size else self.num_microbatches or self.pp_size,
                self.microbatch_size if by_size else None,
            )
            layers = self.num_layers_per_stage
            return _wrap_stages(model, optimizer, schedule, layers, **self.options(device))
        if not DDP.holds(self):
            return super().wrap(model, optimizer, None, device)
        scale = self.loss_scale()
        own: MixedPrecision | None = None if scale is None else ScaledFP16(scale)
        if self.precision == "bf16":
            own = BF16MixedPrecision()
        return self._ddp().wrap(model, optimizer, own, device, max_norm=self.max_norm)

    @property
    def sizes(self) -> MeshSizes:  # type: ignore[override]
        return MeshSizes(
            self.tp_size, self.pp_size, self.extra_dp_size, self.sharing,
            self.ep_size, shards=SHARDED.holds(self), pp_inside=self.dp_outside,
            blocks=() if self.tp_mode == "1d"
            else dims_of(self.tp_mode, self.tp_size, self.tp_depth),
        )  # fmt: skip

    def options(self, device: torch.device) -> dict[str, Any]:
        """Options for `GeminiDDP`, with the mesh and what its ranks share."""
        layers = sequence = None
        if BY_PLAN.holds(self):  # layers in blocks were made so
            layers = TensorParallel(
                self.custom_policy,
                self.enable_sequence_parallelism and self.sharing == 1,
                self.parallel_output,
                self.make_vocab_size_divisible_by,
            )
        if self.sharing > 1:
            mode = str(self.sequence_parallelism_mode)
            whole = not self.parallel_output
            sequence = SequenceParallel(mode, self.inner_ring_size, whole)
        shared = Parallelism(layers, sequence, self.ep_size > 1)
        found = self._zero().options(device)
        if self.placement_policy is not None:
            found["placement_policy"] = self.placement_policy
        return found | {"mesh": self.sizes.mesh(device), "shared": shared}

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        if self.pp_size > 1:
            return nullcontext()  # gradients are reduced once a call of the schedule
        return (self._zero() if isinstance(model, GeminiDDP) else self._ddp()).no_sync(model)


def _wrap_stages(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    schedule: MicrobatchSchedule,
    layers: Sequence[int] | None,
    *,
    mesh: DeviceMesh,
    shared: Parallelism,
    **options: Any,
) -> Pipelined:
    """Cut and wrap this rank's stages of a pipeline; the optimizer keeps their parameters alone.

    layers: of every stage; None divides them evenly. options: for `GeminiDDP`.
    Raises ValueError, before anything is changed, for a model that cannot be cut or split, and for
    an optimizer without parameters of some rank's stages.
    """
    places = [schedule.stages(place, mesh["pp"].size()) for place in range(mesh["pp"].size())]
    stages = stages_of(model, sum(map(len, places)), layers)
    tied = shared_by(model, stages)
    # every rank checks all places: an error on some ranks would leave the others in a collective
    if optimizer is not None:
        for place, theirs in enumerate(places):
            _check_steps(optimizer, place, [stages[i] for i in theirs])
        made_ours(optimizer, model)
    mine = places[mesh.get_local_rank("pp")]
    own = [stages[i] for i in mine]
    sequence = shared.share(model, optimizer, mesh, own)
    with copies_tied(tied, stages, places, mesh, optimizer):
        parts = [GeminiDDP(stage, mesh=mesh, **options) for stage in own]
    if optimizer is not None:
        here = {id(param) for part in parts for param in part.parameters()}
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in here]
        optimizer.bind()  # type: ignore[attr-defined]
    return Pipelined(model, parts, mesh, schedule, sequence)


def _check_steps(optimizer: torch.optim.Optimizer, place: int, stages: Sequence[nn.Module]) -> None:
    ours = {id(param) for param in params_of(optimizer)}
    if not any(id(param) in ours for stage in stages for param in stage.parameters()):
        raise ValueError(
            f"the optimizer has no parameter of the stages of place {place} in the pipeline; "
            "expected one over model.parameters(), or over some of every place"
        )
