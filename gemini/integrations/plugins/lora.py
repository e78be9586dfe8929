"""LoRA by peft, before a module is boosted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini import GeminiDDP
from gemini.checkpoint.adapters import MARK
from gemini.checkpoint.pretrained import check_readable
from gemini.checkpoint.quantise import config_of, quantise


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
        if MARK not in name or id(param) in groups:
            continue
        layer = name.partition(MARK)[0]
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
