"""`python -m bench.gpu --minutes 9 --out DIR [--half 2]`: all that ten minutes, or twice as many,
on a bare GPU can teach.

One section after the other, what is worth most first, each a process with its own limit and its own
files in DIR, which it writes as it goes. `warm` compiles the kernels for all, with all cores. If a
test of `steps` fails, a step waits for the device: figures are not worth their minutes then, and
what follows is left out. Of the others, one that fails or hangs costs only itself. `summary.json`
says how each ended. `--dry` runs all of them small and on the CPU, and collects the tests of a GPU,
so that they cannot rot.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DRY_SECONDS = 300  # of a section: kernels are interpreted, on a CPU that others use too
SHAPES = ("1024/4", "2048/8", "2048/4")  # tile and warps of the update
ON_GPU = "tests/optim/update/test_gpu.py::test_"
NCU = (
    "--clock-control", "none", "-k", "regex:update_kernel", "--launch-count", "10",
    "--section", "SpeedOfLight", "--section", "WarpStateStats",
)  # fmt: skip
FAILED = 1  # pytest: a test failed; other codes and time-outs say nothing about a step
TINY = {  # the model of `bench.train`, dry
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64,
    "n_head": 2, "vocab_size": 256, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Section:
    """One process: what runs, and for how many seconds at most of the 540 that all have."""

    name: str
    command: tuple[str, ...]
    seconds: int
    is_gate: bool = False  # tests: if one fails, what follows is left out


def halves(out: Path, *, dry: bool) -> tuple[list[Section], list[Section]]:
    """In the order of what is worth most; each half fits ten minutes, and compiles for itself."""
    python, device = sys.executable, "sim" if dry else "cuda"
    numel, rounds = (str(1 << 14), "1") if dry else (str(1 << 30), "7")
    own = (python, "-m", "bench.support.gpu_sections", "--device", device, "--out", str(out))

    def kernels(shape: str) -> Section:
        name = "kernels-" + shape.replace("/", "-")
        return Section(
            name,
            (python, "-m", "bench.adam", "--device", device, "--numel", numel, "--rounds", rounds,
             "--launch", shape, "--json", str(out / f"{name}.json")),
            28,
        )  # fmt: skip

    # marks of tests of kernels are there only where kernels are compiled
    pytest = (
        ("env", "TRITON_INTERPRET=0", python, "-m", "pytest", "-q", "--collect-only")
        if dry
        else (python, "-m", "pytest", "-q", "-rA")
    )
    several = not dry and importlib.util.find_spec("xdist") is not None
    spread = ("-n", str(min(12, os.cpu_count() or 1)), "--timeout", "40") if several else ()

    def tests(name: str, seconds: int, *where: str, is_gate: bool = False) -> Section:
        marks = "gpu and not values" if is_gate else "gpu"
        own = () if is_gate else spread
        return Section(name, (*pytest, *own, "-m", marks, *where), seconds, is_gate)

    def found(tool: str, *options: str) -> tuple[str, ...]:
        path = None if dry else shutil.which(tool)
        return () if path is None else (path, *options)

    small = (python, "tests/optim/update/small_steps.py", "cpu" if dry else "cuda")
    adam = (python, "-m", "bench.adam", "--device", device, "--rounds", "1")
    profiler = found("ncu", *NCU)
    profiled = (*profiler, *adam, "--numel", str(1 << 14 if dry else 1 << 28))
    warm = (python, "-m", "bench.support.warm", "--device", "cpu" if dry else "cuda")
    own_sections = {
        name: Section(name, (*own, name), seconds)
        for name, seconds in (
            ("kept", 100), ("places", 60), ("races", 30), ("stream", 60), ("window", 40),
            ("ahead", 40), ("ranks", 40),
        )
    }  # fmt: skip
    first, *others = map(kernels, SHAPES[:1] if dry else SHAPES)
    warm_up = Section("warm", warm if dry else (*warm, "--launch", *SHAPES), 60)
    return [
        warm_up,
        tests(
            "steps", 20, ON_GPU + "a_step_on_a_plain_module_never_waits",
            ON_GPU + "a_step_of_an_engine_never_waits", is_gate=True,
        ),
        first,
        Section("train", (python, "-m", "bench.train", *_training(out, dry=dry)), 100),
        own_sections["kept"],
        Section("doctor", (python, "-m", "gemini", "doctor", "--dir", str(out)), 20),
        tests(
            "tests", 55, "tests/kernels_triton", "tests/gemini/fused/test_kernels.py",
            ON_GPU + "the_report_of_a_step_is_read_later",
        ),
        own_sections["places"],
        own_sections["races"],
    ], [
        warm_up,
        *others,
        tests("graph", 12, ON_GPU + "a_step_is_captured_in_a_graph_and_replayed"),
        tests(
            "profiler", 12,
            ON_GPU + "norm_clip_and_update_of_500_tensors_are_at_most_three_launches",
        ),
        tests(
            "muon", 15, ON_GPU + "muon_on_a_gpu_is_torchs",
            ON_GPU + "muon_over_shards_steps_with_state_on_nvme",
        ),
        tests(
            "tail", 12, ON_GPU + "memory_is_not_handed_on_before_updates_beside_have_read_it",
            ON_GPU + "a_parked_module_gives_the_device_back_and_a_hook_runs_on_its_stream",
        ),
        own_sections["window"],
        own_sections["stream"],
        own_sections["ahead"],
        own_sections["ranks"],
        Section("sanitizer", (*found("compute-sanitizer", "--error-exitcode", "1"), *small), 35),
        *([Section("ncu", profiled, 40)] if profiler or dry else []),
    ]  # fmt: skip


def _training(out: Path, *, dry: bool) -> Sequence[str]:
    """Arguments of `bench.train`: beside torch and FSDP2; dry a tiny model, and ours alone."""
    written = ("--json", str(out / "train.json"), "--force")
    if not dry:
        rows = ("--peers", "torch", "fsdp2", "ours", "--model", "gpt2-medium")
        return ("--device", "cuda", *rows, *written)
    model = out / "tiny.json"
    model.write_text(json.dumps(TINY), encoding="utf-8")
    peers = ("--peers", "torch/adamw-bf16", "ours/resident", "--steps", "3", "--rounds", "1")
    return ("--device", "cpu", *peers, "--model", str(model), "--seq", "16", *written)


def run(section: Section, out: Path, seconds: float, *, dry: bool) -> dict[str, object]:
    """Run one section; its output is in `NAME.log`. How it ended."""
    root = Path(__file__).resolve().parent.parent
    paths = [str(root), str(root / "io"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    # thousands of files: not among the results
    environment.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "gemini-triton"))
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    else:
        environment.pop("TRITON_INTERPRET", None)
    started = time.perf_counter()
    with (out / f"{section.name}.log").open("w", encoding="utf-8") as log:
        try:
            code: int | str = subprocess.run(
                section.command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds,
                env=environment, cwd=root,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
    return {"ended": code, "seconds": round(time.perf_counter() - started, 1)}


def run_all(
    chosen: Sequence[Section], out: Path, minutes: float, *, dry: bool
) -> dict[str, dict[str, object]]:
    """All sections, or as many as the minutes allow; `summary.json` is written as they end."""
    end = time.perf_counter() + 60 * minutes
    summary: dict[str, dict[str, object]] = {}
    stopped_by = ""
    for section in chosen:
        left = end - time.perf_counter()
        if stopped_by:
            summary[section.name] = {"ended": f"left out: {stopped_by} failed"}
        elif left < 5:
            summary[section.name] = {"ended": "no time was left"}
        else:
            seconds = DRY_SECONDS if dry else section.seconds
            summary[section.name] = run(section, out, min(seconds, left), dry=dry)
        if section.is_gate and summary[section.name]["ended"] == FAILED:
            stopped_by = section.name
        print(f"{section.name:16s} {summary[section.name]}", flush=True)
        (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU")
    parser.add_argument("--half", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", nargs="*", help="names of sections of either half")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    first, second = halves(out, dry=args.dry)
    chosen = first if args.half == 1 else second
    if args.only:
        both = {section.name: section for section in (*first, *second)}
        chosen = [section for name, section in both.items() if name in args.only]
    summary = run_all(chosen, out, args.minutes, dry=args.dry)
    return int(any(entry["ended"] != 0 for entry in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
