"""Stack machine of the pickle format, with a limit of memory. Pure. Protocols 2 to 5.

Python's own unpickler lets a program refuse classes, and nothing else: nine bytes make it take
gigabytes for its memo, and one list may be copied into a thousand objects. Here the memory of every
instruction is counted before it is taken. Subclasses define names, calls and objects.
"""

from __future__ import annotations

import gc
import pickletools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

# bytes of memory, of CPython on 64 bits: at least what an instruction takes
SLOT, NUMBER, TEXT, SEQUENCE, DICT, ENTRY, OBJECT = 10, 32, 60, 72, 232, 100, 290
_FIRST_ENTRIES = 5  # of a dict, which are in DICT
_MOST_DIGITS = 32  # bytes of a number
_MOST_MARKS = 1000  # of containers in containers
# values in the pickle itself -> bytes of memory, without a slot and letters
_LITERALS = {
    "NONE": 0, "NEWTRUE": 0, "NEWFALSE": 0, "EMPTY_TUPLE": 0, "BININT1": 0,
    "BININT": NUMBER, "BININT2": NUMBER, "BINFLOAT": NUMBER,
    "LONG1": NUMBER + _MOST_DIGITS, "LONG4": NUMBER + _MOST_DIGITS,
    "SHORT_BINUNICODE": TEXT, "BINUNICODE": TEXT, "BINUNICODE8": TEXT,
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NUMBERS = {
    "BININT": "<i", "BININT1": "<B", "BININT2": "<H", "BINFLOAT": ">d", "PROTO": "<B",
    "FRAME": "<Q", "BINPUT": "<B", "LONG_BINPUT": "<I", "BINGET": "<B", "LONG_BINGET": "<I",
}  # fmt: skip
_BYTES = {  # as many as a number before them says
    "LONG1": "<B", "LONG4": "<i", "SHORT_BINUNICODE": "<B", "BINUNICODE": "<I",
    "BINUNICODE8": "<Q", "SHORT_BINSTRING": "<B",
}  # fmt: skip
# by code: name, form of the number behind it, whether that counts bytes
_OPERATIONS = {
    ord(known.code): (
        known.name,
        struct.Struct(form) if (form := (_NUMBERS | _BYTES).get(known.name)) else None,
        known.name in _BYTES,
    )
    for known in pickletools.opcodes
}


class PickleError(ValueError):
    """Bytes that are no pickle, or one that is not allowed; the text says why."""


class PickleMachine:
    """Reader of the pickles in `data`, one after the other. Subclasses define names and calls."""

    def __init__(self, data: bytes, limit_bytes: int) -> None:
        self._data, self._at = data, 0
        self.left = limit_bytes
        self._clear()

    def _clear(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under marks
        self._memo: list[Any] = []

    def load(self) -> Any:
        """Read the next object. Raises PickleError, and the errors of the subclass."""
        self._clear()
        with no_collection():
            try:
                return self._run()
            except (IndexError, struct.error, UnicodeDecodeError) as error:
                raise PickleError(f"it ends early or is damaged ({error})") from error

    def _run(self) -> Any:
        """Run instructions until STOP. Literals and the memo, the most frequent, take no call."""
        data, at = self._data, self._at
        value: Any = None
        while True:
            name, form, counts = _OPERATIONS.get(data[at], ("", None, False))
            at += 1
            if form is not None:
                (value,) = form.unpack_from(data, at)
                at += form.size
            if counts:
                first, at = at, at + value
                if not first <= at <= len(data):
                    raise PickleError("it ends early")
                value = data[first:at]
            if name in _LITERALS:
                self.left -= SLOT + _LITERALS[name]
                if name in ("LONG1", "LONG4"):
                    if len(value) > _MOST_DIGITS:
                        raise PickleError(f"it has a number of {len(value)} bytes")
                    value = int.from_bytes(value, "little", signed=True)
                elif counts:
                    self.left -= 4 * len(value)
                    value = value.decode("utf-8", "surrogatepass")
                self._stack.append(_CONSTANTS.get(name, value))
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                self.left -= SLOT
                if name == "MEMOIZE" or value == len(self._memo):
                    self._memo.append(self._stack[-1])
                elif value < len(self._memo):
                    self._memo[value] = self._stack[-1]
                else:
                    raise PickleError(f"it remembers value {value} before value {len(self._memo)}")
            elif name in ("BINGET", "LONG_BINGET"):
                self.left -= SLOT
                self._stack.append(self._memo[value])
            elif name == "STOP":
                self._at = at
                return self._stack.pop()
            elif name == "GLOBAL":
                middle = data.find(b"\n", at)
                end = data.find(b"\n", middle + 1)
                if not at <= middle < end:
                    raise PickleError("it ends early")
                self._push_named(data[at:middle].decode(), data[middle + 1 : end].decode())
                at = end + 1
            elif name in _INSTRUCTIONS:
                _INSTRUCTIONS[name](self, value)
            elif name not in ("PROTO", "FRAME"):
                raise PickleError(f"it has the instruction {data[at - 1 : at]!r}")
            if self.left < 0:
                self.take(0)  # says so

    # -- for subclasses --

    def named(self, module: str, name: str) -> Any:
        """Stand-in for the object of a name."""
        raise NotImplementedError

    def made(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        """Object of a class, not filled yet."""
        raise NotImplementedError

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Result of a call."""
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
        """Value outside of the pickle, by its place."""
        self.wrong("a value", place)

    def new_list(self) -> Any:
        return []

    def new_dict(self) -> Any:
        return {}

    def take(self, nbytes: int) -> None:
        """Count `nbytes` of memory. Raises PickleError above the limit."""
        self.left -= nbytes
        if self.left < 0:
            raise PickleError("it would take more memory than its files have bytes")

    def take_entries(self, there: int, more: int) -> None:
        """Count `more` new entries of a dict that has `there`."""
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

    def _push_bytes(self, value: bytes) -> None:
        self.take(SLOT + TEXT + len(value))
        self._stack.append(value)

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
        """Push an object of a class, or the result of a call."""
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
def no_collection() -> Iterator[None]:
    """Context without collection of cycles, which would walk all objects again and again as they
    are made."""
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
    "STACK_GLOBAL": lambda m, _: m._push_named(m._stack.pop(-2), m._stack.pop()),
    "NEWOBJ": lambda m, _: m._push_of(m.made, OBJECT),
    "REDUCE": lambda m, _: m._push_of(m.called, SEQUENCE),
    "BUILD": PickleMachine._build,
    "BINPERSID": PickleMachine._push_persistent,
}
