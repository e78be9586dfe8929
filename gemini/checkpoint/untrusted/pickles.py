"""The stack machine of the pickle format, with a limit of memory. Pure.

Python's own unpickler asks before it looks up a class, and about nothing else: nine bytes make it
take gigabytes for its memo, and one list may be copied into a thousand objects. Here every
instruction says what it takes before it takes it. `pickletools` says what the instructions are;
what names, calls and objects mean is for the subclass to say. Protocols 2 to 5.
"""

from __future__ import annotations

import gc
import io
import pickletools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

# bytes of memory, of CPython on 64 bits: at least what an instruction takes
SLOT, NUMBER, TEXT, SEQUENCE, DICT, ENTRY, OBJECT = 10, 32, 60, 72, 232, 100, 290
_FIRST_ENTRIES = 5  # of a dict, which are in DICT
_MOST_DIGITS = 32  # bytes of a number
_MOST_MARKS = 1000  # of containers in containers
# what stands in the pickle itself, and what it takes beside its slot and its letters
_LITERALS = {
    "NONE": 0, "NEWTRUE": 0, "NEWFALSE": 0, "EMPTY_TUPLE": 0, "BININT1": 0,
    "BININT": NUMBER, "BININT2": NUMBER, "BINFLOAT": NUMBER,
    "LONG1": NUMBER + _MOST_DIGITS, "LONG4": NUMBER + _MOST_DIGITS,
    "SHORT_BINUNICODE": TEXT, "BINUNICODE": TEXT, "BINUNICODE8": TEXT,
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class PickleError(ValueError):
    """What was read is no such pickle; the message says why."""


class PickleMachine:
    """Reads pickles from `data`, one after the other. Subclasses give meaning to what they name."""

    def __init__(self, data: bytes, limit_bytes: int) -> None:
        self._data = io.BytesIO(data)
        self.left = limit_bytes
        self._clear()

    def _clear(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under marks
        self._memo: list[Any] = []

    def load(self) -> Any:
        """The next object. Raises PickleError, and what a subclass raises."""
        self._clear()
        with _no_collection():
            try:
                return self._run()
            except IndexError as error:
                raise PickleError(f"it ends early or is damaged ({error})") from error

    def _run(self) -> Any:
        """What a pickle has most of is done here, without a call: literals, memo, marks."""
        value: Any
        operations = pickletools.genops(self._data)
        while True:
            try:
                opcode, value, _ = next(operations)
            except ValueError as error:
                raise PickleError(f"it ends early or is damaged ({error})") from error
            name = opcode.name
            if name in _LITERALS:
                self.left -= SLOT + _LITERALS[name] + (4 * len(value) if type(value) is str else 0)
                if type(value) is int and value.bit_length() > 8 * _MOST_DIGITS:
                    raise PickleError(f"it has a number of {value.bit_length()} bits")
                self._stack.append(_CONSTANTS.get(name, value))
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                self.left -= SLOT
                if value is None or value == len(self._memo):
                    self._memo.append(self._stack[-1])
                elif value < len(self._memo):
                    self._memo[value] = self._stack[-1]
                else:
                    raise PickleError(f"it remembers value {value} before value {len(self._memo)}")
            elif name in ("BINGET", "LONG_BINGET"):
                self.left -= SLOT
                self._stack.append(self._memo[value])
            elif name == "STOP":
                return self._stack.pop()
            elif name in _INSTRUCTIONS:
                _INSTRUCTIONS[name](self, value)
            elif name not in ("PROTO", "FRAME"):
                raise PickleError(f"it has the instruction {name}")
            if self.left < 0:
                self.take(0)  # says so

    # -- for subclasses --

    def named(self, module: str, name: str) -> Any:
        """What stands for a name."""
        raise NotImplementedError

    def made(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        """An object of a class, not filled yet."""
        raise NotImplementedError

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """What a call gives."""
        raise NotImplementedError

    def fill(self, made: Any, fields: Any) -> None:
        """Give an object its fields."""
        raise NotImplementedError

    def extend(self, there: Any, values: list[Any]) -> None:
        """Add values to a list."""
        raise NotImplementedError

    def update(self, there: Any, values: list[Any]) -> None:
        """Add keys and values, in turn, to a dict."""
        raise NotImplementedError

    def persistent(self, place: Any) -> Any:
        """What a pickle keeps outside of it."""
        self.wrong("a value", place)

    def new_list(self) -> Any:
        return []

    def new_dict(self) -> Any:
        return {}

    def take(self, nbytes: int) -> None:
        """Memory is about to be taken."""
        self.left -= nbytes
        if self.left < 0:
            raise PickleError("it would take more memory than its files have bytes")

    def take_entries(self, there: int, more: int) -> None:
        """A dict grows."""
        self.take(ENTRY * max(0, min(more, there + more - _FIRST_ENTRIES)))

    def wrong(self, expected: str, found: Any) -> NoReturn:
        raise PickleError(f"it has a {type(found).__name__} in the place of {expected}")

    # -- instructions --

    def _mark(self, _: None) -> None:
        if len(self._below) > _MOST_MARKS:
            raise PickleError("it is nested deeper than any list of tensors")
        self.take(SEQUENCE)
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    def _push_new(self, make: Callable[[], Any], nbytes: int) -> None:
        self.take(SLOT + nbytes)
        self._stack.append(make())

    def _push_bytes(self, value: str) -> None:
        self.take(SLOT + TEXT + len(value))
        self._stack.append(value.encode("latin-1"))

    def _push_tuple(self, values: list[Any]) -> None:
        self.take(SEQUENCE + 8 * len(values))
        self._stack.append(tuple(values))

    def _push_tuple_of(self, count: int) -> None:
        values = self._stack[-count:]
        if len(values) != count:
            raise PickleError("it ends early or is damaged")
        del self._stack[-count:]
        self._push_tuple(values)

    def _append(self, values: list[Any]) -> None:
        self.take(SLOT * len(values))
        self.extend(self._stack[-1], values)

    def _set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise PickleError("it has a key without a value")
        self.update(self._stack[-1], values)

    def _push_named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            self.wrong("a name", name)
        self.take(SLOT)
        self._stack.append(self.named(module, name))

    def _push_of(self, make: Callable[[Any, tuple[Any, ...]], Any], nbytes: int) -> None:
        """An object of a class, or what a call gives."""
        arguments, kind = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple:
            self.wrong("arguments", arguments)
        self.take(nbytes)
        self._stack.append(make(kind, arguments))

    def _build(self, _: None) -> None:
        fields = self._stack.pop()
        self.fill(self._stack[-1], fields)

    def _push_persistent(self, _: None) -> None:
        self.take(SLOT)
        self._stack.append(self.persistent(self._stack.pop()))


@contextmanager
def _no_collection() -> Iterator[None]:
    """The collector of cycles would look through all objects again and again as they are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_INSTRUCTIONS: dict[str, Callable[[Any, Any], None]] = {
    "MARK": PickleMachine._mark,
    "SHORT_BINSTRING": PickleMachine._push_bytes,
    "EMPTY_LIST": lambda m, _: m._push_new(m.new_list, SEQUENCE),
    "EMPTY_DICT": lambda m, _: m._push_new(m.new_dict, DICT),
    "APPEND": lambda m, _: m._append([m._stack.pop()]),
    "APPENDS": lambda m, _: m._append(m._since_mark()),
    "SETITEM": lambda m, _: m._set_items([m._stack.pop(-2), m._stack.pop()]),
    "SETITEMS": lambda m, _: m._set_items(m._since_mark()),
    "TUPLE": lambda m, _: m._push_tuple(m._since_mark()),
    "TUPLE1": lambda m, _: m._push_tuple_of(1),
    "TUPLE2": lambda m, _: m._push_tuple_of(2),
    "TUPLE3": lambda m, _: m._push_tuple_of(3),
    "GLOBAL": lambda m, value: m._push_named(*value.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m._push_named(m._stack.pop(-2), m._stack.pop()),
    "NEWOBJ": lambda m, _: m._push_of(m.made, OBJECT),
    "REDUCE": lambda m, _: m._push_of(m.called, SEQUENCE),
    "BUILD": PickleMachine._build,
    "BINPERSID": PickleMachine._push_persistent,
}
