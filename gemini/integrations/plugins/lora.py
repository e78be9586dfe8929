"""LoRA by peft, before a module is boosted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.checkpoint.pretrained import check_readable
from gemini.checkpoint.quantise import config_of, quantise
from gemini.comm.connect import rank
from gemini.ddp import GeminiDDP
from gemini.integrations.parts import inner_of
from gemini.runtime.inspect.full_parameters import full_parameters
from gemini.saved_names import SavedNames, wrappers_aside

_MARK = ".lora_"  # in the name of every parameter that peft adds


def enable_lora(
    model: nn.Module,
    pretrained_dir: str | os.PathLike[str] | None,
    lora_config: Any,
    bnb_quantization_config: Any,
    quantize: bool,
) -> nn.Module:
    """Add LoRA layers; see `Booster.enable_lora`.

    Raises ValueError for a wrapped module, unless exactly one of `lora_config` and `pretrained_dir`
    is given, and for an unknown quantization; ImportError without peft or bitsandbytes.
    """
    if isinstance(model, GeminiDDP | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"enable_lora() of a {type(model).__name__}, whose parameters are set; expected the "
            "plain module: call booster.enable_lora before booster.boost"
        )
    if (lora_config is None) == (pretrained_dir is None):
        raise ValueError(
            "enable_lora() takes lora_config= or pretrained_dir=; expected one of the two"
        )
    peft = _peft()
    wrapped: nn.Module
    if quantize or bnb_quantization_config is not None:
        quantise(model, _config_of(bnb_quantization_config))
    if pretrained_dir is not None:
        check_readable(Path(pretrained_dir))
        wrapped = peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)
    else:
        wrapped = peft.get_peft_model(model, lora_config)
    return wrapped


def _config_of(given: Any) -> Any:
    """Convert a config into transformers' `BitsAndBytesConfig`.

    given: one of transformers, or one of Colossal-AI or accelerate, which has the same names; None
    is Colossal-AI's default, NF4 with quantised statistics.
    """
    names = (
        "load_in_4bit", "load_in_8bit", "llm_int8_threshold", "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype",
    )  # fmt: skip
    if given is None:
        return config_of("nf4", torch.bfloat16)
    if not hasattr(given, "skip_modules"):
        return config_of(given, torch.bfloat16)
    config = config_of("nf4", torch.bfloat16)
    found = {name: getattr(given, name) for name in names if hasattr(given, name)}
    return type(config)(**found, llm_int8_skip_modules=given.skip_modules)


def save_lora(model: nn.Module, folder: str | os.PathLike[str], *, use_safetensors: bool) -> None:
    """Save adapters by peft's `save_pretrained`, on rank 0. Collective.

    Raises ValueError for a module without LoRA layers.
    """
    inner: Any = model.module if isinstance(model, GeminiDDP) else inner_of(model)
    if not hasattr(inner, "peft_config"):
        raise ValueError(
            f"a {type(inner).__name__} has no LoRA layers; expected a module that "
            "booster.enable_lora returned, boosted"
        )
    values = _adapters(model)
    if rank() == 0:
        with wrappers_aside(inner):
            inner.save_pretrained(folder, safe_serialization=use_safetensors, state_dict=values)


def _adapters(model: nn.Module) -> Mapping[str, Tensor]:
    """Whole trained parameters and adapters by name, on rank 0. Collective.

    They are gathered a chunk at a time, and other parameters of the chunk are dropped.
    """
    if not isinstance(model, GeminiDDP):
        inner = inner_of(model)
        own_params = ((n, p) for n, p in inner.named_parameters() if _is_own(n, p))
        saved = SavedNames(inner).saved
        return {saved(name): param.detach().cpu() for name, param in own_params}
    model.engine.call("save_lora_as_pretrained()")
    saved = SavedNames(model.module).saved
    own = {saved(name) for name, param in model.named_parameters() if _is_own(name, param)}
    return {name: value for name, value in full_parameters(model.engine) if name in own}


def _is_own(name: str, param: Tensor) -> bool:
    return _MARK in name or param.requires_grad


def add_lora_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Add adapters to an optimizer; see `LowLevelZeroPlugin.add_lora_params_to_optimizer`."""
    if isinstance(model, GeminiDDP):
        raise ValueError(
            "add_lora_params_to_optimizer() of a wrapped module; expected the plain one: call it "
            "between booster.enable_lora and booster.boost"
        )
    named = dict(model.named_parameters())
    groups = {
        id(param): group["params"] for group in optimizer.param_groups for param in group["params"]
    }
    for name, param in named.items():
        if _MARK not in name or id(param) in groups:
            continue
        layer = name.partition(_MARK)[0]
        base = named.get(f"{layer}.base_layer.weight", named.get(f"{layer}.weight"))
        group = None if base is None else groups.get(id(base))
        if group is None:
            raise ValueError(
                f"the optimizer has no parameter of {layer}, beside which {name} is; expected one "
                "over all of the module's parameters"
            )
        group.append(param)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs peft: pip install peft") from error
    return peft
