"""Processes that end at the n-th call of `nvme.files.calls` that changes a file or a name.

A kill leaves all that the system was told before it, synced or not: between two such calls there is
one moment, and a run has as many as it makes calls. So every moment can be had, and is the same one
however busy the machine is.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.shared.workers import run_processes, start_process
from nvme.files import calls
from tests.support.corpus import Find
from tests.support.disks.faults import path_of

CHANGES = ("open_file", "pwritev", "allocate", "truncate", "punch", "mkdir", "rmdir", "unlink",
           "rename", "exchange", "symlink")  # fmt: skip
KILLED = 9  # exit status


class Changes:
    """How many there were of files with `part` in their path; the process ends in place of the one
    behind `last`."""

    def __init__(self, last: int | None, part: str) -> None:
        self.count, self._last, self._part = 0, last, part
        self._lock = threading.Lock()

    def of(self, name: str) -> Callable[..., Any]:
        real = getattr(calls, name)

        def call(*args: Any) -> Any:
            only_opens = name == "open_file" and not args[1] & os.O_CREAT
            if only_opens or self._part not in path_of(args[name == "symlink"]):
                return real(*args)
            with self._lock:  # nobody else changes a thing while this process ends
                if self.count == self._last:
                    os._exit(KILLED)
                self.count += 1
                return real(*args)

        return call


@contextmanager
def counted(last: int | None, part: str) -> Iterator[Changes]:
    """Changes while this lasts; `last`: of them, the ones that are made before the process ends."""
    changes = Changes(last, part)
    with mock.patch.multiple(calls, **{name: changes.of(name) for name in CHANGES}):
        yield changes


@contextmanager
def counted_in(owner: type, names: Iterable[str], last: int | None, part: str) -> Iterator[Changes]:
    """As `counted`, while these methods of a class run."""
    changes = Changes(last, part)

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with mock.patch.multiple(calls, **{name: changes.of(name) for name in CHANGES}):
                return method(*args, **options)

        return call

    with mock.patch.multiple(owner, **{name: counting(getattr(owner, name)) for name in names}):
        yield changes


def kill_at(
    points: int | Iterable[int] | None,
    check: Callable[[Path], None],
    folder: Path,
    work: Callable[..., int],
    *args: Any,
) -> None:
    """`check` what runs leave that are killed: at that many moments of all that there are, the same
    distance apart; at these; at every one (None).

    `work(last, folder, *args)`, in a process of its own, answers how many changes it makes.
    """
    whole = folder / "whole"
    whole.mkdir()
    (count,) = run_processes(_first_alone, 1, work, None, str(whole), *args)
    shutil.rmtree(whole)
    assert count > 10
    for last in _moments(count, points):
        left = folder / str(last)
        left.mkdir()
        process = start_process(_alone, work, last, str(left), *args)
        process.join()
        assert process.exitcode == KILLED, f"change {last}: exit status {process.exitcode}"
        try:
            check(left)
        except Exception as error:
            raise Find(change=last) from error
        shutil.rmtree(left)


def _moments(count: int, points: int | Iterable[int] | None) -> list[int]:
    if points is None:
        return list(range(count))
    if not isinstance(points, int):  # of code that made more changes: the last one
        return sorted({min(point, count - 1) for point in points})
    return sorted({round(i * (count - 1) / (points - 1)) for i in range(points)})


def _alone(work: Callable[..., Any], *args: Any) -> Any:
    torch.set_num_threads(1)
    return work(*args)


def _first_alone(index: int, work: Callable[..., Any], *args: Any) -> Any:
    return _alone(work, *args)
