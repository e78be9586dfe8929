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
from typing import Any

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class RuleKernel:
    """Kernel of one optimizer: its two functions, and its number of state planes (1 to 3)."""

    name: str
    coefficients: Any  # @triton.jit
    formula: Any  # @triton.jit
    num_planes: int
    keeper: int  # of a plane that is never negative, so that masters may be split; -1: none
    kind: str  # in what planes are kept: of `optim.rules.state_layout.KINDS`
    under_root: int  # bit i: 8 bits of plane i are ratios to the root of `keeper`'s
    stored: tuple[torch.dtype, ...]  # of the slabs of planes, and of those of what groups share

    def shared(self, slabs: list[Any]) -> list[Any]:
        """Slab of what the groups of each plane share; where they share nothing, its own."""
        others = iter(slabs[self.num_planes :])
        shares = [
            self.kind == "8bit" and not self.under_root >> i & 1 for i in range(self.num_planes)
        ]
        return [next(others) if has else slabs[i] for i, has in enumerate(shares)]


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


def _stored(num_planes: int, keeper: int, kind: str, under_root: int) -> tuple[torch.dtype, ...]:
    if kind != "8bit":
        return (torch.bfloat16 if kind == "bf16" else torch.float32,) * num_planes
    codes = (torch.uint8 if i == keeper else torch.int8 for i in range(num_planes))
    return (*codes, *[torch.uint8] * (num_planes - under_root.bit_count()))


def add_kernel(
    name: str, source: str, num_planes: int, keeper: int, kind: str = "fp32", under_root: int = 0
) -> str:
    """Key in `KERNELS` of a rule's kernel, which is made if there is none.

    source: Python of `_coefficients` and `_formula` (see `frame.py`), which may use `tl`, and
        `_power` of fp64 by int64.
    num_planes: 1 to 3. keeper: the plane whose sign tells how a master was rounded; -1: none.
    kind: of `optim.rules.state_layout.KINDS`. under_root: see `RuleKernel`.
    """
    text = f"{source}\n# {num_planes} planes, keeper {keeper}, {kind}, {under_root}\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    key = f"{name}-{digest}"
    if key not in KERNELS:
        file = f"<{key}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"__name__": f"{__name__}.{digest}"}
        names |= {"tl": tl, "triton": triton, "_power": _power}
        exec(compile(text, file, "exec"), names)
        KERNELS[key] = RuleKernel(
            name, names["_coefficients"], names["_formula"], num_planes, keeper, kind, under_root,
            _stored(num_planes, keeper, kind, under_root),
        )  # fmt: skip
    return key
