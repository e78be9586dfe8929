"""What one optimizer step did. Making a report never waits; reading its outcome may."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemini.tickets import Done, Ticket


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
    """What the device knows when the step is done."""

    skipped: bool = False
    grad_norm: float | None = None  # over all ranks, before clipping; None where not asked for
    nonfinite: str | None = None  # the first parameter with a NaN or an Inf, and its rank


@dataclass(frozen=True, slots=True)
class StepReport:
    """Left at `optimizer.last_report` by every `step()`."""

    outcome: Ticket[Outcome] = field(default_factory=lambda: Done(Outcome()))
    traffic: Traffic = field(default_factory=Traffic)
    stalled_seconds: float = 0.0  # waited for the disk
    update_path: str = "cpu"  # or "triton"

    @property
    def skipped(self) -> bool:
        """A gradient was not finite: nothing was changed."""
        return self.outcome.wait().skipped

    @property
    def grad_norm(self) -> float | None:
        """L2 norm over all parameters and ranks, before clipping."""
        return self.outcome.wait().grad_norm

    @property
    def nonfinite(self) -> str | None:
        """Name of the first parameter with a NaN or an Inf, and the rank that saw it."""
        return self.outcome.wait().nonfinite
