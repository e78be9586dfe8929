"""Configs that Hugging Face's models save with their weights, with the dtype that was written.

A model's own config is never changed: a copy says which dtype the files have, in its parts too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.chunk.layout import saved_params

_CONFIGS = ("config", "generation_config")


def written_dtype(model: nn.Module, written: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """Dtype that a config names, as transformers chooses it: of the model's first floating
    parameter, here as it was written. None if none was.

    written: dtypes in the files, by saved name.
    """
    names = [name for _, names in saved_params(model) for name in names if name in written]
    found = (written[name] for name in (*names, *written))
    return next((dtype for dtype in found if dtype.is_floating_point), None)


def save_config(model: nn.Module, dtype: torch.dtype | None, folder: Path) -> None:
    """Save a model's configs into the folder of its weights, which have `dtype`."""
    for attribute in _CONFIGS:
        config: Any = getattr(model, attribute, None)
        if hasattr(config, "save_pretrained"):
            _with_dtype(copy.deepcopy(config), dtype).save_pretrained(folder)


@contextmanager
def substituted_configs(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Context in which copies stand in for a model's configs, so that its own `save_pretrained`
    changes the copies, and saves them with `dtype` and not with that of its parameters."""
    own = {name: vars(model)[name] for name in _CONFIGS if name in vars(model)}
    for name, config in own.items():
        substitute = copy.deepcopy(config)
        if hasattr(substitute, "save_pretrained"):
            vars(substitute)["save_pretrained"] = _saver(substitute, dtype)
        setattr(model, name, substitute)
    try:
        yield
    finally:
        for name, config in own.items():
            setattr(model, name, config)


def _saver(config: Any, dtype: torch.dtype | None) -> Any:
    def save(*args: Any, **options: Any) -> Any:
        vars(config).pop("save_pretrained", None)  # all that a config has goes into its file
        return _with_dtype(config, dtype).save_pretrained(*args, **options)

    return save


def _with_dtype(config: Any, dtype: torch.dtype | None) -> Any:
    """Config whose dtype, and that of the configs inside it, is `dtype` where they have one."""
    name = next((name for name in ("dtype", "torch_dtype") if hasattr(config, name)), None)
    if name is None or dtype is None:
        return config
    setattr(config, name, str(dtype).removeprefix("torch."))
    for part in getattr(config, "sub_configs", ()):
        inner: Any = getattr(config, part, None)
        if getattr(inner, name, None) is not None:
            _with_dtype(inner, dtype)
    return config
