"""What every test gets: the Triton interpreter where there is no GPU, and poisoned memory.

`--shuffle SEED` runs tests in another order, which must make no difference. `--unlike` runs ranks
as processes that hash strings unlike each other; `-rs` lists tests that cannot, and why.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel's module is imported

os.environ["GEMINI_SPEEDS"] = "usual"  # whatever `doctor` measured on this machine

import pytest

from bench.shared.workers import make_ranks_unlike, poison_memory
from gemini.memtracer import monitor
from tests.support import work
from tests.support.disks import own_folder

pytest_plugins = ["tests.support.deaths"]
DEEP = Path(__file__).parent / "deep"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
poison_memory()
work.install()
own_folder.make()  # before anything asks for a temporary folder
try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a bare machine with a GPU
    pass
else:
    # A loaded machine is no failure; examples are the same, so that a failure is the change's.
    busy = [HealthCheck.too_slow]
    settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=busy)
    settings.register_profile("new", deadline=None, suppress_health_check=busy)  # `make deep`
    settings.load_profile("same")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _process_that_does_not_grow(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What libraries allocate once, and what other tests left to malloc, decides no home."""
    if DEEP not in request.path.parents:
        monkeypatch.setattr(monitor, "peak_rss_bytes", lambda: 1 << 30)


@pytest.fixture(autouse=True)
def _same_signal_handlers() -> Iterator[None]:
    """Children inherit them: a handler that a test leaves lets another's outlive its SIGTERM."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    left = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert left == before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run tests in another order")
    parser.addoption("--unlike", action="store_true", help="ranks are processes that hash unlike")
    parser.addoption("--work", action="store_true", help="print the dearest tests of each tier")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(work.Budget())
    if config.getoption("--unlike"):
        make_ranks_unlike()


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if DEEP in item.path.parents:
            item.add_marker(pytest.mark.deep)
        for mark in item.iter_markers("one_process") if config.getoption("--unlike") else ():
            item.add_marker(pytest.mark.skip(reason=f"ranks are threads: {mark.args[0]}"))
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)
