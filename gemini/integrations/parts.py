"""Helpers of all doors: options without effect, ranks, devices, and loaders of data."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from gemini.api import as_precision, rank, world_size

log = logging.getLogger("gemini")
said_already: set[str] = set()
# the engine's names of the dtypes that modules compute in
PRECISIONS = {
    dtype: as_precision(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)
}


def accept(options: Mapping[str, str]) -> None:
    """Log options that change nothing here, with the reason of each: once, on rank 0."""
    new = [name for name in options if name not in said_already]
    said_already.update(new)
    if new and rank() == 0:
        why = "; ".join(f"{name} ({options[name]})" for name in new)
        log.warning("options that change nothing here: %s", why)


def precision_of(option: str, dtype: torch.dtype) -> str:
    """Engine's name of the dtype that `option` was given. Raises ValueError for other dtypes."""
    if dtype not in PRECISIONS:
        known = ", ".join(map(str, PRECISIONS))
        raise ValueError(f"{option}={dtype!r}; expected None, {known}")
    return PRECISIONS[dtype]


def inner_of(model: nn.Module) -> nn.Module:
    """Module inside torch's DDP; any other module is returned as it is."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    return model


def dataloader(
    dataset: Dataset[Any], place: tuple[int, int] | None = None, *, shuffle: bool, seed: int,
    drop_last: bool, num_workers: int, distributed_sampler_cls: type | None = None, **kwargs: Any,
) -> DataLoader[Any]:  # fmt: skip
    """Loader that gives each data-parallel rank its own part of `dataset`.

    place: (index of the part, number of parts); None is (rank, world size).
    seed: of the order, equal on all ranks, and of the random numbers of worker processes, with
        another value for each worker of each part.
    kwargs: for `torch.utils.data.DataLoader`.

    Raises ValueError for a dataset without a length, and for a sampler in `kwargs`.
    """
    for name in ("sampler", "batch_sampler"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}= in prepare_dataloader(); expected distributed_sampler_cls=, a class that "
                "is made with the ranks, or a DataLoader of your own"
            )
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{type(dataset).__name__} is an IterableDataset; expected one with a length, whose "
            "parts ranks can take. Split it by rank yourself, in a DataLoader of your own"
        )
    part, parts = place or (rank(), world_size())
    sampler = (distributed_sampler_cls or DistributedSampler)(
        dataset, num_replicas=parts, rank=part, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    # workers are counted through all parts, so that no two of them draw the same random numbers
    first = seed + part * max(1, num_workers)
    seeded = partial(_seed_worker, first, kwargs.pop("worker_init_fn", None))
    return DataLoader(
        dataset, sampler=sampler, drop_last=drop_last, num_workers=num_workers,
        worker_init_fn=seeded, **kwargs,
    )  # fmt: skip


def _seed_worker(first: int, then: Any, worker: int) -> None:
    seed_all(first + worker)
    if then is not None:
        then(worker)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's random numbers of this process."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
