"""Schemas of settings: a frozen dataclass whose fields are flags and keys of a YAML file. Pure.

    @dataclass(frozen=True, kw_only=True)
    class Config(Settings):
        batch: int = setting(8, "sequences of a forward", least=1)

A field is the one place of an option: its flag, help, YAML key, type and range follow from it.
"""

from __future__ import annotations

import argparse
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Self, get_args, get_type_hints

from gemini import strangers
from gemini.arguments import Parser, did_you_mean, nearest
from gemini.units import parse_bytes

_MOST = 1 << 32  # of a whole number: torch's seeds, and what is counted
_FEW = 6  # choices that are named in the help
_RULE = "setting"
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "one value"}
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class _Setting:
    """Help and limits of one field; see `setting`."""

    says: str
    group: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    one_of: tuple[str, ...] = ()
    is_size: bool = False
    is_typed: bool = False


def setting(default: Any, says: str, **rule: Any) -> Any:
    """Field of a schema, with its help.

    group: heading in the help. least, most, above, below: limits of a number. one_of: texts that
    it may be. is_size: a text such as `8GiB`. is_typed: a flag only, which no file may set.
    """
    return field(default=default, metadata={_RULE: _Setting(says, **rule)})


class Settings:
    """Base of schemas: its values are converted and checked wherever they come from.

    Fields are given by name: their order is that of the help, and changes. Raises ValueError for a
    value of another type or outside its range.
    """

    def __post_init__(self) -> None:
        for one in _settings(type(self)):
            value = _checked(type(self), one, getattr(self, one.name))
            object.__setattr__(self, one.name, value)

    @classmethod
    def from_yaml(
        cls, path: Path, other_names: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Read the values of a YAML file. Raises ValueError for keys that are no fields.

        other_names: names in other tools -> those of the fields.
        """
        found = strangers.read_yaml(path)
        known = [one.name for one in _settings(cls) if not _rule(one).is_typed]
        unknown: dict[str, str] = {}  # key -> the remedy
        for name, value in found.items():
            if name in known:
                if isinstance(value, (dict, list)):
                    kind = type(value).__name__
                    raise ValueError(f"{path} has a {kind} as {name}; expected one value")
                continue
            if any(one.name == name for one in _settings(cls)):
                raise ValueError(
                    f"{path} has the key {name}, and a file does not let code run; expected "
                    f"{flag(name)} on the command line"
                )
            here = other_names.get(name)
            unknown[name] = f"{name} is {here} here" if here else did_you_mean(name, known)
        if unknown:
            keys = (
                "key {}, which is no flag" if len(unknown) == 1 else "keys {}, which are no flags"
            )
            listed = keys.format(", ".join(map(repr, unknown)))
            raise ValueError(f"{path} has the {listed}; {'; '.join(unknown.values())}")
        return {name: value for name, value in found.items() if value is not None}

    def as_yaml(self) -> str:
        """YAML of all fields but those of the command line, which `from_yaml` reads."""
        import yaml

        said = {
            o.name: getattr(self, o.name) for o in _settings(type(self)) if not _rule(o).is_typed
        }
        text: str = yaml.safe_dump(said, sort_keys=False)
        return text

    def changed_from(self, other: Settings, beside: Sequence[str] = ()) -> list[str]:
        """Names of fields that differ from those of `other`, but for `beside`."""
        mine, others = asdict(self), asdict(other)  # type: ignore[call-overload]
        return [name for name in mine if name not in beside and mine[name] != others[name]]

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add a model or a file, `--print-config`, and a flag for each field."""
        parser.add_argument("what", nargs="?", metavar="MODEL|config.yaml", help="flags as keys")
        parser.add_argument(
            "--print-config", action="store_true", default=argparse.SUPPRESS,
            help="all of a run's settings as YAML, and end",
        )  # fmt: skip
        groups: dict[str, Any] = {"": parser}
        for one in _settings(cls):
            rule = _rule(one)
            if rule.group not in groups:
                groups[rule.group] = parser.add_argument_group(rule.group)
            kind = _kind(cls, one.name)
            options: dict[str, Any] = {"action": "store_true"}
            if kind is bool and not rule.is_typed:  # else there is nothing to take back
                options = {"action": argparse.BooleanOptionalAction}
            if kind is not bool:
                convert = partial(_typed, cls, one)
                options = {"type": convert, "metavar": _metavar(kind, rule)}
            groups[rule.group].add_argument(
                flag(one.name), default=argparse.SUPPRESS, help=_help(one), **options
            )

    @classmethod
    def parse(
        cls, parser: Parser, arguments: Sequence[str], *, of_file: type[Settings] | None = None
    ) -> tuple[Self, frozenset[str], Path | None]:
        """Parse a command line: flags, and as the first word a model or a YAML file of settings.

        parser: after `add_to`. of_file: schema of the file, by default the same. Returns the
        settings, what was typed (by name, with `print_config`), and the file.
        Raises ValueError for wrong values in the file.
        """
        typed = vars(parser.parse_args(arguments))
        what = typed.pop("what")
        file = Path(what) if what is not None and what.endswith((".yaml", ".yml")) else None
        given = {} if file is None else (of_file or cls).from_yaml(file, parser.other_names)
        if file is None and what is not None:
            if "model" in typed:
                parser.error(f"two models, {what} and {typed['model']}; expected one model")
            typed["model"] = what
        names = frozenset(typed)
        typed.pop("print_config", None)
        try:
            cls(**given)  # so that a wrong value is told with the file that it is in
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        return cls(**(given | typed)), names, file


def flag(name: str) -> str:
    """Flag of a field."""
    return "--" + name.replace("_", "-")


def _settings(schema: type) -> tuple[Field[Any], ...]:
    return fields(schema)


def _rule(one: Field[Any]) -> _Setting:
    rule: _Setting = one.metadata[_RULE]
    return rule


@cache
def _kinds(schema: type) -> dict[str, tuple[type, ...]]:
    """Types of each field: one, and perhaps None's."""
    return {name: get_args(kind) or (kind,) for name, kind in get_type_hints(schema).items()}


def _kind(schema: type, name: str) -> type:
    return next(kind for kind in _kinds(schema)[name] if kind is not NoneType)


def _checked(schema: type, one: Field[Any], value: Any) -> Any:
    """Value of a field in its type. Raises ValueError."""
    rule, name = _rule(one), flag(one.name)
    if value is None and NoneType in _kinds(schema)[one.name]:
        return None
    kind = _kind(schema, one.name)
    value = _converted(value, kind, name)
    if value == one.default:
        return value
    if isinstance(value, float):
        _check(math.isfinite(value), name, value, "a finite number")
    if isinstance(value, int) and not isinstance(value, bool):
        _check(value < _MOST, name, value, f"less than {_MOST}")
    for limit, holds, words in (
        (rule.least, operator.ge, "{:g} or more"), (rule.most, operator.le, "{:g} or less"),
        (rule.above, operator.gt, "more than {:g}"), (rule.below, operator.lt, "less than {:g}"),
    ):  # fmt: skip
        _check(limit is None or holds(value, limit), name, value, words.format(limit or 0))
    if rule.one_of and value not in rule.one_of:
        near = nearest(value, rule.one_of)
        meant = f"did you mean {near}? " if near else ""
        raise ValueError(f"{name} {value}; {meant}expected one of {', '.join(rule.one_of)}")
    if rule.is_size:
        try:
            parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return value


def _check(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} {value}; expected {expected}")


def _converted(value: Any, kind: type, name: str) -> Any:
    """Value of a text, a YAML file or Python in the type `kind`, without loss."""
    if isinstance(value, bool) is (kind is bool) and isinstance(value, kind):
        return value
    text = str(value).strip()
    if isinstance(value, str) and kind is bool and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    if kind in (int, float, str) and isinstance(value, (str, int, float)):
        convert: Callable[[str], Any] = kind
        try:
            if not isinstance(value, bool):
                return convert(text)
        except ValueError:
            pass
    raise ValueError(f"{name} {value!r}; expected {_EXPECTED[kind]}")


def _typed(schema: type, one: Field[Any], text: str) -> Any:
    """Value of a flag's text, whose error is argparse's."""
    try:
        return _checked(schema, one, text)
    except ValueError as error:
        said = str(error).removeprefix(flag(one.name)).lstrip(": ")
        raise argparse.ArgumentTypeError(said) from None


def _metavar(kind: type, rule: _Setting) -> str:
    if rule.is_size:
        return "SIZE"
    few = "|".join(rule.one_of) if len(rule.one_of) <= _FEW else "NAME"
    return few or {int: "N", float: "X", str: "TEXT"}[kind]


def _help(one: Field[Any]) -> str:
    """Help with the default, where there is one."""
    default, says = one.default, _rule(one).says.replace("%", "%%")
    if default is MISSING or default is None or default == "" or default is False:
        return says
    shown = "on" if default is True else f"{default:g}" if isinstance(default, float) else default
    return f"{says} (default: {shown})"
