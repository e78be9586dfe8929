"""From named parameters to specs. Pure: a model is anything that has `named_parameters`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from gemini.chunk.layout import ParamSpec


class Parameter(Protocol):
    """What is read of a parameter; one on the meta device has it too."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def requires_grad(self) -> bool: ...


class Model(Protocol):
    """What is read of a model: `torch.nn.Module` has it."""

    def named_parameters(self, *, remove_duplicate: bool) -> Iterable[tuple[str, Parameter]]: ...


P = TypeVar("P", bound=Parameter)


def distinct(named: Iterable[tuple[str, P]]) -> list[tuple[P, tuple[str, ...]]]:
    """Each parameter once, in registration order, with all its names."""
    params: dict[int, P] = {}
    names: dict[int, list[str]] = {}
    for name, param in named:
        params[id(param)] = param
        names.setdefault(id(param), []).append(name)
    return [(param, tuple(names[key])) for key, param in params.items()]


def spec_of(param: Parameter, names: tuple[str, ...], dtype: str) -> ParamSpec:
    """The spec of one parameter that is kept in `dtype`."""
    return ParamSpec(names[0], tuple(param.shape), dtype, param.requires_grad, names[1:])


def specs_of(model_or_specs: Model | Sequence[ParamSpec], dtype: str) -> tuple[ParamSpec, ...]:
    """The specs of a model whose parameters are all kept in `dtype`, or the specs given."""
    if isinstance(model_or_specs, Sequence):
        return tuple(model_or_specs)
    named = distinct(model_or_specs.named_parameters(remove_duplicate=False))
    return tuple(spec_of(param, names, dtype) for param, names in named)
