"""Linear layers of bitsandbytes, and stacked experts, whose weights are quantised one at a time.

Until its values are read, a weight has no memory, and the form of its quantised bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gemini.chunk.opaque import drop_storage
from gemini.plan.training import KINDS


def quantise(module: nn.Module, config: Any) -> None:
    """Quantise, in place, a module that has its values."""
    before: dict[str, Any] = dict(module.named_modules())
    for name, layer in put_quantised(module, config):
        _put(layer, quantised(layer, before[name].weight.data))
        layer.bias = before[name].bias


def config_of(quantize: Any, dtype: torch.dtype) -> Any:
    """`BitsAndBytesConfig` of transformers for "nf4" or "int8"; a config is returned as it is.

    Raises ValueError for another value.
    """
    from transformers import BitsAndBytesConfig

    if isinstance(quantize, BitsAndBytesConfig):
        return quantize
    if quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if quantize != "nf4":
        raise ValueError(
            f"quantize={quantize!r}; expected one of {[*KINDS, None]}, or a BitsAndBytesConfig"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def put_quantised(module: nn.Module, config: Any) -> Iterator[tuple[str, Any]]:
    """Replace the linear layers that transformers would quantise by bitsandbytes layers on the meta
    device; yield (name, layer) of each. Raises ImportError without bitsandbytes."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError("quantize= needs bitsandbytes; pip install bitsandbytes") from error
    from transformers import PreTrainedModel
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    theirs = get_keys_to_not_convert(module) if isinstance(module, PreTrainedModel) else ()
    but = {*theirs, *(config.llm_int8_skip_modules or ())}
    replace_with_bnb_linear(module, sorted(but), config)
    mark = "is_loaded_in_4bit" if config.load_in_4bit else "is_loaded_in_8bit"
    setattr(module, mark, True)  # peft looks for it
    layers: Any = bitsandbytes.nn
    for name, layer in module.named_modules():
        if isinstance(layer, layers.Linear4bit | layers.Linear8bitLt):
            yield name, layer


def quantised_experts(values: Tensor) -> nn.Parameter:
    """Stacked experts in NF4 with quantised statistics, like linear layers of "nf4"."""
    from bitsandbytes.functional import quantize_4bit

    data, state = quantize_4bit(values, compress_statistics=True, quant_type="nf4")
    made: Any = nn.Parameter(data, requires_grad=False)
    made.quant_state = state
    return made  # type: ignore[no-any-return]


def put_experts(
    module: nn.Module, key: str, dtype: torch.dtype, templates: dict[Any, nn.Parameter]
) -> nn.Parameter:
    """Replace stacked experts by a parameter without memory, in the form of its quantised bytes,
    and return it. A bitsandbytes layer makes their weights from it.

    templates: a cache, see `without_memory`.
    """
    from bitsandbytes.nn.parametrize import replace_parameter_4bit_prequantized

    shape = module.get_parameter(key).shape
    if (shape, dtype) not in templates:
        templates[shape, dtype] = quantised_experts(torch.zeros(shape, dtype=dtype))
    known: Any = templates[shape, dtype]
    setattr(module, key, nn.Parameter(known.data, requires_grad=False))
    replace_parameter_4bit_prequantized(
        module, key, known.quant_state.as_dict(packed=True), torch.device("cpu")
    )
    layers: Any = module.get_submodule(f"parametrizations.{key}")
    layers.original.quant_state = layers[0].quant_state
    drop_storage(layers.original)
    return layers.original  # type: ignore[no-any-return]


def quantised(layer: Any, values: Tensor) -> nn.Parameter:
    """Quantised weight of a layer from values [out, in], for GPT-2's layers [in, out]."""
    if layer.source_cls.__name__ == "Conv1D":
        values = values.T.contiguous()
    kept: dict[str, Any] = layer.weight.__dict__
    known = type(layer.weight)
    if known.__name__ == "Int8Params":
        made = known(values, requires_grad=False, has_fp16_weights=False)
    else:
        names = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
        made = known(values, requires_grad=False, **{name: kept[name] for name in names})
    quantised_one: nn.Parameter = made.to("cpu")
    return quantised_one


def without_memory(
    layer: Any, dtype: torch.dtype, templates: dict[Any, nn.Parameter]
) -> nn.Parameter:
    """Give a layer a weight without memory, in the form of its quantised bytes, and return it.

    templates: a cache by (shape, dtype): only the first weight of each is quantised, for its form.
    """
    shape = layer.out_features, layer.in_features
    if layer.source_cls.__name__ == "Conv1D":
        shape = shape[::-1]
    if (shape, dtype) not in templates:
        templates[shape, dtype] = quantised(layer, torch.zeros(shape, dtype=dtype))
        drop_storage(templates[shape, dtype])
    return _put(layer, copy.deepcopy(templates[shape, dtype]))


def _put(layer: Any, weight: Any) -> nn.Parameter:
    layer.weight = weight
    if hasattr(weight, "quant_state"):
        weight.module, layer.quant_state = layer, weight.quant_state
    return layer.weight  # type: ignore[no-any-return]
