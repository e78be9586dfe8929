"""How an engine's shards are measured and updated: by the CPU path, or by Triton on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.storage import Chunk
from gemini.units import ParamId
from optim.cpu_path import Piece, grad_sum
from optim.report import StepReport
from optim.rules import UpdateRule
from optim.state_layout import StateLayout
from optim.updaters import Updater, cpu_updater


class StepPath(Protocol):
    """One update path of one rank's shards."""

    merges_parameters: bool  # neighbours with the same hyperparameters may be one piece

    def measure(self, chunks: Sequence[Chunk]) -> tuple[float, ParamId | None]:
        """Sum of squares of the chunks' gradients, and the first parameter that is not finite."""
        ...

    def begin(
        self, hypers: Sequence[Any], present: Sequence[bool], sum_of_squares: float, max_norm: float
    ) -> Updater:
        """The updater of a step that all ranks agreed on."""
        ...

    def count(self, present: Sequence[bool]) -> None:
        """The step was taken: raise the step counts of these parameters."""
        ...

    @property
    def steps(self) -> list[int]:
        """Step count of every parameter; may wait for the device."""
        ...

    def close(self) -> None: ...


class CpuStepPath:
    """Gradients and state in host memory."""

    merges_parameters = True

    def __init__(self, rule: UpdateRule, layout: ChunkLayout, rank: int, cpu_path: str) -> None:
        self._layout = layout
        self._rank = rank
        self._updater = cpu_updater(rule, cpu_path)
        self.steps = [0] * len(layout.params)

    def measure(self, chunks: Sequence[Chunk]) -> tuple[float, ParamId | None]:
        grads = [chunk.grad for chunk in chunks if chunk.grad is not None]
        total = grad_sum(self._updater.workers, grads)
        if total.first_nonfinite is None:
            return total.sum_of_squares, None
        return total.sum_of_squares, self._first_nonfinite(chunks[total.first_nonfinite])

    def _first_nonfinite(self, chunk: Chunk) -> ParamId:
        assert chunk.grad is not None
        for part in self._layout.shard_parts(chunk.spec, self._rank):
            if not bool(torch.isfinite(chunk.grad[part.offset : part.offset + part.numel]).all()):
                return part.param
        raise AssertionError("a chunk has a non-finite gradient outside its parameters")

    def begin(
        self, hypers: Sequence[Any], present: Sequence[bool], sum_of_squares: float, max_norm: float
    ) -> Updater:
        return replace(self._updater, factor=clip_factor(sum_of_squares**0.5, max_norm))

    def count(self, present: Sequence[bool]) -> None:
        for i, there in enumerate(present):
            self.steps[i] += there

    def close(self) -> None:
        self._updater.workers.close()


class TritonStepPath:
    """Gradients and resident state on the device; step counts too."""

    merges_parameters = False

    def __init__(
        self,
        rule: UpdateRule,
        layout: ChunkLayout,
        state: StateLayout,
        group_of: Sequence[int | None],
        rank: int,
        device: torch.device,
    ) -> None:
        from optim.triton_path import TritonUpdater  # Triton is imported where it is used

        self._updater = TritonUpdater(rule, state, [group or 0 for group in group_of], device)
        self._layout = layout
        self._rank = rank
        self._names = [spec.name for spec in layout.params]

    def measure(self, chunks: Sequence[Chunk]) -> tuple[float, ParamId | None]:
        self._updater.measure(self._grad_pieces(chunks))
        return self._updater.read_measure()

    def begin(
        self, hypers: Sequence[Any], present: Sequence[bool], sum_of_squares: float, max_norm: float
    ) -> Updater:
        self._updater.set_measure(sum_of_squares)
        return self._begin(hypers, present, max_norm)

    def begin_unread(
        self, chunks: Sequence[Chunk], hypers: Sequence[Any], present: Sequence[bool],
        max_norm: float,
    ) -> Updater:  # fmt: skip
        """Measure and begin without the host: clip and skip are decided on the device."""
        self._updater.measure(self._grad_pieces(chunks))
        return self._begin(hypers, present, max_norm)

    def report(self) -> StepReport:
        """Of the step that was begun unread; nothing is waited for before a field is read."""
        from optim.triton_path import DeviceOutcome

        outcome = DeviceOutcome(self._updater, self._names)
        return StepReport(outcome, update_path=self._updater.name)

    def _begin(self, hypers: Sequence[Any], present: Sequence[bool], max_norm: float) -> Updater:
        self._updater.set_limits(max_norm)
        self._updater.set_present([i for i, there in enumerate(present) if there])
        self._updater.begin(hypers, with_norm=True)
        return self._updater

    def _grad_pieces(self, chunks: Sequence[Chunk]) -> list[Piece]:
        pieces = []
        for chunk in chunks:
            assert chunk.grad is not None
            for part in self._layout.shard_parts(chunk.spec, self._rank):
                grad = chunk.grad[part.offset : part.offset + part.numel]
                pieces.append(Piece(grad, grad, None, (), None, 0, part.param))
        return pieces

    def count(self, present: Sequence[bool]) -> None:
        """The prologue did."""

    @property
    def steps(self) -> list[int]:
        counts: Tensor = self._updater.steps
        return [int(count) for count in counts.tolist()]

    def close(self) -> None:
        return


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied with so that their norm is at most `max_norm` (0: no clipping).

    As torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
    """
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
