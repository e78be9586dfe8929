"""What a model that only decodes asks for, before it ever ran: a trace, and options that use it.

The weights of a decode step are a cycle: each is read once a token, and its next use is exactly
one token away. So nothing is gained by a change of homes from token to token: as much stays on the
device as has room there, and the rest is read, through buffers as large as the largest part of it.
Chunks are therefore small, and the largest ones stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gemini.chunk.layout import ITEMSIZE, ParamSpec, specs_of
from gemini.memtracer.collector import trace
from gemini.memtracer.decoding import layer_bytes, tokens_in
from gemini.memtracer.module_calls import GatherWhole
from gemini.memtracer.trace import ASSUMED_SIGNATURE, Trace, model_digest
from gemini.placement.policy import AutoPlacement
from gemini.runtime.wrap.specs import collect_params
from gemini.units import MAX_SEQUENCES, MAX_TOKENS, MIB, Bytes, ParamId

from .experts import has_other_experts, hook_stacks

M = TypeVar("M", bound=nn.Module)

# Small parameters share a chunk of at most so many 2**20 elements, and of at most this part of the
# model; each larger one has its own.
CHUNK_SIZE_M = 0.25
_CHUNK_SHARE = 64
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_LOGITS_BYTES = 12  # of one logit: in 16 bits, in fp32, and what sampling makes of it
_OWN = ("placement_policy", "trace", "min_chunk_size_m", "search_range_m", "chunks")


@dataclass(frozen=True, slots=True)
class Serving:
    """Bounds of a model that only decodes.

    max_tokens: of all sequences at once, prompts and what was decoded: the cache of keys and values
        holds so many, and the longest prompt may have as many.
    max_sequences: that are decoded in one pass.
    placement: budgets. All that memory leaves beside the cache and the activations is filled.
    """

    placement: AutoPlacement
    max_tokens: int = MAX_TOKENS
    max_sequences: int = MAX_SEQUENCES

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is below 1; expected 1 or more")

    def begin(self, module: nn.Module, options: Mapping[str, Any]) -> Served:
        """Freeze a module that has no values yet, and trace it as it is before it is quantised.

        Raises ValueError for options that serving decides, and for a module that does not decode.
        """
        theirs = [name for name in _OWN if name in options]
        if theirs:
            raise ValueError(f"{theirs[0]}= with serve=True; expected none: serving plans its own")
        config = getattr(module, "config", None)
        if not hasattr(module, "generate") or getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"serve=True with {type(module).__name__}, which is no decoder that generates; "
                "expected a causal language model"
            )
        module.eval().requires_grad_(False)
        precision = options.get("precision") or _precision_of(module)
        dtype = "float32" if precision == "fp32" else "bfloat16"
        sizes = {spec.name: spec.numel * ITEMSIZE[dtype] for spec in specs_of(module, dtype)}
        find_head: Any = getattr(module, "get_output_embeddings", lambda: None)
        head = find_head()
        if isinstance(head, nn.Module):
            head.register_forward_pre_hook(_contiguous)
        whole: GatherWhole = options.get("gather_whole", has_other_experts)
        planned = self.trace(module, "fp32" if precision == "fp32" else "bf16", whole)
        TokenLimit(self.max_tokens, self.max_sequences).watch(module)
        return Served(planned, sizes, precision, self.placement, whole)

    def trace(self, module: nn.Module, precision: str, gather_whole: GatherWhole) -> Trace:
        """Trace of a pass at the bounds; it stands for every pass within them.

        A pass over the longest prompt has the most activations; one token beside a full cache needs
        the cache, one layer of it again as it grows, and logits of every sequence.
        """
        caches: list[int] = []

        def ends(_: nn.Module, __: Any, outputs: Any) -> None:
            caches.extend(layer_bytes(getattr(outputs, "past_key_values", None)))

        config: Any = module.config
        text = config.get_text_config()
        length = min(self.max_tokens, getattr(text, "max_position_embeddings", self.max_tokens))
        rows = -(-self.max_tokens // length)
        inputs: dict[str, Any] = {
            "input_ids": torch.zeros(rows, length, dtype=torch.long), "use_cache": True,
        }  # fmt: skip
        if "logits_to_keep" in inspect.signature(module.forward).parameters:
            inputs["logits_to_keep"] = 1
        handle = module.register_forward_hook(ends)
        try:
            found = trace(
                module, inputs, precision=precision, kind="eval", gather_whole=gather_whole
            )
        finally:
            handle.remove()
        logits = self.max_sequences * getattr(text, "vocab_size", 0) * _LOGITS_BYTES
        decoding = sum(caches) + max(caches, default=0) + logits
        moments = tuple(
            replace(moment, non_model_bytes=Bytes(max(moment.non_model_bytes, decoding)))
            for moment in found.moments
        )
        return replace(found, signature=ASSUMED_SIGNATURE, moments=moments)


@dataclass(frozen=True, slots=True)
class Served:
    """Trace of a module that is about to be wrapped.

    sizes: bytes of the parameters, in the order in which the trace numbers them, by name; in the
        precision of computing.
    """

    trace: Trace
    sizes: Mapping[str, int]
    precision: str
    placement: AutoPlacement
    gather_whole: GatherWhole

    def options(self, module: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options to wrap the module with, which may be quantised by now.

        Then parameters have other sizes, and a layer computes with a copy of its weight.
        """
        module.requires_grad_(False)
        dtypes = {id(param): "bfloat16" for param in module.parameters()}  # no digest has them
        specs = collect_params(module, dtypes).specs
        trace = self.trace
        if trace.model_digest != model_digest(specs):
            trace = self._of_quantised(specs)
        numel = sum(param.numel() for param in module.parameters())
        size_m = min(CHUNK_SIZE_M, max(1, numel // _CHUNK_SHARE) / MIB)
        return {
            **options, "precision": self.precision, "placement_policy": self.placement,
            "trace": trace, "min_chunk_size_m": size_m, "search_range_m": 0.0,
            "gather_whole": self.gather_whole,
        }  # fmt: skip

    def hooked(self, model: M) -> M:
        """The wrapped module, whose stacked experts are read as tokens are routed to them."""
        engine: Any = model.engine
        hook_stacks(engine.sharding, engine.passes, engine.calls.hook_handles, model)
        return model

    def _of_quantised(self, specs: Sequence[ParamSpec]) -> Trace:
        places = {name: ParamId(i) for i, spec in enumerate(specs) for name in spec.names}
        names = list(self.sizes)
        gone = [name for name in names if name not in places]
        if gone:
            raise ValueError(
                f"serve=True with quantize=, which gives {gone[0]} another name; expected a model "
                "without stacked experts"
            )
        copy = max(self.sizes[spec.name] for spec in specs if spec.form is not None)
        moments = tuple(
            replace(
                moment,
                params=tuple(places[names[param]] for param in moment.params),
                non_model_bytes=Bytes(moment.non_model_bytes + copy),
            )
            for moment in self.trace.moments
        )
        return replace(self.trace, moments=moments, model_digest=model_digest(specs))


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Most tokens in the cache of keys and values, and most sequences of one pass."""

    max_tokens: int
    max_sequences: int

    def watch(self, module: nn.Module) -> None:
        """Check every forward of `module` from now on."""
        module.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        inputs = next((one for one in given if isinstance(one, Tensor)), None)
        if inputs is not None:
            self.check(inputs.shape[0], inputs.shape[1] + tokens_in(kwargs.get("past_key_values")))

    def check(self, sequences: int, length: int) -> None:
        """Raise ValueError for more than was planned. length: tokens of each sequence."""
        if sequences > self.max_sequences:
            raise ValueError(
                f"a pass over {sequences} sequences, and the plan has room for "
                f"{self.max_sequences}; expected max_sequences={sequences} where it is loaded"
            )
        tokens = sequences * length
        if tokens > self.max_tokens:
            raise ValueError(
                f"{tokens} tokens in {sequences} sequences, and the plan has room for "
                f"{self.max_tokens}; expected max_tokens={tokens} where it is loaded"
            )


def _contiguous(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Input of the head, which is the last token of each sequence, as a slice: torch would multiply
    it with a copy of the frozen weight for each of them."""
    # not `contiguous`, which leaves the strides of dimensions of size 1, and those decide it too
    return (args[0].clone(memory_format=torch.contiguous_format), *args[1:]) if args else args


def _precision_of(module: nn.Module) -> str:
    """Precision in which most of a module's parameters are."""
    sizes: dict[str, int] = {}
    for param in module.parameters():
        name = _PRECISIONS.get(param.dtype, "bf16")
        sizes[name] = sizes.get(name, 0) + param.numel()
    return max(sizes, key=lambda name: sizes[name])
