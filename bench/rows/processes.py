"""The processes of one row: started, asked for steps, and ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows.job import Job
from bench.support.machine import MALLOC_ENVIRONMENT

ROOT = Path(__file__).resolve().parent.parent.parent
GRACE_SECONDS = 3.0  # between interrupting a process and killing it
LEAVE_SECONDS = 30.0  # for a process that was told to finish
LAST_LINES = 30  # of what a worker said that failed
WORKER = "bench.rows.worker"


class PeerError(Exception):
    """A row cannot be had; its text is the reason."""


class Ranks:
    """All ranks of one row. Raises PeerError where one dies or says nothing for `timeout` seconds.

    Each is the leader of a session of its own, so that Ctrl-C reaches them through `close` only,
    and `close` reaches what they have started.
    """

    def __init__(self, python: str, jobs: Sequence[Job], timeout: float) -> None:
        self._processes: list[_Process] = []
        self._timeout = timeout
        try:
            for job in jobs:
                path = Path(job.folder) / f"rank{job.rank}.json"
                path.write_text(job.to_json(), encoding="utf-8")
                self._processes.append(_Process([python, "-m", WORKER, str(path)], job))
            self.ready = self._answers()
        except BaseException:
            self.close()
            raise

    def step(self) -> list[dict[str, Any]]:
        """What each rank measured of one step."""
        return self._ask("step")

    def settle(self) -> None:
        """Wait until nothing of the last step is under way."""
        self._ask("settle")

    def finish(self) -> list[dict[str, Any]]:
        """What each rank measured of its whole life; they end."""
        answers = self._ask("finish")
        end(self._processes, patience=LEAVE_SECONDS)
        return answers

    def close(self) -> None:
        """End every process that is left, with what it has started. May be called again."""
        end(self._processes)

    def _ask(self, word: str) -> list[dict[str, Any]]:
        for process in self._processes:
            process.tell(word)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        return read_answers(self._processes, self._timeout)


def prepare(python: str, peer: str, folder: Path, timeout: float) -> dict[str, Any]:
    """Let a peer be imported once, and compile what it compiles. Raises PeerError."""
    job = Job(peer, "", "", str(folder), threads=os.cpu_count() or 1)
    process = _Process([python, "-m", WORKER, "--prepare", peer], job)
    try:
        return read_answers([process], timeout)[0]
    finally:
        end([process])


def environment(threads: int) -> dict[str, str]:
    """Of a worker: this tree's packages, malloc's settings, its number of threads."""
    path = [str(ROOT), str(ROOT / "io"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **MALLOC_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": str(threads),
    }


class _Process:
    """One worker; what it prints is in a file of the row's folder."""

    def __init__(self, command: list[str], job: Job) -> None:
        self.log = Path(job.folder) / f"rank{job.rank}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(job.threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._read = b""

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def answer(self) -> dict[str, Any] | None:
        """The next line, once it is there; None while it is not. Call when there is something."""
        chunk = os.read(self.fileno(), 1 << 16)
        if not chunk:
            raise PeerError(self.reason())
        self._read += chunk
        line, newline, rest = self._read.partition(b"\n")
        if not newline:
            return None
        self._read = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def reason(self) -> str:
        """Why it ended: its last words, or the signal that killed it. More of them on stderr."""
        code = self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = self.log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
        print("\n".join(lines[-LAST_LINES:]), file=sys.stderr)
        return f"exit {code}: {lines[-1].strip() if lines else 'it said nothing'}"

    def signal(self, number: int) -> None:
        """To the process and what it has started, which may outlive it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def shut(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def read_answers(processes: Sequence[_Process], timeout: float) -> list[dict[str, Any]]:
    """One answer of each, in their order."""
    answers: dict[_Process, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout
    while missing := [process for process in processes if process not in answers]:
        ready, _, _ = select.select(missing, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise PeerError(f"no answer in {timeout:.0f} s")
        for process in ready:
            answer = process.answer()
            if answer is not None:
                answers[process] = answer
    return [answers[process] for process in processes]


def end(processes: Sequence[_Process], patience: float = 0.0) -> None:
    """Close their input, wait for `patience` seconds, interrupt, and kill what is left then."""
    for process in processes:
        process.shut()
    _wait(processes, patience)
    for number in (signal.SIGINT, signal.SIGKILL):
        for process in processes:
            process.signal(number)
        _wait(processes, GRACE_SECONDS)


def _wait(processes: Sequence[_Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))


def peers_python() -> str:
    """The interpreter of the environment that `make peers` makes, else the one that runs."""
    own = ROOT / ".venv-peers/bin/python"
    return str(own) if own.exists() else sys.executable
