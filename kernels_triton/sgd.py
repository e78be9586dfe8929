"""SGD with momentum; the formula is `optim.formulas.sgd`, in the same order of operations.

Bytes per element with a bf16 gradient, an fp32 master and a bf16 copy: 2 + 2 * 8 + 2 = 20.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .frame import RuleKernel

# hyperparameter row: lr, momentum, weight_decay


@triton.jit
def _coefficients(hyper, inside, t):
    lr = tl.load(hyper + 0, mask=inside, other=0.0)
    momentum = tl.load(hyper + 1, mask=inside, other=0.0)
    weight_decay = tl.load(hyper + 2, mask=inside, other=0.0)
    zero = lr * 0.0
    return lr, momentum, weight_decay, zero, zero, zero, zero, zero


@triton.jit
def _formula(param, grad, buffer, unused, row):
    lr = tl.load(row + 0)
    momentum = tl.load(row + 1)
    weight_decay = tl.load(row + 2)
    grad = grad + weight_decay * param
    buffer = momentum * buffer + grad
    param = param - lr * buffer
    return param, buffer, unused


SGD = RuleKernel("sgd", _coefficients, _formula, num_planes=1)
