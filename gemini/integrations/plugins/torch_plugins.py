"""torch's own data parallelism as plugins: DDP, FSDP2, and neither."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.api import BackwardPrefetch

from gemini.ddp import GeminiDDP
from gemini.integrations.options import option
from gemini.optim.base import TieredOptimizer

from .fsdp import fully_sharded, sync_off
from .optimizers import Extras, give_extras
from .plugin import Plugin, check_over
from .precision import MixedPrecision as Precision
from .precision import Scaling, compute_in

_STRATEGIES = (None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
_OWN = ("broadcast_buffers", "fp8_communication")  # of TorchDDPPlugin, not handed to torch


@dataclass(frozen=True)
class PlainPlugin(Plugin):
    """No ranks at all: what a Booster without a plugin does."""

    takes_device = True

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: Precision | None,
        device: torch.device,
    ) -> nn.Module:
        check_unwrapped(model)
        if optimizer is not None:
            check_over(optimizer, model)
        model.to(device)
        if precision is not None:
            compute_in(model, precision.dtype, device)
        boost_plain(optimizer, precision)
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class TorchDDPPlugin(Plugin):
    """`torch.nn.parallel.DistributedDataParallel` with its own options.

    The optimizer is torch's or this project's. Without a process group (`launch_from_torch` makes
    one) the module is not wrapped, and trains alone.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    fp8_communication: bool = option(False, absent=True)

    takes_device = True

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: Precision | None,
        device: torch.device,
    ) -> nn.Module:
        return self.wrap_clipped(model, optimizer, precision, device, max_norm=0.0)

    def wrap_clipped(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: Precision | None,
        device: torch.device,
        *,
        max_norm: float,
    ) -> nn.Module:
        """`wrap`, with gradients clipped in every step."""
        PlainPlugin.wrap(PlainPlugin(), model, None, precision, device)
        if optimizer is not None:
            check_over(optimizer, model)
        boost_plain(optimizer, precision, max_norm)
        if not (dist.is_available() and dist.is_initialized()):
            return model
        options = {name: value for name, value in vars(self).items() if name not in _OWN}
        if not self.broadcast_buffers:
            options["broadcast_buffers"] = False
        with warnings.catch_warnings():
            # torch 2.13 renames it, and has no other way to leave buffers alone from the start
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
            return nn.parallel.DistributedDataParallel(model, **options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return model.no_sync()


@dataclass(frozen=True)
class TorchFSDPPlugin(Plugin):
    """torch's FSDP2, `fully_shard`, by the options of its first version.

    The optimizer is one of torch's, made before; it goes on with the sharded parameters.

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
        precision: Precision | None,
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
        fully_sharded(
            model,
            optimizer,
            device,
            group=self.process_group,
            reshard=self.sharding_strategy is not ShardingStrategy.SHARD_GRAD_OP,
            offload=self.cpu_offload is not None and self.cpu_offload.offload_params,
            policy=self.auto_wrap_policy,
            mixed=self.mixed_precision,
            ignored=self.ignored_modules or (),
            init_fn=self.param_init_fn,
            synchronise=self.sync_module_states,
        )
        boost_plain(optimizer, None)
        return model

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with sync_off(model):
            yield


def boost_plain(
    optimizer: torch.optim.Optimizer | None, precision: Precision | None, max_norm: float = 0.0
) -> None:
    """Give an optimizer of plain parameters what a boosted one has."""
    if optimizer is None:
        return
    scaling = None
    if precision is not None and precision.loss_scale is not None:
        scaling = Scaling(precision.loss_scale, says_overflows=precision.says_overflows)
    extras = Extras(scaling, max_norm)
    if isinstance(optimizer, TieredOptimizer) and extras == Extras():
        return
    give_extras(optimizer, extras)


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError for a module that is wrapped already."""
    wrapped = (GeminiDDP, nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
    if isinstance(model, wrapped) or hasattr(model, "set_requires_gradient_sync"):
        raise ValueError(
            f"the module is a {type(model).__name__} already; expected one that is not wrapped: "
            "boost it once"
        )
