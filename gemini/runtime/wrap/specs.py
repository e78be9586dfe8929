"""Parameter specs of a module, and all refusals before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gemini.chunk.layout import ParamSpec, distinct, saved_params, spec_of
from gemini.chunk.local import group_of, is_dtensor, local_of, mesh_dims
from gemini.chunk.opaque import Opaque, is_opaque
from gemini.chunk.parameter import handle_of
from gemini.comm.communicator import Communicator
from gemini.dtypes import DTYPES
from gemini.memtracer.module_calls import is_compiled
from gemini.saved_names import params_by_path
from gemini.units import WORLD, ParamId

IgnoredParams = Collection[nn.Parameter] | Callable[[str, nn.Parameter], bool]


def find_ignored(
    module: nn.Module, ignored_params: IgnoredParams, *, scaled: bool
) -> dict[int, str]:
    """Name by id of the parameters that are left as they are; a tied one under all its names.

    scaled: whether losses are scaled, and with them gradients. Raises ValueError for what is no
    parameter of the module, is on the meta device, or is trained with a scaled loss.
    """
    named = distinct(module.named_parameters(remove_duplicate=False))
    if callable(ignored_params):
        asked = ignored_params
        found = {id(p): names[0] for p, names in named if any(asked(name, p) for name in names)}
    else:
        first = {id(param): names[0] for param, names in named}
        for param in ignored_params:
            if id(param) not in first:
                raise ValueError(
                    f"ignored_params has a {type(param).__name__} of shape "
                    f"{tuple(getattr(param, 'shape', ()))} that is no parameter of this module; "
                    "expected parameters of module.parameters() as it is wrapped, or a function of "
                    "name and parameter"
                )
        found = {id(param): first[id(param)] for param in ignored_params}
    for param, names in named:
        if id(param) not in found:
            continue
        if param.is_meta:
            raise ValueError(
                f"parameter {names[0]} is in ignored_params and on the meta device, where nobody "
                "gives it values; expected one that has values before the module is wrapped"
            )
        if scaled and param.requires_grad:
            raise ValueError(
                f'parameter {names[0]} is in ignored_params and trained, and precision="fp16" '
                "scales the loss, so that its gradient would carry the scale; expected "
                'precision="bf16" or "fp32", or requires_grad_(False)'
            )
    return found


@dataclass(frozen=True, slots=True)
class Collected:
    """Parameters in registration order, tied ones once, their specs, and those that are opaque."""

    params: list[nn.Parameter]
    specs: list[ParamSpec]
    opaque: dict[ParamId, Opaque]
    dtypes: list[torch.dtype]  # that they have
    ignored: Mapping[int, str]  # names by id of parameters that are the user's own

    @property
    def plain(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are not opaque."""
        named = zip(self.specs, self.params, strict=True)
        return [(spec.name, param) for spec, param in named if not is_opaque(param)]


def collect_params(
    module: nn.Module,
    dtypes: Mapping[int, str],
    *,
    meshed: bool = False,
    ignored: Mapping[int, str] = MappingProxyType({}),
) -> Collected:
    """Collect the parameters of a module that are wrapped.

    dtypes: compute dtypes by id. meshed: DTensors are taken, too, by each rank's local part.
    ignored: names by id of parameters that are left out.
    Raises ValueError for what is no module, is wrapped already or by others, has no parameter or
    one that cannot be a view of a chunk, or is compiled into CUDA graphs or by TorchScript.
    """
    for name, child in module.named_modules():
        _check_compiled(name, child)
    found = Collected([], [], {}, [], ignored)
    owners = _owners(module)
    for param, names in saved_params(module):
        if id(param) in ignored:
            continue
        _check(names[0], param, meshed)
        if is_opaque(param):
            one = Opaque(param, list(zip(names, owners[id(param)], strict=True)))
            found.opaque[ParamId(len(found.params))] = one
            spec = one.spec
        else:
            spec = spec_of(param, names, dtypes[id(param)])
            spec = replace(spec, shape=tuple(local_of(param).shape), group=group_of(param))
        found.params.append(param)
        found.specs.append(spec)
        found.dtypes.append(param.dtype if spec.form is None else DTYPES[spec.dtype])
    if not found.params:
        kind, but = type(module).__name__, " but what ignored_params has" if ignored else ""
        raise ValueError(f"{kind} has no parameter{but}; there is nothing to shard")
    return found


def _owners(module: nn.Module) -> dict[int, list[nn.Module]]:
    """Modules that have each parameter, by its id, in the order of its names."""
    found: dict[int, list[nn.Module]] = {}
    for name, param in params_by_path(module):
        found.setdefault(id(param), []).append(module.get_submodule(name.rpartition(".")[0]))
    return found


def padded(specs: Sequence[ParamSpec], comm: Communicator) -> list[ParamSpec]:
    """Make specs the same on all ranks: parameters that torch has split unevenly are as large as
    their largest part. Collective where a parameter is split."""
    if all(spec.group == WORLD for spec in specs):
        return list(specs)
    numels = comm.gather_objects([spec.numel for spec in specs])
    if len({len(of_rank) for of_rank in numels}) > 1:
        return list(specs)  # other modules, which is said where ranks compare them
    return [
        replace(spec, shape=(max(of_all),)) if spec.group != WORLD and len({*of_all}) > 1 else spec
        for spec, of_all in zip(specs, zip(*numels, strict=True), strict=True)
    ]


def _check(name: str, param: nn.Parameter, meshed: bool) -> None:
    if handle_of(param) is not None:
        raise ValueError(
            f"parameter {name} belongs to a GeminiDDP already; wrap a module once, "
            "and use the wrapper's `module` to reach the inner one"
        )
    if param.grad is not None and not param.requires_grad:
        raise ValueError(
            f"parameter {name} is frozen and has a gradient, which a step would take; expected "
            "p.grad to be None (set it so), or a parameter that requires a gradient"
        )
    if is_dtensor(param):
        _check_split(name, param, meshed)
    elif type(param) is not nn.Parameter and not is_opaque(param):
        raise ValueError(
            f"parameter {name} is a {type(param).__name__}; expected a plain torch.nn.Parameter, "
            "or a quantised one that is known: of bitsandbytes (Params4bit, Int8Params) or with "
            "__tensor_flatten__, as torchao's; ignored_params= leaves others as they are"
        )


def _check_split(name: str, param: Any, meshed: bool) -> None:
    from gemini.mesh.roles import EXPERTS

    if not meshed:
        raise ValueError(
            f"parameter {name} is a DTensor, split over a mesh; expected GeminiDDP(mesh=) with the "
            "whole mesh, whose other dimensions shard it further, or parameters that are whole"
        )
    if param.device_mesh.mesh_dim_names is None:
        raise ValueError(
            f"parameter {name} is split over a mesh without names; expected init_device_mesh with "
            "mesh_dim_names"
        )
    if param.is_meta or param.grad is not None or any(p.is_partial() for p in param.placements):
        raise ValueError(
            f"parameter {name} is a DTensor on the meta device, with a gradient, or a partial sum; "
            "expected one that has values, split or replicated, and p.grad to be None"
        )
    if EXPERTS in mesh_dims(param) and EXPERTS not in group_of(param).split("+"):
        raise ValueError(
            f"parameter {name} is replicated over mesh dimension {EXPERTS}, whose ranks have other "
            "tokens; expected a plain parameter, or one that is split over it, as experts are"
        )


def check_split(*, trace: object, init_state_dict: Mapping[str, Tensor] | None) -> None:
    """Raise ValueError for settings that do not go with parameters that are split."""
    given = {
        "trace=": trace is not None,
        "init_state_dict=": init_state_dict is not None,
    }
    for name, there in given.items():
        if there:
            raise ValueError(
                f"{name} does not go with DTensor parameters; expected no trace, and values that "
                "the parameters have"
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
