"""SGD with momentum, dampening and Nesterov's momentum; the formula is `formulas.sgd`, in the
same order of operations.

Bytes per element with a bf16 gradient, an fp32 master and a bf16 copy: 2 + 2 * 8 + 2 = 20.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .frame import RuleKernel

# hyperparameter row: lr, momentum, weight_decay, dampening, nesterov, maximize


@triton.jit
def _coefficients(hyper, inside, t):
    lr = tl.load(hyper + 0, mask=inside, other=0.0)
    momentum = tl.load(hyper + 1, mask=inside, other=0.0)
    weight_decay = tl.load(hyper + 2, mask=inside, other=0.0)
    dampening = tl.load(hyper + 3, mask=inside, other=0.0)
    nesterov = tl.load(hyper + 4, mask=inside, other=0.0)
    maximizes = tl.load(hyper + 5, mask=inside, other=0.0) != 0.0
    intake = tl.where(t == 1, 1.0, 1.0 - dampening)
    sign = tl.where(maximizes, -1.0, 1.0)
    zero = lr * 0.0
    return lr, momentum, weight_decay, intake, sign, nesterov, zero, zero, zero, zero


@triton.jit
def _formula(param, grad, buffer, unused1, unused2, row):
    lr = tl.load(row + 0)
    momentum = tl.load(row + 1)
    weight_decay = tl.load(row + 2)
    intake = tl.load(row + 3)
    sign = tl.load(row + 4)
    nesterov = tl.load(row + 5) != 0.0
    grad = sign * grad + weight_decay * param
    moved = momentum * buffer + intake * grad
    update = tl.where(nesterov, grad + momentum * moved, moved)
    update = tl.where(momentum != 0.0, update, grad)
    moved = tl.where(momentum != 0.0, moved, buffer)
    return param - lr * update, moved, unused1, unused2


SGD = RuleKernel("sgd", _coefficients, _formula, num_planes=1)
