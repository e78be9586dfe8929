"""Question about a model: it is built on the meta device, its chunks searched, its activations
traced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from torch import nn

from gemini.accumulation.chain import REMEDY, Chain, NoChainError
from gemini.chunk.layout import training_layout
from gemini.chunk.sizing.search import ChunkConfiguration, cut, search_chunk_configuration
from gemini.dtypes import BYTES
from gemini.memtracer.trace import sequential_trace
from gemini.optim.adam import AdamRule
from gemini.optim.adaptive import LionRule
from gemini.optim.sgd import SGDRule
from gemini.placement.homes.budgets import first_that_fits
from gemini.placement.policy import SPILL, AutoPlacement
from gemini.placement.sizes import BudgetError
from gemini.placement.timetable.updates import current_update

from . import models
from .activations import Activations, activations_of, constant_activations
from .machine import Hardware
from .quantised import QuantisedBase, name_experts, quantised_base
from .question import Question
from .training import Training
from .words import Answer, answer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# planes that are no masters, by optimizer
LAYOUTS = {"adamw": AdamRule.layout, "lion": LionRule.layout, "sgd": SGDRule.layout}


def plan_for(
    model: str | Path | nn.Module, machine: Hardware, training: Training, *, longest: bool = False
) -> Answer:
    """Plan a training on a machine, or the cheapest change with which it fits.

    model: what `models.build` takes; or a module on the meta device, which gets the adapters and
        the checkpointing that are asked for.
    machine: see `machine_of`.
    longest: whether to say which is the longest sequence that fits; None for a module, or where
        activations are given.

    Nothing is allocated, and no GPU is touched. Raises ValueError for a model that is not known or
    cannot be traced; a model that does not fit is an answer.
    """
    return answer(ask(model, machine, training), training.in_words(), longest=longest)


def _built(what: str | Path | nn.Module, training: Training) -> tuple[nn.Module, QuantisedBase]:
    """Model as it is trained, on the meta device, and its quantised weights."""
    model = (
        what
        if isinstance(what, nn.Module)
        else models.build(
            what, trust_remote_code=training.trust_remote_code, scores=training.scores
        )
    )
    base = QuantisedBase({}, {})
    if training.quantize is not None:
        base = quantised_base(model, training.quantize)
    if training.checkpointing:
        model = models.checkpointed(model)
    if training.lora:
        model = models.add_lora(model, training.lora, training.lora_targets)
    name_experts(model, training.quantize)
    return model, base


def _no_chain(model: nn.Module) -> str:
    """Why micro-batches cannot run layer by layer, as far as modules show it; else ""."""
    try:
        Chain(model, None)
    except NoChainError as error:
        return str(error).removesuffix(f"; {REMEDY}")
    return ""


def ask(
    what: str | Path | nn.Module, machine: Hardware, training: Training, *, only: bool = False
) -> Question:
    """Search the model's chunks and trace it; see `plan_for`. only: with this batch alone."""
    if training.chunked and training.by_trl:
        raise ValueError("a chunked loss beside that of trl; expected one: trl's has no logits")
    if training.activations == SPILL:
        disk = AutoPlacement(
            nvme_budget=machine.nvme, nvme_dir=machine.folder, activations=SPILL
        )  # fmt: skip
        disk.check_lower_tier(has_host_tier=machine.device != "cpu")
    model, base = _built(what, training)
    itemsizes = models.itemsizes(model)
    if training.by_trl or (isinstance(what, str) and what.lower() in models.MODELS):
        itemsizes = [2] * len(itemsizes)  # published weights are in 16 bits
    specs, order = base.specs(model, DTYPES[training.precision]), None
    itemsizes = [1 if spec.dtype == BYTES else n for spec, n in zip(specs, itemsizes, strict=True)]
    searched = search_chunk_configuration(specs, world_size=machine.world_size)
    if training.activation_bytes is None:
        traces = activations_of(
            model, specs, training.seq, training.batch, precision=training.precision,
            by_trl=training.by_trl, chunked=training.chunked, only=only,
        ).traces  # fmt: skip
        traced = Activations({n: base.traced(t, model, specs) for n, t in traces.items()})
        order = traced.at(training.batch).param_order(specs)
    else:
        traced = constant_activations(sequential_trace(specs), training.activation_bytes)
    flops = models.flops_of(model, training.seq, checkpointing=training.checkpointing)
    has_master = training.precision != "fp32"
    planes = replace(LAYOUTS[training.optimizer], kind=training.state)
    planes = planes.with_master() if has_master else planes
    update = current_update(training.update, by_kernels=machine.device != "cpu")
    run = {name: getattr(training, name) for name in Training.__slots__} | {"update": update}

    no_chain = _no_chain(model)
    may_ask = not isinstance(what, nn.Module) and training.activation_bytes is None

    # Asked for late and once each: every other combination is a model that is built and traced.
    @cache
    def other(
        checkpointing: bool, lora: int, quantize: str | None, chunked: bool = False
    ) -> Question | None:
        if not may_ask:
            return None
        try:
            changed = replace(
                training, checkpointing=checkpointing, lora=lora, quantize=quantize,
                chunked=chunked,
            )  # fmt: skip
            return ask(what, machine, changed, only=only)
        # a model without checkpointing, without layers for adapters, or with a loss of its own
        except ValueError:
            return None

    def at(seq: int) -> Question:
        return ask(what, machine, replace(training, seq=seq), only=True)

    def asked(chunks: ChunkConfiguration) -> Question:
        layout = training_layout(specs, chunks.capacities, machine.world_size, order)
        experts, share = models.experts_of(model)
        return Question(
            **run, layout=layout, traced=traced, machine=machine, itemsizes=itemsizes,
            planes=planes, flops_per_token=flops, experts=experts, experts_share=share,
            other=other, at=at if may_ask else None, no_chain=no_chain,
            products=models.products_of(model) if has_master else 0,
        )  # fmt: skip

    def fitting(chunks: ChunkConfiguration) -> Question:
        question = asked(chunks)
        question.wrapped()
        return question

    try:
        return first_that_fits(cut(searched), fitting)
    except BudgetError:  # which is an answer
        return asked(searched)
