"""Shapes of models: from their parameters, their config and traces on fake tensors."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.chunk.layout import ITEMSIZE, distinct, specs_of
from gemini.memtracer.collector import trace
from gemini.memtracer.trace import Trace
from gemini.parallel.cut import ends_of
from gemini.parallel.experts import stacks_of
from gemini.parallel.models import plan_of
from gemini.parallel.shared_sequence import check_shareable
from gemini.placement.orders import LAYER_NUMBER
from gemini.plan.activations import activations_of, depth_of
from gemini.plan.ask import DTYPES
from gemini.plan.models import experts_of

from .shape import ModelShape, Saved, decoder, module

_COLUMNS = re.compile("colwise|qkv")  # words of plans whose inputs' gradients are reduced
_ROWS = re.compile("rowwise")
# fields of a config that ranks of tensor parallelism divide
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def shape_of(
    model: nn.Module, inputs: Any = None, *, seq: int = 1, precision: str = "bf16"
) -> ModelShape:
    """Shape of a model.

    inputs: of one step, as `gemini.trace` takes them; needed for a module without a config of
        transformers. seq: tokens of a sequence.

    Nothing is computed, and the model is not changed. Raises ValueError for inputs that the model
    cannot be traced with.
    """
    # a class of transformers is made anew, with other sizes, by its config alone
    depth = depth_of(model) if hasattr(type(model), "config_class") else None
    stack = _stack(model, depth)
    if stack is None:
        return _of_module(model, inputs, precision)
    name, layers = stack
    params = [
        (names[0], param)
        for param, names in distinct(model.named_parameters(remove_duplicate=False))
    ]
    prefix = f"{name}."
    mine = {n.removeprefix(prefix): p for n, p in params if n.startswith(f"{prefix}1.")}
    experts, used = _experts(model, layers)
    in_experts = sum(p.numel() for n, p in mine.items() if ".experts." in n) if experts else 0
    words = _words(model, name)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = head is not None and id(head.weight) in looked_up
    outside = [(n, p) for n, p in params if not n.startswith(prefix)]
    behind = _behind(model, name, outside)
    config: Any = model.config
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", 0)
    hidden = getattr(text, "hidden_size", 0)
    sizes = {
        "hidden": hidden, "heads": heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or hidden // max(1, heads),
        "vocab": 0 if head is None else head.weight.shape[0],
    }  # fmt: skip
    saved, ends, working = _activations(model, name, sizes, seq, precision)
    return ModelShape(
        type(model).__name__, len(layers), **sizes,
        layer_numel=sum(p.numel() for p in mine.values()) - in_experts,
        split_numel=sum(p.numel() for n, p in mine.items() if _word(n, words)),
        expert_numel=in_experts, experts=experts, experts_used=used,
        first_numel=sum(p.numel() for _, p in outside) - behind, last_numel=behind, tied=tied,
        saved=saved, ends=ends, working=working,
        reduces=(_count(words, _ROWS), _count(words, _COLUMNS)), can=_abilities(model, words),
        is_causal=_is_causal(model), itemsize=ITEMSIZE[DTYPES[precision]],
        trained=_trained(param for _, param in params),
    )  # fmt: skip


def _trained(params: Iterable[nn.Parameter]) -> float:
    """Share of the elements that are trained."""
    totals = Counter[bool]()
    for param in params:
        totals[param.requires_grad] += param.numel()
    return totals[True] / max(1, totals.total())


def _is_causal(model: nn.Module) -> bool:
    """Whether tokens see those before them alone, by the name of its class."""
    return type(model).__name__.endswith(_CAUSAL)


def _of_module(model: nn.Module, inputs: Any, precision: str) -> ModelShape:
    """Shape of a module that is not cut."""
    numel = sum(p.numel() for p in model.parameters())
    saved = 0.0
    if inputs is not None:
        rows = first_tensor(inputs).shape[0]
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        computed = "fp32" if precision == "fp32" else "bf16"  # whose bytes are those of fp16
        saved = trace(model, inputs, precision=computed).peak_non_model_bytes / max(1, rows)
    shape = module(type(model).__name__, numel, saved, ITEMSIZE[DTYPES[precision]])
    return replace(shape, trained=_trained(model.parameters()))


def first_tensor(batch: Any) -> torch.Tensor:
    """First tensor of a batch, whose first size is its rows. Raises ValueError for none."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    for value in [values] if isinstance(values, torch.Tensor) else values:
        if isinstance(value, torch.Tensor) and value.dim():
            return value
    raise ValueError("the batch has no tensor; expected inputs of one step, rows first")


def _stack(model: nn.Module, depth: int | None) -> tuple[str, nn.ModuleList] | None:
    """Path and list of the equal layers of a model; None for a model that is no such stack."""
    for name, child in model.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == depth and depth and depth > 1:
            return name, child
    return None


def _experts(model: nn.Module, layers: nn.ModuleList) -> tuple[int, int]:
    """Experts of a layer, and those that a token is sent to; 0 where there are none."""
    total, share = experts_of(model)
    each = total // len(layers)
    return each, round(share * each)


def _behind(model: nn.Module, layers: str, outside: Sequence[tuple[str, nn.Parameter]]) -> int:
    """Elements of parameters that the model has behind its layers, by the order of its modules."""
    order = [name for name, _ in model.named_modules()]
    at = order.index(layers)
    late = {name for name in order[at:] if not name.startswith(layers)}
    return sum(p.numel() for n, p in outside if n.rpartition(".")[0] in late)


def _words(model: nn.Module, layers: str) -> dict[str, str]:
    """Words of the plan for one layer, by the path in it."""
    found = {}
    for path, how in (plan_of(model) or {}).items():
        for start in (f"{layers}.*.", f"{layers.partition('.')[2]}.*."):
            if path.startswith(start):
                found[path.removeprefix(start)] = str(how)
    return found


def _word(param: str, words: Mapping[str, str]) -> bool:
    """Whether a parameter of layer 1 is split."""
    path = param.partition(".")[2].rpartition(".")[0]
    return bool(_COLUMNS.search(words.get(path, "")) or _ROWS.search(words.get(path, "")))


def _count(words: Mapping[str, str], kind: re.Pattern[str]) -> int:
    return sum(bool(kind.search(how)) for how in words.values())


def _abilities(model: Any, words: Mapping[str, str]) -> frozenset[str]:
    """What the plugins can do with a model, of `gemini.layouts.shape.KINDS`."""
    found = {"tp"} if words else set[str]()
    for name, check in (("pp", ends_of), ("sp", check_shareable)):
        if name == "sp" and not _is_causal(model):
            continue
        try:
            check(model)
        except ValueError:
            continue
        found.add(name)
    if any(stacks_of(one) for one in model.modules()):
        found.add("ep")
    if getattr(model, "supports_gradient_checkpointing", False):
        found.add("recompute")
    return frozenset(found)


def _activations(
    model: Any, layers: str, sizes: Mapping[str, int], seq: int, precision: str
) -> tuple[Saved, float, float]:
    """Bytes of a token: a layer's, those of the head, and those at work in a layer.

    What ranks split is told by a trace of a model with half the heads and half the width; for a
    config that cannot say these, by a formula's shares.
    """
    whole = _traced(model, {}, seq, precision)
    each, ends, working = _per_token(whole, len(model.get_submodule(layers)), seq)
    config: Any = model.config
    named = {n: getattr(config, n) for n in _DIVIDED if isinstance(getattr(config, n, None), int)}
    halves = {n: size // 2 for n, size in named.items() if size % 2 == 0}
    if "head_dim" in config.to_dict() and halves.keys() >= {"num_attention_heads"} and halves == {
        n: size // 2 for n, size in named.items()
    }:  # fmt: skip
        halves["head_dim"] = sizes["head_dim"]
        half, *_ = _per_token(
            _traced(model, halves, seq, precision), len(model.get_submodule(layers)), seq
        )
        split = min(each, max(0.0, 2 * (each - half)))
        return Saved(each - split, split), ends, working
    usual = decoder(
        "", hidden=sizes["hidden"], layers=1, heads=sizes["heads"], vocab=0,
        mlp=4 * sizes["hidden"], gated=False,
    ).saved  # fmt: skip
    return (
        Saved(each * usual.whole / usual.total, each * usual.split / usual.total), ends, working,
    )  # fmt: skip


def _traced(model: Any, changes: Mapping[str, int], seq: int, precision: str) -> Trace:
    """Trace of one sequence of a model of this class, without values, with other sizes."""
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        empty = type(model)(config)
    return activations_of(
        empty, specs_of(empty, "bfloat16"), seq, 1, precision=precision, only=True
    ).traces[1]  # fmt: skip


def _per_token(found: Trace, layers: int, seq: int) -> tuple[float, float, float]:
    """Bytes of a token that one layer keeps; at the peak beyond what all layers keep; and in the
    backward of an inner layer beyond them."""
    forward = {layer: m for m in reversed(found.moments)
               if m.phase == "forward" and (layer := _layer(m.module)) is not None}  # fmt: skip
    grown = forward[2].non_model_bytes - forward[1].non_model_bytes if 2 in forward else 0
    if not grown:
        last = forward[max(forward)].non_model_bytes
        grown = (last - forward[0].non_model_bytes) // max(1, max(forward))
    kept = layers * grown
    inner = [m.non_model_bytes for m in found.moments
             if m.phase == "backward" and _layer(m.module) == layers - 2]  # fmt: skip
    working = max(inner, default=kept) - (layers - 1) * grown
    ends = max(0, found.peak_non_model_bytes - kept)
    return grown / seq, ends / seq, max(0.0, working / seq)


def _layer(name: str) -> int | None:
    match = LAYER_NUMBER.search(name)
    return None if match is None else int(match[1])
