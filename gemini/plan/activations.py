"""Activations of a named model, for any batch, without weights.

The model is traced on fake tensors with the batch that is asked about, and with 1, 2 and 3; beyond,
every period's bytes are linear in the batch. Batch 1 is on no line with the others: a dimension of
1 is contiguous in any order, so a copy of a larger batch is a view there. A deep model of one stack
of equal layers is traced with four of them: what an iteration keeps grows by the same bytes with
every further one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gemini.chunk.layout import ParamSpec, specs_of
from gemini.memtracer.collector import trace
from gemini.memtracer.trace import Layer, Trace, TraceMoment, model_digest
from gemini.placement.orders import LAYER_NUMBER
from gemini.units import Bytes, ParamId

_DEPTH_NAMES = ("num_hidden_layers", "n_layer")
SCORING = "ForSequenceClassification"  # end of a class's name
_TRACED_LAYERS = 4


@dataclass(frozen=True, slots=True)
class Activations:
    """Traces by batch: at least of 1, 2 and 3."""

    traces: Mapping[int, Trace]

    def at(self, batch: int) -> Trace:
        """Trace at another batch. Never below that at batch 2 from there on."""
        trace = self.traces.get(batch)
        if trace is not None:  # the seconds are those of fake tensors
            moments = tuple(replace(m, seconds=0.0) for m in trace.moments)
            return replace(trace, moments=moments)
        two, three, more = self.traces[2], self.traces[3], batch - 2
        moments = tuple(
            replace(
                a,
                non_model_bytes=Bytes(nbytes),
                seconds=0.0,
                saved_bytes=min(
                    nbytes, a.saved_bytes + more * max(0, b.saved_bytes - a.saved_bytes)
                ),
            )
            for a, b in zip(two.moments, three.moments, strict=True)
            for nbytes in (
                a.non_model_bytes + more * max(0, b.non_model_bytes - a.non_model_bytes),
            )
        )
        layers = tuple(
            replace(
                a,
                saved_bytes=Bytes(a.saved_bytes + more * (b.saved_bytes - a.saved_bytes)),
                input_bytes=Bytes(a.input_bytes + more * (b.input_bytes - a.input_bytes)),
            )
            for a, b in zip(two.layers, three.layers, strict=True)
        )
        return replace(two, moments=moments, signature=f"batch {batch}", layers=layers)


def activations_of(
    model: nn.Module,
    specs: Sequence[ParamSpec],
    seq: int,
    batch: int = 1,
    *,
    precision: str = "bf16",
    by_trl: bool = False,
    chunked: bool = False,
    only: bool = False,
) -> Activations:
    """Trace a transformers model on the meta device. Raises ValueError for one without a config.

    specs: of the whole model.
    batch: one more that is traced.
    precision: of computing; fp16 has the bytes of bf16.
    by_trl: with the loss that trl's `SFTTrainer` computes, which never has all logits; of a model
        that scores, with one number of each sequence.
    chunked: with the loss of `chunk_loss`, which has the logits of a few tokens at a time.
    only: no batch but `batch` is asked about.
    """
    if not hasattr(model, "config"):
        raise ValueError(
            f"{type(model).__name__} has no transformers config, so its inputs are not known; "
            "give --activation-bytes, the bytes of a batch of 1"
        )
    depth = depth_of(model)
    traced, num_layers = model, 0
    if depth is not None and depth > _TRACED_LAYERS:
        traced, num_layers = _shallow(model, depth), depth
    if by_trl and not scores(traced):
        _fuse_head(traced)
    if chunked:
        from gemini.mesh.head_loss import chunk_loss

        whole: Any = traced  # adapters are around it
        chunk_loss(whole.get_base_model() if hasattr(whole, "get_base_model") else whole)
    traces, computed = {}, "fp32" if precision == "fp32" else "bf16"
    for size in [batch] if only else sorted({1, 2, 3, batch}):
        inputs = example_inputs(traced, size, seq, by_trl=by_trl)
        one = trace(traced, inputs, precision=computed)
        traces[size] = _deepened(one, traced, specs, num_layers) if num_layers else one
    return Activations(traces)


def _fuse_head(model: nn.Module) -> None:
    """Fuse head and loss, as `SFTTrainer` does to its model."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise ValueError("the loss of trl needs the package trl; pip install trl") from error
    adapted: Any = model
    base = adapted.get_base_model() if hasattr(model, "get_base_model") else adapted
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))


def scores(model: Any) -> bool:
    """Whether a model of transformers, or of peft over one, gives a sequence its scores."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__.endswith(SCORING)


def constant_activations(events: Trace, nbytes: int) -> Activations:
    """`nbytes` for every sample at every moment, where nothing can be traced."""
    return Activations({
        n: replace(
            events,
            moments=tuple(replace(m, non_model_bytes=Bytes(n * nbytes)) for m in events.moments),
        )
        for n in (1, 2, 3)
    })  # fmt: skip


def example_inputs(
    model: nn.Module, batch: int, seq: int, *, by_trl: bool = False
) -> Mapping[str, Any]:
    """Inputs with which a transformers model computes a loss: shapes only."""
    config: Any = model.config
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        size = config.image_size
        pixels = torch.empty(batch, config.num_channels, size, size, device="meta")
        return {name: pixels, "labels": torch.empty(batch, dtype=torch.int64, device="meta")}
    ids = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if by_trl and scores(model):
        labels = torch.empty(batch, device="meta")
        return {**inputs, "labels": labels, "attention_mask": ids, "use_cache": False}
    if by_trl:
        return {**inputs, "attention_mask": ids, "use_cache": False, "fused_lm_head": True}
    if type(model).__name__.endswith("ForPreTraining"):
        inputs["next_sentence_label"] = torch.empty(batch, dtype=torch.int64, device="meta")
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    elif hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return inputs


def depth_of(model: nn.Module) -> int | None:
    """Number of layers of a model of one stack; None for any other."""
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        return None
    return next((getattr(config, n) for n in _DEPTH_NAMES if hasattr(config, n)), None)


def _shallow(model: nn.Module, depth: int) -> nn.Module:
    """Copy with four layers, which keeps what was done to the model: checkpointing, say."""
    shallow = copy.deepcopy(model)
    for parent in list(shallow.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                setattr(parent, name, child[:_TRACED_LAYERS])
                config: Any = shallow.config
                for key in _DEPTH_NAMES:
                    if hasattr(config, key):
                        setattr(config, key, _TRACED_LAYERS)
                if getattr(config, "layer_types", None):
                    config.layer_types = config.layer_types[:_TRACED_LAYERS]
                return shallow
    raise ValueError(
        f"{type(model).__name__} has no list of its {depth} layers; give --activation-bytes, the "
        "bytes of a batch of 1"
    )


def _deepened(
    shallow: Trace, traced: nn.Module, specs: Sequence[ParamSpec], num_layers: int
) -> Trace:
    """Trace of `num_layers` layers from that of four.

    The moments between the first ones of two inner layers (some are in their neighbours) are
    repeated for every layer between; each repetition has other layers' names, and keeps as many
    bytes more or less as a layer leaves for backward.
    """
    index = {name: ParamId(i) for i, spec in enumerate(specs) for name in spec.names}
    names = [spec.name for spec in specs_of(traced, specs[0].dtype)]
    forward = [m for m in shallow.moments if m.phase == "forward"]
    backward = [m for m in shallow.moments if m.phase == "backward"]
    more = num_layers - _TRACED_LAYERS
    one, two = _first(forward, 1), _first(forward, 2)
    grown = forward[two].non_model_bytes - forward[one].non_model_bytes
    grown_saved = forward[two].saved_bytes - forward[one].saved_bytes

    def shifted(moments: Sequence[TraceMoment], layers: int) -> list[TraceMoment]:
        def renamed(name: str) -> str:
            return _shifted_name(name, layers)

        return [
            replace(
                moment,
                module=renamed(moment.module),
                params=tuple(index[renamed(names[param])] for param in moment.params),
                non_model_bytes=Bytes(moment.non_model_bytes + layers * grown),
                saved_bytes=moment.saved_bytes + layers * grown_saved,
            )
            for moment in moments
        ]

    def renamed_layer(layer: Layer, layers: int) -> Layer:
        return replace(layer, name=_shifted_name(layer.name, layers))

    moments = shifted(forward[:one], 0)
    for layers in range(more + 1):
        moments += shifted(forward[one:two], layers)
    moments += shifted(forward[two:], more)
    two, one = _first(backward, 2), _first(backward, 1)
    moments += shifted(backward[:two], more)
    for layers in reversed(range(more + 1)):
        moments += shifted(backward[two:one], layers)
    moments += shifted(backward[one:], 0)
    first, *others = shallow.layers or (None,)
    deep: list[Layer] = []
    if first is not None and len(others) == _TRACED_LAYERS - 1:
        deep = [first, *(renamed_layer(others[0], i) for i in range(more)), *(
            renamed_layer(layer, more) for layer in others
        )]  # fmt: skip
    return Trace(shallow.kind, shallow.signature, model_digest(specs), tuple(moments), tuple(deep))


def _shifted_name(name: str, layers: int) -> str:
    """Name in a model that has so many layers more before this one."""
    return LAYER_NUMBER.sub(lambda m: m[0].replace(m[1], str(int(m[1]) + layers)), name, count=1)


def _first(moments: Sequence[TraceMoment], layer: int) -> int:
    """First moment at a module of this layer."""
    for i, moment in enumerate(moments):
        match = LAYER_NUMBER.search(moment.module)
        if match and int(match[1]) == layer:
            return i
    raise ValueError(f"layer {layer} is not in the trace; give --activation-bytes")
