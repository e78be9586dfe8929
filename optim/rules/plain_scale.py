"""Loss scale of gradients in `p.grad`, for an optimizer that has none of its own.

A loss is scaled before backward; before the step gradients are divided by the scale once, and the
step is left out if one of them is not finite. `LossScale` has the schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gemini.tickets import Done

from .loss_scale import LossScale, ScaleState
from .report import LEAST_SCALE, Outcome, Skips, StepReport
from .saved import check_counters

log = logging.getLogger("gemini")


class Scaling:
    """Loss scale of an optimizer whose gradients are in `p.grad`, in fp32.

    Ranks with the same gradients, as torch's DDP leaves them, decide the same.

    says_overflows: every skipped step is logged. tells: this rank warns of several in a row.
    """

    def __init__(
        self, options: LossScale, *, says_overflows: bool = False, tells: bool = True
    ) -> None:
        self._options = options
        self._says_overflows = says_overflows
        self._state = options.start()
        self._skips = Skips(least=max(options.least, LEAST_SCALE), tells=tells)
        self._is_finite: bool | None = None  # of gradients that were unscaled
        self._nonfinite: str | None = None  # the first parameter of which one is not

    def scaled(self, loss: Tensor) -> Tensor:
        """Loss times the scale, in fp32."""
        return loss.float() * self._state.scale

    @property
    def is_unscaled(self) -> bool:
        return self._is_finite is not None

    @torch.no_grad()
    def unscale(self, params: Iterable[Tensor]) -> None:
        """Divide gradients by the scale; a second call before the step does nothing."""
        if self._is_finite is not None:
            return
        grads = {i: param.grad for i, param in enumerate(params) if param.grad is not None}
        for grad in grads.values():
            grad.mul_(1.0 / self._state.scale)
        # one answer from the device for all gradients, and not a wait for each
        finite = {i: torch.isfinite(grad).all() for i, grad in grads.items()}
        self._is_finite = not finite or bool(torch.stack([*finite.values()]).all())
        if not self._is_finite:
            bad = next(i for i, is_finite in finite.items() if not bool(is_finite))
            self._nonfinite = f"parameter {bad}"

    def stepped(self) -> bool:
        """Whether the step is taken. The scale's schedule advances.

        Raises NonFiniteGradientError for one skipped step too many.
        """
        assert self._is_finite is not None
        good, self._is_finite = self._is_finite, None
        outcome = Outcome(not good, nonfinite=self._nonfinite, loss_scale=self._state.scale)
        self._state = self._options.after(self._state, overflow=not good)
        if not good and self._says_overflows:
            log.info("a gradient is not finite: step skipped, loss scale %g", self._state.scale)
        self._skips.add(StepReport(Done(outcome)))
        return good

    def forget(self) -> None:
        """Note that the gradients were dropped."""
        self._is_finite = None

    def state_dict(self) -> dict[str, float]:
        """Scale and counters of its schedule."""
        return asdict(self._state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned. Raises ValueError for numbers that are none of its."""
        check_counters(saved)
        self._state = ScaleState(
            float(saved["scale"]), int(saved["good_steps"]), int(saved["hysteresis_left"])
        )
