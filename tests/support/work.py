"""What a test has others do, counted: the same number on every machine.

Seconds say how busy a machine is. Work is a sum of what is counted, each kind with about the
seconds of one quiet core that it takes; `tests/budget.toml` says how much of it a tier of tests may
have, and one test of it. A run fails that passes either, and prints its dearest tests.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import subprocess
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook
from triton.runtime.interpreter import InterpreterBuilder

from gemini import GeminiDDP
from nvme.files import calls

BUDGET = Path(__file__).resolve().parent.parent / "budget.toml"
PROPERTY = "work"
TIERS = ("ci", "test")
DEAREST = 10

_counts: Counter[str] = Counter()
_lock = threading.Lock()  # ranks are threads


def _counting(owner: Any, name: str, kind: str | Callable[..., str]) -> None:
    """Have every call of `owner.name` counted as one of `kind`, which may ask its arguments."""
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            _counts[kind if isinstance(kind, str) else kind(*args, **kwargs)] += 1
        return inner(*args, **kwargs)

    setattr(owner, name, counted)


def _kind_of_process(process: object, args: Any, *_: Any, **__: Any) -> str:
    words = args.split() if isinstance(args, str) else args  # a compiler's may name Python's folder
    first = str(next(iter(words), ""))
    return "process" if "python" in Path(first).name else "command"


def install() -> None:
    """Count from now on."""
    _counting(subprocess.Popen, "__init__", _kind_of_process)
    _counting(multiprocessing.process.BaseProcess, "start", "forked")
    _counting(calls, "fsync", "sync")
    _counting(calls, "fdatasync", "sync")
    _counting(InterpreterBuilder, "set_grid_idx", "program")
    _counting(GeminiDDP, "__init__", "wrapped")
    register_optimizer_step_post_hook(lambda *_: _counts.update(step=1))


class Budget:
    """Work of the tests of a session, as a plugin: what it is compared with is read once."""

    def __init__(self) -> None:
        given = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
        self._weights: dict[str, float] = given["weights"]
        self._limits: dict[str, dict[str, float]] = {tier: given[tier] for tier in TIERS}
        self._work: dict[str, dict[str, float]] = {tier: {} for tier in TIERS}

    def work(self, counts: dict[str, int]) -> float:
        return sum(self._weights[kind] * count for kind, count in counts.items())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        _counts.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        item.user_properties.append((PROPERTY, (_tier(item), dict(_counts))))
        self._refuse_if_dear(item)
        return result

    def _refuse_if_dear(self, item: pytest.Item) -> None:
        tier = _tier(item)
        if tier in self._limits and self.work(_counts) > self._limits[tier]["one"]:
            pytest.fail(
                f"a test of {tier!r} may have {self._limits[tier]['one']} of work "
                f"(tests/budget.toml), this has {self.work(_counts):.1f}: {dict(_counts)}. "
                "Mark it `ci` (or put it into tests/deep/), or make it smaller.",
                pytrace=False,
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of every worker's tests, in the process that prints."""
        tier, counts = dict(report.user_properties).get(PROPERTY, ("", {}))
        if report.when == "teardown" and tier in TIERS:
            self._work[tier][report.nodeid] = self.work(counts)

    def over(self) -> list[str]:
        sums = {tier: sum(work.values()) for tier, work in self._work.items()}
        return [
            f"{tier!r} has {total:.1f} of work, {self._limits[tier]['all']} are allowed"
            for tier, total in sums.items()
            if total > self._limits[tier]["all"]
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput") and self.over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over = self.over()
        if not over and not terminalreporter.config.getoption("--work"):
            return
        for tier, work in self._work.items():
            terminalreporter.section(f"work of {tier}: {sum(work.values()):.0f}")
            for nodeid, amount in sorted(work.items(), key=lambda each: -each[1])[:DEAREST]:
                terminalreporter.write_line(f"{amount:8.2f}  {nodeid}")
        for line in over:
            terminalreporter.write_line(f"FAILED tests/budget.toml: {line}", red=True)


def _tier(item: pytest.Item) -> str:
    if item.config.getoption("--unlike"):
        return "ci"
    marks = {mark.name for mark in item.iter_markers()}
    return "deep" if marks & {"deep", "gpu"} else "ci" if "ci" in marks else "test"
