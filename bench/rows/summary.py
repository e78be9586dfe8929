"""What `bench.train` measured: medians with their spread, ratios, tables, a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows.job import number_of_settings
from bench.rows.table import Row
from gemini.placement.picture import dark_too

WARMUP_STEPS = 2  # of each process: the first allocates, and we plan with what it showed
PARTS = ("step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
# of rows whose updates are beside a pass
BESIDE = (
    "hidden_seconds", "waited_seconds", "clipped", "committed"
)  # fmt: skip

EXPLICIT = "the best of ours/zero*"  # the placement that a user would have to name
# what is asked: row, beside which, in what, at most
ASKED: tuple[tuple[str, str, str, float], ...] = (
    ("ours/resident", "torch/adamw-autocast", "step_seconds", 1.00),
    ("ours/resident", "torch/adamw-bf16", "step_seconds", 1.08),
    ("ours/resident", "deepspeed/zero3", "step_seconds", 1.00),
    ("ours/nvme", "deepspeed/zero3-nvme", "peak_rss_mib", 0.50),
    ("ours/nvme", "deepspeed/zero3-nvme", "step_seconds", 0.70),
    ("ours/nvme-tail", "ours/nvme", "step_seconds", 0.85),
    ("ours/nvme-tail", "ours/nvme", "peak_rss_mib", 1.03),
    ("ours/nvme-tail", "ours/resident", "step_seconds", 1.25),
    ("ours/nvme-tail", "deepspeed/zero3-nvme", "step_seconds", 0.50),
    ("ours/resident-8bit", "ours/resident", "peak_rss_mib", 0.76),
    ("ours/nvme-8bit-tail", "ours/nvme-tail", "step_seconds", 0.60),
    ("ours/nvme-bf16-tail", "ours/nvme-tail", "step_seconds", 0.75),
    ("ours/nvme-8bit", "deepspeed/zero3-nvme", "step_seconds", 0.40),
    ("ours/nvme-8bit", "deepspeed/zero3-nvme", "peak_rss_mib", 0.28),
    ("ours/w2", EXPLICIT, "step_seconds", 1.02),  # the default
    ("ours/zero3", "fsdp2/w2", "step_seconds", 1.00),
    ("ours/zero3", "fsdp2/w2", "peak_rss_mib", 1.00),
    ("ours/zero1", "ddp/zero1", "step_seconds", 1.00),
    ("ours/zero1", "ddp/zero1", "peak_rss_mib", 1.00),
    ("ours/zero2", "fsdp2/w2-keep", "step_seconds", 1.00),
    ("ours/zero2", "fsdp2/w2-keep", "peak_rss_mib", 1.00),
    ("ours/mesh-hsdp2x2", "fsdp2/mesh-hsdp2x2", "step_seconds", 1.10),
    ("ours/mesh-hsdp2x2", "fsdp2/mesh-hsdp2x2", "peak_rss_mib", 1.05),
    ("ours/mesh-tp2", "fsdp2/mesh-tp2", "step_seconds", 1.10),
    ("ours/mesh-tp2", "fsdp2/mesh-tp2", "peak_rss_mib", 1.05),
    ("ours/mesh-dp2tp2", "fsdp2/mesh-dp2tp2", "step_seconds", 1.10),
    ("ours/mesh-dp2tp2", "fsdp2/mesh-dp2tp2", "peak_rss_mib", 1.05),
    *(
        (f"ours/mesh-{name}", "fsdp2/mesh-tp2pp2", part, limit)
        for name in ("tp2pp2", "ulysses4", "ring4")  # as many ranks
        for part, limit in (("step_seconds", 1.10), ("peak_rss_mib", 1.05))
    ),
    ("ours/resident", "deepspeed/zero3", "startup_seconds", 0.50),
    ("ours/nvme", "deepspeed/zero3-nvme", "startup_seconds", 0.50),
    ("ours/accelerate", "torch/accelerate", "step_seconds", 1.02),
    ("ours/accelerate", "torch/accelerate", "peak_rss_mib", 1.01),
    ("ours/trainer", "torch/trainer", "step_seconds", 1.02),
    ("ours/trainer", "torch/trainer", "peak_rss_mib", 1.01),
    ("ours/lightning", "torch/lightning", "step_seconds", 1.02),
    ("ours/lightning", "torch/lightning", "peak_rss_mib", 1.01),
)


def summary(
    row: Row,
    configuration: dict[str, Any],
    lives: Sequence[dict[str, Any]],
    steps: Sequence[Sequence[dict[str, float]]],
    reason: str | None,
) -> dict[str, Any]:
    """A row of the JSON: medians, their least and largest under `spread`; or a `reason`.

    lives: of each round what the ranks said when they were `ready` and at their `end`, and
        `nvme_bytes`. steps: of each round the seconds and the loss of every step; those that follow
        a `settle` (`follows_settle`) are not counted.
    """
    fixed = {
        "name": row.name,
        "world_size": row.world_size,
        "settings": number_of_settings(configuration),
        "configuration": configuration,
    }
    if reason is not None:
        return {**fixed, "reason": reason}
    counted = [
        [step for step in life[WARMUP_STEPS:] if "follows_settle" not in step] for life in steps
    ]
    timed = [step for life in counted for step in life]
    samples: dict[str, list[float]] = {part: [step[part] for step in timed] for part in PARTS}
    samples |= {part: [step[part] for step in timed] for part in BESIDE if part in timed[0]}
    for start in ("import_seconds", "wrap_seconds"):
        samples[start] = [max(rank[start] for rank in life["ready"]) for life in lives]
    samples["startup_seconds"] = [
        a + b for a, b in zip(samples["import_seconds"], samples["wrap_seconds"], strict=True)
    ]
    for peak in ("peak_rss_mib", "peak_device_mib"):
        samples[peak] = [max(rank[peak] for rank in life["end"]) for life in lives]
    samples["first_step_seconds"] = [life[0]["step_seconds"] for life in steps]
    return {
        **fixed,
        **{key: statistics.median(values) for key, values in samples.items()},
        "spread": {key: [min(values), max(values)] for key, values in samples.items()},
        "nvme_bytes": lives[0]["nvme_bytes"],
        **_moves(steps),
        "loss": steps[0][-1]["loss"],
        "losses": [step["loss"] for step in steps[0]],
        "steps_by_round": [[step["step_seconds"] for step in life] for life in counted],
        "threads": lives[0]["end"][0]["threads"],
    }


def _moves(steps: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Moves of homes after the warm-up, of rows whose homes follow the batches: inputs have one
    length, so there is none."""
    if "home_moves" not in steps[0][-1]:
        return {}
    warm = WARMUP_STEPS - 1
    return {"moves": sum(life[-1]["home_moves"] - life[warm]["home_moves"] for life in steps)}


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked of us, where both rows are there. Step times are paired step by step."""
    found = {row["name"]: row for row in rows if "reason" not in row}
    named = [row for name, row in found.items() if name.startswith("ours/zero")]
    if named:
        found[EXPLICIT] = min(named, key=lambda row: float(row["step_seconds"]))
    told = []
    for name, beside, key, bound in ASKED:
        if name not in found or beside not in found:
            continue
        ratio = _ratio(found[name], found[beside], key)
        told.append({"row": name, "beside": beside, "of": key, "at_most": bound,
                     "ratio": ratio, "met": ratio <= bound})  # fmt: skip
    return told


def _ratio(ours: dict[str, Any], theirs: dict[str, Any], key: str) -> float:
    if key != "step_seconds":
        return float(ours[key] / theirs[key])
    pairs: list[float] = [
        a / b
        for mine, other in zip(ours["steps_by_round"], theirs["steps_by_round"], strict=True)
        for a, b in zip(mine, other, strict=True)
    ]
    return statistics.median(pairs)


def table(result: dict[str, Any]) -> str:
    """Markdown: a median, and from least to largest in brackets. Rows with a reason come last."""
    cuda = result["device"] != "cpu"
    heads = [
        "run", "step, s", "forward", "backward", "optimizer", "peak RSS, MiB",
        *(["peak device, MiB"] if cuda else []), "on disk, GB",
        f"loss after {result['steps']} steps", "start-up, s", "settings",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in result["rows"]:
        if "reason" in row:
            continue
        cells = [
            row["name"],
            with_spread(row, "step_seconds", 2),
            *(f"{row[part]:.2f}" for part in PARTS[1:]),
            with_spread(row, "peak_rss_mib", 0),
            *([with_spread(row, "peak_device_mib", 0)] if cuda else []),
            f"{row['nvme_bytes'] / 1e9:.2f}",
            f"{row['loss']:.4f}",
            with_spread(row, "startup_seconds", 1),
            str(row["settings"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for row in result["rows"]:
        if "reason" in row:
            lines.append(f"| {row['name']} | " + " | " * (len(heads) - 2) + " |")
    said = [f"{row['name']}: {row['reason']}" for row in result["rows"] if "reason" in row]
    said += [f"{row['name']}: {_beside(row)}" for row in result["rows"] if "hidden_seconds" in row]
    return "\n".join([*lines, *(["", *said] if said else [])])


def _beside(row: dict[str, Any]) -> str:
    """What is said of updates that are beside a pass."""
    said = []
    clipped = row["spread"].get("clipped", (0.0, 1.0))
    if clipped[0] == clipped[1]:
        said.append(f"{'every' if clipped[0] else 'no'} step is clipped")
    if row["hidden_seconds"] + row["waited_seconds"]:
        said.append(
            f"{row['hidden_seconds']:.2f} s a step of the tail are hidden, and "
            f"{row['waited_seconds']:.2f} s waited for"
        )
    counts = row["spread"]["committed"][0]
    return "; ".join([*said, "every step counts" if counts else "NOT EVERY STEP COUNTS"])


def with_spread(row: dict[str, Any], key: str, digits: int) -> str:
    low, high = row["spread"][key]
    return f"{row[key]:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratio_table(result: dict[str, Any]) -> str:
    """Markdown: what is asked of us, and what came out."""
    lines = ["| of | over | in | at most | measured |", "|---|---|---|---:|---:|"]
    for r in result["ratios"]:
        lines.append(
            f"| {r['row']} | {r['beside']} | {r['of'].split('_')[0]} | {r['at_most']:.2f} "
            f"| {r['ratio']:.2f}{'' if r['met'] else ', missed'} |"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Step time and peak memory of every row, with their ranges; whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if "reason" not in row][::-1]
    names = [row["name"] for row in rows]
    # one above the other: a phone shows both, in letters that can be read
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(6.6, 0.7 * len(rows) + 2))
    before = [0.0] * len(rows)
    for part in PARTS[1:]:
        seconds = [row[part] for row in rows]
        top.barh(names, seconds, left=before, label=part.removesuffix("_seconds"))
        before = [a + b for a, b in zip(before, seconds, strict=True)]
    steps = [row["step_seconds"] for row in rows]  # medians of sums, and no sums of medians
    top.errorbar(
        steps, names, xerr=_around(rows, "step_seconds", steps), fmt="o", markersize=4, color="k",
        label="step: median, range",
    )  # fmt: skip
    top.set_xlabel("seconds a step")
    top.legend(fontsize=8)
    peak = "peak_rss_mib" if result["device"] == "cpu" else "peak_device_mib"
    peaks = [row[peak] for row in rows]
    bottom.barh(names, peaks, xerr=_around(rows, peak, peaks))
    bottom.set_xlabel("peak resident memory, MiB" if peak == "peak_rss_mib" else "peak device, MiB")
    figure.suptitle(f"{result['model']}, batch {result['batch']} x {result['seq']} tokens")
    figure.tight_layout()
    part_file = path.with_name(path.name + ".part")
    try:
        undated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
        with matplotlib.rc_context({"svg.hashsalt": result["model"]}):
            figure.savefig(
                part_file, dpi=120, format=path.suffix.removeprefix(".") or "png", **undated
            )
        if path.suffix == ".svg":
            text = part_file.read_text(encoding="utf-8")
            part_file.write_text(dark_too(text), encoding="utf-8")
        part_file.replace(path)
    finally:
        part_file.unlink(missing_ok=True)


def _around(rows: Sequence[dict[str, Any]], key: str, at: Sequence[float]) -> list[list[float]]:
    """How far the least and the largest are from what is drawn."""
    spreads = [row["spread"][key] for row in rows]
    return [
        [max(0.0, here - low) for here, (low, _) in zip(at, spreads, strict=True)],
        [max(0.0, high - here) for here, (_, high) in zip(at, spreads, strict=True)],
    ]
