"""Plugins for torch's DDP, and for one process without data parallelism."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from gemini import GeminiDDP
from gemini.api import by_name
from gemini.integrations.options import option

from .optimizers import boost_plain
from .plugin import Plugin, check_over
from .precision import MixedPrecision, compute_in

_OWN = ("broadcast_buffers", "fp8_communication")  # of TorchDDPPlugin, not handed to torch


@dataclass(frozen=True)
class PlainPlugin(Plugin):
    """Training of one process in plain torch: the plugin of a Booster that is given none."""

    takes_device = True

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: MixedPrecision | None,
        device: torch.device,
        *,
        max_norm: float = 0.0,
    ) -> nn.Module:
        """Move the module to the device. max_norm: limit of every step's gradients; 0: none."""
        check_unwrapped(model)
        if optimizer is not None:
            check_over(optimizer, model)
        model.to(device)
        if precision is not None:
            compute_in(model, precision.dtype, device)
        boost_plain(optimizer, precision, max_norm)
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


@by_name
@dataclass(frozen=True)
class TorchDDPPlugin(PlainPlugin):
    """Plugin for `torch.nn.parallel.DistributedDataParallel` with its own options.

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

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: MixedPrecision | None,
        device: torch.device,
        *,
        max_norm: float = 0.0,
    ) -> nn.Module:
        super().wrap(model, optimizer, precision, device, max_norm=max_norm)
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


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError for a module that is wrapped already."""
    wrapped = (GeminiDDP, nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
    if isinstance(model, wrapped) or hasattr(model, "set_requires_gradient_sync"):
        raise ValueError(
            f"the module is a {type(model).__name__} already; expected one that is not wrapped: "
            "boost it once"
        )
