"""ShardedModelV2, its optimizer and its copies: Colossal-AI's oldest names for ZeRO-3."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from gemini import GeminiDDP, LossScale, StaticPlacement
from gemini.api import TieredOptimizer, full_parameters, takes_fields
from gemini.integrations.options import ZERO_SCALE, check_options, documented, option
from gemini.integrations.torch_optimizers import convert

_FP16_BYTES = 2


@dataclass(frozen=True)
class _ModelOptions:
    """Options of ShardedModelV2, in its order."""

    process_group: dist.ProcessGroup | None = None
    reduce_scatter_process_group: dist.ProcessGroup | None = None
    reduce_scatter_bucket_size_mb: int = option(
        25, valid=lambda size: size > 0, expected="a positive number"
    )
    fp32_reduce_scatter: bool = False
    offload_config: Mapping[str, Any] | None = option(
        None, valid=lambda config: config is None or dict(config) == {"device": "cpu"},
        expected="None or {'device': 'cpu'}. Files are HybridAdam(nvme_offload_fraction=)",
    )  # fmt: skip
    gradient_predivide_factor: float | None = option(
        1.0, valid=lambda factor: factor in (None, 1.0),
        expected="1: gradients are divided by the number of ranks before they are added",
    )  # fmt: skip
    use_memory_tracer: bool = option(False, ignored="what iterations take is always kept")
    reuse_fp16_shard: bool = option(False, ignored="gradients are freed by chunks")

    def __post_init__(self) -> None:
        if self.reduce_scatter_process_group not in (None, self.process_group):
            raise ValueError(
                "reduce_scatter_process_group is another group than process_group; expected None: "
                "gradients are reduced over the ranks that share the parameters"
            )
        check_options(self)


class ShardedModelV2(GeminiDDP):
    """ZeRO-3 in fp16: every rank keeps its shard of parameters, gradients and state.

    shard_strategy: any, without effect; shards are parts of chunks here.
    reduce_scatter_process_group: None, or `process_group`.
    reduce_scatter_bucket_size_mb: MiB that are reduced at once, the size of a chunk.
    fp32_reduce_scatter: gradients travel between ranks, and are added, in fp32.
    offload_config: `{"device": "cpu"}` keeps all shards and state in host memory.

    Raises ValueError for other values than these:
    """

    @takes_fields(options=_ModelOptions())
    def __init__(self, module: nn.Module, shard_strategy: Any, options: _ModelOptions) -> None:
        offload = 0.0 if options.offload_config is None else 1.0
        super().__init__(
            module, placement_policy=StaticPlacement(1.0, offload, offload), precision="fp16",
            process_group=options.process_group,
            communication_dtype="fp32" if options.fp32_reduce_scatter else None, search_range_m=0,
            min_chunk_size_m=options.reduce_scatter_bucket_size_mb / _FP16_BYTES,
        )  # fmt: skip

    def dump_memory_stats(self, filename: str | Path = "dump_mem_stats.log") -> None:
        """Write sampled memory as JSON: bytes at every moment of every kind of iteration."""
        self.memory_stats.dump_memory_stats(filename)


documented(ShardedModelV2, _ModelOptions)


@takes_fields(loss_scale=ZERO_SCALE)
def ShardedOptimizerV2(
    sharded_model: GeminiDDP, optimizer: torch.optim.Optimizer, loss_scale: LossScale
) -> torch.optim.Optimizer:
    """Bind an optimizer to the sharded module, with a loss scale; returns the same object.

    Raises ValueError for a module that is not sharded, and for an optimizer without such a form.
    """
    if not isinstance(sharded_model, GeminiDDP):
        raise ValueError(
            f"sharded_model is a {type(sharded_model).__name__}; expected a ShardedModelV2"
        )
    convert(optimizer)
    assert isinstance(optimizer, TieredOptimizer)
    optimizer.bind_to(sharded_model.parameters())
    sharded_model.engine.reconfigure(max_norm=None, loss_scale=loss_scale)
    return optimizer


@torch.no_grad()
def col_model_deepcopy(sharded_model: GeminiDDP, other_model: nn.Module) -> None:
    """Copy fp32 masters, in the dtypes before wrapping, and buffers into a plain module of the same
    names, on every rank.

    Whole parameters are gathered a chunk at a time. All ranks call.
    Raises ValueError, before anything is changed, for a module with other names or shapes.
    """
    engine = sharded_model.engine
    there: dict[str, Any] = get_model_state_dict(
        other_model
    )  # by the names that are saved, and no copies
    for spec, param in zip(engine.layout.params, engine.params, strict=True):
        for name in spec.names:
            if name not in there or there[name].shape != param.shape:
                raise ValueError(
                    f"other_model has no {name} of shape {tuple(param.shape)}; expected a module "
                    "like the one that was sharded"
                )
    engine.call("col_model_deepcopy()")
    for name, value in full_parameters(engine.weights, everywhere=True):
        there[name].copy_(value)
    for name, buffer in sharded_model.module.named_buffers():
        other_model.get_buffer(name).copy_(buffer)


@torch.no_grad()
def static_copy(model: GeminiDDP, *, everywhere: bool) -> nn.Module | None:
    """Plain copy of the inner module on the CPU: fp32 masters in the dtypes before wrapping.

    everywhere: on every rank, else on rank 0 and None on others. Values are gathered a chunk at a
    time. The copy has the user's hooks and none of the engine's. All ranks call.
    """
    engine = model.engine
    engine.call("get_static_torch_model()")
    plain = None
    if everywhere or engine.comm.rank == 0:
        # memo: deepcopy takes these in place of parameters, whose payloads may be released, and of
        # dicts with the engine's hooks
        memo: dict[int, Any] = {}
        for param, dtype in zip(engine.params, engine.sharding.original_dtypes, strict=True):
            empty = torch.empty(param.shape, dtype=dtype)
            memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
        ours = {handle.id for handle in engine.calls.hook_handles if hasattr(handle, "id")}
        for module in model.module.modules():
            for attribute, hooks in vars(module).items():
                if "_hooks" in attribute and isinstance(hooks, dict):
                    foreign = ((key, hook) for key, hook in hooks.items() if key not in ours)
                    memo[id(hooks)] = OrderedDict(foreign)
        plain = copy.deepcopy(model.module, memo)
    there: dict[str, Any] = {} if plain is None else get_model_state_dict(plain)
    for name, value in full_parameters(engine.weights, everywhere=everywhere):
        there[name].copy_(value)
    if everywhere:
        assert plain is not None
        for name, buffer in model.module.named_buffers():
            plain.get_buffer(name).copy_(buffer)
    return plain
