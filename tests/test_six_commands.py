"""Commands of README.md, as they stand there: install, train, Ctrl-C, the same again, generate."""

import os
import re
import shutil
import signal
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
    """The command that installs, and the block that trains a small model: [begin, train, say]."""
    (install,) = re.findall(r"^    (pip install .*?) +#", text(), re.MULTILINE)
    (block,) = re.findall(
        r"^((?:    .*\n)*    .*small_model.*\n(?:    .*\n)+)", text(), re.MULTILINE
    )
    return [install, *block.replace("\\\n", "").splitlines()]


def text():
    return (ROOT / "README.md").read_text(encoding="utf-8")


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
    (venv / "lib" / version / "site-packages/others.pth").write_text(line, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    environment |= {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(tmp_path / "hub"),
    }  # fmt: skip
    return tmp_path / "clone", environment


def test_a_reader_trains_stops_goes_on_and_generates(clone):
    folder, environment = clone
    install, begin, train, generate = (line.strip() for line in shown())

    def run(*commands, **options):
        return subprocess.Popen(
            ["bash", "-ec", "\n".join(commands)], cwd=folder, env=environment, text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **options,
        )  # fmt: skip

    with run(install, begin, train) as shell:
        saved = folder / "runs/2/checkpoints"
        until(lambda: shell.poll() is not None or list(saved.glob("*/trainer_state.json")))
        os.killpg(shell.pid, signal.SIGINT)  # Ctrl-C, as a terminal sends it
        said = shell.communicate()[0]
    assert shell.returncode != 0, said
    assert re.search(r"stopped; the same command continues from step \d+\n", said), said
    with run(train, generate) as shell:
        said = shell.communicate()[0]
    assert shell.returncode == 0, said
    assert re.search(r"goes on from runs/2/checkpoints/checkpoint-\d+", said), said
    assert said.count("written: runs/2 ") == 1
    assert re.search(r"'generated_text': ['\"]import ", said), said  # a text may have an apostrophe
    assert (folder / "runs/2/report.html").exists()
