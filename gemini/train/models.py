"""The model of a run: its folder, and the model with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint.pretrained import load_pretrained
from gemini.plan.models import adapted

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


def loaded_model(folder: str, config: TrainConfig, options: dict[str, Any]) -> nn.Module:
    """With its weights. Wrapped with `options` where all of it is trained: so it is never whole in
    memory; under LoRA it is in the RAM of each rank until the trainer wraps it. All ranks call."""
    if not config.lora:
        return load_pretrained(folder, precision=PRECISION, force_outputs_fp32=True, **options)
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.manual_seed(config.seed)  # the same adapters on all ranks
    found: nn.Module = adapted(base, config.lora)
    return found
