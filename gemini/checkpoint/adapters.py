"""Files of peft's adapters for a wrapped model, under the names that peft gives them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.checkpoint.format.manifest import CheckpointError
from gemini.checkpoint.ranks import Ranks
from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors
from gemini.ddp import GeminiDDP
from gemini.runtime.inspect.full_parameters import full_parameters
from gemini.saved_names import SavedNames, wrappers_aside

WEIGHTS = "adapter_model.safetensors"
MARK = ".lora_"  # in the name of every parameter that peft adds


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a model of peft."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(module, PeftModel)


def write_adapter(folder: Path, model: GeminiDDP) -> None:
    """Save adapters as peft's `save_pretrained`, with fp32 masters. All ranks call; rank 0 writes.

    Raises CheckpointError on every rank.
    """
    ranks = Ranks(model, "save_model()")
    wanted = set(_places(model))
    values = {
        name: value for name, value in full_parameters(model.engine.weights) if name in wanted
    }
    _write(ranks, folder, model.module, values)


def load_adapter(folder: Path, model: GeminiDDP) -> None:
    """Load adapters that `write_adapter` wrote; the base model stays. All ranks call.

    Raises CheckpointError on every rank for another adapter.
    """
    ranks = Ranks(model, "load_adapter()")
    places = _places(model)

    def read() -> dict[str, Tensor]:
        with ExitStack() as stack:
            found = LazyTensors(folder / WEIGHTS, stack)
            if set(found) != set(places.values()):
                different = sorted(set(found) ^ set(places.values()))
                raise CheckpointError(
                    f"{folder / WEIGHTS} is of another adapter: {different[0]} is only in one of "
                    "them"
                )
            return {name: found[saved] for name, saved in places.items()}

    values = ranks.together(lambda: read() if ranks.rank == 0 else None)
    model.load_state_dict(values or {}, strict=False)


def _places(model: GeminiDDP) -> dict[str, str]:
    """Names in peft's file of the parameters that an adapter saves, by parameter name."""
    from peft import get_peft_model_state_dict

    names = [name for spec in model.engine.layout.params for name in spec.names]
    # peft renames the keys of a state dict: values that are numbers say which name became which
    marks = {name: torch.tensor(i) for i, name in enumerate(names)}
    with wrappers_aside(model.module):
        saved = get_peft_model_state_dict(
            model.module, state_dict=marks, save_embedding_layers=False
        )
    return {names[int(mark)]: key for key, mark in saved.items()}


def save_lora(model: nn.Module, folder: str | os.PathLike[str], *, use_safetensors: bool) -> None:
    """Save adapters by peft's `save_pretrained`, on rank 0. Collective.

    model: a wrapped module, or a plain one. Raises ValueError for a module without LoRA layers,
    CheckpointError on every rank if rank 0 cannot write.
    """
    inner: Any = model.module if isinstance(model, GeminiDDP) else model
    if not hasattr(inner, "peft_config"):
        raise ValueError(
            f"a {type(inner).__name__} has no LoRA layers; expected a module that "
            "booster.enable_lora returned, boosted"
        )
    ranks = Ranks(model, "save_lora_as_pretrained()")
    _write(ranks, Path(folder), inner, _trained(model), safe_serialization=use_safetensors)


def _write(
    ranks: Ranks, folder: Path, module: Any, values: Mapping[str, Tensor], **options: Any
) -> None:
    """Write `values` by the `save_pretrained` of a module of peft's, on rank 0. Collective."""

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with wrappers_aside(module):
            module.save_pretrained(folder, state_dict=values, is_main_process=True, **options)

    ranks.together(lambda: write() if ranks.rank == 0 else None)


def _trained(model: nn.Module) -> Mapping[str, Tensor]:
    """Whole trained parameters and adapters by name, on rank 0. Collective.

    They are gathered a chunk at a time, and other parameters of the chunk are dropped.
    """
    if not isinstance(model, GeminiDDP):
        own_params = ((n, p) for n, p in model.named_parameters() if _is_own(n, p))
        saved = SavedNames(model).saved
        return {saved(name): param.detach().cpu() for name, param in own_params}
    saved = SavedNames(model.module).saved
    own = {saved(name) for name, param in model.named_parameters() if _is_own(name, param)}
    return {name: value for name, value in full_parameters(model.engine.weights) if name in own}


def _is_own(name: str, param: Tensor) -> bool:
    return MARK in name or param.requires_grad
