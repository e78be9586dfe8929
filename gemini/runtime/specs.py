"""From a module to parameter specs, and everything that is refused before anything is changed."""

from __future__ import annotations

from torch import nn

from gemini.chunk.layout import ParamSpec
from gemini.chunk.parameter import ChunkParameter


def collect_params(
    module: nn.Module, compute_dtype: str
) -> tuple[list[nn.Parameter], list[ParamSpec]]:
    """Parameters in registration order, tied ones once, and their specs.

    Raises ValueError for a module that is wrapped already, has a parameter that is on the meta
    device or not floating, or has nothing to train.
    """
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    for key, param in params.items():
        _check(names[key][0], param)
    if not any(param.requires_grad for param in params.values()):
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient; "
            "there is nothing to shard or update"
        )
    specs = [
        ParamSpec(
            name=names[key][0],
            shape=tuple(param.shape),
            dtype=compute_dtype,
            trainable=param.requires_grad,
            aliases=tuple(names[key][1:]),
        )
        for key, param in params.items()
    ]
    return list(params.values()), specs


def _check(name: str, param: nn.Parameter) -> None:
    if isinstance(param, ChunkParameter):
        raise ValueError(
            f"parameter {name} belongs to a GeminiDDP already; wrap a module once, "
            "and use the wrapper's `module` to reach the inner one"
        )
    if param.is_meta:
        raise ValueError(
            f"parameter {name} is on the meta device and has no values; "
            "materialise the module before you wrap it"
        )
    if not param.is_floating_point():
        raise ValueError(
            f"parameter {name} has dtype {param.dtype}; expected a floating one "
            "(make it a buffer if it is not trained)"
        )
