"""LAMB: the update rule, and HybridLamb."""

from __future__ import annotations

from typing import Any, ClassVar

from gemini.optim.rules import formulas
from gemini.optim.rules.measures import NormRule
from gemini.optim.rules.state_layout import Plane, StateLayout

from .elementwise import ElementwiseOptimizer


class LambRule(NormRule):
    """LAMB: m and v in fp32; the formulas are `formulas.lamb` and `formulas.lamb_direction`."""

    name = "lamb"
    layout = StateLayout(
        (Plane("exp_avg", "float32"), Plane("exp_avg_sq", "float32", keeps_ties=True))
    )
    options: ClassVar = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "adam": False,
        "bias_correction": False,
    }  # fmt: skip
    coefficients = staticmethod(formulas.lamb_coefficients)
    formula = staticmethod(formulas.lamb)
    direction = staticmethod(formulas.lamb_direction)

    def trusting(self, hyper: Any, weight_norm: float, direction_norm: float, numel: int) -> Any:
        return hyper if hyper.adam else super().trusting(hyper, weight_norm, direction_norm, numel)


class HybridLamb(ElementwiseOptimizer):
    """LAMB (You et al. 2020) with the arguments of colossalai.nn.Lamb; see `HybridAdam`.

    A parameter moves by lr * |p| / |u| along u, with norms over all ranks: before an update a step
    reads all state once more, and ranks add up squares in one all-reduce.

    adam: trust ratios are 1. bias_correction: of both moments, as in apex's FusedLAMB.

    Raises ValueError for a parameter that torch has split; else as `HybridAdam`. Formula:
    `optim.rules.formulas.lamb`.
    """

    rule = LambRule
