"""The one torch reference of every formula, in fp32. Kernels and the CPU path are tested with it.

Each function is pure: fp32 tensors in, new fp32 tensors out, no branch on their values. Scalars
come as fp32 0-d tensors, rounded once from the fp64 values of `AdamCoefficients` and its like, so
that every implementation starts from the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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


def adam_coefficients(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    step: int,
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
    )


class AdamResult(NamedTuple):
    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def adam(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefficients: Tensor
) -> AdamResult:
    """One step of Adam or AdamW. `coefficients` is fp32 [8] in the order of AdamCoefficients.

    p <- p * decay                     g <- g + l2 * p
    m <- m + (1 - beta1) * (g - m)
    v <- v * beta2 + (1 - beta2) * g * g
    p <- p - step_size * m / (sqrt(v) / sqrt(bias_correction2) + eps)
    """
    w1, beta2, w2, step_size, inv_sqrt_bc2, eps, decay, l2 = coefficients.unbind()
    grad = grad + l2 * param
    param = param * decay
    exp_avg = exp_avg + w1 * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + w2 * grad * grad
    denominator = exp_avg_sq.sqrt() * inv_sqrt_bc2 + eps
    param = param - step_size * (exp_avg / denominator)
    return AdamResult(param, exp_avg, exp_avg_sq)


class SGDResult(NamedTuple):
    param: Tensor
    momentum_buffer: Tensor


def sgd(param: Tensor, grad: Tensor, momentum_buffer: Tensor, coefficients: Tensor) -> SGDResult:
    """One step of SGD with momentum. `coefficients` is fp32 [3]: lr, momentum, weight_decay.

        g <- g + weight_decay * p;    b <- momentum * b + g;    p <- p - lr * b

    Polyak 1964 in the form of torch.optim.SGD. The buffer starts at zero, which makes the first
    step that of torch, whose buffer starts as g.
    """
    lr, momentum, weight_decay = coefficients.unbind()
    grad = grad + weight_decay * param
    momentum_buffer = momentum * momentum_buffer + grad
    return SGDResult(param - lr * momentum_buffer, momentum_buffer)


class LionResult(NamedTuple):
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
