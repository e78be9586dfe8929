"""What a run has to log, for any loop: numbers of its last step, its memory and its speed."""

from __future__ import annotations

from time import perf_counter as clock
from typing import Any

from gemini.optim.base import TieredOptimizer

from .ddp import GeminiDDP


class Metrics:
    """Of one wrapped module and its optimizer, by a hook on `optimizer.step()`.

        metrics = Metrics(model, optimizer)
        for step, batch in enumerate(loader):
            ...
            optimizer.step()
            writer.log(metrics.as_dict(), step)

    optimizer: also as accelerate prepares it.

    Numbers of steps are those of the step before the last one, whose tail has ended: to log waits
    for nothing.
    """

    def __init__(self, model: GeminiDDP, optimizer: TieredOptimizer | Any) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self._model = model
        self._report = optimizer.last_report
        self._began: float | None = None
        self._seconds = 0.0  # of an iteration
        self._hook = optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: Any, *_: Any) -> None:
        now = clock()
        self._seconds = 0.0 if self._began is None else now - self._began
        self._began, self._report = now, optimizer.last_report

    def as_dict(self, prefix: str = "gemini/") -> dict[str, float]:
        """Flat and JSON-able, of this rank: see `StepReport.as_dict` and `MemoryReport.as_dict`.

        iteration_seconds: from step to step. bound_seconds: of the resource that an iteration keeps
        busy the longest, as planned; share_of_bound: of an iteration, 1 is the bound.
        """
        found: dict[str, float] = dict(self._model.memory_report().as_dict())
        if self._report is not None:
            found |= self._report.as_dict()
        cost = self._model.engine.planning.result.cost
        found["bound_seconds"] = cost.busy[cost.bound_by]
        if self._seconds:
            found["iteration_seconds"] = self._seconds
            found["share_of_bound"] = found["bound_seconds"] / self._seconds
        return {f"{prefix}{name}": value for name, value in found.items()}

    def close(self) -> None:
        """Take the hook away."""
        self._hook.remove()
