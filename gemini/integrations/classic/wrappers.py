"""Functional and older names: wrappers by ZeRO stage, chunk managers, checkpoints of epochs.

They make a `GeminiDDP`, by default in fp16, as Colossal-AI did.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import gemini
from gemini import ChunkSearch, HybridSGD, LossScale, StaticPlacement
from gemini.api import (
    ChunkConfiguration,
    Placement,
    TieredOptimizer,
    as_precision,
    passes_on,
    takes_fields,
    this_device,
)
from gemini.integrations.booster import Booster
from gemini.integrations.options import (
    OPTIMIZER_SCALE,
    SCALE,
    SCALE_NAMES,
    Case,
    check_options,
    option,
)
from gemini.integrations.parts import accept
from gemini.integrations.plugins.engine_plugin import (
    Ignored,
    parse_named,
    print_search,
    print_skips,
)
from gemini.integrations.torch_optimizers import convert
from gemini.layouts.machines import cluster_here

from .sharded_v2 import static_copy
from .tensors import split_as_told

get_current_device = this_device


def FusedSGD(
    params: Iterable[Any],
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
) -> HybridSGD:
    """Make a `HybridSGD`. Raises ValueError for `wd_after_momentum`, another formula."""
    if wd_after_momentum:
        raise ValueError(
            "wd_after_momentum=True; expected False: weight decay is added to gradients, as in "
            "torch.optim.SGD"
        )
    return HybridSGD(
        params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
        nesterov=nesterov,
    )  # fmt: skip


@passes_on(gemini.GeminiDDP)
def GeminiDDP(
    module: nn.Module,
    device: torch.device | str | int | None = None,
    placement_policy: str | Placement = "cpu",
    pin_memory: bool = False,
    force_outputs_fp32: bool = False,
    strict_ddp_mode: bool = False,
    search_range_m: float | None = None,
    hidden_dim: int | None = None,
    min_chunk_size_m: float = 32,
    memstats: Any = None,
    *,
    search_range_mb: float | None = None,
    min_chunk_size_mb: float | None = None,
    precision: str = "fp16",
    **options: Any,
) -> gemini.GeminiDDP:
    """Wrap a module in `gemini.GeminiDDP` by its old options.

    Options with `_mb` are in 2**20 elements, as those with `_m`. A module whose parameters have a
    spec of how they are split is split first, and `mesh=` is that of their `ProcessGroup`.

    options: others of `gemini.GeminiDDP`. Raises ValueError for the policy `"const"`, which gives
    no bytes.
    """
    said = (
        ("pin_memory", pin_memory, Ignored.PINNED),
        ("strict_ddp_mode", strict_ddp_mode, Ignored.DATA),
    )
    accept({name: why for name, set_, why in said if set_})
    if isinstance(device, int):
        device = torch.device("cuda", device)
    policy = parse_named(placement_policy)
    mesh = split_as_told(module)
    if mesh is not None:
        options["mesh"] = mesh
    return gemini.GeminiDDP(
        module, device, policy, precision=precision,
        search_range_m=search_range_m if search_range_mb is None else search_range_mb,
        hidden_dim=hidden_dim,
        min_chunk_size_m=min_chunk_size_m if min_chunk_size_mb is None else min_chunk_size_mb,
        force_outputs_fp32=force_outputs_fp32, trace=memstats, **options,
    )  # fmt: skip


def zero_model_wrapper(
    model: nn.Module,
    zero_stage: int = 1,
    gemini_config: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> gemini.GeminiDDP:
    """Shard a module by ZeRO-1, 2 or 3.

    gemini_config: options of the `GeminiDDP` of this module, for stage 3.
    verbose: print what the search for chunks found.
    Raises ValueError for another stage, and for `gemini_config` with stage 1 or 2.
    """
    if zero_stage not in (1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage}; expected 1, 2 or 3")
    if gemini_config and zero_stage != 3:
        raise ValueError(
            f"gemini_config={dict(gemini_config)!r:.80} with zero_stage={zero_stage}; expected "
            "none: it is for stage 3. LowLevelZeroPlugin has the options of the others"
        )
    if zero_stage == 3:
        wrapped = GeminiDDP(model, **(gemini_config or {}))
    else:
        policy = StaticPlacement.zero(zero_stage)
        wrapped = gemini.GeminiDDP(model, placement_policy=policy, precision="fp16")
    if verbose:
        print_search(wrapped)
    return wrapped


def zero_optim_wrapper(
    model: gemini.GeminiDDP,
    optimizer: torch.optim.Optimizer,
    initial_scale: float = SCALE.initial_scale,
    growth_factor: float = SCALE.growth_factor,
    backoff_factor: float = SCALE.backoff_factor,
    growth_interval: int = SCALE.growth_interval,
    hysteresis: int = SCALE.hysteresis,
    min_scale: float = SCALE.min_scale,
    max_scale: float = SCALE.max_scale,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    optim_config: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> torch.optim.Optimizer:
    """Bind an optimizer to the wrapped module, with a loss scale and clipping; the same object.

    optim_config: where the state of an optimizer of torch's goes (`nvme_offload_fraction`, ...).
    verbose: print every step that is skipped.
    Raises ValueError for a module that is not wrapped, and for a loss scale without fp16.
    """
    scale = LossScale(
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis,
        max_scale,
    )  # fmt: skip
    places = dict(optim_config or {})
    return _configured(model, optimizer, scale, max_norm, norm_type, places, verbose=verbose)


DECIDED = Case(lambda _: False, "what wraps the module decides; LowLevelZeroPlugin has the options")


@dataclass(frozen=True)
class _OptimizerOptions:
    """Options of Colossal-AI's LowLevelZeroOptimizer, in its order."""

    pg_to_param_list: Any = option(None, only=DECIDED)
    initial_scale: float = OPTIMIZER_SCALE.initial_scale
    min_scale: float = OPTIMIZER_SCALE.min_scale
    growth_factor: float = OPTIMIZER_SCALE.growth_factor
    backoff_factor: float = OPTIMIZER_SCALE.backoff_factor
    growth_interval: int = OPTIMIZER_SCALE.growth_interval
    hysteresis: int = OPTIMIZER_SCALE.hysteresis
    max_scale: float = OPTIMIZER_SCALE.max_scale
    clip_grad_norm: float = 0.0
    verbose: bool = False
    reduce_bucket_size: int = option(1024 * 1024, only=DECIDED)
    communication_dtype: torch.dtype | None = option(None, only=DECIDED)
    overlap_communication: bool = option(False, ignored="the stage says when gradients are reduced")
    partition_grad: bool = option(False, only=DECIDED)
    cpu_offload: bool = option(False, only=DECIDED)
    dp_process_group: Any = option(None, only=DECIDED)
    extra_dp_group: Any = option(None, only=DECIDED)
    forced_dtype: torch.dtype | None = option(None, only=DECIDED)
    overlap_allgather: bool = option(False, only=DECIDED)
    fp8_communication: bool = option(False, only=DECIDED)

    def __post_init__(self) -> None:
        check_options(self)


@takes_fields(options=_OptimizerOptions())
def LowLevelZeroOptimizer(
    optimizer: torch.optim.Optimizer,
    options: _OptimizerOptions,
    *,
    module: gemini.GeminiDDP | None = None,
) -> torch.optim.Optimizer:
    """Bind an optimizer to a module that ZeRO-1 or 2 has wrapped, with a loss scale.

    Returns the same object. Options that the wrapper decides (buckets, stage, offload, groups,
    dtypes) are refused by name. verbose: print every skipped step. Raises ValueError.
    """
    if module is None:
        raise ValueError(
            "LowLevelZeroOptimizer without module=; expected what zero_model_wrapper(model, "
            "zero_stage=1) returned: parameters are sharded there"
        )
    scale = LossScale(**{name: getattr(options, name) for name in SCALE_NAMES})
    # defaults are no wish: without fp16, where a loss scale is refused, they count as none
    if scale == OPTIMIZER_SCALE and not module.engine.control_vector.active:
        scale = LossScale()
    return _configured(
        module, optimizer, scale, options.clip_grad_norm, 2.0, {}, verbose=options.verbose
    )


def _configured(
    model: gemini.GeminiDDP,
    optimizer: torch.optim.Optimizer,
    scale: LossScale,
    max_norm: float,
    norm_type: float,
    places: dict[str, Any],
    *,
    verbose: bool,
) -> torch.optim.Optimizer:
    if not isinstance(model, gemini.GeminiDDP):
        raise ValueError(
            f"model is a {type(model).__name__}; expected what zero_model_wrapper returned"
        )
    convert(optimizer, **places)
    assert isinstance(optimizer, TieredOptimizer)
    optimizer.bind_to(model.parameters())
    engine = model.engine
    loss_scale = scale if engine.control_vector.active or scale != LossScale() else None
    engine.reconfigure(max_norm=max_norm or None, norm_type=norm_type, loss_scale=loss_scale)
    if verbose:
        print_skips(optimizer, model)
    return optimizer


@dataclass(frozen=True)
class ChunkManager:
    """Manager of chunks that were searched, for `GeminiManager`."""

    chunks: ChunkConfiguration
    device: torch.device | str | None = None
    precision: str = "fp16"

    @staticmethod
    def search_chunk_size(
        model: nn.Module, search_range: int, n_grids: int = 0, min_chunk_size: int = 32 * 2**20
    ) -> int:
        """Search the elements of a chunk; ranges are in elements.

        `n_grids` has no effect: candidates are lengths that fit.
        """
        found = gemini.search_chunk_configuration(
            model, search_range / 2**20, None, min_chunk_size / 2**20, dtype="float16"
        )
        return max(found.capacities.values())


def init_chunk_manager(
    model: nn.Module,
    init_device: torch.device | str | None = None,
    hidden_dim: int | None = None,
    search_range_mb: float | None = 32,
    min_chunk_size_mb: float = 32,
    *,
    precision: str = "fp16",
) -> ChunkManager:
    """Search chunks for a module that computes in `precision`; ranges are in 2**20 elements.

    Raises ValueError for an unknown precision.
    """
    precision = as_precision(precision)
    search = ChunkSearch(search_range_mb, hidden_dim, min_chunk_size_mb)
    return ChunkManager(search.of(model, precision), init_device, precision)


@dataclass(frozen=True)
class GeminiManager:
    """Manager of a placement policy and chunks, for `ZeroDDP`."""

    placement_policy: str | Placement
    chunk_manager: ChunkManager

    @staticmethod
    def get_default_device(placement_policy: str) -> torch.device:
        """Device where parameters live: the CPU for `"cpu"`, else this process's device."""
        placement = parse_named(placement_policy)
        on_host = isinstance(placement, StaticPlacement) and placement.offload_param_frac == 1
        return torch.device("cpu") if on_host else this_device()


def ZeroDDP(
    module: nn.Module,
    gemini_manager: GeminiManager,
    pin_memory: bool = False,
    force_outputs_fp32: bool = False,
    strict_ddp_mode: bool = False,
) -> gemini.GeminiDDP:
    """Wrap a module in `GeminiDDP` with chunks that were searched before."""
    manager = gemini_manager.chunk_manager
    return GeminiDDP(
        module, manager.device, gemini_manager.placement_policy, pin_memory, force_outputs_fp32,
        strict_ddp_mode, precision=manager.precision, chunks=manager.chunks,
    )  # fmt: skip


def get_static_torch_model(
    zero_ddp_model: gemini.GeminiDDP,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    only_rank_0: bool = True,
) -> nn.Module | None:
    """Plain copy of the module with whole parameters, from fp32 masters; the wrapper stays.

    only_rank_0: other ranks get None, and make no copy. All ranks call.
    Raises ValueError for a module that is not wrapped.
    """
    if not isinstance(zero_ddp_model, gemini.GeminiDDP):
        raise ValueError(
            f"zero_ddp_model is a {type(zero_ddp_model).__name__}; expected a GeminiDDP: "
            "copy.deepcopy copies a plain module"
        )
    plain = static_copy(zero_ddp_model, everywhere=not only_rank_0)
    return None if plain is None else plain.to(device, dtype)


def save_checkpoint(
    file: str | os.PathLike[str],
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Save by `gemini.save_checkpoint` with an epoch; `file` is a folder here. All ranks call."""
    gemini.save_checkpoint(file, model, optimizer, lr_scheduler, extra={"epoch": epoch})


def load_checkpoint(
    file: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """Load by `gemini.load_checkpoint`, and raise as it does. All ranks call.

    Returns the epoch that was saved, -1 if there is none.
    """
    extra = gemini.load_checkpoint(file, model, optimizer, lr_scheduler, strict=strict)
    return int(extra.get("epoch", -1)) if isinstance(extra, dict) else -1


def autoparallelize(
    model: nn.Module,
    meta_args: Any = None,
    *args: Any,
    memory_budget: float = -1.0,
    **others: Any,
) -> nn.Module:
    """The model in its fastest layout on this machine, ready for a loop. Collective.

    There the layout is of operators; here it is of what the plugins run, as
    `gemini.autoparallelize` finds it, which returns the plugin.

        samples = {"input_ids": ids}  # rows of all ranks
        model = autoparallelize(model, samples)
        optimizer = HybridAdam(model.parameters())
        for batch in loader:  # of this rank
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    meta_args: inputs of one step of all ranks, rows first.
    memory_budget: bytes of a device; -1: what it has left.
    args, others: of the solver there. They change nothing, and are said.

    No layout has a pipeline, as a loop calls the model.

    Raises ValueError without inputs, and if nothing fits.
    """
    if meta_args is None:
        raise ValueError("autoparallelize() without inputs; expected meta_args, those of one step")
    solver = [f"argument {i + 3}" for i in range(len(args))] + sorted(others)
    accept(dict.fromkeys(solver, "every layout that the plugins run is priced"))
    cluster = cluster_here()
    if memory_budget > 0:
        cluster = replace(cluster, device_bytes=int(memory_budget))
    plugin = gemini.autoparallelize(model, meta_args, machine=cluster, pipelines=False)
    return Booster(plugin=plugin).boost(model)[0]
