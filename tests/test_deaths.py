"""A run whose worker is killed ends unlike one whose test fails, and is gone on with."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deaths import ONLY_DIED

pytestmark = pytest.mark.ci  # runs of pytest in processes
ROOT = Path(__file__).resolve().parent.parent
KILLED = """
import os, pathlib

def test_before(): note("before")

def test_dies():
    if not pathlib.Path("died").exists() or ALWAYS:
        pathlib.Path("died").touch()
        os.kill(os.getpid(), 9)
    note("dies")

def test_behind(): note("behind")

def note(name):
    with open("ran", "a", encoding="utf-8") as file:
        print(name, file=file)
"""


def run(folder, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--max-worker-restart", "0"]
    command += ["--dist", "loadfile", "-p", "tests.support.deaths", "-c", "none.ini", *options]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        encoding="utf-8",
    )  # fmt: skip


def write(folder, always, more=""):
    (folder / "none.ini").write_text("[pytest]\n", encoding="utf-8")
    text = KILLED.replace("ALWAYS", str(always)) + more
    (folder / "test_it.py").write_text(text, encoding="utf-8")


def test_what_a_dead_worker_left_is_run_once_more(tmp_path):
    write(tmp_path, always=False)
    first = run(tmp_path)
    assert first.returncode == ONLY_DIED, first.stdout + first.stderr
    assert "gw0 died with status -9" in first.stdout
    again = run(tmp_path, "--unended")
    assert again.returncode == 0, again.stdout + again.stderr
    ran = (tmp_path / "ran").read_text(encoding="utf-8").split()
    assert sorted(ran) == ["before", "behind", "dies"]  # each once


@pytest.mark.parametrize(
    ("always", "more"), [(True, ""), (False, "def test_fails(): assert False\n")]
)
def test_a_test_that_dies_again_or_fails_is_a_failure(tmp_path, always, more):
    write(tmp_path, always, more)
    assert run(tmp_path).returncode == ONLY_DIED
    assert run(tmp_path, "--unended").returncode not in (0, 5)


def test_a_failure_beside_a_death_is_a_failure(tmp_path):
    write(tmp_path, always=False)
    text = (tmp_path / "test_it.py").read_text(encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        "def test_fails(): assert False\n" + text, encoding="utf-8"
    )
    assert run(tmp_path).returncode == 1


ENABLES = """
import ctypes, faulthandler

def test_as_torch_does(): faulthandler.enable()

def test_reads_nothing(): ctypes.string_at(0)
"""


def test_the_trace_of_a_death_is_printed_whatever_was_enabled_before(tmp_path):
    (tmp_path / "none.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(ENABLES, encoding="utf-8")
    ended = run(tmp_path)
    assert ended.returncode == ONLY_DIED and "gw0 died with status -11" in ended.stdout
    said = ended.stdout + ended.stderr
    assert "Fatal Python error: Segmentation fault" in said and "test_reads_nothing" in said
