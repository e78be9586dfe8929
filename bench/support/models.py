"""Models by name, without weights: on the meta device, from their published sizes.

`build` takes a name, the path of a `config.json`, or `package.module:factory`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

# class of the configuration, class of the model, and what differs from the class's defaults
_Entry = tuple[str, str, dict[str, Any]]
_LLAMA = ("LlamaConfig", "LlamaForCausalLM")
_GPT2 = ("GPT2Config", "GPT2LMHeadModel")

MODELS: dict[str, _Entry] = {
    "gpt2": (*_GPT2, {}),
    "gpt2-medium": (*_GPT2, {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": (*_GPT2, {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": (*_GPT2, {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert-base": ("BertConfig", "BertForPreTraining", {}),
    "bert-large": (
        "BertConfig",
        "BertForPreTraining",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "t5-small": ("T5Config", "T5ForConditionalGeneration", {}),
    "t5-large": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_layers": 24, "num_heads": 16},
    ),
    "opt-1.3b": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "word_embed_proj_dim": 2048,
        },
    ),
    "opt-6.7b": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 4096,
            "ffn_dim": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "word_embed_proj_dim": 4096,
        },
    ),
    "llama-150m": (
        *_LLAMA,
        {
            "hidden_size": 768,
            "intermediate_size": 2304,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
    ),
    "llama-7b": (*_LLAMA, {"hidden_size": 4096, "intermediate_size": 11008}),
    "llama-13b": (
        *_LLAMA,
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
        },
    ),
    "llama-70b": (
        *_LLAMA,
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "mixtral-8x7b": ("MixtralConfig", "MixtralForCausalLM", {}),
    "vit-base": ("ViTConfig", "ViTForImageClassification", {"num_labels": 1000}),
}


def build(what: str) -> nn.Module:
    """A model on the meta device. Raises ValueError for what is not known."""
    return _meta(maker(what))


def maker(what: str) -> Callable[[], Any]:
    """What makes the model, with random weights. Raises ValueError for what is not known."""
    if ":" in what and not what.endswith(".json"):
        return _factory(what)
    if what.endswith(".json"):
        return _from_config(Path(what))
    if what not in MODELS:
        raise ValueError(
            f"no model {what!r}; expected one of {', '.join(MODELS)}, "
            "the path of a config.json, or package.module:factory"
        )
    config_class, model_class, changes = MODELS[what]
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, config_class)(**changes)
    return lambda: getattr(transformers, model_class)(config)


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """The model with PEFT's LoRA adapters of `rank` on its usual layers, all else frozen."""
    try:
        import peft
    except ImportError as error:
        raise ValueError("LoRA needs the package peft; install it") from error
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank)
    return _meta(lambda: peft.get_peft_model(model, config))


def itemsizes(model: nn.Module) -> list[int]:
    """Bytes an element of every parameter, in registration order."""
    return [param.dtype.itemsize for param in model.parameters()]


def _meta(make: Callable[[], Any]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a module, got a {type(model).__name__}")
    on_others = [name for name, param in model.named_parameters() if not param.is_meta]
    if on_others:
        raise ValueError(f"parameter {on_others[0]} was not made on the meta device")
    return model


def _factory(what: str) -> Callable[[], Any]:
    """`package.module:factory`, called without arguments."""
    module, _, name = what.partition(":")
    factory = getattr(importlib.import_module(module), name, None)
    if not callable(factory):
        raise ValueError(f"{module} has no callable {name!r}")
    return factory  # type: ignore[no-any-return]


def _from_config(path: Path) -> Callable[[], Any]:
    """The class that a config.json names as its architecture, else a causal language model."""
    transformers = importlib.import_module("transformers")
    fields = json.loads(path.read_text())
    config = transformers.AutoConfig.for_model(**fields)
    named = next((n for n in fields.get("architectures") or () if hasattr(transformers, n)), None)

    def make() -> Any:
        if named is None:
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = getattr(transformers, named)(config)
        dtype = config.dtype  # of the weights that lie beside it
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return model if dtype is None else model.to(dtype)

    return make
