"""FSDP2 under the options of FSDP1: units by policy, and an optimizer that was made before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import _Policy


def fully_sharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None,
    reshard: bool,
    offload: bool,
    policy: Callable[..., Any] | None,
    mixed: MixedPrecision | None,
    ignored: Iterable[nn.Module],
    init_fn: Callable[[nn.Module], None] | None,
    synchronise: bool,
) -> None:
    """Shard `model` in place; `optimizer` has the sharded parameters afterwards.

    Raises ValueError for an optimizer that has stepped, and for parameters without values.
    """
    if optimizer is not None and optimizer.state:
        raise ValueError(
            "this optimizer has state of whole parameters; expected one that has not stepped: "
            "boost first, then load its state"
        )
    empty = any(param.is_meta for param in model.parameters())
    if empty and init_fn is None:
        raise ValueError(
            "the module has parameters on the meta device; expected param_init_fn= beside it, "
            "which makes their values"
        )
    ignored = list(ignored)
    if not empty:
        model.to(device)
        if synchronise:
            _take_first_ranks(model, group)
    before = dict(model.named_parameters(remove_duplicate=False))
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, device.type)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": _precision(mixed),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        "ignored_params": {param for module in ignored for param in module.parameters()},
    }
    for unit in _units(model, policy, ignored):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    if empty:
        assert init_fn is not None
        model.to_empty(device="cpu" if offload else device)
        for module in model.modules():
            init_fn(module)
    if optimizer is not None:
        after = dict(model.named_parameters(remove_duplicate=False))
        sharded = {id(param): after[name] for name, param in before.items()}
        for param_group in optimizer.param_groups:
            param_group["params"] = [sharded[id(param)] for param in param_group["params"]]


def _units(
    model: nn.Module, policy: Callable[..., Any] | None, ignored: list[nn.Module]
) -> list[nn.Module]:
    """Modules below the root that are sharded alone, inner ones first."""
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
    """Elements that units below `module` took, as FSDP1 counts them."""
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


@torch.no_grad()
def _take_first_ranks(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


@contextmanager
def sync_off(model: nn.Module) -> Iterator[None]:
    """Gradients of backwards inside stay whole and local."""
    module: Any = model
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def full_state(model: nn.Module) -> Mapping[str, Any]:
    """On the CPU, on rank 0; empty on the others. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: Mapping[str, Any] = get_model_state_dict(model, options=options)
    return found
