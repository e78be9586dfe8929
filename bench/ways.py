"""The main job in seven ways, each in a process of its own, and one table.

baseline     torch AdamW, fp32 weights under bf16 autocast
floor        bf16 model, gradients packed and dropped: what no state manager can go below
resident     GeminiDDP, everything in RAM
nvme         GeminiDDP, the whole optimizer state on disk
nvme-tail    the same, updated behind the next forward (ADR 0002)
plain        HybridAdam on the unwrapped model, otherwise as baseline
plain-nvme   the same with its state on disk
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.support import matmul
from bench.support.disk import mixed_gb_per_s
from bench.support.machine import MALLOC_ENVIRONMENT, write_result
from gemini.nvme import default_folder

ROOT = Path(__file__).resolve().parent.parent
RUNS: dict[str, list[str]] = {
    "baseline": ["--baseline"],
    "floor": ["--floor"],
    "resident": [],
    "nvme": ["--nvme-fraction", "1.0"],
    "nvme-tail": ["--nvme-fraction", "1.0", "--update", "tail"],
    "plain": ["--plain"],
    "plain-nvme": ["--plain", "--nvme-fraction", "1.0"],
}
WARMUP_STEPS = 2  # not in the median of step seconds


def run(name: str, flags: list[str], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One training in a fresh process; what `train_gpt.py --json` wrote."""
    out = args.out / f"{name}.json"
    command = [
        sys.executable, "-m", matmul.__name__, str(ROOT / "examples/train_gpt.py"),
        "--model", args.model, "--steps", str(args.steps), "--batch", "4", "--seq", "128",
        "--device", "cpu",
        "--nvme-dir", str(folder), "--json", str(out), *flags,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "io"), os.environ.get("PYTHONPATH", "")])
    print(f"\n{name}:", flush=True)
    subprocess.run(
        command, check=True, env={**os.environ, **MALLOC_ENVIRONMENT, "PYTHONPATH": path}
    )
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def row(name: str, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "peak_rss_mib": round(result["peak_rss_mib"][-1]),
        "step_seconds_median": statistics.median(result["step_seconds"][WARMUP_STEPS:]),
        "train_loss_first": result["train_loss"][0],
        "train_loss_last": result["train_loss"][-1],
        "val_loss": result["val_loss"],
        "nvme_bytes": result["nvme_bytes"],
        "bytes_moved_per_step": result["bytes_moved_per_step"],
    }


def table(rows: list[dict[str, Any]], mixed: float) -> str:
    lines = [
        "| run | peak RSS, MiB | step, s | train loss | validation loss | on disk, GB "
        "| moved a step, GB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r['name']} | {r['peak_rss_mib']} | {r['step_seconds_median']:.2f} "
            f"| {r['train_loss_last']:.4f} | {r['val_loss']:.4f} | {r['nvme_bytes'] / 1e9:.2f} "
            f"| {r['bytes_moved_per_step'] / 1e9:.2f} |"
        )
    lines.append(f"\nDisk, reads and writes mixed half and half: {mixed:.2f} GB/s")
    lines += ["", *bounds({r["name"]: r for r in rows}, mixed)]
    return "\n".join(lines)


def bounds(rows: dict[str, dict[str, Any]], mixed: float) -> list[str]:
    """What the disk lets a step take at least: its bytes behind what `resident` takes, or beside
    it where they have a tail. A row that a result was made without is said to be missing."""
    least = rows["resident"]["step_seconds_median"]
    lines = []
    for name, has_tail in (("nvme", False), ("nvme-tail", True)):
        if name not in rows:
            lines.append(f"`{name}` was not measured: this result was made before it was a row.")
            continue
        disk = rows[name]["bytes_moved_per_step"] / 1e9 / mixed
        bound = max(least, disk) if has_tail else least + disk
        seconds = rows[name]["step_seconds_median"]
        of = "the larger of `resident`'s step and" if has_tail else "`resident`'s step plus"
        lines.append(
            f"`{name}` takes {seconds:.2f} s a step, {seconds / bound:.2f} of its bound: "
            f"{bound:.2f} s = {of} its bytes at that speed."
        )
    return lines


def draw(results: dict[str, dict[str, Any]], rows: list[dict[str, Any]], out: Path) -> None:
    """`loss.png` and `memory.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for name in ("baseline", "resident", "nvme"):
        style = "--" if name == "nvme" else "-"
        axes.plot(results[name]["train_loss"], style, label=name)
    axes.set(xlabel="step", ylabel="training loss", title="GPT-2 on the standard library")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120)

    figure, axes = pyplot.subplots()
    bars = axes.bar([r["name"] for r in rows], [r["peak_rss_mib"] for r in rows])
    axes.bar_label(bars)
    axes.set(ylabel="peak RSS, MiB", title="Peak resident memory of the process")
    figure.savefig(out / "memory.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/ways")
    parser.add_argument("--nvme-dir", type=Path, help="default: a temporary folder on a disk")
    parser.add_argument("--json", type=Path, help="default: summary.json beside the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.nvme_dir or default_folder()

    results = {}
    for name, flags in RUNS.items():
        results[name] = run(name, flags, args, folder)
        if name == "nvme-tail":  # a shared disk is slower once it was busy for a while
            mixed = mixed_gb_per_s(folder)
    rows = [row(name, result) for name, result in results.items()]
    summary = {
        "rows": rows,
        "mixed_disk_gb_per_s": mixed,
    }
    path = args.json or args.out / "summary.json"
    write_result(path, summary)
    draw(results, rows, args.out)
    print("\n" + table(rows, mixed))
    print(f"\nwritten: {path}; {args.out}/loss.png, memory.png")


if __name__ == "__main__":
    main()
