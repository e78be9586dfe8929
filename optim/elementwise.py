"""Optimizer of a rule: its arguments are the rule's options, and where its state lives."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

from gemini.arguments import check_arguments
from gemini.optim.rules.rule import UpdateRule

from .base import TieredOptimizer

# arguments of HybridAdam that say where state lives and how it is updated
_PLACES = {
    name: parameter
    for name, parameter in inspect.signature(TieredOptimizer.__init__).parameters.items()
    if name not in ("self", "params", "defaults", "rule")
}


class ElementwiseOptimizer(TieredOptimizer):
    """Optimizer of an elementwise rule: a subclass names its `rule` (docs/extending.md).

    It is made with parameters or groups and the rate, and by name with the rule's other options and
    the arguments of `HybridAdam` that say where state lives and how it is updated;
    `inspect.signature` shows them.

    Raises ValueError for an option out of range and names it, TypeError for an unknown argument,
    and as `HybridAdam`.
    """

    rule: ClassVar[type[UpdateRule]]
    extra: ClassVar[dict[str, Any]] = {}  # of every group, beside the rule's options
    without: ClassVar[frozenset[str]] = frozenset()  # places that it does not have

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "rule" in vars(cls):
            cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]

    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        signature: inspect.Signature = type(self).__signature__  # type: ignore[attr-defined]
        check_arguments(type(self).__name__, signature, (params, *args), [*kwargs])
        given = signature.bind(params, *args, **kwargs)
        given.apply_defaults()
        options = {name: given.arguments[name] for name in self.rule.options}
        places = {name: given.arguments[name] for name in _PLACES if name not in self.without}
        super().__init__(params, {**options, **self.extra}, self.rule(), **places)


def _signature(cls: type[ElementwiseOptimizer]) -> inspect.Signature:
    """Signature: parameters and the rate by position, all else by name."""
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    shown = [inspect.Parameter("params", by_position, annotation=Iterable[Any])]
    for name, default in cls.rule.options.items():
        kind = by_position if name == "lr" else inspect.Parameter.KEYWORD_ONLY
        annotation = tuple[float, float] if name == "betas" else type(default)
        shown.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    shown += (place for name, place in _PLACES.items() if name not in cls.without)
    return inspect.Signature(sorted(shown, key=lambda one: one.kind), return_annotation=None)
