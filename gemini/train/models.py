"""The model of a run: empty, for the plan, and with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import gemini
from gemini.checkpoint.pretrained import load_pretrained

from .config import TrainConfig

PRECISION = "bf16"


def folder_of(model: str) -> str:
    """A folder as it is; an id on the hub as the folder that it is downloaded to."""
    if Path(model).expanduser().is_dir():
        return str(Path(model).expanduser())
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found: str = snapshot_download(model, ignore_patterns=["*.bin", "*.pth", "*.gguf"])
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        said = str(error).strip().splitlines()[0]
        raise ValueError(f"--model {model} is no folder here, and the hub says: {said}") from None
    return found


def empty_model(folder: str, config: TrainConfig) -> nn.Module:
    """On the meta device, as it is trained: with its adapters, and with checkpointing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with gemini.init_empty():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model.tie_weights()
        model = adapted(model, config)
    if config.checkpointing:
        inner = model.get_base_model() if config.lora else model
        inner.gradient_checkpointing_enable({"use_reentrant": False})
        if config.lora:
            model.enable_input_require_grads()
    trained: nn.Module = model.train()
    return trained


def loaded_model(folder: str, config: TrainConfig, options: dict[str, Any]) -> nn.Module:
    """With its weights. Wrapped with `options` where all of it is trained: so it is never whole in
    memory; under LoRA it is in the RAM of each rank until the trainer wraps it. All ranks call."""
    if not config.lora:
        return load_pretrained(folder, precision=PRECISION, force_outputs_fp32=True, **options)
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(config.seed)  # the same adapters on all ranks
    return adapted(base, config)


def adapted(model: nn.Module, config: TrainConfig) -> nn.Module:
    """With adapters, where the run has some."""
    if not config.lora:
        return model
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=config.lora, lora_alpha=2 * config.lora, lora_dropout=0.0, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    found: nn.Module = get_peft_model(model, lora)
    return found
