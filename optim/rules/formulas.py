"""The one torch reference of every formula, in fp32. Kernels and the CPU path are tested with it.

Each function is pure: fp32 tensors in, new fp32 tensors out, no branch on their values. Scalars
come as fp32 0-d tensors, rounded once from the fp64 values of `AdamCoefficients` and its like, so
that every implementation starts from the same bits.

Stochastic rounding of fp32 to bf16 adds 16 random bits below the bits that are kept, and cuts them
off: the mean of a rounded value is the value, so that updates smaller than half a bf16 step are not
lost. The bits are Philox4x64-10 (Salmon et al. 2011) with key (seed, parameter) and counter
(1 + element // 16, step): they do not depend on where an element lives. `kernels_triton.rounding`
makes the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ELEMENTS_PER_BLOCK = 16  # of noise: four words of 64 bits


class AdamCoefficients(NamedTuple):
    """Scalars of one Adam step, made in fp64 from the hyperparameters and the step count t.

    Kingma & Ba 2015, algorithm 1 and section 2; decoupled decay: Loshchilov & Hutter 2019,
    algorithm 2. Names as in torch.optim.AdamW's single-tensor form.
    """

    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float  # lr / (1 - beta1^t)
    inv_sqrt_bias_correction2: float  # 1 / sqrt(1 - beta2^t)
    eps: float
    decay: float  # 1 - lr * weight_decay where decoupled, else 1
    l2: float  # weight_decay where not decoupled, else 0
    sign: float  # of the gradient: -1 maximizes
    takes_maximum: float  # 1 where v is replaced by its largest value so far, else 0


def adam_coefficients(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    step: int,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
) -> AdamCoefficients:
    """`step` counts from 1."""
    beta1, beta2 = betas
    bias_correction1 = 1.0 - beta1**step if bias_correction else 1.0
    bias_correction2 = 1.0 - beta2**step if bias_correction else 1.0
    return AdamCoefficients(
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        step_size=lr / bias_correction1,
        inv_sqrt_bias_correction2=bias_correction2**-0.5,
        eps=eps,
        decay=1.0 - lr * weight_decay if adamw_mode else 1.0,
        l2=0.0 if adamw_mode else weight_decay,
        sign=-1.0 if maximize else 1.0,
        takes_maximum=float(amsgrad),
    )


class AdamResult(NamedTuple):
    """What an update of Adam makes, all [n]."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def adam(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefficients: Tensor
) -> AdamResult:
    """One step of Adam or AdamW. `coefficients` is fp32 [10] in the order of AdamCoefficients.

    p <- p * decay                     g <- sign * g + l2 * p
    m <- m + (1 - beta1) * (g - m)
    v <- v * beta2 + (1 - beta2) * g * g
    p <- p - step_size * m / (sqrt(v) / sqrt(bias_correction2) + eps)
    """
    param, exp_avg, exp_avg_sq = _moments(param, grad, exp_avg, exp_avg_sq, coefficients)
    return AdamResult(_stepped(param, exp_avg, exp_avg_sq, coefficients), exp_avg, exp_avg_sq)


class AmsgradResult(NamedTuple):
    """What an update of Amsgrad makes, all [n]."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor


def amsgrad(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor,
    coefficients: Tensor,
) -> AmsgradResult:
    """`adam` with the largest v so far in place of v (Reddi et al. 2018, algorithm 2).

    As in torch the maximum is of v before its bias is corrected. Where `takes_maximum` is 0, the
    step is that of `adam` and the maximum stays as it is.
    """
    takes_maximum = coefficients[9] != 0
    param, exp_avg, exp_avg_sq = _moments(param, grad, exp_avg, exp_avg_sq, coefficients)
    maximum = torch.maximum(max_exp_avg_sq, exp_avg_sq)
    second = torch.where(takes_maximum, maximum, exp_avg_sq)
    return AmsgradResult(
        _stepped(param, exp_avg, second, coefficients),
        exp_avg,
        exp_avg_sq,
        torch.where(takes_maximum, maximum, max_exp_avg_sq),
    )


def _moments(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefficients: Tensor
) -> AdamResult:
    """Decayed parameter, new m and v."""
    w1, beta2, w2, _, _, _, decay, l2, sign, _ = coefficients.unbind()
    grad = sign * grad + l2 * param
    exp_avg = exp_avg + w1 * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + w2 * grad * grad
    return AdamResult(param * decay, exp_avg, exp_avg_sq)


def _stepped(param: Tensor, exp_avg: Tensor, second: Tensor, coefficients: Tensor) -> Tensor:
    step_size, inv_sqrt_bc2, eps = coefficients[3], coefficients[4], coefficients[5]
    denominator = second.sqrt() * inv_sqrt_bc2 + eps
    return param - step_size * (exp_avg / denominator)


class SGDCoefficients(NamedTuple):
    """Scalars of one SGD step, made from the hyperparameters and the step count t."""

    lr: float
    momentum: float
    weight_decay: float
    intake: float  # of the gradient into the buffer: 1 - dampening, but 1 in the first step
    sign: float  # of the gradient: -1 maximizes
    nesterov: float  # 1 where the step looks ahead, else 0


def sgd_coefficients(
    lr: float,
    momentum: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    step: int,
) -> SGDCoefficients:
    """`step` counts from 1."""
    return SGDCoefficients(
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        intake=1.0 if step == 1 else 1.0 - dampening,
        sign=-1.0 if maximize else 1.0,
        nesterov=float(nesterov),
    )


class SGDResult(NamedTuple):
    """What an update of SGD makes, all [n]."""

    param: Tensor
    momentum_buffer: Tensor


def sgd(param: Tensor, grad: Tensor, momentum_buffer: Tensor, coefficients: Tensor) -> SGDResult:
    """One step of SGD. `coefficients` is fp32 [6] in the order of SGDCoefficients.

        g <- sign * g + weight_decay * p;    b <- momentum * b + intake * g
        p <- p - lr * b, or with Nesterov's momentum p - lr * (g + momentum * b)

    Polyak 1964, Sutskever et al. 2013, in the form of torch.optim.SGD. The buffer starts at zero,
    which makes the first step that of torch, whose buffer starts as g. Where momentum is 0 the step
    is that of g, and the buffer stays as it is.
    """
    lr, momentum, weight_decay, intake, sign, nesterov = coefficients.unbind()
    grad = sign * grad + weight_decay * param
    moved = momentum * momentum_buffer + intake * grad
    update = torch.where(nesterov != 0, grad + momentum * moved, moved)
    update = torch.where(momentum != 0, update, grad)
    moved = torch.where(momentum != 0, moved, momentum_buffer)
    return SGDResult(param - lr * update, moved)


class LionResult(NamedTuple):
    """What an update of Lion makes, all [n]."""

    param: Tensor
    exp_avg: Tensor


def lion(param: Tensor, grad: Tensor, exp_avg: Tensor, coefficients: Tensor) -> LionResult:
    """One step of Lion (Chen et al. 2023, algorithm 2). `coefficients` is fp32 [4]:
    1 - beta1, 1 - beta2, lr, 1 - lr * weight_decay.

        p <- p * (1 - lr * weight_decay)
        p <- p - lr * sign(m + (1 - beta1) * (g - m));    m <- m + (1 - beta2) * (g - m)
    """
    w1, w2, lr, decay = coefficients.unbind()
    param = param * decay
    update = exp_avg + w1 * (grad - exp_avg)
    param = param - lr * update.sign()
    return LionResult(param, exp_avg + w2 * (grad - exp_avg))


def noise(seed: int, param: int, step: int, first: int, numel: int) -> Tensor:
    """int32 [numel] in [0, 2**16) for elements [first, first + numel) of a parameter."""
    skip = first % ELEMENTS_PER_BLOCK
    generator = np.random.Philox(
        key=np.array([seed, param], dtype=np.uint64),
        # numpy counts up before it makes a block
        counter=np.array([first // ELEMENTS_PER_BLOCK, step, 0, 0], dtype=np.uint64),
    )
    words: np.ndarray = generator.random_raw(-(-(skip + numel) // 4))
    halves = torch.from_numpy(words.view(np.int16))[skip : skip + numel]
    return halves.to(torch.int32).bitwise_and_(0xFFFF)


def round_stochastic(values: Tensor, random: Tensor, out: Tensor) -> None:
    """fp32 [n] to bf16 [n] `out`, up or down by `random` (from `noise`); NaN stays NaN."""
    bits = random.add_(values.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16)
    out.copy_(bits.view(torch.bfloat16))
    out.masked_fill_(values.isnan(), torch.nan)
