"""Small LoRA models on a quantised base, and how they train plainly, to compare with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared.models import seeded
from bench.shared.reference import flat
from optim import HybridAdam

KINDS = ("nf4", "nf4-double", "int8", "torchao")
VOCABULARY, HIDDEN, STEPS = 128, 64, 3


def quantised(model: nn.Module, kind: str) -> nn.Module:
    """`model` with every linear layer but the head as a library quantises it."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        def is_inner(module: nn.Module, name: str) -> bool:
            return isinstance(module, nn.Linear) and "lm_head" not in name

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_inner)
        return model
    import bitsandbytes as bnb

    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and key != "lm_head":
                setattr(module, key, _by_bitsandbytes(bnb, child, kind))
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return model


def _by_bitsandbytes(bnb: Any, linear: nn.Linear, kind: str) -> nn.Module:
    sizes, weight = (linear.in_features, linear.out_features), linear.weight.data
    if kind == "int8":
        made = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return made.to("cpu")
    options = {"quant_type": "nf4", "compress_statistics": kind == "nf4-double"}
    if kind == "nf4-double":  # packed as numbers that float
        options["quant_storage"] = torch.bfloat16
    made = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=weight.dtype, **options)
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=made, **options)
    return made.to("cpu")


def lora(
    kind: str,
    *,
    reentrant: bool | None = None,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """Adapters in `dtype` on a small Llama. reentrant: of gradient checkpointing; None: without."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=VOCABULARY,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with seeded(seed):
        base = quantised(LlamaForCausalLM(config).to(dtype), kind).requires_grad_(False)
        projections = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        options = LoraConfig(r=4, lora_alpha=8, target_modules=projections)
        model = get_peft_model(base, options, autocast_adapter_dtype=False)
        for name, param in model.named_parameters():
            if "lora_" in name:  # beside int8 peft makes them fp32
                param.data = param.data.to(dtype)
            if "lora_B" in name:
                param.data.normal_(std=0.02)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model.train()


def batches(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield torch.randint(0, VOCABULARY, (2, 2, 16), generator=generator)[rank]


def bytes_of(tensor: Tensor) -> list[Tensor]:
    """Of the plain tensors that a tensor consists of: packed bits may be NaNs of their dtype."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach().contiguous().reshape(-1).view(torch.uint8)]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in bytes_of(getattr(tensor, name))]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two state dicts have the same names in the same order, classes and bits."""
    return list(a) == list(b) and all(
        type(a[name]) is type(b[name])
        and all(map(torch.equal, bytes_of(a[name]), bytes_of(b[name])))
        for name in b
    )


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


@dataclass(frozen=True, slots=True)
class Loop:
    """How both are trained: parts of a batch before each step, and what a step does.

    overflows: a step whose gradients are not finite, which is skipped. scale: of losses at first,
    which such a step halves.
    """

    parts: int = 1
    max_norm: float = 0.0
    overflows: int | None = None
    scale: float = 1.0

    def steps(self, rank: int) -> Iterator[list[tuple[Tensor, float]]]:
        """Inputs of a step's parts, each with a factor of its loss."""
        for step, ids in enumerate(batches(rank)):
            factor = math.inf if step == self.overflows else 1.0
            yield [(part, factor) for part in ids.chunk(self.parts)]


def plain_losses(
    model: nn.Module, world_size: int = 1, loop: Loop = Loop(), norms: Sequence[float] = ()
) -> list[list[float]]:
    """Losses of every rank, trained with masters in fp32; ranks' gradients are summed in their
    dtype, and those of parts in fp32.

    norms: that steps have clipped by, whose last bits differ with the tiles that they are summed in
    (docs/numerics.md).
    """
    params = list(adapters(model).values())
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = HybridAdam(masters, lr=1e-2)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    scale, clipped_by = loop.scale, iter(norms)
    for of_ranks in zip(*map(loop.steps, range(world_size)), strict=True):
        totals = [torch.zeros_like(master) for master in masters]
        for of_part in zip(*of_ranks, strict=True):
            sums: list[Tensor] = []
            for rank, (ids, factor) in enumerate(of_part):
                loss = model(input_ids=ids, labels=ids).loss * factor
                (loss * scale).backward()
                losses[rank].append(loss.item())
                shares = [param.grad / world_size for param in params]
                sums = [a + b for a, b in zip(sums, shares, strict=True)] if sums else shares
                model.zero_grad()
            totals = [a + b.float() for a, b in zip(totals, sums, strict=True)]
        if not all(total.isfinite().all() for total in totals):
            scale /= 2 if loop.scale != 1 else 1
            continue
        factor = 1.0
        if loop.max_norm:
            found, norm = float(flat(totals).norm()) / scale, next(clipped_by)
            assert abs(norm - found) < 1e-6 * found and found > loop.max_norm
            factor = loop.max_norm / (norm + 1e-6)
        for master, total in zip(masters, totals, strict=True):
            master.grad = total * (factor / scale)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return losses


def wrapped_losses(
    model: Any, rank: int = 0, loop: Loop = Loop(), norms: list[float] | None = None
) -> list[float]:
    """Losses of one rank of a wrapped model, trained as `plain_losses` does. norms: those that
    steps clip by are put there."""
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    losses = []
    for parts in loop.steps(rank):
        for ids, factor in parts:
            loss = model(input_ids=ids, labels=ids).loss * factor
            loss.backward()
            losses.append(loss.item())
        norm = float(optimizer.clip_grad_norm_(loop.max_norm)) if loop.max_norm else 0.0
        optimizer.step()
        optimizer.zero_grad()
        if norms is not None and math.isfinite(norm):
            norms.append(norm)
    assert optimizer.skipped_steps == (loop.overflows is not None)
    optimizer.close()
    return losses
