"""Six commands of README.md, as they stand there: install, begin, train, kill, go on, generate."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.until import until

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.ci
# What a clone has of this
CLONE = (
    "gemini", "optim", "io", "kernels_triton", "examples", "pyproject.toml", "README.md", "LICENSE",
)  # fmt: skip


def shown():
    """The first block of the page."""
    (block,) = re.findall(r"^## Six commands\n\n.*?\n\n((?:    .*\n)+)", text(), re.MULTILINE)
    return [line.partition("    #")[0].strip() for line in block.splitlines()]


def text():
    return (ROOT / "README.md").read_text()


@pytest.fixture
def clone(tmp_path):
    """(A copy of the sources, an environment in which README's `python` and `pip` are)

    The environment is clean, but for a path line to the packages of the tests: what pip is asked
    for it installs there, and what these have it does not fetch again.
    """
    for name in CLONE:
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tmp_path / "clone" / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    line = sysconfig.get_path("purelib") + "\n"
    (venv / "lib" / version / "site-packages/others.pth").write_text(line)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    environment |= {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(tmp_path / "hub"),
    }  # fmt: skip
    return tmp_path / "clone", environment


def test_a_reader_trains_kills_goes_on_and_generates(clone):
    folder, environment = clone
    install, begin, train, kill, go_on, generate = shown()
    assert train.endswith("&") and kill == "kill -9 $!"
    with subprocess.Popen(
        ["bash"], cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, bufsize=1,
    ) as shell:  # fmt: skip
        shell.stdin.write(f"set -e\n{install}\n{begin}\n{train}\n")
        saved = folder / "runs/1/checkpoints"
        until(lambda: shell.poll() is not None or list(saved.glob("*/trainer_state.json")))
        said = shell.communicate(f"{kill}\n{go_on}\n{generate}\n")[0]
    assert shell.returncode == 0, said
    assert re.search(r"goes on from runs/1/checkpoints/checkpoint-\d+", said), said
    assert said.count("written: runs/1 ") == 1
    assert re.search(r"'generated_text': ['\"]import ", said), said  # a text may have an apostrophe
    assert (folder / "runs/1/report.html").exists()
