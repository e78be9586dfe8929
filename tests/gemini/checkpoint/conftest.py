"""A saved folder to change, and saves that wait before they begin."""

import shutil
import threading

import pytest

import gemini
from gemini.checkpoint import save as save_module
from tests.support.disks.hostile import small


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    gemini.save_checkpoint(folder / "a", *small(), extra=[1, "two"])
    return folder / "a"


@pytest.fixture
def saved(original, tmp_path):
    shutil.copytree(original, tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def held(monkeypatch):
    """Saves in the background do not begin before it is set."""
    goes_on, start = threading.Event(), save_module.in_background
    monkeypatch.setattr(
        save_module,
        "in_background",
        lambda path, work: start(path, lambda: (goes_on.wait(), work())),
    )
    yield goes_on
    goes_on.set()
