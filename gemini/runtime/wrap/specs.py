"""From a module to parameter specs, and everything that is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gemini.chunk.layout import ParamSpec
from gemini.chunk.parameter import ChunkParameter
from gemini.chunk.sizing.model_specs import distinct, spec_of
from gemini.memtracer.module_calls import is_compiled


def collect_params(
    module: nn.Module, dtypes: Mapping[int, str]
) -> tuple[list[nn.Parameter], list[ParamSpec]]:
    """Parameters in registration order, tied ones once, and their specs.

    dtypes: what each computes in, by id.
    Raises ValueError for what is no module, is wrapped already or by others, has no parameter or
    one that cannot be a view of a chunk, or is compiled into CUDA graphs or by TorchScript.
    """
    for name, child in module.named_modules():
        _check_compiled(name, child)
    named = distinct(module.named_parameters(remove_duplicate=False))
    for param, names in named:
        _check(names[0], param)
    if not named:
        raise ValueError(f"{type(module).__name__} has no parameter; there is nothing to shard")
    return [param for param, _ in named], [
        spec_of(param, names, dtypes[id(param)]) for param, names in named
    ]


def _check(name: str, param: nn.Parameter) -> None:
    if isinstance(param, ChunkParameter):
        raise ValueError(
            f"parameter {name} belongs to a GeminiDDP already; wrap a module once, "
            "and use the wrapper's `module` to reach the inner one"
        )
    if param.grad is not None and not param.requires_grad:
        raise ValueError(
            f"parameter {name} is frozen and has a gradient, which a step would take; expected "
            "p.grad to be None (set it so), or a parameter that requires a gradient"
        )
    if type(param).__name__ == "DTensor":  # importing it takes a second
        raise ValueError(
            f"parameter {name} is a DTensor, split over a mesh by another library; wrap a module "
            "whose parameters are whole, which is sharded over one process group here"
        )
    if type(param) is not nn.Parameter:
        raise ValueError(
            f"parameter {name} is a {type(param).__name__}; expected a plain torch.nn.Parameter "
            "(wrap a module before other libraries replace its parameters)"
        )
    if not param.is_floating_point():
        raise ValueError(
            f"parameter {name} has dtype {param.dtype}; expected a floating one "
            "(make it a buffer if it is not trained)"
        )


def check_module(module: object) -> None:
    """Raise ValueError for what is no module."""
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"module is a {type(module).__name__}; expected a torch.nn.Module "
            "(nn.ModuleList or nn.Sequential for several)"
        )


def _check_compiled(name: str, module: nn.Module) -> None:
    """Refuse a module that torch.compile captures in CUDA graphs, and one of TorchScript."""
    if any(base.__name__ == "ScriptModule" for base in type(module).__mro__):
        raise ValueError(
            f"{name or 'the module'} is compiled by TorchScript, whose calls take no hooks; wrap "
            "the module that was scripted, with torch.compile if it is to be compiled"
        )
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
