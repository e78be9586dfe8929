"""Numbers for a log of any loop: of a step, of memory and of speed."""

from __future__ import annotations

from time import perf_counter as clock
from typing import Any

from gemini.arguments import by_name
from gemini.optim.base import TieredOptimizer

from .ddp import GeminiDDP


@by_name
class Metrics:
    """Metrics of one wrapped module and its optimizer, by a hook on `optimizer.step()`.

        metrics = Metrics(model, optimizer)
        for step, batch in enumerate(loader):
            ...
            optimizer.step()
            writer.log(metrics.as_dict(), step)

    optimizer: of the module; also one that accelerate has prepared.

    Numbers of a step are those of the step before the last one, whose tail has ended: so logging
    waits for nothing.
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
        """Numbers of this rank, flat and JSON-able: those of `StepReport.as_dict` and
        `MemoryReport.as_dict`, and three more.

        iteration_seconds: from step to step. bound_seconds: planned seconds of the resource that an
        iteration keeps busy the longest. share_of_bound: bound_seconds / iteration_seconds, 1 at
        the bound.
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
        """Remove the hook."""
        self._hook.remove()
