"""Copies of the repository in which tests run, each test run in a process that was forked.

Torch takes longer to import than most of these tests take. So this process imports it once, and
nothing of ours; its children import ours from the copy that they work in.
"""

from __future__ import annotations

import atexit
import compileall
import faulthandler
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

OURS = ("gemini", "optim", "nvme", "kernels_triton", "bench", "tests")
SOURCES = ("gemini", "optim", "kernels_triton", "io/nvme")
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist.egg-info")
_TIMEOUT = "Timeout (0:"  # as faulthandler says it
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)

_OPTIONS = ("-x", "-q", "--tb=line", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run of tests."""

    code: int  # of pytest: 0 all passed, 1 one failed or did not end, others are no verdict
    seconds: float  # of CPU, with what it waited for
    failed: str  # the first test that did
    output: str

    @property
    def end(self) -> str:
        """How it ended, where no test failed."""
        return "did not end" if _TIMEOUT in self.output else f"ended with {self.code}"


def warm_up() -> None:
    """Import what tests need and mutations do not change."""
    import pytest  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401


class Tree:
    """One copy; one run at a time."""

    def __init__(self, source: Path, root: Path) -> None:
        self.root = root
        shutil.copytree(source, root, symlinks=True, ignore=_LEFT_OUT)
        for folder in SOURCES:
            # by content: a mutation may be as long and as old as what it takes the place of
            compileall.compile_dir(
                root / folder, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH
            )
        self._log = root.with_suffix(".log")
        self.pid = 0

    def begin(self, tests: Sequence[str], limit_seconds: int | None) -> None:
        """Run tests up to the first that fails."""
        assert not self.pid
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(tests, limit_seconds)

    def ended(self, status: int, seconds: float) -> Outcome:
        self._kill()  # what a test left running
        self.pid = 0
        output = self._log.read_text(errors="replace", encoding="utf-8")
        failed = _FAILED.search(output)
        code = os.waitstatus_to_exitcode(status)
        return Outcome(code, seconds, failed.group(1) if failed else "", output)

    def close(self) -> None:
        if self.pid:
            self._kill()
            os.waitpid(self.pid, 0)

    def _kill(self) -> None:
        """The session that the child is the first process of."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _run(self, tests: Sequence[str], limit_seconds: int | None) -> None:
        code = 70
        try:
            os.setsid()
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            if limit_seconds is not None:  # what pytest captures is lost with the process
                faulthandler.dump_traceback_later(limit_seconds, exit=True, file=log)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.root)
            folders = [str(self.root), str(self.root / "io")]
            os.environ["PYTHONPATH"] = os.pathsep.join(folders)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
            sys.path[:0] = folders
            for name in list(sys.modules):
                if _top(name) in OURS:
                    del sys.modules[name]
            finders = [f for f in sys.meta_path if _top(type(f).__module__) not in OURS]
            sys.meta_path[:] = finders  # `gemini.names` has one
            import pytest

            code = pytest.main([*_OPTIONS, "-m", _marks(tests), *tests])
            atexit._run_exitfuncs()
        finally:
            sys.stdout.flush()
            os._exit(code)


def next_outcome(running: Sequence[Tree]) -> tuple[Tree, Outcome]:
    """Of the first run that ends."""
    pid, status, used = os.wait4(-1, 0)
    tree = next(tree for tree in running if tree.pid == pid)
    return tree, tree.ended(status, used.ru_utime + used.ru_stime)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _marks(tests: Sequence[str]) -> str:
    """Those of `make ci` where they are named alone, and not with their module."""
    return "not gpu" if all("::" in test for test in tests) else "not gpu and not ci"
