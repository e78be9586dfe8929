"""`make results`: everything in bench/results/ made again, here, from one clean commit.

    python -m bench.docs.remake [--only NAME ...] [--list] [--smoke FOLDER]

The commands, one after the other, on a machine that does nothing else and has fio and what
`make peers` makes; then the tables of README.md and docs/. `--smoke` runs small versions of those
that have one, into a folder: do they still run?
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.machine import commit

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "bench/results"


@dataclass(frozen=True, slots=True)
class Result:
    """One file, what makes it, and about how long that takes on 2 cores and a disk of 2 GB/s."""

    name: str
    arguments: tuple[str, ...]
    minutes: int
    smoke: tuple[str, ...] = ()  # of a small version; none: there is none
    environment: str = ""  # the folder of another one than this Python's; `make FOLDER/ok` makes it

    @property
    def path(self) -> str:
        return f"{RESULTS}/{self.name}.json"

    @property
    def command(self) -> str:
        """As the file names it."""
        return shlex.join(["python", "-m", *self.arguments, "--json", self.path])

    @property
    def python(self) -> str:
        return str(ROOT / self.environment / "bin/python") if self.environment else sys.executable


# what draws comes last: a drawing is a file of the commit
EVERYTHING = (
    Result("chunk-search", ("bench.chunk_search", "--model", "all"), 3, ("bench.chunk_search",)),
    Result("gathers", ("bench.host.gathers",), 1, ("bench.host.gathers", "--model", "gpt2")),
    Result("calls-cpu", ("bench.host.calls",), 3),
    Result("numerics-cpu", ("bench.numerics",), 10),
    Result("predict-cpu", ("bench.predict",), 10),
    Result(
        "adam-cpu", ("bench.adam",), 5, ("bench.adam", "--numel", "1048576", "--rounds", "2")
    ),
    Result(
        "overhead-cpu", ("bench.overhead",), 12,
        ("bench.overhead", "--only", "small", "--rounds", "2"),
    ),
    Result(
        "nvme-cpu", ("bench.nvme",), 15,
        ("bench.nvme", "--size", "64MiB", "--numel", "0", "--rounds", "1"),
    ),
    Result("checkpoint-cpu", ("bench.checkpoint",), 10, ("bench.checkpoint", "--layers", "2")),
    Result("ways", ("bench.ways",), 10),
    Result(
        "activations-cpu",
        (
            "bench.activations", "--rows",
            "spill;spill, checkpointing;recompute;auto;spill, chunked",
        ),
        9,
        ("bench.activations", "--model", "tiny", "--seq", "512", "--room", "60"),
    ),
    Result(
        "serving-cpu", ("bench.serving",), 3,
        ("bench.serving", "--model", "tiny", "--rounds", "1", "--new-tokens", "2"),
    ),
    Result(
        "converge-cpu", ("bench.converge", "--picture", "docs/converge.svg"), 10,
        ("bench.converge", "--steps", "2", "--seeds", "1", "--only", "ours/fp32", "ours/8bit"),
    ),
    Result(
        "muon-cpu", ("bench.muon",), 4,
        ("bench.muon", "--layers", "1", "--width", "128", "--rounds", "1"),
    ),
    Result("train-cpu", ("bench.train", "--rounds", "2", "--steps", "10"), 20),
    Result(
        "meshes-cpu",
        (
            "bench.train", "--peers", "fsdp2/mesh", "ours/mesh", "--model", "llama-150m",
            "--rounds", "2", "--steps", "5",
        ),
        5,
    ),
    Result("capacity-cpu", ("bench.capacity",), 25),
    Result(
        "qlora-cpu", ("bench.capacity", "--qlora"), 20,
        ("bench.capacity", "--qlora", "--model", "small", "--steps", "3", "--rss-limit", "1000MiB"),
    ),
    Result(
        "cuda-stub", ("tests.cuda_stub", "tests.cuda_stub.steps"), 2, environment=".venv-cuda"
    ),
    Result(
        "cuda-prices", ("tests.cuda_stub", "tests.cuda_stub.prices"), 4, environment=".venv-cuda"
    ),
    Result(
        "certificate-cpu", ("bench.certificate", "--draws", "200", "--minutes", "84"), 84,
        ("bench.certificate", "--draws", "1"),
    ),
    Result("picture", ("bench.docs.picture",), 3),
)  # fmt: skip


def squashed() -> dict[str, str]:
    """By the commit that a result names, where that is not in the history: the one that has its
    work."""
    lines = (ROOT / RESULTS / "squashed.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def run(result: Result, arguments: Sequence[str], path: str) -> bool:
    """Whether it made its file. One that exists begins anew; where that fails it stays."""
    print(f"\n{shlex.join(['python', '-m', *arguments, '--json', path])}", flush=True)
    started = time.perf_counter()
    file = ROOT / path
    before = file.read_bytes() if file.exists() else None
    file.unlink(missing_ok=True)
    try:
        done = subprocess.run([result.python, "-m", *arguments, "--json", path], cwd=ROOT)
    except FileNotFoundError:
        print(f"there is no {result.environment}: make {result.environment}/ok")
        made = False
    else:
        made = done.returncode == 0 and file.exists()
    if not made and before is not None:
        file.write_bytes(before)
    seconds = time.perf_counter() - started
    print(f"{result.name}: {'made' if made else 'FAILED'} in {seconds:.0f} s", flush=True)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.docs.remake")
    parser.add_argument("--only", nargs="+", choices=[result.name for result in EVERYTHING])
    parser.add_argument("--list", action="store_true", help="print the commands and their minutes")
    parser.add_argument("--smoke", type=Path, metavar="FOLDER", help="small versions, into it")
    args = parser.parse_args(argv)
    wanted = [result for result in EVERYTHING if not args.only or result.name in args.only]
    if args.list:
        for result in wanted:
            print(f"{result.minutes:3d} min  {result.command}")
        print(f"{sum(result.minutes for result in wanted):3d} min in all, about")
        return 0
    if args.smoke is not None:
        small = [result for result in wanted if result.smoke]
        failed = [r for r in small if not run(r, r.smoke, str(args.smoke / f"{r.name}.json"))]
    else:
        found = commit()
        if found == "unknown" or found.endswith("+"):
            parser.error(
                f"the commit is {found}: results name the commit that made them, so commit what "
                "was changed first"
            )
        failed = [r for r in wanted if not run(r, r.arguments, r.path)]
        subprocess.run([sys.executable, "-m", "bench.docs.readme"], cwd=ROOT, check=True)
    if failed:
        print(f"\nnot made: {', '.join(result.name for result in failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
