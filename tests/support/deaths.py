"""What a worker that died left unrun: told from a test that fails, and run once more.

A worker of `pytest -n` that is ended by a signal (the kernel's for memory, an abort of a library)
ends the run, and its test counts as failed whatever it would have come to. If nothing else failed,
the run ends with `ONLY_DIED`, and `--unended` runs what the run before it did not end. How a worker
died is printed: by which signal, behind the trace that Python writes.
"""

from __future__ import annotations

import faulthandler
import subprocess
from contextlib import suppress
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

ONLY_DIED = 9  # none of pytest's
ENDED = "gemini/ended"  # in pytest's cache
DIED_WITHIN = 10  # seconds from the end of its connection to its own


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unended", action="store_true", help="what the last run did not end")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # the plugin of the cache may be off
    if not hasattr(config, "workerinput") and getattr(config, "cache", None) is not None:
        config.pluginmanager.register(Deaths(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Traces go where pytest has them go. Parts of torch and a test may have called `enable`, which
    takes what is the error output just then: a file that ends with the worker."""
    stderr = item.config.stash.get(fault_handler_stderr_fd_key, None)
    if stderr is not None:
        faulthandler.enable(file=stderr)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--unended"):  # in workers, too: all collect the same
        ended = set(_cache(config).get(ENDED, []))
        items[:] = [item for item in items if item.nodeid not in ended]


def _cache(config: pytest.Config) -> pytest.Cache:
    assert config.cache is not None
    return config.cache


class Deaths:
    """Of the process that prints: which tests ended, which failed, and of which a worker died."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ended = set(_cache(config).get(ENDED, []) if config.getoption("--unended") else [])
        self._failed: set[str] = set()
        self._died: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._ended.add(report.nodeid)
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._died.add(crashitem)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error is None:
            return
        with suppress(AttributeError, subprocess.TimeoutExpired):  # of execnet's own, not promised
            status = node.gateway._io.popen.wait(DIED_WITHIN)
            printer: Any = self._config.pluginmanager.get_plugin("terminalreporter")
            printer.write_line(f"\n{node.gateway.id} died with status {status}", red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        _cache(self._config).set(ENDED, sorted(self._ended))
        if self._died and self._failed <= self._died:
            session.exitstatus = ONLY_DIED
