"""Param groups from a state dict: checked, and merged into those of an optimizer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gemini.optim.rules.saved import is_alike

Group = Mapping[str, Any]
CheckOptions = Callable[[Group, Sequence[Any]], None]  # of a group with these parameters

# Options of torch.optim's optimizers that change the update, at the value that leaves it as it is:
# an optimizer without an option accepts no other.
_ABSENT = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0}
# options of how torch computes an update, which have no meaning here: they are dropped
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}

_STAGED = (
    "make it with the groups that were saved, load, and then unfreeze what is trained from now on "
    "and add it by add_param_group()"
)

# options of torch.optim's optimizers that have one value here; torch asks for them by name
_TORCH_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


def as_torchs(group: Group) -> dict[str, Any]:
    """Saved group with the options that torch's own optimizers ask for."""
    found = {**_TORCH_OPTIONS, **group}
    if "adamw_mode" in group:
        found["decoupled_weight_decay"] = group["adamw_mode"]
    return found


def merged_groups(
    mine: Sequence[Group],
    saved: Sequence[Group],
    names: Mapping[int, str] | None,
    check: CheckOptions,
) -> list[dict[str, Any]]:
    """Merge `saved` groups into `mine`: missing options are kept, options of torch alone dropped.

    names: of the parameters by id, where state dicts are keyed by name.
    check: raises ValueError for unknown options, and TypeError for a value of another type.
    Raises as `check`, ValueError for other groups than `mine`, and for options that change the
    update.
    """
    if len(mine) != len(saved):
        raise ValueError(
            f"the state dict has {len(saved)} param groups and this optimizer has {len(mine)}; "
            f"{_STAGED}"
        )
    merged = []
    for index, (ours, theirs) in enumerate(zip(mine, saved, strict=True)):
        _check_params(index, ours, theirs, names)
        absent = {option: value for option, value in _ABSENT.items() if option not in ours}
        for option, value in absent.items():
            if theirs.get(option, value) != value:
                raise ValueError(
                    f"param group {index} of the state dict has {option}={theirs[option]!r}, "
                    "which this optimizer does not have"
                )
        group = {**ours, "params": list(theirs["params"])}
        dropped = {*absent, *_IMPLEMENTATION, "params", "decoupled_weight_decay"} - ours.keys()
        dropped.add("state")  # in what it is kept is this optimizer's own
        if "param_names" in ours:  # and so are the names of its parameters
            dropped.add("param_names")
        group |= {key: value for key, value in theirs.items() if key not in dropped}
        if "adamw_mode" in ours and "adamw_mode" not in theirs:
            group["adamw_mode"] = theirs.get("decoupled_weight_decay", ours["adamw_mode"])
        check(group, ours["params"])
        for option, value in theirs.items():
            rate = 1.0 if option.endswith("_lr") else None  # of a schedule, which adds `initial_lr`
            own = ours.get(option, rate)
            kept = option not in {*dropped, "params"} and value is not None
            if kept and not is_alike(own, value):
                raise ValueError(
                    f"param group {index} of the state dict has {option}={value!r:.80}; expected "
                    f"the like of {own!r:.80}"
                )
        merged.append(group)
    return merged


def _differing(here: Sequence[str], there: Sequence[Any]) -> str:
    """Names that only one of two groups has, in words; empty where there are only positions."""
    said = []
    for names, others, whose in ((here, there, "this optimizer's"), (there, here, "the saved one")):
        known = set(others)
        own = [name for name in names if name not in known]
        if here and own and all(isinstance(name, str) for name in there):
            more = f" and {len(own) - 2} more" if len(own) > 2 else ""
            said.append(f"{', '.join(own[:2])}{more} only in {whose}")
    return f" ({'; '.join(said)})" if said else ""


def _check_params(index: int, ours: Group, theirs: Group, names: Mapping[int, str] | None) -> None:
    here = [] if names is None else [names[id(param)] for param in ours["params"]]
    if len(ours["params"]) != len(theirs["params"]):
        raise ValueError(
            f"param group {index} of the state dict has {len(theirs['params'])} parameters and "
            f"this optimizer's has {len(ours['params'])}{_differing(here, theirs['params'])}; "
            f"{_STAGED}"
        )
    for name in theirs["params"] if names is not None else ():
        if isinstance(name, str) and name not in here:
            raise ValueError(
                f"param group {index} of the state dict has parameter {name}, which is not in "
                "this optimizer's; make it with the same groups"
            )
