"""bf16 matrix products on a processor that has no instructions for them.

    python -m bench.support.matmul SCRIPT ARGS...    run SCRIPT so

There torch multiplies bf16 matrices element by element, fifty times slower than fp32, and a
benchmark of anything else cannot be made. `use_fp32` computes them in fp32 and rounds once, which
is what such instructions do: every row of a benchmark is given it, and its result says so.
Gradients of weights and inputs come by here too; attention is made of products then.
"""

from __future__ import annotations

import functools
import runpy
import sys
import threading
import warnings
from typing import Any

import torch
from torch import Tensor

MAX_NUMEL = 1 << 21  # of what is held in fp32 of one operand or result: 8 MiB
NATIVE, IN_FP32 = "native", "in fp32, rounded"
_libraries: list[torch.library.Library] = []


@functools.cache
def has_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices itself, or by AVX-512 as quickly as fp32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def products() -> str:
    """How whoever called `use_fp32` makes products of bf16 matrices."""
    return NATIVE if has_bf16() else IN_FP32


@functools.cache
def use_fp32(*, always: bool = False) -> None:
    """Compute this process's bf16 products in fp32, where the processor has none of its own."""
    if has_bf16() and not always:
        return
    torch.backends.cuda.enable_flash_sdp(False)  # the switch of the CPU's attention, too
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)  # it lives as long as the process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        library.impl("mm", _mm, "CPU")
        library.impl("addmm", _addmm, "CPU")
        library.impl("bmm", _bmm, "CPU")
        library.impl("baddbmm", _baddbmm, "CPU")


# The variants with `out` are not replaced: they are what is called below, without the interpreter.


def _mm(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    if a.dtype is not torch.bfloat16:
        return torch.mm(a, b, out=out)
    _product(out, a, b)
    return out


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    if a.dtype is not torch.bfloat16:
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)
    product = out.new_empty(out.shape, dtype=torch.float32)
    _product(product, a, b)
    if alpha != 1:
        product.mul_(alpha)
    if beta != 0:
        product.add_(bias, alpha=beta)
    return out.copy_(product)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(*a.shape[:2], b.shape[2])
    if a.dtype is not torch.bfloat16:
        return torch.bmm(a, b, out=out)
    product = out.new_empty(out.shape, dtype=torch.float32)
    return out.copy_(torch.bmm(a.float(), b.float(), out=product))


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out = a.new_empty(*a.shape[:2], b.shape[2])
    if a.dtype is not torch.bfloat16:
        return torch.baddbmm(bias, a, b, beta=beta, alpha=alpha, out=out)
    product = _bmm(a.float(), b.float()).mul_(alpha)
    return out.copy_(product.add_(bias, alpha=beta) if beta != 0 else product)


def _product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [m, n] of a [m, k] and b [k, n], in pieces that are small in fp32."""
    (m, k), n = a.shape, b.shape[1]
    if max(m * k, k * n, m * n) <= MAX_NUMEL:
        total = _scratch.of(2, m, n)
        out.copy_(torch.mm(_scratch.fp32(0, a), _scratch.fp32(1, b), out=total))
    elif m >= max(k, n):
        _product(out[: m // 2], a[: m // 2], b)
        _product(out[m // 2 :], a[m // 2 :], b)
    elif n >= k:
        _product(out[:, : n // 2], a, b[:, : n // 2])
        _product(out[:, n // 2 :], a, b[:, n // 2 :])
    else:
        total = out.new_zeros(m, n, dtype=torch.float32)
        length = max(1, MAX_NUMEL // max(m, n))
        for first in range(0, k, length):
            part = slice(first, first + length)
            left, right = _scratch.fp32(0, a[:, part]), _scratch.fp32(1, b[part])
            torch.addmm(total, left, right, out=total)
        out.copy_(total)


class _Scratch(threading.local):
    """Three fp32 buffers of a thread: memory that is given back and asked for anew costs more than
    a piece's product does."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0) for _ in range(3)]

    def of(self, which: int, rows: int, columns: int) -> Tensor:
        """Unwritten, [rows, columns]."""
        if self._buffers[which].numel() < rows * columns:
            self._buffers[which] = torch.empty(rows * columns)
        return self._buffers[which][: rows * columns].view(rows, columns)

    def fp32(self, which: int, matrix: Tensor) -> Tensor:
        """The matrix's values, in its order of rows and columns."""
        rows, columns = matrix.shape
        if matrix.stride(0) < matrix.stride(1):
            return self.of(which, columns, rows).t().copy_(matrix)
        return self.of(which, rows, columns).copy_(matrix)


_scratch = _Scratch()


def main() -> None:
    use_fp32()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
