"""Report of a run, `report.html`, with pictures inside: a browser fetches nothing else."""

from __future__ import annotations

import io
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gemini import __version__
from gemini.plan.table import rendered

from .config import TrainConfig

Log = Sequence[Mapping[str, Any]]  # of Trainer's state: one entry each time that it logs
_PARTS = {
    "seconds_passes": "forward and backward",
    "seconds_update": "step",
    "seconds_between": "between: data, evaluation, saving",
}
_TIERS = ("device", "host", "nvme")
_KINDS = {"predicted": "--", "measured": "-"}  # lines


def write_report(
    path: Path, log: Log, *, title: str, plan: str, config: str,
    samples: Sequence[tuple[str, str]], planned_seconds: float | None = None,
) -> None:  # fmt: skip
    """Write a run's summary, plan, pictures of its log, samples and config into one HTML file.

    planned_seconds: of a step, drawn beside those that were measured.
    """
    pictures = PICTURES | {"Seconds of a step": partial(_seconds, planned=planned_seconds)}
    drawn = {name: _drawn(draw, log) for name, draw in pictures.items()}
    text = rendered(
        "report", title=title, plan=plan, config=config, samples=samples,
        summary=summary(log, planned_seconds),
        pictures={name: svg for name, svg in drawn.items() if svg is not None},
    )  # fmt: skip
    # a continuation may end in half of a character, which utf-8 does not have
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def card(settings: TrainConfig, eval_loss: float | None, *, config: str) -> str:
    """Model card of a run's result: what it was made of, and how it is read."""
    base = settings.model
    hub = not Path(base).exists()
    has_adapters = settings.lora and not settings.merge
    head = ["---", *([f"base_model: {base}"] if hub else []),
            f"library_name: {'peft' if has_adapters else 'transformers'}",
            f"tags: [gemini, {settings.method}]", "---"]  # fmt: skip
    how = {"sft": "fine-tuned", "dpo": "trained by DPO", "grpo": "trained by GRPO",
           "reward": "trained as a reward model"}  # fmt: skip
    how["sft"] = "trained from scratch" if settings.from_scratch else how["sft"]
    what = f"LoRA adapters of rank {settings.lora}" if settings.lora else "All weights"
    what += " merged into all weights" if settings.merge else ""
    loss = "" if eval_loss is None else f" Loss on held-out rows: {eval_loss:.4f}."
    task = "SequenceClassification" if settings.scores else "CausalLM"
    kind = f"AutoPeftModelFor{task}" if has_adapters else f"AutoModelFor{task}"
    one_label = ", num_labels=1" if task == "SequenceClassification" else ""
    return "\n".join([
        *head, "", f"# {Path(settings.out).name}", "",
        f"{what} of `{base}`, {how[settings.method]} on `{settings.data}`.{loss}", "",
        "```python",
        f"from {'peft' if has_adapters else 'transformers'} import {kind}", "",
        f'model = {kind}.from_pretrained("{settings.out}"{one_label})',
        "```", "", "Settings:", "", "```yaml", config.rstrip(), "```", "",
    ])  # fmt: skip


def summary(log: Log, planned_seconds: float | None = None) -> dict[str, str]:
    """Summary of a run by its log: losses, tokens, time; then the machine and versions. Empty for a
    run that logged nothing."""
    found: dict[str, str] = {}
    for key, name in (("loss", "loss of training"), ("eval_loss", "loss of held-out data")):
        steps, values = _points(log, key)
        if steps:
            found[name] = (
                f"{values[0]:.4g} at step {steps[0]}, {values[-1]:.4g} at step {steps[-1]}"
            )
    _, tokens = _points(log, "num_tokens")
    if tokens:
        found["tokens"] = f"{tokens[-1]:,.0f}"
    _, seconds = _points(log, "seconds")
    if seconds:
        middle = sorted(seconds)[len(seconds) // 2]
        beside = "" if planned_seconds is None else f", planned {planned_seconds:.3g} s"
        found["a step"] = f"{middle:.3g} s, the median of what was logged{beside}"
    _, runtime = _points(log, "train_runtime")
    if runtime:
        found["time"] = f"{runtime[-1]:,.0f} s since this start of the run"
    if not found:
        return {}
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, threads: {torch.get_num_threads()}"
    found["machine"] = f"{device}; {platform.platform()}"
    others = [f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "peft")]
    found["versions"] = ", ".join([f"gemini {__version__}", *others])
    return found


def _drawn(draw: Callable[[Any, Log], None], log: Log) -> str | None:
    """Picture as SVG; None if the log has no points for it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    draw(axes, log)
    lines: list[Any] = list(axes.lines)
    for line in lines:
        if len(line.get_xdata()) == 1:  # of which a line shows nothing
            line.set_marker("o")
    if not any(len(line.get_xdata()) for line in lines):
        return None
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _points(log: Log, key: str) -> tuple[list[int], list[float]]:
    """Steps whose log entries have `key`, and its values."""
    found = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in found], [value for _, value in found]


def _loss(axes: Any, log: Log) -> None:
    for key, label in (("loss", "trained on"), ("eval_loss", "held out")):
        steps, values = _points(log, key)
        if steps:
            axes.plot(steps, values, "o-" if key == "eval_loss" else "-", label=label)
    axes.set_ylabel("loss, nats a token")


def _rate(axes: Any, log: Log) -> None:
    axes.plot(*_points(log, "learning_rate"))
    axes.set_ylabel("learning rate")


def _seconds(axes: Any, log: Log, planned: float | None = None) -> None:
    steps, values = _points(log, "seconds")
    axes.plot(steps, values, label="measured")
    if steps and planned is not None:
        axes.axhline(planned, linestyle="--", color="C1", label="predicted")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)


def _memory(axes: Any, log: Log) -> None:
    names = [f"gemini/{tier}_{kind}_bytes" for tier in _TIERS for kind in _KINDS]
    most = max((one.get(name, 0) for one in log for name in names), default=0)
    unit, name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    for tier, colour in zip(_TIERS, ("C0", "C1", "C2"), strict=True):
        for kind, style in _KINDS.items():
            steps, values = _points(log, f"gemini/{tier}_{kind}_bytes")
            if any(values):
                scaled = [value / unit for value in values]
                axes.plot(steps, scaled, style, color=colour, label=f"{tier}, {kind}")
    axes.set_ylabel(f"{name} of a rank at its peak")
    axes.set_ylim(0, 1.1 * most / unit or None)  # no line runs on the frame


def _where(axes: Any, log: Log) -> None:
    columns = {label: _points(log, key) for key, label in _PARTS.items()}
    steps = next(iter(columns.values()))[0]
    if steps:
        axes.stackplot(steps, [values for _, values in columns.values()], labels=list(columns))
        axes.plot(
            *_points(log, "gemini/stalled_seconds"), "k:", label="of the step, waiting for the disk"
        )
    axes.set_ylabel("seconds a step")


PICTURES: dict[str, Callable[[Any, Log], None]] = {
    "Loss": _loss,
    "Learning rate": _rate,
    "Seconds of a step": _seconds,
    "Memory, as predicted and as measured": _memory,
    "Where time went": _where,
}
