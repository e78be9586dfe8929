"""The stack machine of the pickle format, with a limit of memory. Pure.

Python's own unpickler asks before it looks up a class, and about nothing else: nine bytes make it
take gigabytes for its memo, and one list may be copied into a thousand objects. Here every
instruction says what it takes before it takes it. What names, calls and objects mean is for the
subclass to say. Protocols 2 to 5.
"""

from __future__ import annotations

import gc
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

# bytes of memory, of CPython on 64 bits: at least what an instruction takes
SLOT, NUMBER, TEXT, SEQUENCE, DICT, ENTRY, OBJECT = 10, 32, 60, 72, 232, 100, 290
_FIRST_ENTRIES = 5  # of a dict, which are in DICT
_MOST_DIGITS = 32  # bytes of a number
_MOST_MARKS = 1000  # of containers in containers


class PickleError(ValueError):
    """What was read is no such pickle; the message says why."""


class PickleMachine:
    """Reads pickles from `data`, one after the other. Subclasses give meaning to what they name.

    data: bytes, or what can be indexed, sliced and searched like them.
    """

    def __init__(self, data: Any, limit_bytes: int) -> None:
        self.data, self.at = data, 0
        self.left = limit_bytes
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under marks
        self.memo: list[Any] = []

    def load(self) -> Any:
        """The next object. Raises PickleError, and what a subclass raises."""
        self.stack, self.below, self.memo = [], [], []
        with _no_collection():
            try:
                return self._run()
            except (IndexError, struct.error, UnicodeDecodeError) as error:
                raise PickleError(f"it ends early or is damaged ({error})") from error

    def _run(self) -> Any:
        data, instructions = self.data, _INSTRUCTIONS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            instruction = instructions.get(code)
            if instruction is None:
                raise PickleError(f"it has the instruction {bytes([code])!r}")
            instruction(self)

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

    def wrong(self, expected: str, found: Any) -> NoReturn:
        raise PickleError(f"it has a {type(found).__name__} in the place of {expected}")

    # -- reading --

    def bytes_of(self, count: int) -> bytes:
        found: bytes = self.data[self.at : self.at + count]
        if len(found) != count:
            raise PickleError("it ends early")
        self.at += count
        return found

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.data, self.at)[0]
        self.at += form.size
        return value

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise PickleError("it ends early")
        return self.bytes_of(end + 1 - self.at)[:-1].decode()

    def since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.below.pop()
        return found

    # -- instructions --

    def push(self, value: Any) -> None:
        self.take(SLOT)
        self.stack.append(value)

    def push_number(self, form: struct.Struct) -> None:
        self.take(SLOT + NUMBER)
        self.stack.append(self.number(form))

    def push_byte(self) -> None:
        self.push(self.data[self.at])
        self.at += 1

    def push_long(self, form: struct.Struct) -> None:
        count = self.number(form)
        if not 0 <= count <= _MOST_DIGITS:
            raise PickleError(f"it has a number of {count} bytes")
        self.take(SLOT + NUMBER + count)
        self.stack.append(int.from_bytes(self.bytes_of(count), "little", signed=True))

    def push_float(self) -> None:
        self.take(SLOT + NUMBER)
        self.stack.append(_F8.unpack(self.bytes_of(8))[0])

    def push_text(self, form: struct.Struct) -> None:
        text = self.bytes_of(self.number(form))
        self.take(SLOT + TEXT + 4 * len(text))
        self.stack.append(text.decode("utf-8", "surrogatepass"))

    def push_bytes(self, form: struct.Struct) -> None:
        value = self.bytes_of(self.number(form))
        self.take(SLOT + TEXT + len(value))
        self.stack.append(value)

    def push_list(self) -> None:
        self.take(SLOT + SEQUENCE)
        self.stack.append(self.new_list())

    def push_dict(self) -> None:
        self.take(SLOT + DICT)
        self.stack.append(self.new_dict())

    def push_tuple(self) -> None:
        values = self.since_mark()
        self.take(SEQUENCE + 8 * len(values))
        self.stack.append(tuple(values))

    def push_tuple_of(self, count: int) -> None:
        self.take(SEQUENCE)
        values = self.stack[-count:]
        if len(values) != count:
            raise PickleError("it ends early or is damaged")
        self.stack[-count:] = [tuple(values)]

    def mark(self) -> None:
        if len(self.below) > _MOST_MARKS:
            raise PickleError("it is nested deeper than any list of tensors")
        self.take(SEQUENCE)
        self.below.append(self.stack)
        self.stack = []

    def append_to(self, values: list[Any]) -> None:
        self.take(SLOT * len(values))
        self.extend(self.stack[-1], values)

    def set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise PickleError("it has a key without a value")
        self.update(self.stack[-1], values)

    def take_entries(self, there: int, more: int) -> None:
        """A dict grows."""
        self.take(ENTRY * max(0, min(more, there + more - _FIRST_ENTRIES)))

    def remember(self) -> None:
        self.take(SLOT)
        self.memo.append(self.stack[-1])

    def remember_at(self, form: struct.Struct) -> None:
        index = self.number(form)
        if index == len(self.memo):
            self.remember()
        elif index < len(self.memo):
            self.memo[index] = self.stack[-1]
        else:
            raise PickleError(f"it remembers value {index} before value {len(self.memo)}")

    def recall(self, form: struct.Struct) -> None:
        self.push(self.memo[self.number(form)])

    def push_named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            self.wrong("a name", name)
        self.push(self.named(module, name))

    def push_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.push_named(module, name)

    def push_made(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            self.wrong("arguments", arguments)
        self.take(OBJECT)
        self.stack.append(self.made(kind, arguments))

    def push_called(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            self.wrong("arguments", arguments)
        self.take(SEQUENCE)
        self.stack.append(self.called(function, arguments))

    def build(self) -> None:
        fields = self.stack.pop()
        self.fill(self.stack[-1], fields)


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


def _skip(machine: PickleMachine, count: int) -> None:
    machine.bytes_of(count)


_STOP = pickle.STOP[0]
_U1, _U2, _U4, _U8, _I4, _F8 = (
    struct.Struct(form) for form in ("<B", "<H", "<I", "<Q", "<i", ">d")
)
_INSTRUCTIONS: dict[int, Callable[[PickleMachine], None]] = {
    code[0]: instruction
    for code, instruction in {
        pickle.PROTO: lambda m: _skip(m, 1),
        pickle.FRAME: lambda m: _skip(m, 8),
        pickle.MEMOIZE: PickleMachine.remember,
        pickle.BINPUT: lambda m: m.remember_at(_U1),
        pickle.LONG_BINPUT: lambda m: m.remember_at(_U4),
        pickle.BINGET: lambda m: m.recall(_U1),
        pickle.LONG_BINGET: lambda m: m.recall(_U4),
        pickle.NONE: lambda m: m.push(None),
        pickle.NEWTRUE: lambda m: m.push(True),
        pickle.NEWFALSE: lambda m: m.push(False),
        pickle.EMPTY_TUPLE: lambda m: m.push(()),
        pickle.BININT: lambda m: m.push_number(_I4),
        pickle.BININT1: PickleMachine.push_byte,
        pickle.BININT2: lambda m: m.push_number(_U2),
        pickle.LONG1: lambda m: m.push_long(_U1),
        pickle.LONG4: lambda m: m.push_long(_I4),
        pickle.BINFLOAT: PickleMachine.push_float,
        pickle.SHORT_BINUNICODE: lambda m: m.push_text(_U1),
        pickle.BINUNICODE: lambda m: m.push_text(_U4),
        pickle.BINUNICODE8: lambda m: m.push_text(_U8),
        pickle.SHORT_BINSTRING: lambda m: m.push_bytes(_U1),
        pickle.MARK: PickleMachine.mark,
        pickle.EMPTY_LIST: PickleMachine.push_list,
        pickle.EMPTY_DICT: PickleMachine.push_dict,
        pickle.APPEND: lambda m: m.append_to([m.stack.pop()]),
        pickle.APPENDS: lambda m: m.append_to(m.since_mark()),
        pickle.SETITEM: lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
        pickle.SETITEMS: lambda m: m.set_items(m.since_mark()),
        pickle.TUPLE: PickleMachine.push_tuple,
        pickle.TUPLE1: lambda m: m.push_tuple_of(1),
        pickle.TUPLE2: lambda m: m.push_tuple_of(2),
        pickle.TUPLE3: lambda m: m.push_tuple_of(3),
        pickle.GLOBAL: lambda m: m.push_named(m.line(), m.line()),
        pickle.STACK_GLOBAL: PickleMachine.push_stack_global,
        pickle.NEWOBJ: PickleMachine.push_made,
        pickle.REDUCE: PickleMachine.push_called,
        pickle.BUILD: PickleMachine.build,
        pickle.BINPERSID: lambda m: m.push(m.persistent(m.stack.pop())),
    }.items()
}
