"""Digests of short runs: wherever their state lives, and whenever it is updated.

{resident, host, stream, nvme} x {serial, tail} x what happens in a run: of each there is one
digest of weights and state in a precision. `host`: state in memory beside a simulated
device, updated there; `stream`: it travels to the device, whose kernels run in Triton's
interpreter. On the others the update is compiled, as its loop has the kernels' bits
(docs/numerics.md).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement
from gemini.optim import HybridAdam, LossScale, NvmeConfig, StepReport
from gemini.placement.timetable.updates import SERIAL, TAIL, UPDATES

NUM_STEPS = 4
MAX_NORM = 0.1  # gradients have norms of about 1
# by tier: what computes, and the shares of the state in host memory and on NVMe
TIERS: dict[str, tuple[Callable[[], Any], float, float]] = {
    "resident": (lambda: "cpu", 0.0, 0.0),
    "host": (SimBackend, 1.0, 0.0),
    "stream": (lambda: SimBackend(updates_by_triton=True), 1.0, 0.0),
    "nvme": (lambda: "cpu", 0.0, 1.0),
}


class Small(nn.Module):
    """Layers of odd sizes in several chunks and blocks, one of which not every call uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(33, 77, bias=False), nn.Linear(77, 33)
        self.aside = nn.Linear(77, 33, bias=False)

    def forward(self, x: Tensor, aside: bool) -> Tensor:
        inner = nn.functional.gelu(self.first(x))
        out: Tensor = self.last(inner)
        return out + self.aside(inner) if aside else out


class Run:
    """One module and its optimizer, at some step."""

    def __init__(self, precision: str, tier: str, update: str, folder: Path) -> None:
        make_device, host_frac, nvme_frac = TIERS[tier]
        self.options = precision, tier, update, folder
        self.model = GeminiDDP(
            Small(),
            make_device(),
            StaticPlacement(offload_optim_frac=host_frac),
            precision=precision,
            loss_scale=LossScale(initial_scale=2.0**10) if precision == "fp16" else None,
            min_chunk_size_m=0.003,
            update=update,
        )
        self.optimizer = HybridAdam(
            self.model.parameters(),
            lr=1e-2,
            eps=1e-3,  # an update that feels a factor
            weight_decay=0.01,
            nvme_offload_fraction=nvme_frac,
            nvme_offload_dir=str(folder),
            nvme=NvmeConfig(block_numel=1024),
            cpu_path="auto" if tier == "stream" else "compile",
        )
        self.generator = torch.Generator().manual_seed(1)
        self.reports: list[StepReport] = []

    def step(self, *, parts: int = 1, aside: bool = True, clip: bool = False) -> None:
        """Nothing here asks for what a tail does: the next forward comes beside it."""
        for _ in range(parts):
            x = torch.randn(5, 33, generator=self.generator)
            self.model(x, aside).float().square().mean().backward()
        if clip:
            assert float(self.model.clip_grad_norm_(MAX_NORM)) > MAX_NORM
        self.optimizer.step()
        self.optimizer.zero_grad()
        report = self.optimizer.last_report
        assert report is not None
        self.reports.append(report)

    def skip(self) -> None:
        """A step with a gradient that is not finite."""
        weight = self.model.module.get_parameter("last.weight")
        handle = weight.register_hook(lambda grad: grad * float("nan"))
        self.step()
        handle.remove()
        assert self.reports[-1].skipped

    def resumed(self) -> Run:
        """Another one, from a checkpoint of this one."""
        folder = self.options[-1] / "saved"
        gemini.save_checkpoint(folder, self.model, self.optimizer)
        self.optimizer.close()
        again = Run(*self.options)
        gemini.load_checkpoint(folder, again.model, again.optimizer)
        again.generator = self.generator
        return again

    @property
    def less_as(self) -> str | None:
        """The rule by which less is hidden than was asked for; None: there is none.

        Raises AssertionError where steps were not as that says.
        """
        update, engine = self.options[2], self.model.engine
        no_tail = engine.overlap.against_tail()
        for report in self.reports:
            has_tail = report.behind.wait().seconds > 0
            # where a device decides, what it skips is given to it all the same
            is_skipped = report.skipped and report.update_path != "triton"
            expected = update == TAIL and no_tail is None and not is_skipped
            assert has_tail == expected, report
        return None if update == SERIAL else no_tail

    def digest(self) -> str:
        """Of weights, planes of state, and step counts."""
        weights, state = self.model.state_dict(), self.optimizer.state_dict()["state"]
        found = hashlib.sha256()
        for name, _ in self.model.module.named_parameters():
            planes = {**state[name], "step": torch.as_tensor(float(state[name]["step"]))}
            for tensor in (weights[name], *(planes[plane] for plane in sorted(planes))):
                found.update(tensor.float().contiguous().numpy().tobytes())
        return found.hexdigest()


def whole(run: Run) -> Run:
    for _ in range(NUM_STEPS):
        run.step()
    return run


def resume(run: Run) -> Run:
    """In the middle."""
    for _ in range(NUM_STEPS // 2):
        run.step()
    run = run.resumed()
    for _ in range(NUM_STEPS // 2):
        run.step()
    return run


def clip(run: Run) -> Run:
    for _ in range(NUM_STEPS):
        run.step(clip=True)
    return run


def accumulate(run: Run) -> Run:
    for _ in range(NUM_STEPS):
        run.step(parts=3)
    return run


def skip(run: Run) -> Run:
    for step in range(NUM_STEPS):
        if step % 3 == 1:
            run.skip()
        else:
            run.step()
    return run


def absent(run: Run) -> Run:
    """Gradients, of one layer, in every other step."""
    for step in range(NUM_STEPS):
        run.step(aside=step % 2 == 0)
    return run


SCHEDULES: dict[str, Callable[[Run], Run]] = {
    f.__name__: f for f in (clip, accumulate, skip, absent, resume)
}
# kernels sum the squares of a norm in another order, so its last bits are others: what is clipped
# to it has one digest where it streams, and one elsewhere
BY_NORM, OWN_NORM = {"clip"}, {"stream"}
EQUALS = {"resume": whole}  # the bits of another schedule, which one tier has in serial steps


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `less_as`: the rule by which less is hidden than was asked for."""

    precision: str
    tier: str
    update: str
    schedule: str
    sha256: str
    less_as: str | None = None


def cell(precision: str, tier: str, update: str, schedule: Callable[[Run], Run]) -> Cell:
    with tempfile.TemporaryDirectory() as folder:
        run = schedule(Run(precision, tier, update, Path(folder)))
        try:
            name, reason = schedule.__name__, run.less_as
            return Cell(precision, tier, update, name, run.digest(), reason)
        finally:
            run.optimizer.close()


def cells(precision: str, tiers: Sequence[str] = tuple(TIERS)) -> Iterator[Cell]:
    """All of one precision."""
    for name, schedule in SCHEDULES.items():
        if name in EQUALS:
            yield cell(precision, tiers[0], UPDATES[0], EQUALS[name])
        for tier in tiers:
            for update in UPDATES:
                yield cell(precision, tier, update, schedule)


def different(found: Sequence[Cell]) -> list[str]:
    """Precisions and schedules of which there is not one digest."""
    same_as = {other.__name__: name for name, other in EQUALS.items()}
    seen: dict[tuple[str, bool], set[str]] = {}
    for one in found:
        schedule = same_as.get(one.schedule, one.schedule)
        apart = schedule in BY_NORM and one.tier in OWN_NORM
        seen.setdefault((f"{one.precision} {schedule}", apart), set()).add(one.sha256)
    return list(dict.fromkeys(name for (name, _), digests in seen.items() if len(digests) > 1))


def table(found: Sequence[Cell]) -> str:
    """Of one precision: a row for each tier and update, a column for each schedule."""
    lines = [f"{found[0].precision:18}" + "".join(f"{name:>14}" for name in SCHEDULES)]
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for one in found:
        rows.setdefault((one.tier, one.update), {})[one.schedule] = one
    for (tier, update), row in rows.items():
        digests = "".join(f"{row[name].sha256[:12]:>14}" for name in SCHEDULES)
        rules = {one.less_as for one in row.values()} - {None}
        said = f"  less, as {', '.join(sorted(map(str, rules)))}" if rules else ""
        lines.append(f"{tier + ' ' + update:18}{digests}{said}")
    return "\n".join(lines)
