"""From a module to parameter specs, and everything that is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gemini.chunk.layout import ParamSpec
from gemini.chunk.model_specs import distinct, spec_of
from gemini.chunk.parameter import ChunkParameter


def collect_params(
    module: nn.Module, dtypes: Mapping[int, str]
) -> tuple[list[nn.Parameter], list[ParamSpec]]:
    """Parameters in registration order, tied ones once, and their specs.

    dtypes: what each computes in, by id.
    Raises ValueError for a module that is wrapped already, has a parameter that is not floating,
    has nothing to train, or is compiled into CUDA graphs.
    """
    for name, child in module.named_modules():
        _check_compiled(name, child)
    named = distinct(module.named_parameters(remove_duplicate=False))
    for param, names in named:
        _check(names[0], param)
    if not any(param.requires_grad for param, _ in named):
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient; "
            "there is nothing to shard or update"
        )
    return [param for param, _ in named], [
        spec_of(param, names, dtypes[id(param)]) for param, names in named
    ]


def _check(name: str, param: nn.Parameter) -> None:
    if isinstance(param, ChunkParameter):
        raise ValueError(
            f"parameter {name} belongs to a GeminiDDP already; wrap a module once, "
            "and use the wrapper's `module` to reach the inner one"
        )
    if not param.is_floating_point():
        raise ValueError(
            f"parameter {name} has dtype {param.dtype}; expected a floating one "
            "(make it a buffer if it is not trained)"
        )


def _check_compiled(name: str, module: nn.Module) -> None:
    """Refuse a module that torch.compile captures in CUDA graphs."""
    compiled: Any = module if is_compiled(module) else None
    if module._compiled_call_impl is not None:
        compiled = module._compiled_call_impl
    get_config = getattr(compiled, "get_compiler_config", None)
    config = get_config() if get_config is not None else None  # None: not by inductor
    if config is not None and config.get("triton.cudagraphs"):
        raise ValueError(
            f"{name or 'the module'} is compiled into CUDA graphs, which replay reads of fixed "
            "addresses, and a chunk that is gathered again has another; compile it with "
            'mode="default" or "max-autotune-no-cudagraphs"'
        )


def is_compiled(module: nn.Module) -> bool:
    """By torch.compile; without an import of the compiler, which takes seconds."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
