"""Conversion of torch's optimizers, as trainers make them, into this project's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from gemini.api import TieredOptimizer
from gemini.optim import (
    HybridAdadelta,
    HybridAdafactor,
    HybridAdagrad,
    HybridAdam,
    HybridAdamax,
    HybridLion,
    HybridMuon,
    HybridNAdam,
    HybridRAdam,
    HybridRMSprop,
    HybridSGD,
)

T = TypeVar("T", bound=TieredOptimizer)
Group = Mapping[str, Any]
TAKEN = (
    "torch.optim.AdamW, Adam, SGD, Adagrad, RMSprop, Adamax, NAdam, RAdam, Adadelta, "
    "Adafactor or Muon, a Lion, AdamW of bitsandbytes, AdamW8bit of torchao, or one of gemini.optim"
)
# where state lives and how it is updated, which the given optimizer has no options for
PLACES = ("nvme_offload_fraction", "nvme_offload_dir", "nvme_write_budget", "nvme", "cpu_path")
# options of torch's implementations, which change updates by rounding alone
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


def _as(ours: type[T], other: str) -> type[T]:
    """Subclass of `ours` with another optimizer's name: monitors and dashboards show it."""
    name = other.replace(".", " ").split()[-1]
    said = {"__module__": __name__, "__doc__": f"One that was {other}.", "in_place_of": other}
    kind: Any = type(ours)
    made: type[T] = kind(name, (ours,), said)
    return made


AdamW, Adam = _as(HybridAdam, "torch.optim.AdamW"), _as(HybridAdam, "torch.optim.Adam")
SGD, Muon = _as(HybridSGD, "torch.optim.SGD"), _as(HybridMuon, "torch.optim.Muon")
Adagrad = _as(HybridAdagrad, "torch.optim.Adagrad")
Adadelta = _as(HybridAdadelta, "torch.optim.Adadelta")
RMSprop, Adamax = _as(HybridRMSprop, "torch.optim.RMSprop"), _as(HybridAdamax, "torch.optim.Adamax")
NAdam, RAdam = _as(HybridNAdam, "torch.optim.NAdam"), _as(HybridRAdam, "torch.optim.RAdam")
Adafactor = _as(HybridAdafactor, "torch.optim.Adafactor")
Lion, AdamW8bit = _as(HybridLion, "a Lion"), _as(HybridAdam, "an AdamW8bit")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of optimizer that can be converted: its class here, and how its options are read."""

    ours: type[TieredOptimizer]
    read: Callable[[Group], dict[str, Any]]
    taken: frozenset[str]
    without: Mapping[str, Any]  # options that ours lacks, with the value that changes nothing
    reads_state: bool = True


def convert(optimizer: torch.optim.Optimizer, **adam: Any) -> torch.optim.Optimizer:
    """Turn `optimizer` in place into one of this project's; returns the same object.

    Schedulers and hooks of it go on working, made before or after. Parameters, groups with their
    labels, and options stay. Its state is taken over, by a collective if the parameters are a
    wrapped module's. An optimizer of this project is returned as it is.

    adam: where state lives (`PLACES`), as in `optim.HybridAdam`, for every kind of optimizer.

    Raises ValueError, before anything changes, for an optimizer or an option without a meaning
    here, for `adam` options outside of `PLACES`, and for any with an optimizer of this project.
    """
    if isinstance(optimizer, TieredOptimizer):
        if adam:
            raise ValueError(
                f"{', '.join(adam)} given with a {type(optimizer).__name__}; expected no options "
                "beside an optimizer of this project: give them where it is made"
            )
        return optimizer
    kind = _kind(optimizer)
    _check_places(adam)
    for options in (optimizer.defaults, *optimizer.param_groups):
        _check_options(optimizer, kind, options)
    labels = [
        {key: value for key, value in group.items() if key not in optimizer.defaults}
        for group in optimizer.param_groups
    ]
    groups = [
        {**own, **kind.read(group)}
        for own, group in zip(labels, optimizer.param_groups, strict=True)
    ]
    ours = kind.ours(groups, **kind.read(optimizer.defaults), **adam)
    # torch's Adagrad makes its state before its first step, and its SGD counts none
    if any(state.get("step", 1) for state in optimizer.state.values()):
        if not kind.reads_state:
            raise ValueError(
                f"a {type(optimizer).__name__} has taken a step, and its state is in codes of its "
                "own; expected one before its first step"
            )
        ours.load_state_dict(optimizer.state_dict())
    ours.hand_over_to(optimizer)
    return optimizer


def _kind(optimizer: torch.optim.Optimizer) -> _Kind:
    """Kind of an optimizer by its exact class: a subclass's changes would be lost.

    Raises ValueError for an unknown class, and for a replaced `step`.
    """
    found = _TORCH.get(type(optimizer)) or _of_few_bits(type(optimizer))
    if found is None and type(optimizer).__name__ == "Lion" and "betas" in optimizer.defaults:
        found = _LION
    if found is None:
        raise ValueError(
            f"a {type(optimizer).__module__}.{type(optimizer).__name__} has no form whose state "
            f"is sharded; expected {TAKEN}"
        )
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"the step of this {type(optimizer).__name__} was replaced, which would be lost; "
            "expected an optimizer as its class makes it: replace its step afterwards"
        )
    return found


def _of_few_bits(known: type) -> _Kind | None:
    """Kind of an optimizer of torchao or bitsandbytes, neither of which is imported."""
    package, name = known.__module__.partition(".")[0], known.__name__
    if package == "torchao" and name == "AdamW8bit":
        return _EIGHT_BITS
    if package != "bitsandbytes" or not name.removeprefix("Paged").startswith("AdamW"):
        return None
    return _EIGHT_BITS if name.endswith("8bit") else replace(_EIGHT_BITS, ours=AdamW, read=_plain)


def _check_places(adam: Mapping[str, Any]) -> None:
    for name in adam:
        if name not in PLACES:
            raise ValueError(
                f"{name} beside an optimizer of torch's; expected one of {', '.join(PLACES)}: "
                "what changes the update is the optimizer's own option"
            )


def _check_options(optimizer: torch.optim.Optimizer, kind: _Kind, options: Group) -> None:
    for name in optimizer.defaults:
        if name in kind.taken or name in _IMPLEMENTATION or name not in options:
            continue
        if name not in kind.without or options[name] != kind.without[name]:
            raise ValueError(
                f"{type(optimizer).__name__} has {name}={options[name]!r}, which "
                f"{kind.ours.own_name()} does not have; expected {sorted(kind.taken)}"
            )
    if kind is _LION and getattr(optimizer, "decoupled_wd", False):
        raise ValueError(
            "Lion with decoupled_weight_decay=True; expected weight decay times the rate: divide "
            "weight_decay by the rate yourself"
        )


def _adam(group: Group) -> dict[str, Any]:
    flags = {name: group[name] for name in ("amsgrad", "maximize")}
    return {**_plain(group), **flags, "adamw_mode": group["decoupled_weight_decay"]}


def _plain(group: Group) -> dict[str, Any]:
    return {name: group[name] for name in _PLAIN}


def _eight_bits(group: Group) -> dict[str, Any]:
    return {**_plain(group), "state": "8bit"}


def _sgd(group: Group) -> dict[str, Any]:
    found = {name: group[name] for name in HybridSGD.rule.options}
    if not found["momentum"]:
        found["dampening"] = 0  # of nothing; ours refuses it
    return found


def _alike(ours: Any, **without: Any) -> _Kind:
    """Kind whose options are all those of the rule of `ours`, by the same names."""
    return _named(ours, *ours.rule.options, **without)


def _named(ours: type[TieredOptimizer], *names: str, **without: Any) -> _Kind:
    """Kind whose options are `names`, by the same names in `ours`."""
    return _Kind(
        ours, lambda group: {name: group[name] for name in names}, frozenset(names), without
    )


_PLAIN = ("lr", "betas", "eps", "weight_decay")
_ADAM = _Kind(
    Adam, _adam, frozenset({*_PLAIN, "amsgrad", "maximize", "decoupled_weight_decay"}), {}
)
_LION = _alike(
    Lion, maximize=False, caution=False, corrected_weight_decay=False, cautious_factor=1.0
)
_EIGHT_BITS = _Kind(
    AdamW8bit, _eight_bits, frozenset(_PLAIN),
    {"alpha": 0.0, "t_alpha": None, "t_beta3": None, "amsgrad": False}, reads_state=False,
)  # fmt: skip
_TORCH: dict[type, _Kind] = {
    torch.optim.AdamW: replace(_ADAM, ours=AdamW),
    torch.optim.Adam: _ADAM,
    torch.optim.SGD: replace(_alike(SGD), read=_sgd),
    torch.optim.Adagrad: _alike(Adagrad),
    torch.optim.RMSprop: _alike(RMSprop),
    torch.optim.Adamax: _alike(Adamax),
    torch.optim.NAdam: _alike(NAdam),
    torch.optim.RAdam: _alike(RAdam),
    torch.optim.Adadelta: _alike(Adadelta),
    torch.optim.Adafactor: _named(
        Adafactor, "lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"
    ),
    torch.optim.Muon: _named(
        Muon, "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps",
        "adjust_lr_fn",
    ),
}  # fmt: skip
