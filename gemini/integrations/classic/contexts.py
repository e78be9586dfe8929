"""Contexts in which old scripts make modules without memory, and strategies of their shards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gemini import init_empty
from gemini.api import fill_empty
from gemini.integrations.parts import accept

from .tensors import ProcessGroup, ReplicaSpec, ShardSpec, let_be_told

SEED = 2**10 - 1  # the default there
MADE_LATER = "values are made where the wrapper computes"


class BaseShardStrategy:
    """Strategy of a module's shards, without effect: a shard is a rank's part of a chunk here."""


class TensorShardStrategy(BaseShardStrategy):
    """Strategy that cut each tensor by itself; see `BaseShardStrategy`."""


class BucketTensorShardStrategy(TensorShardStrategy):
    """Strategy that gathered several tensors at once; see `BaseShardStrategy`."""


@contextmanager
def ColoInitContext(
    device: torch.device | str | int | None = None,
    dtype: torch.dtype = torch.float,
    default_pg: Any = None,
    default_dist_spec: Any = None,
) -> Iterator[None]:
    """Context whose modules take no memory for parameters until they are wrapped: `init_empty`.

    device, dtype: without effect. Values are made in fp32, chunk by chunk, on the device where the
        wrapper computes.
    default_pg, default_dist_spec: a `ProcessGroup` and a spec of `gemini.integrations.classic.
        tensors` that parameters begin with. Their methods are those of `ColoParameter`.

    Raises ValueError for another dtype than float32, and for other classes of the last two.
    """
    group = ProcessGroup() if default_pg is None else default_pg
    spec = ReplicaSpec() if default_dist_spec is None else default_dist_spec
    if not (isinstance(group, ProcessGroup) and isinstance(spec, ReplicaSpec | ShardSpec)):
        raise ValueError(
            f"default_pg={default_pg!r} and default_dist_spec={default_dist_spec!r}; expected a "
            "ProcessGroup, and a ShardSpec or a ReplicaSpec, of gemini.integrations.classic.tensors"
        )
    if dtype != torch.float:
        raise ValueError(
            f"dtype={dtype}; expected torch.float: give precision= to what wraps the module"
        )
    if device is not None:
        accept({"device of ColoInitContext": "values are made where the wrapper computes"})
    told = register_module_parameter_registration_hook(
        lambda _, __, param: let_be_told(param, group, spec)
    )
    try:
        with init_empty():
            yield
    finally:
        told.remove()


@contextmanager
def ZeroInitContext(
    target_device: torch.device | str | int | None = None,
    shard_strategy: BaseShardStrategy | None = None,
    seed: int = SEED,
    shard_param: bool = False,
    default_dtype: torch.dtype | None = None,
    bf16: bool = False,
    model_numel_tensor: Tensor | None = None,
) -> Iterator[None]:
    """Context whose modules take no memory for parameters until they are wrapped: `init_empty`.

    target_device, shard_strategy, shard_param, bf16, seed: without effect. Values are made chunk by
        chunk where the wrapper computes, from torch's random numbers, and a rank keeps its part.
    default_dtype: None or torch.float, in which values are made.
    model_numel_tensor: one element, to which the number of the parameters' elements is added.

    Raises ValueError for another dtype, and for a strategy of another class.
    """
    if not isinstance(shard_strategy, BaseShardStrategy | None):
        raise ValueError(
            f"shard_strategy is a {type(shard_strategy).__name__}; expected a TensorShardStrategy "
            "or a BucketTensorShardStrategy"
        )
    if default_dtype not in (None, torch.float):
        raise ValueError(
            f"default_dtype={default_dtype}; expected None or torch.float: give precision= to "
            "what wraps the module"
        )
    ignored = (
        ("target_device", target_device is not None, MADE_LATER),
        ("seed", seed != SEED, "values are made from torch's random numbers: torch.manual_seed"),
        ("shard_param", shard_param, "a rank keeps its part when the module is wrapped"),
        ("bf16", bf16, "precision= of what wraps the module says what it computes in"),
    )
    accept({f"{name} of ZeroInitContext": why for name, given, why in ignored if given})
    counted: dict[int, nn.Parameter] = {}

    def count(_: nn.Module, __: str, param: nn.Parameter | None) -> None:
        if param is not None:
            counted[id(param)] = param

    told = register_module_parameter_registration_hook(count)
    try:
        with init_empty():
            yield
    finally:
        told.remove()
        if model_numel_tensor is not None:
            model_numel_tensor += sum(param.numel() for param in counted.values())


class LazyInitContext:
    """Context whose modules take no memory for parameters until they are wrapped: `init_empty`.

    tensor_cls, default_device: without effect; values are made where the wrapper computes.
    """

    def __init__(
        self, tensor_cls: Any = None, default_device: torch.device | str | None = None
    ) -> None:
        given = {"tensor_cls": tensor_cls, "default_device": default_device}
        accept(
            {f"{n} of LazyInitContext": MADE_LATER for n, value in given.items()
             if value is not None}
        )  # fmt: skip
        self._empty = init_empty()

    def __enter__(self) -> Self:
        self._empty.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._empty.__exit__(*error)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Make the values of a module that nothing will wrap, on the CPU; returns the module.

        verbose: print how many elements were made. Tied parameters stay tied. Raises ValueError
        for a module that cannot be initialised: its own classes say how.
        """
        made = fill_empty(module)
        if verbose:
            numel = sum(param.numel() for param in made)
            sys.stdout.write(f"{numel:,} elements of {len(made)} parameters were made\n")
        return module
