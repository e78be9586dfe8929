"""Searches without an end: python -m tests.deep [--list] [AREA ...]

An area is a group of jobs, each a command. A job that passes gets its line in `ledger.toml`, which
is committed: what was searched, on which commit. A run passes over what its commit has in the
ledger, so one that was stopped goes on. Searches with a seed begin where the last ended. What they
find is kept in tests/corpus/, and replayed by `make test`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.lines import PLACES

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
LEDGER = FOLDER / "ledger.toml"
PYTEST = ("-m", "pytest", "-q", "--tb=short")
ROUNDS = 20  # of new examples: 10 000 files of checkpoints and stores that were changed
CERTIFICATES = 200
PROGRAMS = {1: 2000, 2: 500}  # drawn, by ranks
BESIDE_READERS = 500  # drawn
DOORS = 500  # drawn with wrappers and files
LENGTHS = 2000  # drawn programs
OVERLAPS = {1: 1500, 2: 500}  # drawn, by ranks
INTERRUPTED = 400  # drawn, a place
TIME_OUTS = "400"
SOME_LINES = "500"  # where one takes two seconds


@dataclass(frozen=True, slots=True)
class Job:
    """A command for this Python, or for make; a search takes `--seed`."""

    area: str
    name: str
    command: tuple[str, ...]
    num_seeds: int = 0  # that one run of it uses up

    @property
    def title(self) -> str:
        return f"{self.area}: {self.name}"


@dataclass(frozen=True, slots=True)
class Entry:
    """The last time that a job passed."""

    commit: str
    seconds: int
    said: str  # its last line
    next_seed: int = 0


def jobs() -> Iterator[Job]:
    for path in sorted(FOLDER.glob("*/test_*.py")):
        file = str(path.relative_to(ROOT))
        yield Job(path.parent.name, path.stem.removeprefix("test_"), (*PYTEST, "-m", "", file))
    yield Job("cases", "of other tests", (*PYTEST, "-m", "deep", "tests", f"--ignore={FOLDER}"))
    unlike = ("--unlike", "-m", "not deep and not gpu", "tests/dist", "tests/integrations")
    yield Job("unlike", "ranks that hash strings unlike", (*PYTEST, *unlike))
    for number in range(ROUNDS):
        new = ("-x", "-m", "hypothesis and not gpu", "--hypothesis-profile=new")
        yield Job("fuzz", f"new examples, round {number + 1}", (*PYTEST, *new))
    for ranks, count in PROGRAMS.items():
        drawn = ("-m", "tests.support.loops.programs", f"--ranks={ranks}", f"--count={count}")
        yield Job("fuzz", f"programs at {ranks} ranks", drawn, count)
    drawn = ("-m", "tests.support.loops.programs", "--readers=2", f"--count={BESIDE_READERS}")
    yield Job("fuzz", "programs beside readers", drawn, BESIDE_READERS)
    drawn = ("-m", "tests.support.loops.programs", "--doors", f"--count={DOORS}")
    yield Job("fuzz", "programs under wrappers, through files", drawn, DOORS)
    drawn = ("-m", "tests.support.loops.lengths", f"--count={LENGTHS}")
    yield Job("fuzz", "programs of many lengths", drawn, LENGTHS)
    for ranks, count in OVERLAPS.items():
        drawn = ("-m", "tests.support.loops.overlaps", f"--ranks={ranks}", f"--count={count}")
        yield Job("fuzz", f"steps that overlap a pass, at {ranks} ranks", drawn, count)
    drawn = ("-m", "bench.certificate", f"--draws={CERTIFICATES}")
    yield Job("certificate", f"{CERTIFICATES} plans", drawn, 1)
    for name, place in PLACES.items():
        some = (SOME_LINES,) if place.ranks > 1 and place.home == "files" else ()
        yield Job("lines", name, ("-m", "tests.support.lines", name, *some))
        if place.ranks == 1:
            timed = ("-m", "tests.support.lines", name, TIME_OUTS, "--sent=time-out")
            yield Job("lines", f"{name}, time-outs", timed)
            drawn = ("-m", "tests.support.loops.interrupted", name, f"--count={INTERRUPTED}")
            yield Job("interrupted", name, drawn, INTERRUPTED)
    mutants = ("-m", "tests.mutate", "--ledger", str(FOLDER / "mutants.toml"))
    yield Job("mutants", "all", mutants)
    yield Job("oldest", "torch and Triton", ("make", "test-oldest"))
    yield Job("cuda", "over a stub of it", ("make", "test-cuda"))


def read(ledger: Path = LEDGER) -> dict[str, Entry]:
    if not ledger.exists():
        return {}
    return {
        title: Entry(**entry)
        for title, entry in tomllib.loads(ledger.read_text(encoding="utf-8")).items()
    }


def write(entries: dict[str, Entry], ledger: Path = LEDGER) -> None:
    lines = ["# What `make deep` has searched: the last time that each of its jobs passed.\n"]
    for title, entry in sorted(entries.items()):
        said = entry.said.replace("\\", "/").replace('"', "'")
        seed = f"next_seed = {entry.next_seed}\n" if entry.next_seed else ""
        lines.append(
            f'["{title}"]\ncommit = "{entry.commit}"\nseconds = {entry.seconds}\n'
            f'said = "{said}"\n{seed}'
        )
    ledger.write_text("\n".join(lines), encoding="utf-8")


def run(job: Job, commit: str, last: Entry | None) -> Entry | None:
    """None where it fails, having printed all that it said."""
    seed = last.next_seed if last else 0
    command = [*job.command, f"--seed={seed}"] if job.num_seeds else list(job.command)
    if command[0] != "make":
        command.insert(0, sys.executable)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")]),
    }  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    seconds = round(time.monotonic() - began)
    if done.returncode:
        print(done.stdout)
        return None
    *_, said = ["", *done.stdout.splitlines()]
    return Entry(commit, seconds, said, seed + job.num_seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    every = list(jobs())
    areas = list(dict.fromkeys(job.area for job in every))
    parser = argparse.ArgumentParser(prog="python -m tests.deep")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(areas))
    parser.add_argument("--list", action="store_true", help="say what was searched when")
    asked = parser.parse_args(arguments)
    unknown = set(asked.areas) - set(areas)
    if unknown:
        parser.error(f"no such area: {', '.join(sorted(unknown))}; there are {', '.join(areas)}")
    selected = [job for job in every if not asked.areas or job.area in asked.areas]
    commit = subprocess.check_output(["git", "rev-parse", "--short=9", "HEAD"], cwd=ROOT, text=True)
    entries, failed = read(), []
    for job in selected:
        last = entries.get(job.title)
        if asked.list or (last and last.commit == commit.strip()):
            print(f"{job.title}: {last}" if last else f"{job.title}: never")
            continue
        entry = run(job, commit.strip(), last)
        print(f"{job.title}: {entry or 'FAILED'}", flush=True)
        if entry is None:
            failed.append(job.title)
            continue
        entries[job.title] = entry
        write(entries)
    for title in failed:
        print(f"failed: {title}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
