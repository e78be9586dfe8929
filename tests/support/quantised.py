"""Small LoRA models on a quantised base, and how they train plainly, to compare with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from bench.shared.models import seeded
from bench.shared.reference import flat
from optim import HybridAdam

KINDS = ("nf4", "nf4-double", "int8", "torchao")
VOCABULARY, HIDDEN, STEPS = 128, 64, 3


class Packed(nn.Module):
    """4-bit numbers of 16 values, two in a byte, with one power of two for each 32: MXFP4's form.
    As a parametrisation of a weight, as bitsandbytes' own of stacked experts."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        exponents = weight.reshape(-1, 32).abs().amax(1).float().log2().ceil().int()
        self.scales = nn.Parameter((exponents + 127).to(torch.uint8), requires_grad=False)

    def blocks_of(self, weight: Tensor) -> Tensor:
        steps = weight.reshape(-1, 32).float() / self._scale()
        codes = (steps * 8 + 8).clamp(0, 15).to(torch.uint8)
        return codes[:, ::2] | codes[:, 1::2] << 4

    def forward(self, blocks: Tensor) -> Tensor:
        codes = torch.stack([blocks & 15, blocks >> 4], -1).reshape(-1, 32)
        return ((codes.float() - 7.5) / 8 * self._scale()).to(self.dtype).reshape(self.shape)

    def _scale(self) -> Tensor:
        return torch.exp2(self.scales.float() - 127).unsqueeze(1)


def _packed(module: nn.Module, name: str) -> None:
    weight = getattr(module, name).data
    form = Packed(weight)
    setattr(module, name, nn.Parameter(form.blocks_of(weight), requires_grad=False))
    register_parametrization(module, name, form, unsafe=True)


def quantised(model: nn.Module, kind: str) -> nn.Module:
    """`model` with every linear layer but the head as a library quantises it, and in 4 bits stacked
    experts too."""
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if type(child).__name__ == "Conv1D":
                setattr(module, key, _as_linear(child))
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            for name in ("gate_up_proj", "down_proj"):
                if kind in FOUR_BITS:
                    FOUR_BITS[kind](module, name)
    if kind == "packed":
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and "lm_head" not in name:
                _packed(module, "weight")
        return model
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


def _as_linear(conv: Any) -> nn.Linear:
    """Of GPT-2's layers, as transformers takes them to quantise them."""
    made = nn.Linear(*conv.weight.shape, bias=True, dtype=conv.weight.dtype)
    made.weight.data, made.bias = conv.weight.data.T.contiguous(), conv.bias
    return made


def _stacked_nf4(module: nn.Module, name: str) -> None:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    replace_parameter_4bit(module, name, compress_statistics=True)


FOUR_BITS = {"nf4": _stacked_nf4, "packed": _packed}


def _by_bitsandbytes(bnb: Any, linear: nn.Linear, kind: str) -> nn.Module:
    sizes, weight = (linear.in_features, linear.out_features), linear.weight.data
    has_bias = linear.bias is not None
    if kind == "int8":
        made = bnb.nn.Linear8bitLt(*sizes, bias=has_bias, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        made.bias = linear.bias
        return made.to("cpu")
    options = {"quant_type": "nf4", "compress_statistics": kind == "nf4-double"}
    if kind == "nf4-double":  # packed as numbers that float
        options["quant_storage"] = torch.bfloat16
    made = bnb.nn.Linear4bit(*sizes, bias=has_bias, compute_dtype=weight.dtype, **options)
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=made, **options)
    made.bias = linear.bias
    return made.to("cpu")


_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": HIDDEN}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "llama": (
        {**_ATTENTION, "intermediate_size": 2 * HIDDEN},
        (*_PROJECTIONS, "gate_proj", "up_proj", "down_proj"),
    ),
    "qwen3_moe": (
        {**_ATTENTION, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
         "head_dim": 32},
        _PROJECTIONS,
    ),
    "gpt2": (
        {"n_embd": HIDDEN, "n_head": 2, "n_positions": 64, "embd_pdrop": 0, "resid_pdrop": 0,
         "attn_pdrop": 0},
        ("c_attn", "c_proj", "c_fc"),
    ),
}  # fmt: skip


def lora(
    kind: str,
    *,
    reentrant: bool | None = None,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    family: str = "llama",
    **adapter: Any,
) -> Any:
    """Adapters in `dtype` on a small model. reentrant: of gradient checkpointing; None: without."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes, projections = FAMILIES[family]
    config = AutoConfig.for_model(family, num_hidden_layers=layers, vocab_size=VOCABULARY,
                                  tie_word_embeddings=True, use_cache=False, **sizes)  # fmt: skip
    with seeded(seed):
        base = quantised(AutoModelForCausalLM.from_config(config).to(dtype), kind)
        base.requires_grad_(False)
        options = LoraConfig(r=4, lora_alpha=8, target_modules=list(projections), **adapter)
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
