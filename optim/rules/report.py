"""Report of one optimizer step. Making it never waits; reading its outcome may."""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import asdict, dataclass, field

from gemini.tickets import Done, Ticket

log = logging.getLogger("gemini")

MOST_SKIPPED = 64  # steps in a row, at the least loss scale: by then no batch is to blame
LEAST_SCALE = 1.0  # of torch's GradScaler, which knows none: below it there is nothing to be won


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes moved by one step, per link."""

    nvme_read: int = 0
    nvme_write: int = 0
    host_to_device: int = 0
    device_to_host: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.nvme_read + other.nvme_read,
            self.nvme_write + other.nvme_write,
            self.host_to_device + other.host_to_device,
            self.device_to_host + other.device_to_host,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.nvme_read - other.nvme_read,
            self.nvme_write - other.nvme_write,
            self.host_to_device - other.host_to_device,
            self.device_to_host - other.device_to_host,
        )

    @property
    def total(self) -> int:
        return self.nvme_read + self.nvme_write + self.host_to_device + self.device_to_host


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a step that the device knows when the step is done."""

    skipped: bool = False
    grad_norm: float | None = None  # over all ranks, before clipping; None where not asked for
    nonfinite: str | None = None  # the first parameter with a NaN or an Inf, and its rank
    loss_scale: float = 1.0  # that the gradients of this step carried


@dataclass(frozen=True, slots=True)
class TailResult:
    """Result of a tail: what a step did after `step()` returned; nothing where it has none."""

    committed: bool = True  # it counts; else a disk failed, and the step is undone
    traffic: Traffic = field(default_factory=Traffic)
    stalled_seconds: float = 0.0  # the tail waited for the disk
    seconds: float = 0.0  # that the tail took
    waited_seconds: float = 0.0  # of them the next pass, or who asked, has waited for so many


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report that every `step()` leaves at `optimizer.last_report`. Its traffic is that of the
    call; `behind` has that of the tail, and waits for it."""

    outcome: Ticket[Outcome] = field(default_factory=lambda: Done(Outcome()))
    traffic: Traffic = field(default_factory=Traffic)
    stalled_seconds: float = 0.0  # waited for the disk
    nvme_written_total: int = 0  # bytes, since the state was made: what wears the disk
    update_path: str = "cpu"  # or "cpu-compiled", or "triton"
    behind: Ticket[TailResult] = field(default_factory=lambda: Done(TailResult()))

    def as_dict(self) -> dict[str, float]:
        """Numbers for a log, flat: bytes by link, seconds, counts. Waits until all of it has ended.

        A norm that nobody asked for, or that is not finite, is left out.
        """
        outcome, behind = self.outcome.wait(), self.behind.wait()
        moved = asdict(self.traffic + behind.traffic)
        norm = outcome.grad_norm
        return {
            **{f"{link}_bytes": nbytes for link, nbytes in moved.items()},
            "stalled_seconds": self.stalled_seconds + behind.stalled_seconds,
            "tail_seconds": behind.seconds,
            "hidden_seconds": max(0.0, behind.seconds - behind.waited_seconds),
            "skipped": int(outcome.skipped),
            "loss_scale": outcome.loss_scale,
            **({} if norm is None or not math.isfinite(norm) else {"grad_norm": norm}),
        }

    @property
    def committed(self) -> bool:
        """Whether the step counts, on every rank. False until its tail has ended; never waits."""
        return self.behind.ready() and self.behind.wait().committed

    @property
    def skipped(self) -> bool:
        """Whether a gradient was not finite, and nothing was changed."""
        return self.outcome.wait().skipped

    @property
    def grad_norm(self) -> float | None:
        """Norm over all parameters and ranks, unscaled, before clipping: L2, or what was
        clipped."""
        return self.outcome.wait().grad_norm

    @property
    def nonfinite(self) -> str | None:
        """Name of the first parameter with a NaN or an Inf, and the rank that saw it."""
        return self.outcome.wait().nonfinite

    @property
    def loss_scale(self) -> float:
        """Factor that the gradients of this step carried; 1 without a loss scale."""
        return self.outcome.wait().loss_scale


class NonFiniteGradientError(ArithmeticError):
    """As many steps in a row were skipped as `on_nonfinite` allows; the last changed nothing."""

    def __init__(self, message: str, report: StepReport) -> None:
        super().__init__(message)
        self.report = report


class Skips:
    """Skipped steps in a row: the 1st, 2nd, 4th, 8th ... is logged, and one too many raises.

    most: skipped steps in a row, at a loss scale of `least` or below it, that raise; inf: none do.
    tells: whether this rank logs.
    """

    def __init__(
        self, most: float = MOST_SKIPPED, least: float = LEAST_SCALE, *, tells: bool = True
    ) -> None:
        self._most, self._least, self._tells = most, least, tells
        self._unread: deque[StepReport] = deque()
        self._in_a_row = self._at_least = 0

    def add(self, report: StepReport) -> None:
        """Note a step. Waits for outcomes only where this one may be too many.

        Raises NonFiniteGradientError.
        """
        self._unread.append(report)
        # All ranks raise in one step, whatever each has heard of its device: none goes on before it
        # knows that this step is not the last one allowed.
        while self._unread and (
            self._unread[0].outcome.ready() or self._at_least + len(self._unread) >= self._most
        ):
            self._note(self._unread.popleft())

    def _note(self, report: StepReport) -> None:
        outcome = report.outcome.wait()
        self._in_a_row = self._in_a_row + 1 if outcome.skipped else 0
        stays = outcome.skipped and outcome.loss_scale <= self._least
        self._at_least = self._at_least + 1 if stays else 0
        row, where = self._in_a_row, outcome.nonfinite or "a parameter"
        if self._tells and row == 1:
            log.warning(
                "step skipped: the gradient of %s is not finite (loss scale %g); of more in a row "
                "the 2nd, 4th, 8th and so on are logged",
                where,
                outcome.loss_scale,
            )
        elif self._tells and row and row & (row - 1) == 0:
            log.warning(
                "%d steps skipped in a row: the gradient of %s is not finite (loss scale %g)",
                row,
                where,
                outcome.loss_scale,
            )
        if self._at_least < self._most:
            return
        self._at_least = 0
        if self._most == 1:
            raise NonFiniteGradientError(
                f"the gradient of {where} is not finite (loss scale {outcome.loss_scale:g}); "
                "weights and state are those of the last step",
                report,
            )
        raise NonFiniteGradientError(
            f"{self._most:g} steps in a row were skipped, where no lower loss scale than "
            f"{outcome.loss_scale:g} can help: in the last one the gradient of {where} is not "
            "finite; weights and state are those of the last step that counted. Look at the loss "
            f"and the batch; GeminiDDP(on_nonfinite={self._most:g}) is how many it takes, and "
            'with on_nonfinite="skip" none raise',
            report,
        )
