"""Wrong arguments, of functions and of commands: what is said of them. Pure."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

C = TypeVar("C", bound=Callable[..., Any])

_SHOWN = 9  # names of arguments in a message
_VERY_LIKE = 0.85  # of an option that is elsewhere
_NONE: Mapping[str, str] = MappingProxyType({})
LAST_WORDS = "GEMINI_LAST_WORDS"  # a file for what a rank says last: `run` prints it at its end
_WAIT_SECONDS = 10.0
REFUSED, STOPPED = 2, 128 + signal.SIGINT  # exit statuses


def nearest(word: object, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The name that was probably meant, whatever the case and the dashes; None if none is near."""
    plain = {_plain(name): name for name in sorted(known)}
    near = difflib.get_close_matches(_plain(str(word)), plain, n=1, cutoff=likeness)
    return plain[near[0]] if near else None


def did_you_mean(word: object, known: Sequence[str]) -> str:
    """End of a message about an unknown name: the one that was probably meant, or all of them."""
    near = nearest(word, known)
    return f"expected one of {', '.join(known)}" if near is None else f"did you mean {near}?"


def _plain(word: str) -> str:
    return re.sub(r"[-_. ]", "", word.lower())


def check_arguments(
    name: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Sequence[str],
    inside: Mapping[str, str] = _NONE,
) -> None:
    """Raise TypeError for an unknown argument, with the name that was probably meant, and for one
    by position too many, with the names of those that follow.

    inside: options of a value that is an argument -> how that value is written.
    """
    parameters = signature.parameters.values()
    open_ended = {one.kind for one in parameters}
    placed = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    named = [*placed, *(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)]
    if inspect.Parameter.VAR_KEYWORD not in open_ended:
        for given in kwargs:
            if given not in named:
                near = nearest(given, inside, _VERY_LIKE) or nearest(given, named)
                raise TypeError(
                    f"{name}() got an unexpected keyword argument {given!r}"
                    + (f"; did you mean {inside.get(near, near)}?" if near else "")
                )
    if len(args) > len(placed) and inspect.Parameter.VAR_POSITIONAL not in open_ended:
        rest = [f"{one}=" for one in named if one not in placed]
        names = ", ".join([*rest[:_SHOWN], *(["..."] if rest[_SHOWN:] else [])])
        also = f"; expected it by name: {names}" if rest else ""
        taken = ", ".join(one for one in placed if one != "self")
        raise TypeError(
            f"{name}() takes {taken} by position, and got {args[len(placed)]!r} behind{also}"
        )


class Parser(argparse.ArgumentParser):
    """Parser of a command line whose errors are one line. Flags may have underscores for dashes.

    other_names: names in other tools -> those of the flags here, with underscores.
    """

    def __init__(self, *, other_names: Mapping[str, str] = _NONE, **kwargs: Any) -> None:
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter  # with its lines
        super().__init__(allow_abbrev=False, **kwargs)
        self.other_names = other_names

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([self._with_dashes(one) for one in given], namespace)

    def _with_dashes(self, word: str) -> str:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        known = self._option_string_actions
        return dashed + equals + value if name not in known and dashed in known else word

    def error(self, message: str) -> NoReturn:
        """End the process with status 2, in one line: a usage of many flags would hide it."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown is not None:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            known = self.other_names.get(unknown[1].strip("-").replace("-", "_"))
            near = f"--{known.replace('_', '-')}" if known else nearest(unknown[1], flags)
            message += f"; did you mean {near}?" if near else ""
        refuse(f"{self.prog}: error: {' '.join(message.split())} (see --help)")


def refuse(line: str) -> NoReturn:
    """End the process with status 2 and a line on stderr; of several ranks rank 0 says it.

    The others wait for their end, which follows on rank 0's: a rank that nobody ends was refused
    alone, and says so itself.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_WAIT_SECONDS)
        line = f"rank {rank}: {line}"
    _say_last(line)
    sys.exit(REFUSED)


def stopped(how_to_go_on: str = "") -> int:
    """Say in a line on stderr that Ctrl-C stopped a command; of several ranks rank 0 says it.

    Returns the exit status.
    """
    if "RANK" in os.environ:  # torchrun passes on what a terminal sent already
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.environ.get("RANK", "0") == "0":
        _say_last("stopped" + (f"; {how_to_go_on}" if how_to_go_on else ""))
    return STOPPED


def _say_last(line: str) -> None:
    """Write a line to stderr, or leave it to `run`, whose last line it is."""
    last_words = os.environ.get(LAST_WORDS)
    if last_words is None:
        sys.stderr.write(f"{line}\n")
    else:
        Path(last_words).write_text(f"{line}\n", encoding="utf-8")


def by_name(what: C) -> C:
    """Decorator of a class, a constructor or a function: wrong arguments are a TypeError as
    `check_arguments` says it.
    """
    if isinstance(what, type):
        constructor: Any = what
        constructor.__init__ = by_name(constructor.__init__)
        return what
    signature = inspect.signature(what)
    is_init = what.__name__ == "__init__"
    called = what.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    values, inside = getattr(what, "whole_values", ((), _NONE))

    @wraps(what)
    def checked(*args: Any, **kwargs: Any) -> Any:
        name = type(args[0]).__name__ if is_init and args else called
        check_arguments(name, signature, args, [key for key in kwargs if key not in values], inside)
        return what(*args, **kwargs)

    return cast(C, checked)


def with_options_of(target: Callable[..., Any], function: Callable[..., Any]) -> inspect.Signature:
    """Signature of a function whose `**options` go to `target`: with the keywords of that which it
    has not itself. Arguments of `target` without a default are the function's to give, but for one
    that passes on `*args` too: there they are the caller's."""
    own = inspect.signature(function)
    *shown, rest = own.parameters.values()
    assert rest.kind is rest.VAR_KEYWORD
    given = inspect.signature(target).parameters.values()
    names = {one.name for one in shown if one.kind is not one.VAR_POSITIONAL}
    passes_all = len(names) < len(shown)
    passed = [
        one.replace(kind=one.KEYWORD_ONLY)
        for one in given
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and one.name not in names
        and (passes_all or one.default is not one.empty)
    ]
    taken = {one.name for one in passed}  # `args=` beside `*args`
    shown = [one.replace(name=f"{one.name}_") if one.name in taken else one for one in shown]
    open_ended = [one for one in given if one.kind is one.VAR_KEYWORD]
    return own.replace(parameters=[*shown, *passed, *open_ended])


def check_passed_on(
    name: str, target: Callable[..., Any], function: Callable[..., Any], given: Sequence[str]
) -> None:
    """Raise TypeError for the first `given` option that neither `function` has nor `target`, to
    which its `**options` go."""
    check_arguments(name, with_options_of(target, function), (), given)


def passes_on(target: Callable[..., Any]) -> Callable[[C], C]:
    """Decorator of a constructor or a function whose `**options` go to `target`: an unknown one is
    a TypeError as `check_arguments` says it."""

    def decorator(function: C) -> C:
        changed: Any = function
        changed.__signature__ = with_options_of(target, function)
        made = vars(target).get("__init__") if isinstance(target, type) else target
        if hasattr(made, "whole_values"):  # values in place of the fields that a signature shows
            changed.whole_values = made.whole_values  # type: ignore[union-attr]
        return by_name(function)

    return decorator
