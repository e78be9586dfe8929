"""Question about a model: it is built on the meta device, its chunks searched, its activations
traced."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from gemini.optim.rules.state_layout import WEIGHT_DTYPE
from gemini.optim.sgd import SGDRule
from gemini.placement.homes.budgets import first_that_fits
from gemini.placement.orders import BATCHES, LAYERS
from gemini.placement.policy import AUTO, KEEP, SPILL, AutoPlacement
from gemini.placement.sizes import BudgetError, StateBytes, wider_chunks
from gemini.placement.timetable.updates import TAIL, current_update

from . import models
from .activations import Activations, activations_of, constant_activations
from .machine import Hardware
from .quantised import KINDS, QuantisedBase, name_experts, quantised_base
from .question import AVERAGES, Question
from .words import Answer, answer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# planes that are no masters, by optimizer
LAYOUTS = {"adamw": AdamRule.layout, "lion": LionRule.layout, "sgd": SGDRule.layout}
QUANTISED = ("adamw",)  # whose state may be kept in fewer bits
_GO = {
    KEEP: "",
    SPILL: ", the oldest below the device where it has no room",
    AUTO: ", or below the device, or computed again, as the plan says",
}


@dataclass(frozen=True, slots=True)
class Training:
    """Training of a model.

    batch, seq: sequences of a rank in one forward, and their tokens.
    accumulate: forwards and backwards before a step, in the order of `gemini.accumulate`.
    lora: rank of adapters; 0 trains the whole model. lora_targets: as `models.adapters_of`.
    quantize: of the base under adapters: one of `quantised.KINDS`; None leaves it in 16 bits.
    precision: of `DTYPES`. optimizer: of `LAYOUTS`. state: as `HybridAdam` takes it.
    nvme_fraction: of the optimizer's state, at least, on NVMe.
    activation_bytes: of one sample, where nothing can be traced.
    update: of `GeminiDDP`.
    by_trl: as `python -m gemini train` does it: with trl's loss, a frozen base in 16 bits.
    ema: home of an average of the weights, as `gemini.EMA` has it; None: there is none.
    trust_remote_code: whether the code of the model's own folder is run, which its config names.
    lengths: of inputs that differ in a run, `seq` the longest: a CPU compiles products for each.
    scores: whether a reward model is trained, with a head of one score.
    loaded: whether the module has its values before it is wrapped, as `from_pretrained` leaves it.
    keep_originals, canonical: of `GeminiDDP`.
    activations: where they go: of `AutoPlacement`.
    chunked: whether `chunk_loss` has changed the model: the logits of a few tokens exist at a time.
    """

    batch: int = 1
    seq: int = 1024
    lora: int = 0
    checkpointing: bool = False
    precision: str = "bf16"
    optimizer: str = "adamw"
    nvme_fraction: float = 0.0
    activation_bytes: int | None = None
    accumulate: int = 1
    update: str = TAIL
    by_trl: bool = False
    ema: str | None = None
    state: str = "fp32"
    quantize: str | None = None
    trust_remote_code: bool = False
    lengths: int = 1
    lora_targets: tuple[str, ...] | None = None
    scores: bool = False
    loaded: bool = False
    keep_originals: bool = False
    activations: str = KEEP
    chunked: bool = False
    accumulate_order: str = BATCHES
    canonical: bool = False

    def __post_init__(self) -> None:
        if self.quantize is not None and (self.quantize not in KINDS or not self.lora):
            raise ValueError(
                f"quantize={self.quantize!r} with lora={self.lora}; expected one of {KINDS}, of a "
                "base that is frozen under adapters: give their rank"
            )
        if self.state != "fp32" and self.optimizer not in QUANTISED:
            raise ValueError(
                f"state={self.state!r} with {self.optimizer}; expected fp32, or one of {QUANTISED}"
            )

    @property
    def by_layers(self) -> bool:
        """Whether micro-batches run layer by layer."""
        return self.accumulate > 1 and self.accumulate_order == LAYERS

    def in_words(self) -> tuple[str, str]:
        trained = f"LoRA of rank {self.lora}" if self.lora else "all parameters trained"
        trained += f" on a base in {self.quantize}" if self.quantize else ""
        kept = "computed again in backward" if self.checkpointing else "kept for backward"
        kept += _GO[self.activations]
        times = f", {self.accumulate} times a step" if self.accumulate > 1 else ""
        if self.by_layers:
            times += " layer by layer"
        how = "traced" if self.activation_bytes is None else "given"
        loss = "of a reward model" if self.scores else "with the loss of trl"
        how += ", with the loss of chunk_loss" if self.chunked else ""
        average = f", their average in {AVERAGES[self.ema]}" if self.ema else ""
        return (
            f"batch of a rank {self.batch}{times}, {self.seq} tokens, {self.precision}, "
            f"{self.optimizer} with {self.state} state, {trained}{average} (as asked)",
            f"activations: {kept} ({how}{f', {loss}' if self.by_trl else ''})",
        )


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
        activations = Activations({n: base.traced(t, model, specs) for n, t in traces.items()})
        order = activations.at(training.batch).param_order(specs)
    else:
        activations = constant_activations(sequential_trace(specs), training.activation_bytes)
    trained = sum(spec.numel for spec in specs if spec.trainable)
    flops = models.flops_of(
        model, training.seq, checkpointing=training.checkpointing,
        trained=trained if training.lora else None,
    )  # fmt: skip
    has_master = training.precision != "fp32"
    state = replace(LAYOUTS[training.optimizer], kind=training.state)
    state = state.with_master() if has_master else state

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
        return Question(
            layout, activations, machine, training.batch, training.seq, training.accumulate,
            training.lora, training.checkpointing, training.nvme_fraction,
            wider_chunks(layout, itemsizes),
            StateBytes(state.bytes_per_element, has_master),
            flops,
            current_update(training.update, by_kernels=machine.device != "cpu"),
            training.ema, *models.experts_of(model), other,
            state.splits(WEIGHT_DTYPE), training.quantize,
            models.products_of(model) if has_master else 0, training.lengths, training.loaded,
            training.keep_originals, training.activations, training.chunked,
            at if may_ask else None, training.accumulate_order, no_chain, training.canonical,
        )  # fmt: skip

    def fitting(chunks: ChunkConfiguration) -> Question:
        question = asked(chunks)
        question.wrapped()
        return question

    try:
        return first_that_fits(cut(searched), fitting)
    except BudgetError:  # which is an answer
        return asked(searched)
