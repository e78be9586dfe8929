"""Schedule-free AdamW: the update rule, and an optimizer with two sets of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from gemini.optim.rules import formulas
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.saved import MOST_STEPS
from gemini.optim.rules.state_layout import MASTER, Plane, StateLayout

from .elementwise import ElementwiseOptimizer


class ScheduleFreeRule(UpdateRule):
    """Schedule-free AdamW: v and the fast weights z in fp32; see `formulas.schedule_free`."""

    name = "schedule_free"
    layout = StateLayout((Plane("exp_avg_sq", "float32", keeps_ties=True), Plane("z", "float32")))
    options: ClassVar = {
        "lr": 2.5e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0.0,
        "r": 0.0, "weight_lr_power": 2.0,
    }  # fmt: skip
    # sums of powers of step counts stay within fp64
    ranges: ClassVar = {
        "warmup_steps": (0.0, float(MOST_STEPS)), "r": (0.0, 10.0), "weight_lr_power": (0.0, 10.0),
    }  # fmt: skip
    coefficients = staticmethod(formulas.schedule_free_coefficients)
    formula = staticmethod(formulas.schedule_free)

    def hyper(self, group: Mapping[str, Any]) -> Any:
        hyper = super().hyper(group)
        if not hyper.beta1:
            raise ValueError("betas[0]=0 leaves eval() no way to its weights; expected above 0")
        return hyper


class HybridScheduleFreeAdamW(ElementwiseOptimizer):
    """Schedule-free AdamW (Defazio et al. 2024), with the arguments of `schedulefree`'s class; see
    `HybridAdam`.

    Call `eval()` before weights are used or saved, and `train()` before the next step. Groups carry
    the mode (`train_mode`), and state dicts with them. An optimizer begins in training mode.

    warmup_steps: number of steps over which the rate grows to lr. r, weight_lr_power: how steps are
        weighed. The sum of weights is a function of a parameter's step count, and no state: a
        schedule changes rates, and no weight of a step.

    Raises as `HybridAdam`; RuntimeError for a step in the mode of `eval()`, ValueError for 16-bit
    weights without fp32 masters, which could not come back. Formula:
    `optim.rules.formulas.schedule_free`.
    """

    rule = ScheduleFreeRule
    extra: ClassVar = {"train_mode": True}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update once, in training mode; see `TieredOptimizer.step`. Raises RuntimeError in the
        mode of `eval()`."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("a step after eval(); call optimizer.train() before it")
        return super().step(closure)

    def eval(self) -> None:
        """Set weights to x, the average of all steps. Every rank must call it."""
        self._become(False, lambda beta1: 1.0 - 1.0 / beta1)

    def train(self) -> None:
        """Set weights to y, at which gradients are taken. Every rank must call it."""
        self._become(True, lambda beta1: 1.0 - beta1)

    def _become(self, train_mode: bool, share: Callable[[float], float]) -> None:
        self._refuse_unusable()
        self._bind()
        narrow = [p.dtype for p in self._flat_params() if p.dtype.itemsize < 4]
        if narrow and MASTER not in [p.name for target in self._targets for p in target.planes]:
            raise ValueError(
                f"weights in {narrow[0]} without fp32 masters cannot come back from eval(); "
                "wrap the module with master_weights=True, or keep it in fp32"
            )
        shares = [
            share(float(group["betas"][0])) if group["train_mode"] != train_mode else 0.0
            for group in self.param_groups
        ]
        for target in self._targets:
            target.blend("z", shares)
        for group in self.param_groups:
            group["train_mode"] = train_mode
