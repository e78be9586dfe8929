"""From a model to its plan: on the meta device, with the chunks and activations that it has."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from gemini.chunk.layout import training_layout
from gemini.chunk.sizing.search import search_chunk_configuration
from gemini.memtracer.trace import sequential_trace
from gemini.placement.sizes import StateBytes, wider_chunks

from . import models
from .activations import activations_of, constant_activations
from .machine import Hardware
from .question import Question
from .words import Answer, answer

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MOMENTS = {"adamw": 8, "lion": 4, "sgd": 4}  # bytes an element of state, beside masters
MASTER = 4


def plan_for(
    model: str | nn.Module,
    machine: Hardware,
    *,
    batch: int = 1,
    seq: int = 1024,
    lora: int = 0,
    checkpointing: bool = False,
    precision: str = "bf16",
    optimizer: str = "adamw",
    nvme_fraction: float = 0.0,
    activation_bytes: int | None = None,
) -> Answer:
    """What training would take on a machine, or the cheapest change with which it fits.

    model: what `models.build` takes; or a module on the meta device, which gets the adapters and
        the checkpointing that are asked for.
    machine: see `machine_of`.
    batch, seq: sequences of a rank in one forward, and their tokens.
    lora: rank of adapters; 0 trains the whole model.
    precision: of `DTYPES`. optimizer: of `MOMENTS`.
    nvme_fraction: of the optimizer's state, at least, on NVMe.
    activation_bytes: of one sample, where nothing can be traced.

    Nothing is allocated, and no GPU is touched. Raises ValueError for a model that is not known or
    cannot be traced; a model that does not fit is an answer.
    """
    assumed = (
        f"batch of a rank {batch}, {seq} tokens, {precision}, {optimizer} with fp32 state, "
        f"{f'LoRA of rank {lora}' if lora else 'all parameters trained'} (as asked)",
        f"activations: {'computed again in backward' if checkpointing else 'kept for backward'} "
        f"({'traced' if activation_bytes is None else 'given'})",
    )
    question = ask(
        model, machine, batch, seq, lora, checkpointing, precision, optimizer, nvme_fraction,
        activation_bytes,
    )  # fmt: skip
    return answer(question, assumed)


def ask(
    what: str | nn.Module,
    machine: Hardware,
    batch: int = 1,
    seq: int = 1024,
    lora: int = 0,
    checkpointing: bool = False,
    precision: str = "bf16",
    optimizer: str = "adamw",
    nvme_fraction: float = 0.0,
    activation_bytes: int | None = None,
) -> Question:
    """Search the model's chunks and trace it; see `plan_for`."""
    model = models.build(what) if isinstance(what, str) else what
    itemsizes = models.itemsizes(model)
    if checkpointing:
        model = models.checkpointed(model)
    if lora:
        model = models.add_lora(model, lora)
        itemsizes = models.itemsizes(model)
    if isinstance(what, str) and what.lower() in models.MODELS:
        itemsizes = [2] * len(itemsizes)  # published weights are in 16 bits
    dtype = DTYPES[precision]
    found = search_chunk_configuration(model, dtype=dtype, world_size=machine.world_size)
    layout = training_layout(found.layout.params, found.capacities, machine.world_size)
    if activation_bytes is None:
        activations = activations_of(model, layout.params, seq)
    else:
        activations = constant_activations(sequential_trace(layout.params), activation_bytes)
    trained = sum(spec.numel for spec in layout.params if spec.trainable)
    used = models.used_numel(model)
    gradients = trained if lora else used  # those of inputs are computed either way
    question = Question(
        layout, activations, machine, batch, seq, nvme_fraction, wider_chunks(layout, itemsizes),
        StateBytes(MOMENTS[optimizer] + MASTER * (precision != "fp32"), precision != "fp32"),
        float(2 * (2 + checkpointing) * used + 2 * gradients),
    )  # fmt: skip
    if checkpointing or activation_bytes is not None or not isinstance(what, str):
        return question

    def lighter() -> Question:
        try:
            return ask(what, machine, batch, seq, lora, True, precision, optimizer, nvme_fraction)
        except ValueError:  # a model without checkpointing stays as it is
            return question

    return replace(question, lighter=lighter)
