"""Elementwise optimizers of torch.optim other than Adam and SGD, each a rule and a class.

Formulas, with their sources, are in `optim.rules.formulas`. All else follows from formula and
planes: where state lives, sharding, clipping, checkpoints, kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gemini.callers import wants_dtensors
from gemini.optim.rules import formulas
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import Plane, StateLayout

from .elementwise import ElementwiseOptimizer


def _planes(*names: str, positive: str) -> StateLayout:
    """Layout of fp32 planes; one is never negative, and keeps the ties of split masters."""
    return StateLayout(tuple(Plane(name, "float32", name == positive) for name in names))


class LionRule(UpdateRule):
    """Lion: one moment in fp32; the formula is `formulas.lion`."""

    name = "lion"
    layout = StateLayout((Plane("exp_avg", "float32"),))
    options: ClassVar = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    coefficients = staticmethod(formulas.lion_coefficients)
    formula = staticmethod(formulas.lion)

    def update(
        self, param: Tensor, grad: Tensor, planes: Sequence[Tensor], hyper: Any, step: int
    ) -> None:
        """Update in place, which takes half as long; multiply-adds are contracted."""
        (exp_avg,) = planes
        if hyper.weight_decay:
            param.mul_(1 - hyper.lr * hyper.weight_decay)
        update = exp_avg.lerp(grad, 1 - hyper.beta1).sign_()
        param.add_(update, alpha=-hyper.lr)
        exp_avg.lerp_(grad, 1 - hyper.beta2)


class HybridLion(ElementwiseOptimizer):
    """Lion (Chen et al. 2023) with fp32 state on device, host or NVMe; see `HybridAdam`.

    Raises as `HybridAdam`. Formula: `optim.rules.formulas.lion`.
    """

    rule = LionRule


class AdagradRule(UpdateRule):
    """Adagrad: the sum of squared gradients in fp32; the formula is `formulas.adagrad`."""

    name = "adagrad"
    layout = _planes("sum", positive="sum")
    options: ClassVar = {
        "lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0,
        "eps": 1e-10, "maximize": False,
    }  # fmt: skip
    coefficients = staticmethod(formulas.adagrad_coefficients)
    formula = staticmethod(formulas.adagrad)


class HybridAdagrad(ElementwiseOptimizer):
    """Adagrad (Duchi et al. 2011) with the arguments of torch.optim.Adagrad; see `HybridAdam`.

    Raises as `HybridAdam`. Formula: `optim.rules.formulas.adagrad`.
    """

    rule = AdagradRule


class RMSpropRule(UpdateRule):
    """RMSprop: an average of squared gradients in fp32; the formula is `formulas.rmsprop`.

    Momentum and the mean have planes where a group asks for them.
    """

    name = "rmsprop"
    layout = _planes("square_avg", positive="square_avg")
    optional: ClassVar = {
        "momentum": Plane("momentum_buffer", "float32"), "centered": Plane("grad_avg", "float32"),
    }  # fmt: skip
    options: ClassVar = {
        "lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0,
        "centered": False, "maximize": False,
    }  # fmt: skip
    ranges: ClassVar = {"alpha": (0.0, 1.0)}
    coefficients = staticmethod(formulas.rmsprop_coefficients)
    formula = staticmethod(formulas.rmsprop)


class HybridRMSprop(ElementwiseOptimizer):
    """RMSprop (Hinton 2012) with the arguments of torch.optim.RMSprop; see `HybridAdam`.

    momentum, centered: per group. The state has a plane for each that any group asks for, which is
        settled when it is made. A variance that rounding makes negative, which is NaN in torch, is
        0.

    Raises as `HybridAdam`. Formula: `optim.rules.formulas.rmsprop`.
    """

    rule = RMSpropRule


class AdamaxRule(UpdateRule):
    """Adamax: an average of gradients and a fading maximum in fp32; see `formulas.adamax`."""

    name = "adamax"
    layout = _planes("exp_avg", "exp_inf", positive="exp_inf")
    options: ClassVar = {
        "lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False,
    }  # fmt: skip
    coefficients = staticmethod(formulas.adamax_coefficients)
    formula = staticmethod(formulas.adamax)


class HybridAdamax(ElementwiseOptimizer):
    """Adamax (Kingma & Ba 2015) with the arguments of torch.optim.Adamax; see `HybridAdam`.

    Raises as `HybridAdam`. Formula: `optim.rules.formulas.adamax`.
    """

    rule = AdamaxRule


class NAdamRule(UpdateRule):
    """NAdam: m and v in fp32, as Adam's; the formula is `formulas.nadam`."""

    name = "nadam"
    layout = _planes("exp_avg", "exp_avg_sq", positive="exp_avg_sq")
    options: ClassVar = {
        "lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
        "momentum_decay": 4e-3, "decoupled_weight_decay": False, "maximize": False,
    }  # fmt: skip
    coefficients = staticmethod(formulas.nadam_coefficients)
    formula = staticmethod(formulas.nadam)


class HybridNAdam(ElementwiseOptimizer):
    """NAdam (Dozat 2016) with the arguments of torch.optim.NAdam; see `HybridAdam`.

    The product of its momentums so far is a function of the step count, and no state.

    Raises as `HybridAdam`. Formula: `optim.rules.formulas.nadam`.
    """

    rule = NAdamRule

    def state_dict(self) -> dict[str, Any]:
        """State dict with the product of momentums that torch keeps; see `TieredOptimizer`."""
        found = super().state_dict()
        for group in found["param_groups"] if not wants_dtensors() else ():
            hyper = self.rule().hyper(group)
            for key in group["params"]:
                planes = found["state"].get(key, {})
                if "step" in planes:
                    product = formulas.nadam_product(hyper, int(planes["step"]))
                    planes["mu_product"] = torch.tensor(product)
        return found


class RAdamRule(UpdateRule):
    """RAdam: m and v in fp32, as Adam's; the formula is `formulas.radam`."""

    name = "radam"
    layout = _planes("exp_avg", "exp_avg_sq", positive="exp_avg_sq")
    options: ClassVar = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
        "decoupled_weight_decay": False, "maximize": False,
    }  # fmt: skip
    coefficients = staticmethod(formulas.radam_coefficients)
    formula = staticmethod(formulas.radam)


class HybridRAdam(ElementwiseOptimizer):
    """RAdam (Liu et al. 2020) with the arguments of torch.optim.RAdam; see `HybridAdam`.

    Raises as `HybridAdam`. Formula: `optim.rules.formulas.radam`.
    """

    rule = RAdamRule


class AdadeltaRule(UpdateRule):
    """Adadelta: averages of squared gradients and of squared updates; see `formulas.adadelta`."""

    name = "adadelta"
    layout = _planes("square_avg", "acc_delta", positive="square_avg")
    options: ClassVar = {
        "lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False,
    }  # fmt: skip
    ranges: ClassVar = {"rho": (0.0, 1.0)}
    coefficients = staticmethod(formulas.adadelta_coefficients)
    formula = staticmethod(formulas.adadelta)


class HybridAdadelta(ElementwiseOptimizer):
    """Adadelta (Zeiler 2012) with the arguments of torch.optim.Adadelta; see `HybridAdam`.

    Raises as `HybridAdam`. Formula: `optim.rules.formulas.adadelta`.
    """

    rule = AdadeltaRule
