"""Lion; the formula is `optim.rules.formulas.lion`, in the same order of operations.

Bytes per element with a bf16 gradient, an fp32 master and a bf16 copy: 2 + 2 * 8 + 2 = 20.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .frame import RuleKernel

# hyperparameter row: lr, beta1, beta2, weight_decay


@triton.jit
def _coefficients(hyper, inside, t):
    lr = tl.load(hyper + 0, mask=inside, other=0.0)
    beta1 = tl.load(hyper + 1, mask=inside, other=0.0)
    beta2 = tl.load(hyper + 2, mask=inside, other=0.0)
    weight_decay = tl.load(hyper + 3, mask=inside, other=0.0)
    zero = lr * 0.0
    decay = 1.0 - lr * weight_decay
    return 1.0 - beta1, 1.0 - beta2, lr, decay, zero, zero, zero, zero, zero, zero


@triton.jit
def _formula(param, grad, exp_avg, unused1, unused2, row):
    w1 = tl.load(row + 0)
    w2 = tl.load(row + 1)
    lr = tl.load(row + 2)
    decay = tl.load(row + 3)
    param = param * decay
    update = exp_avg + w1 * (grad - exp_avg)
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, update))
    param = param - lr * sign
    exp_avg = exp_avg + w2 * (grad - exp_avg)
    return param, exp_avg, unused1, unused2


LION = RuleKernel("lion", _coefficients, _formula, num_planes=1)
