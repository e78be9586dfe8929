"""Torch functions of elements as C++ loops: traced once, and written down operator by operator.

A loop has the operators of the function in their order, in the dtypes that torch computes them in,
and nothing is contracted or reordered: it gives the bits of torch's scalar arithmetic on every
processor (`tracing.py`).

    run(words, num_words, scalars, num_scalars, threads)

works on rows. A row has its length and the addresses of its columns in `words`, and its scalars
(fp32) in `scalars`. Threads take tiles of rows by turns and end with the call, so that none waits
for a lock of Python's. It returns 0, and 1 where the arrays do not have whole rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import torch

from .tracing import EXAMPLE, OperatorTrace

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
_FUNCTIONS = {
    "div": "{0} / {1}", "maximum": "larger({0}, {1})", "minimum": "smaller({0}, {1})",
    "sign": "sign_of({0})", "where": "{0} ? {1} : {2}",
    "at_least": "at_least({0}, {1})", "at_most": "at_most({0}, {1})",
}  # fmt: skip
_OF_FLOATS = {"sqrt": "sqrtf({0})", "abs": "fabsf({0})", "reciprocal": "1.0f / {0}"}

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
    """Source of a library whose `run` calls `tile` on each tile of each row.

    tile: `static void tile(const int64_t* columns, const float* scalars, int64_t first, int64_t n)`
    """
    constants = f"COLUMNS = {columns}, SCALARS = {scalars}, TILE = {tile_numel}"
    return f"{_PRELUDE}static const int64_t {constants};\n\n{tile}{_FRAME}"


def traced_tile(
    program: Callable[..., object], num_scalars: Sequence[int], columns: Sequence[torch.dtype]
) -> str:
    """Trace a function that changes its columns in place by `copy_`, to the C++ of a `tile`.

    program: called with one fp32 tensor [k] for every k of `num_scalars`, then the columns, each
    [n]; it treats every element alike. Raises NotImplementedError naming an unknown operator, or
    another thing that a loop cannot do.
    """
    trace = OperatorTrace(Cpp())
    scalars = [torch.zeros(count) for count in num_scalars]
    examples = [torch.zeros(EXAMPLE, dtype=dtype) for dtype in columns]
    trace.name_inputs(scalars, examples)
    with torch.no_grad(), trace:
        program(*scalars, *examples)
    return _tile(trace)


def _tile(trace: OperatorTrace) -> str:
    lines = ["static void tile(const int64_t* columns, const float* scalars,"]
    lines.append("                 int64_t first, int64_t n) {")
    lines += [f"  const float s{i} = scalars[{i}];" for i in trace.inputs("s")]
    lines += [f"  {line}" for line in trace.once]
    for number, column in enumerate(trace.columns):
        kind = "" if number in trace.stored else "const "
        kind += f"{_TYPES[column.dtype]}*"
        lines.append(f"  {kind} __restrict p{number} = ({kind})columns[{number}] + first;")
    lines.append("#pragma omp simd")
    lines.append("  for (int64_t i = 0; i < n; i++) {")
    lines += [
        f"    const {_TYPES[trace.columns[i].dtype]} x{i} = p{i}[i];" for i in trace.inputs("x")
    ]
    lines += [f"    {line}" for line in trace.each]
    lines += [f"    p{number}[i] = {name};" for number, name in sorted(trace.stored.items())]
    return "\n".join([*lines, "  }", "}", ""])


def widened(dtype: torch.dtype, expression: str) -> str:
    """C++ expression of an element of a float type as fp32."""
    return Cpp().converted(expression, dtype, torch.float32)


def element_type(dtype: torch.dtype) -> str:
    """C++ type that keeps elements of a dtype."""
    return _TYPES[dtype]


class Cpp:
    """Dialect of C++: how operators are written."""

    def functions(self, dtype: torch.dtype) -> Mapping[str, str]:
        return {**_FUNCTIONS, **_OF_FLOATS} if dtype == torch.float32 else _FUNCTIONS

    def computes_in(self, dtype: torch.dtype) -> bool:
        return dtype in _TYPES and dtype not in _HALVES

    def constant(self, value: float, dtype: torch.dtype) -> str:
        if dtype != torch.float32:
            return f"({_TYPES[dtype]}){int(value)}"
        return f"float_of(0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X}u)"

    def converted(self, text: str, dtype: torch.dtype, to: torch.dtype) -> str:
        if dtype == to:
            return text
        if to not in _TYPES:
            raise NotImplementedError(f"the update computes in {to}; expected fp32")
        if dtype in _HALVES:
            return self.converted(f"widen_{_HALVES[dtype]}({text})", torch.float32, to)
        if to in _HALVES:
            return f"round_{_HALVES[to]}({self.converted(text, dtype, torch.float32)})"
        return f"({_TYPES[to]})({text})"

    def bits_as(self, text: str, dtype: torch.dtype, to: torch.dtype) -> str:
        if dtype == torch.float32:
            text = f"bits_of({text})"
        return f"float_of((uint32_t)({text}))" if to == torch.float32 else f"({_TYPES[to]})({text})"

    def declared(self, name: str, dtype: torch.dtype, expression: str) -> str:
        return f"const {_TYPES[dtype]} {name} = {expression};"

    def power(self, base: str, exponent: str) -> None:
        """None: no loop has a power."""
