"""Plugin for torch's FSDP2, by the options of FSDP1: units by policy, any optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.api import BackwardPrefetch
from torch.distributed.fsdp.wrap import _Policy

from gemini.api import TieredOptimizer, by_name
from gemini.integrations.options import option
from gemini.parallel.styles import put_in_place, take_first_ranks

from .optimizers import boost_plain
from .plugin import Plugin, check_over
from .precision import MixedPrecision as BoosterPrecision
from .torch_plugins import check_unwrapped

_STRATEGIES = (None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


@by_name
@dataclass(frozen=True)
class TorchFSDPPlugin(Plugin):
    """Plugin for torch's FSDP2 (`fully_shard`), by the options of FSDP1.

    The optimizer is one of torch, made before `boost`; it gets the sharded parameters.

    sharding_strategy: FULL_SHARD (also None) or SHARD_GRAD_OP.
    cpu_offload: `CPUOffload(offload_params=True)` keeps parameters and state on the host.
    auto_wrap_policy: which modules are sharded as units of their own; None is the root alone.
    mixed_precision: dtypes of parameters and reductions; of buffers None or float32.
    param_init_fn: called for each module with parameters on the meta device, with its memory there.
    sync_module_states: all ranks begin with rank 0's values.
    """

    process_group: dist.ProcessGroup | None = None
    sharding_strategy: ShardingStrategy | None = option(
        None,
        valid=lambda strategy: strategy in _STRATEGIES,
        expected="FULL_SHARD or SHARD_GRAD_OP. TorchDDPPlugin shards nothing; a hybrid needs a "
        "device mesh",
    )
    cpu_offload: CPUOffload | None = None
    auto_wrap_policy: Callable[..., Any] | None = None
    backward_prefetch: BackwardPrefetch | None = option(
        None,
        valid=lambda when: when in (None, BackwardPrefetch.BACKWARD_PRE),
        expected="None or BACKWARD_PRE, which is what FSDP2 does",
    )
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool = False
    fp8_communication: bool = option(False, absent=True)

    def check_together(self) -> None:
        mixed = self.mixed_precision
        if mixed is not None and mixed.buffer_dtype not in (None, torch.float32):
            raise ValueError(
                f"mixed_precision has buffer_dtype={mixed.buffer_dtype}; expected None: FSDP2 "
                "leaves buffers as they are, so cast them yourself"
            )
        if mixed is not None and mixed.keep_low_precision_grads:
            raise ValueError(
                "mixed_precision has keep_low_precision_grads=True; expected False: FSDP2 keeps "
                "gradients in the dtype of the parameters"
            )

    @property
    def own_precision(self) -> str | None:  # type: ignore[override]
        names = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16"}
        dtype = None if self.mixed_precision is None else self.mixed_precision.param_dtype
        return names.get(dtype, str(dtype))

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: BoosterPrecision | None,
        device: torch.device,
    ) -> nn.Module:
        check_unwrapped(model)
        if isinstance(optimizer, TieredOptimizer):
            raise ValueError(
                f"a {type(optimizer).__name__} with TorchFSDPPlugin; expected an optimizer of "
                "torch.optim, or GeminiPlugin, which shards for this one"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "TorchFSDPPlugin without a process group; expected one: call "
                "gemini.integrations.launch.launch_from_torch() first"
            )
        if optimizer is not None:
            check_over(optimizer, model)
        self._shard(model, optimizer, device)
        boost_plain(optimizer, None)
        return model

    def _shard(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
    ) -> None:
        """Shard the module in place; the optimizer gets its parameters. Raises ValueError."""
        if optimizer is not None and optimizer.state:
            raise ValueError(
                "this optimizer has state of whole parameters; expected one that has not stepped: "
                "boost first, then load its state"
            )
        empty = any(param.is_meta for param in model.parameters())
        if empty and self.param_init_fn is None:
            raise ValueError(
                "the module has parameters on the meta device; expected param_init_fn= beside it, "
                "which makes their values"
            )
        if not empty:
            model.to(device)
            # before sharding: each rank cuts its shard from its own values
            if self.sync_module_states:
                take_first_ranks(model, self.process_group)
        # `fully_shard` makes new parameters; by their names the optimizer finds them afterwards
        before = dict(model.named_parameters(remove_duplicate=False))
        group = self.process_group or dist.group.WORLD
        offload = self.cpu_offload is not None and self.cpu_offload.offload_params
        ignored = list(self.ignored_modules or ())
        options: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(group, device.type),  # type: ignore[arg-type]
            "reshard_after_forward": self.sharding_strategy is not ShardingStrategy.SHARD_GRAD_OP,
            "mp_policy": _precision(self.mixed_precision),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
            "ignored_params": {param for module in ignored for param in module.parameters()},
        }
        for unit in [*_units(model, self.auto_wrap_policy, ignored), model]:
            fully_shard(unit, **options)
        # after sharding, so that memory is made for this rank's shards alone
        if empty:
            assert self.param_init_fn is not None
            model.to_empty(device="cpu" if offload else device)
            for module in model.modules():
                self.param_init_fn(module)
        after = dict(model.named_parameters(remove_duplicate=False))
        put_in_place(optimizer, {id(param): after[name] for name, param in before.items()})

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        module: Any = model
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)


def _units(
    model: nn.Module, policy: Callable[..., Any] | None, ignored: list[nn.Module]
) -> list[nn.Module]:
    """Modules below the root that are units of their own, inner ones first.

    `fully_shard` leaves out parameters that an inner unit has, so inner units come first.
    """
    if policy is None:
        return []
    left_out = {inner for module in ignored for inner in module.modules()}
    if isinstance(policy, _Policy):
        chosen = policy._run_policy(model, left_out, {})
        found = [module for module in model.modules() if module in chosen and module is not model]
        return found[::-1]
    units: list[nn.Module] = []
    _visit(model, policy, left_out, units)
    return units


def _visit(
    module: nn.Module, policy: Callable[..., Any], left_out: set[nn.Module], units: list[nn.Module]
) -> int:
    """Append the units below `module`; returns their elements, as FSDP1 counts them."""
    taken = 0
    for child in module.children():
        if child in left_out or child in units:
            continue
        numel = sum(param.numel() for param in child.parameters())
        inside = 0
        if policy(module=child, recurse=True, nonwrapped_numel=numel):
            inside = _visit(child, policy, left_out, units)
        if policy(module=child, recurse=False, nonwrapped_numel=numel - inside):
            units.append(child)
            inside = numel
        taken += inside
    return taken


def _precision(mixed: MixedPrecision | None) -> MixedPrecisionPolicy:
    if mixed is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=mixed.param_dtype,
        reduce_dtype=mixed.reduce_dtype,
        cast_forward_inputs=mixed.cast_root_forward_inputs,
    )
