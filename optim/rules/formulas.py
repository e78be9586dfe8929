"""The update formulas, each written once: eager updates, compiled loops and kernels follow.

A rule has two pure functions (`optim.rules.rule.UpdateRule`): `X_coefficients(h, t)`, in fp64, of
named hyperparameters and the step count from 1, and `X(param, grad, c, *, planes)`, in fp32 and
without a branch on values. Coefficients are rounded once to fp32, so that every implementation
starts from the same bits.

Stochastic rounding of fp32 to bf16 adds 16 random bits below the bits that are kept, and cuts them
off: the mean of a rounded value is the value, so that updates smaller than half a bf16 step are not
lost. The bits are Philox4x64-10 (Salmon et al. 2011) with key (seed, parameter) and counter
(1 + element // 16, step): they do not depend on where an element lives. `kernels_triton.rounding`
makes the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, where

from .scalars import at_least, at_most, falling_product, log, power, power_sum, sqrt
from .scalars import where as choose

_TINY = 1e-300
ELEMENTS_PER_BLOCK = 16  # of noise: four words of 64 bits
Planes = dict[str, Tensor]
Updated = tuple[Tensor, Planes]


def _sign(h: Any) -> Any:
    return choose(h.maximize, -1.0, 1.0)


# -- Adam, AdamW (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2) and AMSGrad
# (Reddi et al. 2018, algorithm 2)


def adam_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of Adam. In the decoupled mode the parameter decays, else the gradient has an L2
    term."""
    corrected = choose(h.bias_correction, 1.0 - h.beta2**t, 1.0)
    return {
        "w1": 1.0 - h.beta1,
        "beta2": h.beta2,
        "w2": 1.0 - h.beta2,
        "step_size": h.lr / choose(h.bias_correction, 1.0 - h.beta1**t, 1.0),
        "inv_sqrt_correction2": corrected**-0.5,
        "eps": h.eps,
        "decay": choose(h.adamw_mode, 1.0 - h.lr * h.weight_decay, 1.0),
        "l2": choose(h.adamw_mode, 0.0, h.weight_decay),
        "sign": _sign(h),
        "takes_maximum": h.amsgrad,
    }


def adam_8bit_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of Adam with moments of 8 bits. `inverse_bound`: 1 over the most that
    |m| / sqrt(v) comes to in t steps of exact moments, whatever the gradients are.

    By Cauchy and Schwarz that is the root of (1 - beta1)^2 / (1 - beta2) times the sum of q^i,
    i < t, with q = beta1^2 / beta2.
    """
    ratio = at_least(h.beta1 * h.beta1, _TINY) / at_least(h.beta2, _TINY)
    below = choose(ratio > 1.0, 1.0 / ratio, ratio)
    is_flat = 1.0 - below < 1e-9
    inverse_sum = choose(is_flat, 1.0 / t, (1.0 - below) / choose(is_flat, 1.0, 1.0 - below**t))
    inverse_sum = inverse_sum * choose(ratio > 1.0, below**t / below, 1.0)
    found = adam_coefficients(h, t)
    del found["takes_maximum"]  # no form of its plane has 8 bits
    return {**found, "inverse_bound": sqrt(inverse_sum * (1.0 - h.beta2)) / (1.0 - h.beta1)}


def adam_8bit(
    param: Tensor,
    grad: Tensor,
    c: Any,
    *,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
) -> Updated:
    """v <- at least (m * inverse_bound)^2, which codes may have rounded it below; then Adam."""
    assert max_exp_avg_sq is None
    exp_avg_sq = torch.maximum(exp_avg_sq, least_square(exp_avg, c.inverse_bound))
    return adam(param, grad, c, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def least_square(exp_avg: Tensor, inverse_bound: Any) -> Tensor:
    """Second moments that exact ones are not below."""
    root: Tensor = exp_avg * inverse_bound
    return root * root


def adam(
    param: Tensor,
    grad: Tensor,
    c: Any,
    *,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
) -> Updated:
    """p <- p * decay                     g <- sign * g + l2 * p
    m <- m + (1 - beta1) * (g - m)
    v <- v * beta2 + (1 - beta2) * g * g
    p <- p - step_size * m / (sqrt(v) / sqrt(bias_correction2) + eps)

    With `max_exp_avg_sq` the largest v so far takes the place of v where `takes_maximum` is not 0;
    as in torch it is of v before its bias is corrected. Elsewhere it stays as it is.
    """
    grad = c.sign * grad + c.l2 * param
    param = param * c.decay
    exp_avg = exp_avg + c.w1 * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * c.beta2 + c.w2 * grad * grad
    planes, second = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, exp_avg_sq
    if max_exp_avg_sq is not None:
        largest = torch.maximum(max_exp_avg_sq, exp_avg_sq)
        second = where(c.takes_maximum != 0, largest, exp_avg_sq)
        planes["max_exp_avg_sq"] = where(c.takes_maximum != 0, largest, max_exp_avg_sq)
    denominator = second.sqrt() * c.inv_sqrt_correction2 + c.eps
    return param - c.step_size * (exp_avg / denominator), planes


# -- SGD with momentum (Polyak 1964; Sutskever et al. 2013), in torch's form


def sgd_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of SGD. The first gradient goes into the buffer whole, whatever the dampening:
    the buffer starts at zero."""
    return {
        "lr": h.lr,
        "momentum": h.momentum,
        "weight_decay": h.weight_decay,
        "intake": choose(t == 1, 1.0, 1.0 - h.dampening),
        "sign": _sign(h),
        "nesterov": h.nesterov,
    }


def sgd(param: Tensor, grad: Tensor, c: Any, *, momentum_buffer: Tensor) -> Updated:
    """g <- sign * g + weight_decay * p;    b <- momentum * b + intake * g
    p <- p - lr * b, or with Nesterov's momentum p - lr * (g + momentum * b)

    Where momentum is 0 the step is that of g, and the buffer stays as it is.
    """
    grad = c.sign * grad + c.weight_decay * param
    moved = c.momentum * momentum_buffer + c.intake * grad
    update = where(c.nesterov != 0, grad + c.momentum * moved, moved)
    update = where(c.momentum != 0, update, grad)
    buffer = where(c.momentum != 0, moved, momentum_buffer)
    return param - c.lr * update, {"momentum_buffer": buffer}


# -- Lion (Chen et al. 2023, algorithm 2)


def lion_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of Lion. Weight decay is decoupled, times the rate."""
    decay = 1.0 - h.lr * h.weight_decay
    return {"w1": 1.0 - h.beta1, "w2": 1.0 - h.beta2, "lr": h.lr, "decay": decay}


def lion(param: Tensor, grad: Tensor, c: Any, *, exp_avg: Tensor) -> Updated:
    """p <- p * decay - lr * sign(m + (1 - beta1) * (g - m));    m <- m + (1 - beta2) * (g - m)"""
    update = exp_avg + c.w1 * (grad - exp_avg)
    new = param * c.decay - c.lr * update.sign()
    return new, {"exp_avg": exp_avg + c.w2 * (grad - exp_avg)}


# -- Adagrad (Duchi et al. 2011), as in torch


def adagrad_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of Adagrad. The plane begins at zeros, and so with its initial value in the
    first step."""
    return {
        "rate": h.lr / (1.0 + (t - 1) * h.lr_decay),
        "weight_decay": h.weight_decay,
        "begins": choose(t == 1, 1.0, 0.0),
        "initial": h.initial_accumulator_value,
        "eps": h.eps,
        "sign": _sign(h),
    }


def adagrad(param: Tensor, grad: Tensor, c: Any, *, sum: Tensor) -> Updated:
    """g <- sign * g + weight_decay * p;    s <- s + g * g;    p <- p - rate * g / (sqrt(s) + eps)

    rate = lr / (1 + (t - 1) * lr_decay)
    """
    grad = c.sign * grad + c.weight_decay * param
    sum = where(c.begins != 0, c.initial, sum) + grad * grad
    return param - c.rate * (grad / (sum.sqrt() + c.eps)), {"sum": sum}


# -- RMSprop (Hinton 2012; centered: Graves 2013), as in torch


def rmsprop_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of RMSprop. A group without momentum, or not centered, leaves the planes of
    others alone."""
    return {
        "lr": h.lr,
        "alpha": h.alpha,
        "intake": 1.0 - h.alpha,
        "eps": h.eps,
        "weight_decay": h.weight_decay,
        "momentum": h.momentum,
        "centered": h.centered,
        "sign": _sign(h),
    }


def rmsprop(
    param: Tensor,
    grad: Tensor,
    c: Any,
    *,
    square_avg: Tensor,
    grad_avg: Tensor | None = None,
    momentum_buffer: Tensor | None = None,
) -> Updated:
    """s <- alpha * s + (1 - alpha) * g * g;    [a <- a + (1 - alpha) * (g - a); s - a * a for s]
    u <- g / (sqrt(s) + eps);    [b <- momentum * b + u for u];    p <- p - lr * u
    """
    grad = c.sign * grad + c.weight_decay * param
    second = c.alpha * square_avg + c.intake * grad * grad
    planes = {"square_avg": second}
    if grad_avg is not None:
        mean = grad_avg + c.intake * (grad - grad_avg)
        planes["grad_avg"] = where(c.centered != 0, mean, grad_avg)
        # a variance is not negative, but by rounding
        second = where(c.centered != 0, (second - mean * mean).clamp(min=0.0), second)
    update = grad / (second.sqrt() + c.eps)
    if momentum_buffer is not None:
        moved = c.momentum * momentum_buffer + update
        update = where(c.momentum != 0, moved, update)
        planes["momentum_buffer"] = where(c.momentum != 0, moved, momentum_buffer)
    return param - c.lr * update, planes


# -- Adamax (Kingma & Ba 2015, algorithm 2), as in torch: eps is added before the maximum


def adamax_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of Adamax. Only the first moment is biased."""
    return {
        "w1": 1.0 - h.beta1,
        "beta2": h.beta2,
        "step_size": h.lr / (1.0 - h.beta1**t),
        "eps": h.eps,
        "weight_decay": h.weight_decay,
        "sign": _sign(h),
    }


def adamax(param: Tensor, grad: Tensor, c: Any, *, exp_avg: Tensor, exp_inf: Tensor) -> Updated:
    """m <- m + (1 - beta1) * (g - m);    u <- max(beta2 * u, |g| + eps)
    p <- p - lr / (1 - beta1**t) * m / u
    """
    grad = c.sign * grad + c.weight_decay * param
    exp_avg = exp_avg + c.w1 * (grad - exp_avg)
    exp_inf = torch.maximum(exp_inf * c.beta2, grad.abs() + c.eps)
    return param - c.step_size * (exp_avg / exp_inf), {"exp_avg": exp_avg, "exp_inf": exp_inf}


# -- NAdam (Dozat 2016), as in torch


def nadam_product(h: Any, t: Any) -> Any:
    """Product mu_1 ... mu_t: a function of the count, and so exact where training resumes. A
    schedule of beta1 counts as if it always had been this one."""
    return h.beta1**t * falling_product(h.momentum_decay * log(0.96), t)


def nadam_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of NAdam. Momentum grows with the count."""
    product = nadam_product(h, t)
    mu = h.beta1 * (1.0 - 0.5 * power(0.96, t * h.momentum_decay))
    mu_next = h.beta1 * (1.0 - 0.5 * power(0.96, (t + 1) * h.momentum_decay))
    return {
        "w1": 1.0 - h.beta1,
        "beta2": h.beta2,
        "w2": 1.0 - h.beta2,
        "of_grad": h.lr * (1.0 - mu) / (1.0 - product),
        "of_moment": h.lr * mu_next / (1.0 - product * mu_next),
        "inv_sqrt_correction2": (1.0 - h.beta2**t) ** -0.5,
        "eps": h.eps,
        "decay": choose(h.decoupled_weight_decay, 1.0 - h.lr * h.weight_decay, 1.0),
        "l2": choose(h.decoupled_weight_decay, 0.0, h.weight_decay),
        "sign": _sign(h),
    }


def nadam(param: Tensor, grad: Tensor, c: Any, *, exp_avg: Tensor, exp_avg_sq: Tensor) -> Updated:
    """m and v as Adam's;    d = sqrt(v / bias_correction2) + eps
    p <- p * decay - a * g / d - b * m / d, one after the other, as torch rounds it

    a = lr * (1 - mu_t) / (1 - mu_1 ... mu_t),    b = lr * mu_t+1 / (1 - mu_1 ... mu_t+1)
    """
    grad = c.sign * grad + c.l2 * param
    exp_avg = exp_avg + c.w1 * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * c.beta2 + c.w2 * grad * grad
    denominator = exp_avg_sq.sqrt() * c.inv_sqrt_correction2 + c.eps
    param = param * c.decay - c.of_grad * (grad / denominator)
    param = param - c.of_moment * (exp_avg / denominator)
    return param, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


# -- RAdam (Liu et al. 2020), as in torch


def radam_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of RAdam: rectified where the length of the average is above 5, else SGD with
    momentum."""
    beta2_t = h.beta2**t
    longest = 2.0 / (1.0 - h.beta2) - 1.0
    length = longest - 2.0 * t * beta2_t / (1.0 - beta2_t)
    rectified = length > 5.0
    above = (length - 4.0) * (length - 2.0) * longest
    below = (longest - 4.0) * (longest - 2.0) * length
    factor = sqrt(choose(rectified, above, 1.0) / choose(rectified, below, 1.0) * (1.0 - beta2_t))
    return {
        "w1": 1.0 - h.beta1,
        "beta2": h.beta2,
        "w2": 1.0 - h.beta2,
        "step_size": h.lr / (1.0 - h.beta1**t) * choose(rectified, factor, 1.0),
        "rectified": choose(rectified, 1.0, 0.0),
        "eps": h.eps,
        "decay": choose(h.decoupled_weight_decay, 1.0 - h.lr * h.weight_decay, 1.0),
        "l2": choose(h.decoupled_weight_decay, 0.0, h.weight_decay),
        "sign": _sign(h),
    }


def radam(param: Tensor, grad: Tensor, c: Any, *, exp_avg: Tensor, exp_avg_sq: Tensor) -> Updated:
    """m and v as Adam's;    p <- p * decay - step_size * m [/ (sqrt(v) + eps) where rectified]"""
    grad = c.sign * grad + c.l2 * param
    exp_avg = exp_avg + c.w1 * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * c.beta2 + c.w2 * grad * grad
    adapted = exp_avg / (exp_avg_sq.sqrt() + c.eps)
    update = where(c.rectified != 0, adapted, exp_avg)
    return param * c.decay - c.step_size * update, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


# -- Adadelta (Zeiler 2012, algorithm 1), as in torch


def adadelta_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of Adadelta. None depends on the count."""
    return {
        "lr": h.lr,
        "rho": h.rho,
        "intake": 1.0 - h.rho,
        "eps": h.eps,
        "weight_decay": h.weight_decay,
        "sign": _sign(h),
    }


def adadelta(
    param: Tensor, grad: Tensor, c: Any, *, square_avg: Tensor, acc_delta: Tensor
) -> Updated:
    """s <- rho * s + (1 - rho) * g * g;    d <- sqrt(a + eps) / sqrt(s + eps) * g
    a <- rho * a + (1 - rho) * d * d;    p <- p - lr * d
    """
    grad = c.sign * grad + c.weight_decay * param
    square_avg = c.rho * square_avg + c.intake * grad * grad
    delta = (acc_delta + c.eps).sqrt() / (square_avg + c.eps).sqrt() * grad
    acc_delta = c.rho * acc_delta + c.intake * delta * delta
    return param - c.lr * delta, {"square_avg": square_avg, "acc_delta": acc_delta}


# -- Schedule-free AdamW (Defazio et al. 2024), as in facebookresearch/schedule_free


def schedule_free_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of schedule-free AdamW. The weight of step i is i**r * (its rate /
    lr)**weight_lr_power, and the rate grows over `warmup_steps`: the sum of all weights so far is a
    function of the count. Another schedule changes the rate of a step, and not its weight."""
    warm = at_least(h.warmup_steps, 1.0)
    share = at_most(t / warm, 1.0)
    rising = at_most(t * 1.0, h.warmup_steps)
    total = power_sum(h.r + h.weight_lr_power, rising) / power(warm, h.weight_lr_power)
    # the difference first: a long warm-up's sum is lost beside either of its two
    total = total + (power_sum(h.r, t) - power_sum(h.r, rising))
    weight = power(t * 1.0, h.r) * power(share, h.weight_lr_power)
    pull = choose(h.lr == 0.0, 0.0, weight / total)
    return {
        "beta2": h.beta2,
        "w2": 1.0 - h.beta2,
        "inv_sqrt_correction2": (1.0 - h.beta2**t) ** -0.5,
        "eps": h.eps,
        "weight_decay": h.weight_decay,
        "begins": choose(t == 1, 1.0, 0.0),
        "pull": pull,
        "of_y": h.lr * share * (1.0 - h.beta1 * (1.0 - pull)),
        "of_z": h.lr * share,
    }


def schedule_free(param: Tensor, grad: Tensor, c: Any, *, exp_avg_sq: Tensor, z: Tensor) -> Updated:
    """v as Adam's;    u <- g / (sqrt(v / bias_correction2) + eps) + weight_decay * y
    y <- y + pull * (z - y) - lr * (1 - beta1 * (1 - pull)) * u;    z <- z - lr * u

    The parameter is y while training, and x = y + (1 - 1 / beta1) * (z - y) in `eval()`.
    """
    z = where(c.begins != 0, param, z)
    exp_avg_sq = exp_avg_sq * c.beta2 + c.w2 * grad * grad
    update = grad / (exp_avg_sq.sqrt() * c.inv_sqrt_correction2 + c.eps) + c.weight_decay * param
    new = param + c.pull * (z - param) - c.of_y * update
    return new, {"exp_avg_sq": exp_avg_sq, "z": z - c.of_z * update}


# -- LAMB (You et al. 2020, algorithm 2), as in colossalai.nn.Lamb: bias corrections are an option


def lamb_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of LAMB. `trust` of a parameter: |p| / |u|, or 1 where one of them is 0, or
    `adam` is set."""
    return {
        "w1": 1.0 - h.beta1,
        "beta2": h.beta2,
        "w2": 1.0 - h.beta2,
        "inv_correction1": choose(h.bias_correction, 1.0 / (1.0 - h.beta1**t), 1.0),
        "inv_sqrt_correction2": choose(h.bias_correction, (1.0 - h.beta2**t) ** -0.5, 1.0),
        "eps": h.eps,
        "weight_decay": h.weight_decay,
        "step_size": h.lr * h.trust,
    }


def lamb_direction(
    param: Tensor, grad: Tensor, c: Any, *, exp_avg: Tensor, exp_avg_sq: Tensor
) -> Updated:
    """m and v as Adam's;    u = m / (sqrt(v) + eps) + weight_decay * p"""
    exp_avg = exp_avg + c.w1 * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq * c.beta2 + c.w2 * grad * grad
    denominator = exp_avg_sq.sqrt() * c.inv_sqrt_correction2 + c.eps
    direction = (exp_avg * c.inv_correction1) / denominator + c.weight_decay * param
    return direction, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def lamb(param: Tensor, grad: Tensor, c: Any, *, exp_avg: Tensor, exp_avg_sq: Tensor) -> Updated:
    """p <- p - lr * trust * u, of `lamb_direction`"""
    direction, planes = lamb_direction(param, grad, c, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    return param - c.step_size * direction, planes


# -- Adafactor (Shazeer & Stern 2018, algorithm 4) as torch.optim.Adafactor has it


def adafactor_coefficients(h: Any, t: Any) -> dict[str, Any]:
    """Coefficients of Adafactor. `trust` of a parameter: max(eps[1], RMS(p)) / max(1, RMS(u) / d),
    or 1 over the latter. Where it is `factored`, v is known, and stays."""
    rate = choose(h.relative_step, at_most(power(t, -0.5), h.lr), h.lr)
    return {
        "share": choose(h.factored, 0.0, power(t, h.beta2_decay)),
        "floor": h.floor,
        "sign": _sign(h),
        "decay": 1.0 - h.lr * h.weight_decay,
        "step_size": rate * h.trust,
    }


def adafactor_direction(param: Tensor, grad: Tensor, c: Any, *, variance: Tensor) -> Updated:
    """v <- v + share * (g * g - v);    u = sign * g / max(sqrt(v), floor)"""
    variance = variance + c.share * (grad * grad - variance)
    direction = c.sign * grad / torch.maximum(variance.sqrt(), c.floor)
    return direction, {"variance": variance}


def adafactor(param: Tensor, grad: Tensor, c: Any, *, variance: Tensor) -> Updated:
    """p <- p * decay - step_size * u, of `adafactor_direction`"""
    direction, planes = adafactor_direction(param, grad, c, variance=variance)
    return param * c.decay - c.step_size * direction, planes


# -- rounding at random


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
