"""What `python -m gemini run` starts: modules on all ranks, and commands that are refused."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemini.launcher import run as launcher

pytestmark = pytest.mark.ci  # trl alone takes seconds to import

ROOT = Path(__file__).resolve().parents[3]


def test_a_module_is_run_on_all_ranks(tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, sys; print(os.environ['RANK'], sys.argv[1:])", encoding="utf-8"
    )
    command = [sys.executable, "-m", "gemini", "run", "--nproc_per_node", "2", "-m", "job", "--x"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 ['--x']" in done.stdout and "1 ['--x']" in done.stdout


def test_ctrl_c_reaches_what_run_started_and_the_last_words_come_last(tmp_path, monkeypatch, capfd):
    """A terminal sends it to `run` alone: what it starts has a session of its own."""
    code = (
        "import os, pathlib, signal\n"
        "said = pathlib.Path(os.environ['GEMINI_LAST_WORDS'])\n"
        "signal.signal(signal.SIGINT, lambda *_: (said.write_bytes(b'step 7\\n'), os._exit(130)))\n"
        "pathlib.Path(f'{said}.ready').touch()\n"
        "signal.pause()\n"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def until_ready(seconds):
        if list(tmp_path.glob("*/*.ready")):
            raise KeyboardInterrupt

    polls = {"sleep": until_ready}
    monkeypatch.setattr(launcher, "time", SimpleNamespace(**polls))
    assert launcher._run([[sys.executable, "-c", code]]) == 130
    assert capfd.readouterr().err == "step 7\n"


def test_of_several_ranks_one_says_why_they_are_refused():
    """In one line, to which torchrun adds no summary."""
    command = [sys.executable, "-m", "gemini", "run", "--nproc_per_node", "2"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    done = subprocess.run(
        [*command, "-m", "gemini", "train", "--lr", "0"], cwd=ROOT, capture_output=True, text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    said = "python -m gemini train: error: argument --lr: 0.0; expected more than 0"
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(said), done.stderr
    assert done.stderr.count(said) == 1 and "torch/distributed/elastic" not in done.stderr


def test_the_doctor_imports_no_trainer():
    code = (
        "import sys, gemini.__main__, gemini.doctor.measure, gemini.launcher.run\n"
        "sys.exit('transformers' in sys.modules or 'trl' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
