"""Kernels of an update rule, from the source of its two functions.

Bytes per element with a bf16 gradient, an fp32 master and a bf16 copy: 2 + 2 * 4 + 2 + 8 for every
plane, so 28 for Adam, 36 with the largest v so far, 20 for SGD and Lion.

The source has no file: it is kept where Python looks for lines, so that Triton reads it as it reads
files, compiles it once and finds it again in its own cache, which goes by the text.
"""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gemini.kernels_triton.quantised import Codec


@dataclass(frozen=True, slots=True)
class PlaneForm:
    """How the state planes of a rule are kept."""

    kind: str  # name of all below
    num_planes: int  # 1 to 3
    keeper: int  # of a plane that is never negative, so that masters may be split; -1: none
    under_root: int  # bit i: plane i is kept as a ratio to the root of `keeper`'s
    codec: Codec
    stored: tuple[torch.dtype, ...]  # of the slabs of planes, and of those of what groups share
    shared: tuple[int, ...]  # by plane: slab of what its groups share; its own: they share nothing


class RuleKernel(NamedTuple):
    """Kernel of one optimizer: its two functions, and its state."""

    name: str
    coefficients: Any  # @triton.jit
    formula: Any  # @triton.jit
    form: PlaneForm


# The key has a digest of all that a kernel is made of, as rules of one name may differ.
KERNELS: dict[str, RuleKernel] = {}


@triton.jit
def _power(base, exponent):
    """Power base ** exponent for int64 exponents up to 2**40, in fp64, by square and multiply."""
    result = tl.full(exponent.shape, 1.0, tl.float64)
    for _ in range(40):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


def add_kernel(name: str, source: str, form: PlaneForm) -> str:
    """Key in `KERNELS` of a rule's kernel, which is made if there is none.

    source: Python of `_coefficients` and `_formula` (see `frame.py`), which may use `tl`, and
        `_power` of fp64 by int64.
    """
    text = (
        f"{source}\n# {form.num_planes} planes, keeper {form.keeper}, {form.kind}, "
        f"{form.under_root}\n"
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    key = f"{name}-{digest}"
    if key not in KERNELS:
        file = f"<{key}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"__name__": f"{__name__}.{digest}"}
        names |= {"tl": tl, "triton": triton, "_power": _power}
        exec(compile(text, file, "exec"), names)
        KERNELS[key] = RuleKernel(name, names["_coefficients"], names["_formula"], form)
    return key
