"""A pickle of plain values and of objects of a few classes, within a limit of memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .pickles import OBJECT, PickleError, PickleMachine

_MOST_FIELDS = 64


class ObjectReader(PickleMachine):
    """Makes plain values and the objects it is told; an object is made once, and filled once.

    classes: by module and name; filled with a dict of fields, or by `__setstate__` where they have
        it.
    functions: by module and name; called with the arguments that stand there.
    value_of: for every other name; raises for what is none.
    keys: classes whose objects may be keys beside strings and numbers, with what is asked of their
        fields before; raises PickleError for fields whose hash is not that of a few values.
    """

    def __init__(
        self,
        data: bytes,
        limit_bytes: int,
        classes: Mapping[tuple[str, str], type],
        functions: Mapping[tuple[str, str], Callable[..., Any]],
        value_of: Callable[[str, str], Any],
        keys: Mapping[type, Callable[[Any], None]],
    ) -> None:
        super().__init__(data, limit_bytes)
        self._classes, self._functions, self._value_of = classes, functions, value_of
        self._kinds = frozenset(classes.values())
        self._key_types = frozenset((str, int, *keys))
        self._checks = keys

    def named(self, module: str, name: str) -> Any:
        self.take(OBJECT)
        key = (module, name)
        if key in self._classes:
            return _Class(self._classes[key])
        if key in self._functions:
            return _Function(self._functions[key])
        return self._value_of(module, name)

    def made(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        if type(kind) is not _Class or arguments:
            self.wrong("a class", kind)
        return object.__new__(kind.kind)

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if type(function) is not _Function or len(arguments) > _MOST_FIELDS:
            self.wrong("a function", function)
        self.take(sum(8 * len(a) for a in arguments if type(a) in (tuple, list, str)))
        try:
            return function.call(*arguments)
        except Exception as error:  # whatever it says of arguments that nobody gives it
            raise PickleError(f"it calls {function.call.__name__} with {error}") from error

    def fill(self, made: Any, fields: Any) -> None:
        kind = type(made)
        if kind not in self._kinds or vars(made):
            self.wrong("a new object", made)
        if hasattr(made, "__setstate__"):
            try:
                made.__setstate__(fields)
            except Exception as error:
                raise PickleError(f"a {kind.__name__} is filled with {error}") from error
            return
        if type(fields) is not dict or len(fields) > _MOST_FIELDS:
            self.wrong("a dict of fields", fields)
        if kind in self._checks:
            self._checks[kind](fields)
        vars(made).update(fields)

    def extend(self, there: Any, values: list[Any]) -> None:
        if type(there) is not list:
            self.wrong("a list", there)
        there.extend(values)

    def update(self, there: Any, values: list[Any]) -> None:
        if not isinstance(there, dict):
            self.wrong("a dict", there)
        self.take_entries(len(there), len(values) // 2)
        for i in range(0, len(values), 2):
            key = values[i]
            if type(key) not in self._key_types or (type(key) in self._kinds and not vars(key)):
                self.wrong("a key", key)
            there[key] = values[i + 1]


class _Class:
    """Stands for a class until an object of it is made."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


class _Function:
    """Stands for a function until it is called."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
