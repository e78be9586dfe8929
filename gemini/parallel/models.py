"""Plans for models that transformers has no plan for, in the words of users' plans.

`base.` stands for the model with the layers: `transformer.` in a GPT2LMHeadModel, and nothing in a
GPT2Model. Layers that a model lacks are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

HEAD = "colwise_gather_output"
PLANS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "base.wte": "embedding_rowwise",
        "base.h.*.attn": "divide num_heads split_size embed_dim",
        "base.h.*.attn.c_attn": "qkv_colwise",
        "base.h.*.attn.c_proj": "rowwise",
        "base.h.*.mlp.c_fc": "colwise",
        "base.h.*.mlp.c_proj": "rowwise",
        "lm_head": HEAD,
    },
    "bert": {
        "base.embeddings.word_embeddings": "embedding_rowwise",
        **dict.fromkeys(
            (f"base.encoder.layer.*.attention.self.{name}" for name in ("query", "key", "value")),
            "colwise",
        ),
        "base.encoder.layer.*.attention.output.dense": "rowwise",
        "base.encoder.layer.*.intermediate.dense": "colwise",
        "base.encoder.layer.*.output.dense": "rowwise",
        "cls.predictions.decoder": HEAD,
    },
    "opt": {
        "base.decoder.embed_tokens": "embedding_rowwise",
        "base.decoder.layers.*.self_attn": "divide num_heads",
        **dict.fromkeys(
            (f"base.decoder.layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"
        ),
        "base.decoder.layers.*.self_attn.out_proj": "rowwise",
        "base.decoder.layers.*.fc1": "colwise",
        "base.decoder.layers.*.fc2": "rowwise",
        "lm_head": HEAD,
    },
    "bloom": {
        "base.word_embeddings": "embedding_rowwise",
        "base.h.*.self_attention": "divide num_heads, alibi",
        "base.h.*.self_attention.query_key_value": "colwise",
        "base.h.*.self_attention.dense": "rowwise",
        "base.h.*.mlp.dense_h_to_4h": "colwise",
        "base.h.*.mlp.dense_4h_to_h": "rowwise",
        "lm_head": HEAD,
    },
    "gptj": {
        "base.wte": "embedding_rowwise",
        "base.h.*.attn": "divide num_attention_heads",
        **dict.fromkeys((f"base.h.*.attn.{name}_proj" for name in "qkv"), "colwise"),
        "base.h.*.attn.out_proj": "rowwise",
        "base.h.*.mlp.fc_in": "colwise",
        "base.h.*.mlp.fc_out": "rowwise",
        "lm_head": HEAD,
    },
    # keys that all heads share have one head, which is refused by its number
    "falcon": {
        "base.word_embeddings": "embedding_rowwise",
        "base.h.*.self_attention": "divide num_heads num_kv_heads, alibi attention_mask",
        "base.h.*.self_attention.query_key_value": "colwise",
        "base.h.*.self_attention.dense": "rowwise",
        "base.h.*.mlp.dense_h_to_4h": "colwise",
        "base.h.*.mlp.dense_4h_to_h": "rowwise_cloned",
        "lm_head": HEAD,
    },
    "t5": {
        "shared": "embedding_rowwise",
        "encoder.embed_tokens": "embedding_rowwise",
        "decoder.embed_tokens": "embedding_rowwise",
        **{
            f"{side}.block.*.layer.*.{attention}{name}": how
            for side in ("encoder", "decoder")
            for attention in ("SelfAttention", "EncDecAttention")
            for name, how in (
                ("", "divide n_heads"),
                *((f".{name}", "colwise") for name in "qkv"),
                (".o", "rowwise"),
                (".relative_attention_bias", "colwise"),  # of each head
            )
        },
        **{
            f"{side}.block.*.layer.*.DenseReluDense.{name}": how
            for side in ("encoder", "decoder")
            for name, how in (
                ("wi", "colwise"),
                ("wi_0", "colwise"),
                ("wi_1", "colwise"),
                ("wo", "rowwise"),
            )
        },
        "lm_head": HEAD,
    },
    "vit": {
        **dict.fromkeys((f"base.layers.*.attention.{name}_proj" for name in "qkv"), "colwise"),
        "base.layers.*.attention.o_proj": "rowwise",
        "base.layers.*.mlp.fc1": "colwise",
        "base.layers.*.mlp.fc2": "rowwise",
    },
}


def plan_of(model: nn.Module) -> Mapping[str, Any] | None:
    """Plan of a model: its own, or one of `PLANS`; None for a model with neither."""
    own = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if own or kind not in PLANS:
        return own if isinstance(own, Mapping) else None
    base: Any = getattr(model, "base_model", model)
    prefix = "" if base is model else f"{getattr(model, 'base_model_prefix', '')}."
    return {name.replace("base.", prefix, 1): how for name, how in PLANS[str(kind)].items()}


def is_ours(model: nn.Module, given: object) -> bool:
    """Whether a model's plan is transformers' or one of `PLANS`, and not a user's."""
    own = getattr(model, "tp_plan", None)
    if given is not None or not type(model).__module__.startswith("transformers."):
        return False
    known = {**(getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {})}
    known |= {"embed_tokens": "embedding_rowwise"}  # which transformers adds
    known |= getattr(type(model), "_tp_plan", None) or {}
    return all(
        any(name.endswith(key) and how == word for key, word in known.items())
        for name, how in (own or {}).items()
    )
