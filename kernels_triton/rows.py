"""Norms and cross-entropy of rows, forward and backward: one pass over a row each way.

    rms     y = x * r * w                  r = 1 / sqrt(mean(x^2) + eps)
    layer   y = (x - m) * r * w + b        r = 1 / sqrt(mean((x - m)^2) + eps), m = mean(x)
    loss    log(sum(exp(x))) - (1 - s) * x[t] - s * mean(x)     s: label smoothing, t: target

Everything is computed in fp32 and rounded once. Sums have one order, whatever the device: a row is
summed by one program, and gradients of weights by a fixed number of programs, each over its rows.
Derivatives are the formulas' own: with h = (x - m) * r and d = g * w,
dx = r * (d - h * mean(d * h) - mean(d)), the last term only of `layer`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import load, store

NORM_WIDTH = 1 << 14  # most elements of a row: it stays in registers
SUMMERS = 128  # programs that sum the gradients of weights
LOSS_BLOCK = 4096  # logits that are read at once


@triton.jit
def _row(
    x, numel, mean, scale, row, i, mask, DTYPE: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """Normalised row h."""
    values = load(x + row * numel, i, mask, DTYPE, True)
    if CENTRED:
        values = tl.where(mask, values - tl.load(mean + row), 0.0)
    return values * tl.load(scale + row)


@triton.jit
def norm_rows_kernel(
    x,  # [rows, numel]; bf16 as int16
    weight,  # [numel]
    bias,  # [numel], where HAS_BIAS
    out,  # [rows, numel]
    mean,  # fp32 [rows], where CENTRED
    scale,  # fp32 [rows]: r
    numel,
    eps,
    offset,  # of the weight: 1 where modules keep it less 1
    DTYPE: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one row in one program."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < numel
    values = load(x + row * numel, i, mask, DTYPE, True)
    if CENTRED:
        middle = tl.sum(values, axis=0) / numel
        tl.store(mean + row, middle)
        values = tl.where(mask, values - middle, 0.0)
    r = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / numel + eps)
    tl.store(scale + row, r)
    y = values * r * (load(weight, i, mask, DTYPE, True) + offset)
    if HAS_BIAS:
        y += load(bias, i, mask, DTYPE, True)
    store(out + row * numel, i, y, mask, DTYPE, True)


@triton.jit
def norm_rows_backward_kernel(
    x,
    weight,
    grad,  # [rows, numel], of the output
    x_grad,  # [rows, numel]
    weight_sums,  # fp32 [programs, numel]
    bias_sums,  # the same, where HAS_BIAS
    mean,
    scale,
    rows,
    numel,
    offset,
    DTYPE: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of every n-th row in one of n programs, and sums of those of weight and bias."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    mask = i < numel
    w = load(weight, i, mask, DTYPE, True) + offset
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    for k in range((rows - program + programs - 1) // programs):
        row = program + k * programs
        h = _row(x, numel, mean, scale, row, i, mask, DTYPE, CENTRED)
        g = load(grad + row * numel, i, mask, DTYPE, True)
        d = tl.where(mask, g * w, 0.0)
        of_weight += g * h
        if HAS_BIAS:
            of_bias += g
        d -= h * (tl.sum(d * h, axis=0) / numel)
        if CENTRED:
            d -= tl.sum(tl.where(mask, g * w, 0.0), axis=0) / numel
        store(x_grad + row * numel, i, d * tl.load(scale + row), mask, DTYPE, True)
    place = program * numel
    tl.store(weight_sums + place + i, of_weight, mask=mask)
    if HAS_BIAS:
        tl.store(bias_sums + place + i, of_bias, mask=mask)


@triton.jit
def loss_rows_kernel(
    logits,  # [rows, numel]; bf16 as int16
    targets,  # int64 [rows]
    losses,  # fp32 [rows]: 0 of an ignored row, NaN of a target that is no column
    sums,  # fp32 [rows]: log(sum(exp(x)))
    numel,
    ignored,
    smoothing,
    DTYPE: tl.constexpr,
    SMOOTHS: tl.constexpr,  # else infinite logits would count
    BLOCK: tl.constexpr,
):
    """Loss of one row in one program, which reads the row in blocks."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    i = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, numel, BLOCK):
        mask = i + start < numel
        values = load(logits + row * numel + start, i, mask, DTYPE, True)
        if SMOOTHS:
            plain += values
        values = tl.where(mask, values, float("-inf"))
        higher = tl.maximum(most, values)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.exp(values - base)
        most = higher
    highest = tl.max(most, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    whole = base + tl.log(tl.sum(total * tl.exp(most - base), axis=0))
    tl.store(sums + row, whole)
    known = (target >= 0) & (target < numel)
    column = tl.where(known, target, 0)
    picked = tl.sum(load(logits + row * numel + column, i, i < 1, DTYPE, True), axis=0)
    loss = whole - (1.0 - smoothing) * picked
    if SMOOTHS:
        loss -= smoothing * (tl.sum(plain, axis=0) / numel)
    loss = tl.where(known, loss, float("nan"))
    tl.store(losses + row, tl.where(target == ignored, 0.0, loss))


@triton.jit
def loss_rows_backward_kernel(
    logits,
    targets,
    sums,
    factors,  # fp32 [rows]: gradient of each row's loss
    grad,  # [rows, numel], of the logits
    numel,
    ignored,
    smoothing,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of one block of one row in one program."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    i = tl.arange(0, BLOCK)
    mask = i + start < numel
    target = tl.load(targets + row)
    values = load(logits + row * numel + start, i, mask, DTYPE, True)
    share = tl.exp(values - tl.load(sums + row)) - smoothing / numel
    share = tl.where(i + start == target, share - (1.0 - smoothing), share)
    share = tl.where(target == ignored, 0.0, share * tl.load(factors + row))
    store(grad + row * numel + start, i, share, mask, DTYPE, True)
