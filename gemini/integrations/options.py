"""Table of a door's options: the default of each, the case it is for, and why it is refused.

    bucket_cap_mb: int = option(25, only=DDP)  # in another case any other value is refused
    use_fp8: bool = option(False, absent=True)  # any other value is refused
    pin_memory: bool = option(False, ignored="what is staged is always pinned")  # said in one line

`check_options` carries the table out, `documented` shows it in the docstring of the door.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from typing import Any

from gemini import LossScale

from .parts import accept

# Default loss scales of doors. The first is this project's and that of most of Colossal-AI.
SCALE = LossScale()
ZERO_SCALE = LossScale(initial_scale=2.0**32)  # LowLevelZeroPlugin, ShardedOptimizerV2, fp16_naive
OPTIMIZER_SCALE = LossScale(growth_interval=2000, max_scale=2.0**24)  # LowLevelZeroOptimizer
TORCH_SCALE = LossScale(  # torch.amp.GradScaler's, which has no limits
    min_scale=2.0**-60, growth_interval=2000, hysteresis=1, max_scale=2.0**60
)
SCALE_NAMES = tuple(one.name for one in fields(LossScale))

_RULE = "rule"  # in the metadata of a field


@dataclass(frozen=True, slots=True)
class Case:
    """Case in which options of a door have a meaning.

    remedy: text of the error for an option in another case; values of the door fill its braces.
    """

    holds: Callable[[Any], bool]
    remedy: str


@dataclass(frozen=True, slots=True)
class _Rule:
    """Checks and texts of one option; see `option`."""

    only: Case | None = None
    absent: bool = False
    ignored: str | Callable[[Any], str] = ""
    kind: type | tuple[type, ...] | None = None
    valid: Callable[[Any], bool] | None = None
    expected: str = ""
    name: str = ""


FP16 = Case(
    lambda door: door.precision == "fp16",
    "a loss scale is for precision='fp16', and not for {precision!r}",
)


def option(default: Any = MISSING, **rule: Any) -> Any:
    """Field of a door with a rule.

    only: case in which values other than the default are taken. absent: they never are.
    ignored: reason why another value changes nothing, or a function of the door that returns it.
    kind, valid, expected: class of a value other than the default; whether a value may be given;
        and text of the error that says what may.
    name: the option's name in the door that it is `handed` to.
    """
    return field(default=default, metadata={_RULE: _Rule(**rule)})


def size(default: Any = MISSING, **rule: Any) -> Any:
    """Field of a door that is a number of ranks or rows, 1 or more, or None."""
    valid = {"valid": lambda size: size is None or size >= 1, "expected": "1 or more"}
    return option(default, **valid, **rule)


def check_options(door: Any, also: Callable[[], None] | None = None) -> None:
    """Refuse values without a meaning here, and log options that change nothing.

    also: checks of several options together, before anything is logged.
    Raises ValueError, and NotImplementedError for what is absent.
    """
    changes_nothing = {}
    for one in fields(door):
        rule = one.metadata.get(_RULE, _Rule())
        value = getattr(door, one.name)
        given = f"{one.name}={value if isinstance(value, Enum) else repr(value)}"
        if rule.valid is not None and not rule.valid(value):
            raise ValueError(f"{given}; expected {rule.expected}")
        if value == one.default:
            continue
        if rule.absent:
            raise NotImplementedError(f"{given} is not there yet; leave it away")
        if rule.only is not None and not rule.only.holds(door):
            remedy = rule.only.remedy.format_map(vars(door))
            raise ValueError(f"{given}; expected {one.default!r}: {remedy}")
        if rule.kind is not None and not isinstance(value, rule.kind):
            raise ValueError(f"{one.name} is a {type(value).__name__}; expected {rule.expected}")
        if rule.ignored:
            why = rule.ignored if isinstance(rule.ignored, str) else rule.ignored(door)
            changes_nothing[f"{one.name}=False" if value is False else one.name] = why
    if also is not None:
        also()
    accept(changes_nothing)


def handed(door: Any, case: Case) -> dict[str, Any]:
    """Values of the options of one case, by the names of the door that takes them over."""
    if not case.holds(door):
        return {}
    rules = {one.name: one.metadata.get(_RULE, _Rule()) for one in fields(door)}
    return {rule.name or n: getattr(door, n) for n, rule in rules.items() if rule.only is case}


def documented(door: Any, table: Any = None) -> None:
    """Add the rules of a door's table to its docstring.

    table: dataclass with the options; None is the door itself, before it becomes a dataclass.
    """
    said: dict[str, list[str]] = {}
    for name, found in (vars(door) if table is None else table.__dataclass_fields__).items():
        rule = found.metadata.get(_RULE, _Rule()) if isinstance(found, Field) else _Rule()
        if rule.only is not None:
            said.setdefault(rule.only.remedy.replace("{precision!r}", "others"), []).append(name)
        if rule.absent:
            said.setdefault("not there yet", []).append(name)
        if rule.expected and table is not None:
            said.setdefault(rule.expected, []).append(name)
        if rule.ignored:
            why = f": {rule.ignored}" if isinstance(rule.ignored, str) else ""
            said.setdefault(f"changes nothing{why}", []).append(name)
    lines = [f"    {', '.join(names)}: {why}." for why, names in said.items()]
    if lines and door.__doc__:
        door.__doc__ = "\n".join([door.__doc__.rstrip(), "", *lines, "    "])
