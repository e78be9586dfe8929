"""Base of plugins: options, and how a module and its optimizer are wrapped with them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gemini.api import passes_on, rank, this_device, world_size
from gemini.integrations.options import check_options, documented
from gemini.integrations.parts import dataloader
from gemini.parallel.sizes import MeshSizes

from .precision import MixedPrecision, check_is_own, parse_precision


class Plugin:
    """Base class of what a `Booster` wraps modules by.

    A plugin is a frozen dataclass of options with a method `wrap`. An option that is not always
    taken is an `option` of `gemini.integrations.options`.

    own_precision: precision of modules; None if `Booster(mixed_precision=)` chooses it.
    takes_device: whether `Booster(device=)` chooses the device.
    """

    own_precision: str | None = None
    takes_device = False
    sizes: MeshSizes = MeshSizes()  # of its mesh

    def __init_subclass__(cls) -> None:
        documented(cls)

    def __post_init__(self) -> None:
        check_options(self, self.check_together)

    def check_together(self) -> None:
        """Raise ValueError for options that contradict each other."""

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: MixedPrecision | None,
        device: torch.device,
    ) -> nn.Module:
        """Wrap a module; the optimizer gets its parameters, and stays the same object."""
        raise NotImplementedError

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which backwards reduce nothing over ranks."""
        context: AbstractContextManager[None] = model.no_sync()  # type: ignore[operator]
        return context

    @passes_on(DataLoader)
    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Loader with this rank's part of `dataset`; see `gemini.integrations.parts.dataloader`.

        Ranks that split layers or share sequences, and places of one pipeline, get the same part.
        Call `loader.sampler.set_epoch(epoch)` for another order in each epoch.
        """
        return dataloader(
            dataset, self.sizes.data_place(rank(), world_size()), batch_size=batch_size,
            shuffle=shuffle, seed=seed, drop_last=drop_last, pin_memory=pin_memory,
            num_workers=num_workers, distributed_sampler_cls=distributed_sampler_cls, **kwargs,
        )  # fmt: skip

    prepare_train_dataloader = prepare_dataloader

    def checked(
        self, precision: str | MixedPrecision | None, device: torch.device | str | None
    ) -> tuple[MixedPrecision | None, torch.device]:
        """Check a Booster's precision and device against the plugin.

        Raises ValueError for one that the plugin chooses itself.
        """
        name = type(self).__name__
        if device is not None and not self.takes_device:
            raise ValueError(
                f"device={device!r} with {name}, which computes on the CUDA device of this "
                "process, else on the CPU; expected None: call torch.cuda.set_device before"
            )
        if self.own_precision is not None:
            check_is_own(precision, self.own_precision, name)
            return None, this_device(device)
        return parse_precision(precision), this_device(device)


def check_over(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ValueError for an optimizer with parameters that the module does not have."""
    there = {id(param) for param in model.parameters()}
    strangers = [p for p in params_of(optimizer) if id(p) not in there]
    if strangers:
        raise ValueError(
            f"the optimizer has {len(strangers)} parameters that are not the module's; expected "
            "one over model.parameters(), made from the module that is boosted"
        )


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
