"""Trace of torch functions of elements as lines of another language, operator by operator.

A traced function has the operators of the original in their order, in the dtypes that torch
computes them in. Only operators that are exact, or correctly rounded, are known; a `Dialect` says
how each is written (`cpp_loops.py`, `triton_source.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

EXAMPLE = 8191  # elements of a column while it is traced; no row of scalars is as long
_ARITHMETIC = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}",
    "neg": "-{0}",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "__and__": "{0} & {1}", "__or__": "{0} | {1}", "__xor__": "{0} ^ {1}",
    "__lshift__": "{0} << {1}", "bitwise_left_shift": "{0} << {1}",
    "__rshift__": "{0} >> {1}", "bitwise_right_shift": "{0} >> {1}",
}  # fmt: skip
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_DIALECTS = ("div", "maximum", "minimum", "sign", "sqrt", "abs", "reciprocal")
KNOWN = sorted({*_ARITHMETIC, *_COMPARISONS, *_DIALECTS, "where", "clamp", "to", "view", "copy_"})


class Dialect(Protocol):
    """Dialect: how a language writes traced operators."""

    def functions(self, dtype: torch.dtype) -> Mapping[str, str]:
        """Operators that give this dtype as templates; also `where`, `at_least` and `at_most`."""
        ...

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether operators may give it."""
        ...

    def constant(self, value: float, dtype: torch.dtype) -> str:
        """Number in a dtype, exactly as torch rounds it."""
        ...

    def converted(self, text: str, dtype: torch.dtype, to: torch.dtype) -> str:
        """Value of one dtype in another, rounded once."""
        ...

    def bits_as(self, text: str, dtype: torch.dtype, to: torch.dtype) -> str:
        """Bits of a value of one dtype as another of the same size."""
        ...

    def declared(self, name: str, dtype: torch.dtype, expression: str) -> str:
        """Line that gives an expression a name."""
        ...

    def power(self, base: str, exponent: str) -> str | None:
        """base ** exponent, of the name of a tensor or a number; None: unknown."""
        ...


class OperatorTrace(TorchDispatchMode):
    """Trace with a line for every operator that is called while this context is entered."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer torch's question with no: yes would import its compiler, 200 MiB and seconds."""
        return False

    def __init__(self, dialect: Dialect) -> None:
        super().__init__()
        self._dialect = dialect
        self._names: dict[int, str] = {}  # by the identity of a tensor
        self._alive: list[tuple[Tensor, int]] = []  # so that no identity is used twice; versions
        self._rows: dict[int, int] = {}  # of scalars: where each begins
        self.columns: list[Tensor] = []
        self.once: list[str] = []  # of numbers
        self.each: list[str] = []  # of elements
        self.stored: dict[int, str] = {}  # by column
        self.used: set[str] = set()  # inputs that are read: s0, s1 ... of the rows, x0 ... columns

    def name_inputs(self, scalars: Sequence[Tensor], columns: Sequence[Tensor]) -> None:
        """Name the tensors that the function is called with."""
        begin = 0
        for row in scalars:
            self._rows[id(row)] = begin
            begin += row.numel()
        self.columns = list(columns)
        for number, column in enumerate(columns):
            self._name(column, f"x{number}")

    def inputs(self, kind: str) -> list[int]:
        """Numbers of the scalars ("s") or columns ("x") that are read, in order."""
        return sorted(int(name[1:]) for name in self.used if name[0] == kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name: str = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in ("select", "unbind") and id(args[0]) in self._rows:
            self._take_scalars(name, args, result)
        elif name in ("detach", "alias"):
            self._name(result, self.read(args[0]))
        elif name == "copy_":
            self._store(args[0], args[1])
        else:
            self._name(result, self._declared(result, self._expression(name, args, kwargs, result)))
        return result

    # -- names of tensors --

    def _name(self, tensor: Tensor, name: str) -> None:
        if tensor.shape not in ((), (EXAMPLE,)):
            raise NotImplementedError(
                f"a tensor of shape {tuple(tensor.shape)} in an update that treats every element "
                "alike; expected [n], or one number"
            )
        self._names[id(tensor)] = name
        self._alive.append((tensor, tensor._version))

    def read(self, tensor: Tensor) -> str:
        """Name of a tensor in the lines."""
        name = self._names.get(id(tensor))
        if name is None:
            raise NotImplementedError(
                "the update uses a tensor of its own; expected only those that it is called with"
            )
        version = next(v for alive, v in reversed(self._alive) if alive is tensor)
        if tensor._version != version:
            raise NotImplementedError(
                "the update reads a view of what it changed after it was made"
            )
        if name[0] in "sx":
            self.used.add(name)
        return name

    def _declared(self, result: Tensor, expression: str) -> str:
        name = f"t{len(self.once) + len(self.each)}"
        lines = self.once if result.dim() == 0 else self.each
        lines.append(self._dialect.declared(name, result.dtype, expression))
        return name

    def _take_scalars(self, name: str, args: Any, result: Any) -> None:
        begin = self._rows[id(args[0])]
        if name == "select":
            taken = [(args[2] % args[0].numel(), result)]
        else:
            taken = list(enumerate(result))
        for i, scalar in taken:
            self._name(scalar, f"s{begin + i}")

    def _store(self, column: Tensor, value: Tensor) -> None:
        number = next((i for i, own in enumerate(self.columns) if own is column), None)
        if number is None:
            raise NotImplementedError("copy_ into a tensor that is no column of the update")
        stored = self._declared(column, self._as(value, column.dtype))
        self.stored[number] = stored
        self._name(column, stored)

    # -- operators --

    def _expression(self, name: str, args: Any, kwargs: Any, result: Any) -> str:
        if not isinstance(result, Tensor):
            raise NotImplementedError(f"the update calls torch's {name}, which ends the loop")
        dtype, dialect = result.dtype, self._dialect
        if name == "_to_copy" and set(kwargs or ()) <= {"dtype"}:
            return self._as(args[0], dtype)
        if name == "view" and isinstance(args[1], torch.dtype):
            if args[0].dtype.itemsize != dtype.itemsize:
                raise NotImplementedError(
                    f"the update views {args[0].dtype} as {dtype}; expected one of its size"
                )
            return dialect.bits_as(self.read(args[0]), args[0].dtype, dtype)
        if name in ("full", "scalar_tensor") and result.dim() == 0:
            return self._as(args[-1], dtype)
        if not dialect.computes_in(dtype):
            raise NotImplementedError(f"the update computes in {dtype}; expected fp32, by .float()")
        functions = dialect.functions(dtype)
        if name == "where" and len(args) == 3:
            chosen = [self._as(value, dtype) for value in args[1:]]
            return functions["where"].format(self._as(args[0], torch.bool), *chosen)
        if name in _COMPARISONS:
            common = torch.result_type(args[0], args[1])
            left, right = (self._as(value, common) for value in args)
            return f"{left} {_COMPARISONS[name]} {right}"
        if name in ("clamp", "clamp_min", "clamp_max") and not kwargs:
            return self._clamped(name, args, functions, dtype)
        if name == "pow" and not kwargs and (found := self._power(args, dtype)) is not None:
            return found
        template = _ARITHMETIC.get(name) or functions.get(name)
        if not template or kwargs or len(args) > 2:
            raise NotImplementedError(
                f"the update calls torch's {name} of {dtype}, which the compiled path does not "
                f"know; it knows {', '.join(KNOWN)}"
            )
        return template.format(*(self._as(value, dtype) for value in args))

    def _power(self, args: Any, dtype: torch.dtype) -> str | None:
        base, exponent = args
        if not isinstance(base, Tensor):
            return None
        text = self._as(base, dtype)
        if isinstance(exponent, Tensor):
            return self._dialect.power(text, self.read(exponent))
        return f"{text} * {text}" if exponent == 2 else self._dialect.power(text, repr(exponent))

    def _clamped(
        self, name: str, args: Sequence[Any], functions: Mapping[str, str], dtype: torch.dtype
    ) -> str:
        value, low, high = (*args, None, None)[:3]
        if name == "clamp_max":
            low, high = None, low
        text = self._as(value, dtype)
        for limit, function in ((low, "at_least"), (high, "at_most")):
            if limit is not None:
                text = functions[function].format(text, self._as(limit, dtype))
        return text

    def _as(self, value: Any, dtype: torch.dtype) -> str:
        """Expression of a tensor or a number, in a dtype."""
        if isinstance(value, Tensor):
            name = self.read(value)
            return (
                name if value.dtype == dtype else self._dialect.converted(name, value.dtype, dtype)
            )
        return self._dialect.constant(value, dtype)
