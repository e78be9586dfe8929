"""Modules that compute in fp32 inside a 16-bit model: which, and the casts at their boundary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from gemini.trees import map_tensors

KeepFp32 = Callable[[str, nn.Module], bool]  # of a module's qualified name and itself


def find_fp32_modules(
    root: nn.Module, keep_fp32: KeepFp32 | None, *, cast_buffers: bool
) -> dict[str, nn.Module]:
    """Find the outermost modules that `keep_fp32` is true for, by name, and all batch norms.

    Batch norms have fp32 statistics, with which their operators take no 16-bit weights, unless
    buffers are cast, too.
    Raises ValueError where `keep_fp32` is true for the root (ask for precision="fp32" then).
    """
    fp32_modules: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if any(name.startswith(f"{outer}.") for outer in fp32_modules):
            continue
        if isinstance(module, _NormBase) and name != "" and not cast_buffers:
            fp32_modules[name] = module
            continue
        if keep_fp32 is None or not keep_fp32(name, module):
            continue
        if name == "":
            raise ValueError('keep_fp32 is true for the whole module; use precision="fp32"')
        fp32_modules[name] = module
    return fp32_modules


def param_dtypes(root: nn.Module, fp32_modules: dict[str, nn.Module], dtype: str) -> dict[int, str]:
    """Compute dtype of every parameter, by id.

    Raises ValueError for a parameter that is tied across the boundary of a module in fp32.
    """
    inside = {id(p): name for name, module in fp32_modules.items() for p in module.parameters()}
    dtypes: dict[int, str] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        here = "float32" if any(name.startswith(f"{outer}.") for outer in fp32_modules) else dtype
        if dtypes.setdefault(id(param), here) != here:
            raise ValueError(
                f"parameter {name} is tied to one of {inside[id(param)]}, which keep_fp32 keeps in "
                "fp32, and is itself outside; keep both or none"
            )
    return dtypes


def buffers_as_weights(root: nn.Module) -> set[int]:
    """Find the buffers that have the dtype of weights, by id: the vectors of torch's two spectral
    norms, which are multiplied with one, and what a module's class has in `buffers_as_weights`."""
    found: set[int] = set()
    for module in root.modules():
        if isinstance(module, _SpectralNorm):
            found |= {id(buffer) for buffer in module.buffers(recurse=False)}
        found |= {id(getattr(module, name)) for name in getattr(module, "buffers_as_weights", ())}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                found |= {id(getattr(module, f"{hook.name}_{end}")) for end in "uv"}
    return found


def cast_at_boundary(module: nn.Module, dtype: torch.dtype) -> list[RemovableHandle]:
    """Hook a module, so that its floating inputs are cast to fp32 and its outputs to `dtype`."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors((args, kwargs), lambda tensor: _cast(tensor, torch.float32))

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(output, lambda tensor: _cast(tensor, dtype))

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
