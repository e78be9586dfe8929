"""Quantised base of `load_pretrained(quantize=)` in a plan: bytes of its weights, and the copies in
16 bits that its layers compute with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from gemini.chunk.layout import ParamSpec, distinct, spec_of
from gemini.dtypes import BYTES
from gemini.memtracer.trace import Trace, model_digest
from gemini.units import PARAM_ALIGN_NUMEL, Bytes, align_up

_BLOCK, _OUTER_BLOCK, _CODES, _OUTER_CODES = 64, 256, 16, 256  # of NF4 with quantised statistics


@dataclass(frozen=True, slots=True)
class QuantisedBase:
    """Parameters of a model that are quantised, by id.

    numel: elements. nbytes: of all plain tensors that a chunk then holds, as bitsandbytes makes
    them.
    """

    numel: Mapping[int, int]
    nbytes: Mapping[int, int]

    def specs(self, model: nn.Module, dtype: str) -> tuple[ParamSpec, ...]:
        """Specs of a model with its adapters. `dtype`: of parameters that are not quantised."""
        found = []
        for param, names in distinct(model.named_parameters(remove_duplicate=False)):
            spec = spec_of(param, names, dtype)
            if id(param) in self.nbytes:
                spec = replace(spec, shape=(self.nbytes[id(param)],), dtype=BYTES)
            found.append(spec)
        return tuple(found)

    def traced(self, trace: Trace, model: nn.Module, specs: Sequence[ParamSpec]) -> Trace:
        """Trace of the quantised model, from that of the model in 16 bits: each call also makes a
        weight."""
        params = [param for param, _ in distinct(model.named_parameters(remove_duplicate=False))]
        made = [2 * self.numel.get(id(param), 0) for param in params]
        moments = tuple(
            replace(
                moment,
                non_model_bytes=Bytes(
                    moment.non_model_bytes + max((made[i] for i in moment.params), default=0)
                ),
            )
            for moment in trace.moments
        )
        return replace(trace, model_digest=model_digest(specs), moments=moments)


def quantised_base(model: nn.Module, kind: str) -> QuantisedBase:
    """Weights that `load_pretrained` quantises in a model of transformers, before it has adapters:
    linear layers but for those that transformers leaves alone, and under "nf4" stacked experts."""
    numel, nbytes = {}, {}
    for weight, outputs in _linear_weights(model):
        count = numel[id(weight)] = weight.numel()
        nbytes[id(weight)] = _nf4(count) if kind == "nf4" else _int8(count, outputs)
    for _, module, key in stacked_experts(model, kind):
        weight = module.get_parameter(key)
        count = numel[id(weight)] = weight.numel()
        nbytes[id(weight)] = _nf4(count)
    return QuantisedBase(numel, nbytes)


def name_experts(model: nn.Module, kind: str | None) -> None:
    """Give stacked experts of a model with its adapters the names that they have when they are
    quantised: a layer makes them of what is stored."""
    for _, module, key in [*stacked_experts(model, kind)]:
        register_parametrization(module, key, nn.Identity())


def stacked_experts(module: nn.Module, quantize: object) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, key) of every parameter [experts, ...] of transformers' modules of experts
    that `load_pretrained(quantize=)` quantises: all under "nf4", none else. transformers leaves
    them in 16 bits, most of such a model."""
    for name, child in module.named_modules() if quantize == "nf4" else ():
        if type(child).__name__.endswith("Experts"):
            for key, param in list(child.named_parameters(recurse=False)):
                if param.ndim == 3:
                    yield f"{name}.{key}", child, key


def _linear_weights(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Weights and their outputs, as transformers' `replace_with_bnb_linear` finds them."""
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    but = sorted(get_keys_to_not_convert(model)) if isinstance(model, PreTrainedModel) else []
    for name, layer in model.named_modules():
        if not should_convert_module(name, but):
            continue
        if isinstance(layer, Conv1D):
            yield layer.weight, layer.nf
        elif type(layer) is nn.Linear:
            yield layer.weight, layer.out_features


def _nf4(numel: int) -> int:
    """Two codes a byte; statistics of 64 elements in a byte, and of 256 of these in fp32."""
    blocks = -(-numel // _BLOCK)
    outer = -(-blocks // _OUTER_BLOCK)
    sizes = (-(-numel // 2), blocks, 4 * outer, 4 * _OUTER_CODES, 4 * _CODES, 4)
    return sum(align_up(size, PARAM_ALIGN_NUMEL) for size in sizes)


def _int8(numel: int, rows: int) -> int:
    """A byte an element, and a scale of fp32 for each row."""
    return align_up(numel, PARAM_ALIGN_NUMEL) + align_up(4 * rows, PARAM_ALIGN_NUMEL)
