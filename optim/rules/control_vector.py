"""Control vector of one target: loss scale, its counters, and what kernels leave there.

fp64, where gradients are: on the device the kernels change it and the host never has to look. It is
written by `fill_`: `tensor[field] = number` copies a tensor of the host, and waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gemini.kernels_triton import control_fields as fields

from .loss_scale import LossScale, ScaleState

_OPTIONS = {
    fields.GROWTH_FACTOR: "growth_factor",
    fields.BACKOFF_FACTOR: "backoff_factor",
    fields.GROWTH_INTERVAL: "growth_interval",
    fields.HYSTERESIS: "hysteresis",
    fields.MIN_SCALE: "min_scale",
    fields.MAX_SCALE: "max_scale",
}
UNSCALED = LossScale(initial_scale=1.0, growth_interval=0)


class ControlVector:
    """Numbers that the kernels of a step leave each other; `options` None: no loss scale."""

    def __init__(
        self, options: LossScale | None, device: torch.device, rounding_seed: int = 0
    ) -> None:
        self.active = options is not None
        with torch.inference_mode(False):  # it has a version
            self.tensor = torch.zeros(fields.NUM_CONTROL, dtype=torch.float64, device=device)
        self._host: Tensor | None = None  # pinned, where it is read by way of it
        self._known: tuple[int, list[float]] | None = None  # version, and what was read of it
        self.tensor[fields.SEED].fill_(float(rounding_seed))
        self.configure(options or UNSCALED)

    def configure(self, options: LossScale) -> None:
        """Start again with other options."""
        self.options = options
        for field, name in _OPTIONS.items():
            self.tensor[field].fill_(float(getattr(options, name)))
        self._write(options.start())

    @property
    def scale(self) -> Tensor:
        """fp64 0-d, a view: multiplies gradients without a word to the host."""
        return self.tensor[fields.LOSS_SCALE]

    @property
    def used(self) -> Tensor:
        """fp64 0-d, a view: scale of the gradients of the last step."""
        return self.tensor[fields.USED_SCALE]

    def values(self) -> list[float]:
        """[NUM_CONTROL], as it is now. Waits for the device."""
        now = self.tensor
        if now.is_cuda:  # `tolist` would copy to memory that is not pinned
            if self._host is None:
                self._host = torch.empty_like(now, device="cpu", pin_memory=True)
            self._host.copy_(now, non_blocking=True)
            torch.cuda.current_stream(now.device).synchronize()
            now = self._host
        found: list[float] = now.tolist()
        self._known = self.tensor._version, found
        return found

    def changed(self) -> None:
        """Forget what was read: a kernel changed it, which no version of the tensor shows."""
        self._known = None

    def read(self) -> ScaleState:
        """Read the scale. Waits for the device, unless `values` were read since it last changed."""
        if self._known is None or self._known[0] != self.tensor._version:
            self.values()
            assert self._known is not None
        values = self._known[1]
        return ScaleState(
            values[fields.LOSS_SCALE],
            int(values[fields.GOOD_STEPS]),
            int(values[fields.HYSTERESIS_LEFT]),
        )

    @property
    def skipped_steps(self) -> int:
        """Number of skipped steps. Waits for the device."""
        return int(self.tensor[fields.SKIPPED_STEPS])

    def stepped(self, overflow: bool) -> None:
        """Move the schedule on where the host decided whether a step counts."""
        self.used.copy_(self.scale)
        if overflow:
            self.tensor[fields.SKIPPED_STEPS].add_(1)
        if self.active:
            self._write(self.options.after(self.read(), overflow))

    def state_dict(self) -> dict[str, float | int]:
        state = self.read()
        counters: dict[str, float | int] = {"skipped_steps": self.skipped_steps}
        if self.active:
            counters |= {
                "scale": state.scale,
                "good_steps": state.good_steps,
                "hysteresis_left": state.hysteresis_left,
            }
        return counters

    def load_state_dict(self, counters: Mapping[str, Any]) -> None:
        """Load a scale. One that was saved without a scale, or the other way round, changes
        nothing. Raises ValueError for values that no scale has."""
        from .saved import check_counters

        check_counters(counters)
        self.tensor[fields.SKIPPED_STEPS].fill_(float(counters.get("skipped_steps", 0)))
        if self.active and "scale" in counters:
            self._write(
                ScaleState(
                    float(counters["scale"]),
                    int(counters["good_steps"]),
                    int(counters["hysteresis_left"]),
                )
            )

    def _write(self, state: ScaleState) -> None:
        self.changed()
        self.tensor[fields.LOSS_SCALE].fill_(state.scale)
        self.tensor[fields.GOOD_STEPS].fill_(float(state.good_steps))
        self.tensor[fields.HYSTERESIS_LEFT].fill_(float(state.hysteresis_left))
