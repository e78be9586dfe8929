"""The update's formulas, two functions an optimizer; those of `optim.rules.formulas`, in the same
order of operations.

Bytes per element with a bf16 gradient, an fp32 master and a bf16 copy: 2 + 3 * 8 + 2 = 28 for Adam,
with the largest v so far 36; 2 + 2 * 8 + 2 = 20 for SGD and Lion.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .frame import RuleKernel

# -- Adam, AdamW and AMSGrad. Hyperparameter row: lr, beta1, beta2, eps, weight_decay, decoupled,
# bias_correction, maximize, amsgrad


@triton.jit
def _power(base, exponent):
    """base ** exponent for int64 exponents up to 2**40, in fp64, by square and multiply."""
    result = tl.full(exponent.shape, 1.0, tl.float64)
    for _ in range(40):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def _adam_coefficients(hyper, inside, t):
    lr = tl.load(hyper + 0, mask=inside, other=0.0)
    beta1 = tl.load(hyper + 1, mask=inside, other=0.0)
    beta2 = tl.load(hyper + 2, mask=inside, other=0.0)
    eps = tl.load(hyper + 3, mask=inside, other=0.0)
    weight_decay = tl.load(hyper + 4, mask=inside, other=0.0)
    decoupled = tl.load(hyper + 5, mask=inside, other=0.0) != 0.0
    corrects = tl.load(hyper + 6, mask=inside, other=0.0) != 0.0
    maximizes = tl.load(hyper + 7, mask=inside, other=0.0) != 0.0
    takes_maximum = tl.load(hyper + 8, mask=inside, other=0.0)
    correction1 = tl.where(corrects, 1.0 - _power(beta1, t), 1.0)
    correction2 = tl.where(corrects, 1.0 - _power(beta2, t), 1.0)
    return (
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / correction1,
        1.0 / tl.sqrt(correction2),
        eps,
        tl.where(decoupled, 1.0 - lr * weight_decay, 1.0),
        tl.where(decoupled, 0.0, weight_decay),
        tl.where(maximizes, -1.0, 1.0),
        takes_maximum,
    )


@triton.jit
def _adam_moments(param, grad, exp_avg, exp_avg_sq, row):
    w1 = tl.load(row + 0)
    beta2 = tl.load(row + 1)
    w2 = tl.load(row + 2)
    decay = tl.load(row + 6)
    l2 = tl.load(row + 7)
    sign = tl.load(row + 8)
    grad = sign * grad + l2 * param
    param = param * decay
    exp_avg = exp_avg + w1 * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + w2 * grad * grad
    return param, exp_avg, exp_avg_sq


@triton.jit
def _adam_stepped(param, exp_avg, second, row):
    step_size = tl.load(row + 3)
    inv_sqrt_bc2 = tl.load(row + 4)
    eps = tl.load(row + 5)
    denominator = tl.sqrt_rn(second) * inv_sqrt_bc2 + eps
    return param - step_size * tl.div_rn(exp_avg, denominator)


@triton.jit
def _adam_formula(param, grad, exp_avg, exp_avg_sq, unused, row):
    param, exp_avg, exp_avg_sq = _adam_moments(param, grad, exp_avg, exp_avg_sq, row)
    return _adam_stepped(param, exp_avg, exp_avg_sq, row), exp_avg, exp_avg_sq, unused


@triton.jit
def _amsgrad_formula(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, row):
    takes_maximum = tl.load(row + 9) != 0.0
    param, exp_avg, exp_avg_sq = _adam_moments(param, grad, exp_avg, exp_avg_sq, row)
    maximum = tl.maximum(max_exp_avg_sq, exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
    second = tl.where(takes_maximum, maximum, exp_avg_sq)
    maximum = tl.where(takes_maximum, maximum, max_exp_avg_sq)
    return _adam_stepped(param, exp_avg, second, row), exp_avg, exp_avg_sq, maximum


# -- SGD with momentum, dampening and Nesterov's momentum. Hyperparameter row: lr, momentum,
# weight_decay, dampening, nesterov, maximize


@triton.jit
def _sgd_coefficients(hyper, inside, t):
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
def _sgd_formula(param, grad, buffer, unused1, unused2, row):
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


# -- Lion. Hyperparameter row: lr, beta1, beta2, weight_decay


@triton.jit
def _lion_coefficients(hyper, inside, t):
    lr = tl.load(hyper + 0, mask=inside, other=0.0)
    beta1 = tl.load(hyper + 1, mask=inside, other=0.0)
    beta2 = tl.load(hyper + 2, mask=inside, other=0.0)
    weight_decay = tl.load(hyper + 3, mask=inside, other=0.0)
    zero = lr * 0.0
    decay = 1.0 - lr * weight_decay
    return 1.0 - beta1, 1.0 - beta2, lr, decay, zero, zero, zero, zero, zero, zero


@triton.jit
def _lion_formula(param, grad, exp_avg, unused1, unused2, row):
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


ADAM = RuleKernel("adam", _adam_coefficients, _adam_formula, num_planes=2, keeps_ties=True)
AMSGRAD = RuleKernel("amsgrad", _adam_coefficients, _amsgrad_formula, num_planes=3, keeps_ties=True)
SGD = RuleKernel("sgd", _sgd_coefficients, _sgd_formula, num_planes=1)
LION = RuleKernel("lion", _lion_coefficients, _lion_formula, num_planes=1)
