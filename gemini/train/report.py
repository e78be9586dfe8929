"""Report of a run, `report.html`, with pictures inside: a browser fetches nothing else."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import TrainConfig

Log = Sequence[Mapping[str, Any]]  # of Trainer's state: one entry each time that it logs
_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 16px sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
pre {{ background: #f4f4f4; padding: 1em; overflow: auto; max-height: 40em; white-space: pre-wrap }}
svg {{ max-width: 100%; height: auto }}</style>
<h1>{title}</h1>
"""
_PARTS = {
    "seconds_passes": "forward and backward",
    "seconds_update": "step",
    "seconds_between": "between: data, evaluation, saving",
}
_TIERS = ("device", "host", "nvme")
_KINDS = {"predicted": "--", "measured": "-"}  # lines


def write_report(
    path: Path, log: Log, *, title: str, plan: str, config: str, samples: Sequence[tuple[str, str]]
) -> None:
    """Write a run's plan, pictures of its log, samples and config into one HTML file."""
    parts = [_PAGE.format(title=html.escape(title)), _text("As planned", plan)]
    for name, draw in PICTURES.items():
        svg = _drawn(draw, log)
        if svg is not None:
            parts.append(f"<h2>{name}</h2>\n{svg}")
    if samples:
        said = "\n\n".join(f"{prompt}\n--> {answer}" for prompt, answer in samples)
        parts.append(_text("Continuations of held-out data", said))
    parts.append(_text("config.yaml", config))
    # a continuation may end in half of a character, which utf-8 does not have
    path.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")


def card(settings: TrainConfig, eval_loss: float | None, *, config: str) -> str:
    """Model card of a run's result: what it was made of, and how it is read."""
    base = settings.model
    hub = not Path(base).exists()
    head = ["---", *([f"base_model: {base}"] if hub else []),
            f"library_name: {'peft' if settings.lora else 'transformers'}",
            f"tags: [gemini, {settings.method}]", "---"]  # fmt: skip
    how = {"sft": "fine-tuned", "dpo": "trained by DPO", "grpo": "trained by GRPO"}
    how["sft"] = "trained from scratch" if settings.from_scratch else how["sft"]
    what = f"LoRA adapters of rank {settings.lora}" if settings.lora else "All weights"
    loss = "" if eval_loss is None else f" Loss on held-out rows: {eval_loss:.4f}."
    kind = "AutoPeftModelForCausalLM" if settings.lora else "AutoModelForCausalLM"
    return "\n".join([
        *head, "", f"# {Path(settings.out).name}", "",
        f"{what} of `{base}`, {how[settings.method]} on `{settings.data}`.{loss}", "",
        "```python",
        f"from {'peft' if settings.lora else 'transformers'} import {kind}", "",
        f'model = {kind}.from_pretrained("{settings.out}")',
        "```", "", "Settings:", "", "```yaml", config.rstrip(), "```", "",
    ])  # fmt: skip


def _text(title: str, text: str) -> str:
    return f"<h2>{title}</h2>\n<pre>{html.escape(text)}</pre>"


def _drawn(draw: Callable[[Any, Log], None], log: Log) -> str | None:
    """Picture as SVG; None if the log has no points for it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    draw(axes, log)
    lines: list[Any] = list(axes.lines)
    if not any(len(line.get_xdata()) for line in lines):
        return None
    axes.set_xlabel("step")
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


def _seconds(axes: Any, log: Log) -> None:
    axes.plot(*_points(log, "seconds"))
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
    axes.set_ylim(bottom=0)


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
