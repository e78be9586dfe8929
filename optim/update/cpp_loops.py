"""Torch functions of elements as C++ loops: traced once, and written down operator by operator.

A loop has the operators of the function in their order, in the dtypes that torch computes them in,
and nothing is contracted or reordered: it gives the bits of torch's scalar arithmetic on every
processor. Only operators that are exact, or correctly rounded, are known.

    run(words, num_words, scalars, num_scalars, threads)

works on rows. A row has its length and the addresses of its columns in `words`, and its scalars
(fp32) in `scalars`. Threads take tiles of rows by turns and end with the call, so that nobody
waits for a lock of Python's. It answers 0, and 1 where the arrays do not have whole rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EXAMPLE = 8191  # elements of a column while it is traced; no row of scalars is as long
_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "uint16_t",  # as bits
    torch.float16: "uint16_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
}
_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ARITHMETIC = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}",
    "div": "{0} / {1}", "neg": "-{0}", "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})", "sign": "sign_of({0})",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "__and__": "{0} & {1}", "__or__": "{0} | {1}", "__xor__": "{0} ^ {1}",
    "__lshift__": "{0} << {1}", "bitwise_left_shift": "{0} << {1}",
    "__rshift__": "{0} >> {1}", "bitwise_right_shift": "{0} >> {1}",
}  # fmt: skip
_ONLY_FLOAT = {"sqrt": "sqrtf({0})", "abs": "fabsf({0})", "reciprocal": "1.0f / {0}"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
KNOWN = sorted({*_ARITHMETIC, *_ONLY_FLOAT, *_COMPARISONS, "where", "clamp", "to", "view", "copy_"})

_PRELUDE = """\
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static inline float widen_bf16(uint16_t x) { return float_of((uint32_t)x << 16); }
static inline uint16_t round_bf16(float x) {  // to nearest, ties to even; NaN is 0x7FC0
  const uint32_t bits = bits_of(x);
  return x != x ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
static inline float widen_fp16(uint16_t x) {
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7FFF) << 13;
  const uint32_t exponent = rest & 0x0F800000;
  const float subnormal = float_of(rest + 0x38800000) - float_of(0x38800000);
  const uint32_t other = rest + 0x38000000 + (exponent == 0x0F800000 ? 0x38000000u : 0u);
  return float_of(sign | (exponent == 0 ? bits_of(subnormal) : other));
}
static inline uint16_t round_fp16(float x) {  // to nearest, ties to even
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7FFFFFFF;
  const uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - 0x3F000000;
  const uint32_t normal = (rest + 0xC8000FFF + ((rest >> 13) & 1)) >> 13;
  const uint32_t large = rest > 0x7F800000 ? 0x7E00u : 0x7C00u;
  const uint32_t finite = rest < 0x38800000 ? subnormal : normal;
  return (uint16_t)(sign | (rest >= 0x47800000 ? large : finite));
}
template <class T> static inline T larger(T a, T b) { return a > b || a != a ? a : b; }
template <class T> static inline T smaller(T a, T b) { return a < b || a != a ? a : b; }
template <class T> static inline T at_least(T x, T low) { return x < low ? low : x; }  // NaN stays
template <class T> static inline T at_most(T x, T high) { return x > high ? high : x; }
template <class T> static inline T sign_of(T x) { return (T)((T)0 < x) - (T)(x < (T)0); }

"""

_FRAME = """
static void walk(const int64_t* row, int64_t rows, const float* scalars,
                 std::atomic<int64_t>* next) {
  int64_t mine = (*next)++, before = 0;  // this thread's tile; tiles of earlier rows
  for (int64_t r = 0; r < rows; r++, row += 1 + COLUMNS, scalars += SCALARS) {
    const int64_t tiles = (row[0] + TILE - 1) / TILE;
    for (; mine < before + tiles; mine = (*next)++) {
      const int64_t first = (mine - before) * TILE;
      tile(row + 1, scalars, first, std::min(TILE, row[0] - first));
    }
    before += tiles;
  }
}

extern "C" int run(const int64_t* words, int64_t num_words, const float* scalars,
                   int64_t num_scalars, int64_t threads) {
  const int64_t rows = num_words / (1 + COLUMNS);
  if (num_words != rows * (1 + COLUMNS) || num_scalars != rows * SCALARS) return 1;
  int64_t tiles = 0;
  for (int64_t r = 0; r < rows; r++) tiles += (words[r * (1 + COLUMNS)] + TILE - 1) / TILE;
  std::atomic<int64_t> next(0);
  std::vector<std::thread> others;
  try {
    for (int64_t t = 1; t < std::min(threads, tiles); t++)
      others.emplace_back(walk, words, rows, scalars, &next);
  } catch (const std::system_error&) {  // no more threads: those that there are do it
  }
  walk(words, rows, scalars, &next);
  for (auto& other : others) other.join();
  return 0;
}
"""


def library(tile: str, *, columns: int, scalars: int, tile_numel: int) -> str:
    """The source of a library whose `run` calls `tile` on each tile of each row.

    tile: `static void tile(const int64_t* columns, const float* scalars, int64_t first, int64_t n)`
    """
    constants = f"COLUMNS = {columns}, SCALARS = {scalars}, TILE = {tile_numel}"
    return f"{_PRELUDE}static const int64_t {constants};\n\n{tile}{_FRAME}"


def traced_tile(
    program: Callable[..., object], num_scalars: Sequence[int], columns: Sequence[torch.dtype]
) -> str:
    """The `tile` of a function that changes its columns in place by `copy_`.

    program: called with one fp32 tensor [k] for every k of `num_scalars`, then the columns, each
    [n]; it treats every element alike. Raises NotImplementedError naming an operator that is not
    known, or what else a loop cannot do.
    """
    trace = _Trace()
    scalars = [torch.zeros(count) for count in num_scalars]
    examples = [torch.zeros(_EXAMPLE, dtype=dtype) for dtype in columns]
    trace.name_inputs(scalars, examples)
    with torch.no_grad(), trace:
        program(*scalars, *examples)
    return trace.text()


def widened(dtype: torch.dtype, expression: str) -> str:
    """An element of a float type as fp32, in C++."""
    return _converted(expression, dtype, torch.float32)


def element_type(dtype: torch.dtype) -> str:
    """In which C++ keeps it."""
    return _TYPES[dtype]


class _Trace(TorchDispatchMode):
    """Every operator that is called while this is entered, as a line of C++."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's question; yes would import torch's compiler, 200 MiB and seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}  # by the identity of a tensor
        self._alive: list[tuple[Tensor, int]] = []  # so that no identity is used twice; versions
        self._rows: dict[int, int] = {}  # of scalars: where each begins
        self._columns: list[Tensor] = []
        self._once: list[str] = []  # before the loop
        self._each: list[str] = []  # in it
        self._stored: dict[int, str] = {}  # by column
        self._used: dict[str, str] = {}  # what is read of the inputs: name to its definition

    def name_inputs(self, scalars: Sequence[Tensor], columns: Sequence[Tensor]) -> None:
        """What the function is called with."""
        begin = 0
        for row in scalars:
            self._rows[id(row)] = begin
            begin += row.numel()
        self._columns = list(columns)
        for number, column in enumerate(columns):
            self._name(column, f"x{number}")

    def text(self) -> str:
        """The whole `tile`."""
        lines = ["static void tile(const int64_t* columns, const float* scalars,"]
        lines.append("                 int64_t first, int64_t n) {")
        lines += [line for name, line in sorted(self._used.items()) if name[0] == "s"]
        lines += self._once
        for number, column in enumerate(self._columns):
            kind = "" if number in self._stored else "const "
            kind += f"{_TYPES[column.dtype]}*"
            lines.append(f"  {kind} __restrict p{number} = ({kind})columns[{number}] + first;")
        lines.append("#pragma omp simd")
        lines.append("  for (int64_t i = 0; i < n; i++) {")
        lines += [line for name, line in sorted(self._used.items()) if name[0] == "x"]
        lines += self._each
        lines += [f"    p{number}[i] = {name};" for number, name in sorted(self._stored.items())]
        return "\n".join([*lines, "  }", "}", ""])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name: str = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in ("select", "unbind") and id(args[0]) in self._rows:
            self._take_scalars(name, args, result)
        elif name in ("detach", "alias"):
            self._name(result, self._read(args[0]))
        elif name == "copy_":
            self._store(args[0], args[1])
        else:
            self._name(result, self._declared(result, self._expression(name, args, kwargs, result)))
        return result

    # -- what tensors are called --

    def _name(self, tensor: Tensor, name: str) -> None:
        if tensor.shape not in ((), (_EXAMPLE,)):
            raise NotImplementedError(
                f"a tensor of shape {tuple(tensor.shape)} in an update that treats every element "
                "alike; expected [n], or one number"
            )
        self._names[id(tensor)] = name
        self._alive.append((tensor, tensor._version))

    def _read(self, tensor: Tensor) -> str:
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
        if name[0] == "x":
            number = int(name[1:])
            kind = _TYPES[self._columns[number].dtype]
            self._used[name] = f"    const {kind} {name} = p{number}[i];"
        return name

    def _declared(self, result: Tensor, expression: str) -> str:
        name = f"t{len(self._once) + len(self._each)}"
        line = f"const {_TYPES[result.dtype]} {name} = {expression};"
        if result.dim() == 0:
            self._once.append(f"  {line}")
        else:
            self._each.append(f"    {line}")
        return name

    def _take_scalars(self, name: str, args: Any, result: Any) -> None:
        begin = self._rows[id(args[0])]
        if name == "select":
            taken = [(args[2] % args[0].numel(), result)]
        else:
            taken = list(enumerate(result))
        for i, scalar in taken:
            self._name(scalar, f"s{begin + i}")
            self._used[f"s{begin + i}"] = f"  const float s{begin + i} = scalars[{begin + i}];"

    def _store(self, column: Tensor, value: Tensor) -> None:
        number = next((i for i, own in enumerate(self._columns) if own is column), None)
        if number is None:
            raise NotImplementedError("copy_ into a tensor that is no column of the update")
        stored = self._declared(column, self._as(value, column.dtype))
        self._stored[number] = stored
        self._name(column, stored)

    # -- what operators are --

    def _expression(self, name: str, args: Any, kwargs: Any, result: Any) -> str:
        if not isinstance(result, Tensor):
            raise NotImplementedError(f"the update calls torch's {name}, which ends the loop")
        dtype = result.dtype
        if name == "_to_copy" and set(kwargs or ()) <= {"dtype"}:
            return self._as(args[0], dtype)
        if name == "view" and isinstance(args[1], torch.dtype):
            return _bits_as(self._read(args[0]), args[0].dtype, dtype)
        if dtype in _HALVES or dtype not in _TYPES:
            raise NotImplementedError(f"the update computes in {dtype}; expected fp32, by .float()")
        if name == "where" and len(args) == 3:
            chosen = [self._as(value, dtype) for value in args[1:]]
            return f"{self._as(args[0], torch.bool)} ? {chosen[0]} : {chosen[1]}"
        if name in _COMPARISONS:
            common = torch.result_type(args[0], args[1])
            left, right = (self._as(value, common) for value in args)
            return f"{left} {_COMPARISONS[name]} {right}"
        if name in ("clamp", "clamp_min", "clamp_max") and not kwargs:
            return self._clamped(name, args, dtype)
        if name == "pow" and args[1] == 2 and not kwargs:
            return "{0} * {0}".format(self._as(args[0], dtype))
        template = _ARITHMETIC.get(name) or (dtype == torch.float32 and _ONLY_FLOAT.get(name))
        if not template or kwargs or len(args) > 2:
            raise NotImplementedError(
                f"the update calls torch's {name} of {dtype}, which the compiled path does not "
                f"know; it knows {', '.join(KNOWN)}"
            )
        return template.format(*(self._as(value, dtype) for value in args))

    def _clamped(self, name: str, args: Sequence[Any], dtype: torch.dtype) -> str:
        value, low, high = (*args, None, None)[:3]
        if name == "clamp_max":
            low, high = None, low
        text = self._as(value, dtype)
        for limit, function in ((low, "at_least"), (high, "at_most")):
            if limit is not None:
                text = f"{function}({text}, {self._as(limit, dtype)})"
        return text

    def _as(self, value: Any, dtype: torch.dtype) -> str:
        """A tensor or a number, in a dtype."""
        if isinstance(value, Tensor):
            return _converted(self._read(value), value.dtype, dtype)
        if dtype != torch.float32:
            return f"({_TYPES[dtype]}){int(value)}"
        return f"float_of(0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X}u)"


def _converted(text: str, dtype: torch.dtype, to: torch.dtype) -> str:
    """A value of one dtype in another, rounded once."""
    if dtype == to:
        return text
    if to not in _TYPES:
        raise NotImplementedError(f"the update computes in {to}; expected fp32")
    if dtype in _HALVES:
        return _converted(f"widen_{_HALVES[dtype]}({text})", torch.float32, to)
    if to in _HALVES:
        return f"round_{_HALVES[to]}({_converted(text, dtype, torch.float32)})"
    return f"({_TYPES[to]})({text})"


def _bits_as(text: str, dtype: torch.dtype, to: torch.dtype) -> str:
    """The bits of a value of one dtype as another of the same size."""
    if dtype.itemsize != to.itemsize:
        raise NotImplementedError(f"the update views {dtype} as {to}; expected one of its size")
    if dtype == torch.float32:
        text = f"bits_of({text})"
    return f"float_of((uint32_t)({text}))" if to == torch.float32 else f"({_TYPES[to]})({text})"
