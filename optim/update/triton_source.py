"""Source of two Triton functions from a rule's two functions, traced operator by operator.

`_coefficients` computes in fp64, on vectors of counters, `_formula` in fp32, on tiles; the frame
that calls them is `kernels_triton.update.frame`. The same rule gives the same text, by which Triton
knows what it has compiled. Square roots and quotients of fp32 are correctly rounded; nothing is
contracted, as kernels are launched without fusion.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gemini.optim.rules.rule import UpdateRule

from .tracing import EXAMPLE, OperatorTrace

MOST_PLANES, MOST_NUMBERS = 3, 10  # of a kernel: planes, and of both kinds of numbers
_STEP = "x0"  # the step count as fp64, of coefficients
_TYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.bool: "tl.int1",
}
_ANY = {
    "where": "tl.where({0}, {1}, {2})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
    "abs": "tl.abs({0})",
    "at_least": "tl.where({0} < {1}, {1}, {0})",  # NaN stays
    "at_most": "tl.where({0} > {1}, {1}, {0})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}
_FUNCTIONS = {
    torch.float32: {
        **_ANY, "sqrt": "tl.sqrt_rn({0})", "div": "tl.div_rn({0}, {1})",
        "reciprocal": "tl.div_rn({0} * 0.0 + 1.0, {0})",
    },
    torch.float64: {
        **_ANY, "sqrt": "tl.sqrt({0})", "div": "{0} / {1}", "reciprocal": "1.0 / {0}",
        "exp": "tl.exp({0})", "log": "tl.log({0})",
    },
}  # fmt: skip


def kernel_source(rule: UpdateRule) -> str:
    """Python source of the functions `_coefficients` and `_formula`, which use `tl` and `_power`.

    Raises NotImplementedError, with the operator's name, for an operator that no kernel has.
    """
    planes, row = len(rule.layout.planes), rule.hyper(rule.options)
    for found, most, what in (
        (planes, MOST_PLANES, "planes"),
        (len(row), MOST_NUMBERS, "hyperparameters"),
        (len(rule.coefficient_names), MOST_NUMBERS, "coefficients"),
    ):
        if found > most:
            raise NotImplementedError(f"{rule.name} has {found} {what}; a kernel has {most}")
    return f"{_coefficients(rule)}\n\n{_formula(rule, planes)}"


def _coefficients(rule: UpdateRule) -> str:
    trace, hyper = OperatorTrace(Triton()), rule.hyper(rule.options)
    # Counts are fp64 from the start: torch would make fp32 of an integer and a number.
    row, step = torch.ones(len(hyper), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    trace.name_inputs([row], [step])
    with trace:
        found = rule.coefficients(type(hyper)(*row.unbind()), step)
        results = [_result(trace, value) for value in found.values()]
    results += [Triton().constant(0.0, torch.float64)] * (MOST_NUMBERS - len(results))
    lines = ["@triton.jit", "def _coefficients(hyper, inside, count):"]
    lines += [f"    {_STEP} = count.to(tl.float64)"]
    lines += [f"    s{i} = tl.load(hyper + {i}, mask=inside, other=0.0)" for i in trace.inputs("s")]
    lines += [f"    {line}" for line in trace.once]
    return "\n".join([*lines, f"    return {', '.join(results)}", ""])


def _result(trace: OperatorTrace, value: Any) -> str:
    """Expression of a coefficient; flags and counts as fp64."""
    if not isinstance(value, Tensor):
        return Triton().constant(float(value), torch.float64)
    return trace.read(value if value.dtype == torch.float64 else value.double())


def _formula(rule: UpdateRule, num_planes: int) -> str:
    trace = OperatorTrace(Triton())
    values = torch.ones(len(rule.coefficient_names))
    columns = [torch.ones(EXAMPLE) for _ in range(2 + num_planes)]
    trace.name_inputs([values], columns)
    with trace:
        new = rule.updated(columns[0], columns[1], columns[2:], values)
        results = [trace.read(tensor) for tensor in new]
    unused = [f"x{i}" for i in range(2 + num_planes, 2 + MOST_PLANES)]
    names = [f"x{i}" for i in range(2 + num_planes)]
    lines = ["@triton.jit", f"def _formula({', '.join([*names, *unused])}, row):"]
    lines += [f"    s{i} = tl.load(row + {i})" for i in trace.inputs("s")]
    lines += [f"    {line}" for line in (*trace.once, *trace.each)]
    return "\n".join([*lines, f"    return {', '.join([*results, *unused])}", ""])


class Triton:
    """Dialect of Triton: how operators are written."""

    def functions(self, dtype: torch.dtype) -> Mapping[str, str]:
        return _FUNCTIONS.get(dtype, _ANY)

    def computes_in(self, dtype: torch.dtype) -> bool:
        return dtype in _TYPES

    def constant(self, value: float, dtype: torch.dtype) -> str:
        if not dtype.is_floating_point:
            return repr(int(value))
        if dtype == torch.float32:
            value = struct.unpack("<f", struct.pack("<f", value))[0]
        text = repr(float(value)) if math.isfinite(value) else f'float("{value}")'
        # Triton takes a bare number for fp32, so another dtype is spelled out.
        return text if dtype == torch.float32 else f"tl.full(count.shape, {text}, {_TYPES[dtype]})"

    def converted(self, text: str, dtype: torch.dtype, to: torch.dtype) -> str:
        if to not in _TYPES or dtype not in _TYPES:
            raise NotImplementedError(f"the update computes in {to}; expected fp32")
        return f"({text} != 0)" if to == torch.bool else f"{text}.to({_TYPES[to]})"

    def bits_as(self, text: str, dtype: torch.dtype, to: torch.dtype) -> str:
        return f"{text}.to({_TYPES[to]}, bitcast=True)"

    def declared(self, name: str, dtype: torch.dtype, expression: str) -> str:
        return f"{name} = {expression}"

    def power(self, base: str, exponent: str) -> str | None:
        if exponent == _STEP:
            return f"_power({base}, count)"
        known = {"0.5": "tl.sqrt({0})", "-0.5": "1.0 / tl.sqrt({0})"}
        return known[exponent].format(base) if exponent in known else None
