"""Commands of docs/first-model.md, each run as it stands there, and Ctrl-C between them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.until import until

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/first-model.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.ci


def blocks():
    """Indented blocks, each as one script."""
    found = re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


@pytest.fixture
def shell(tmp_path):
    """Starts a script in a folder with the examples, where `python` is this one."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")]),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HOME": str(tmp_path / "hub"),
    }  # fmt: skip

    def start(script):
        return subprocess.Popen(
            ["bash", "-ec", script], cwd=tmp_path, env=environment, text=True, encoding="utf-8",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    return start


def test_every_command_of_the_page_runs_and_says_what_the_page_says(shell, tmp_path):
    from gemini.train.trainer import last_checkpoint

    make, plan, printed, train, generate = blocks()
    with shell(make) as job:
        said = job.communicate()[0]
    assert job.returncode == 0 and '{"text": "' in said, said

    with shell(plan) as job:
        said = job.communicate()[0]
    assert job.returncode == 0, said
    lines = [re.split(r"[\d,:]", line)[0] for line in printed.splitlines()[:-1]]
    assert len(lines) == 7 and all(f"\n{line}" in f"\n{said}" for line in lines if line), said

    out = tmp_path / "runs/first"
    with shell(train) as job:
        until(lambda: job.poll() is not None or last_checkpoint(out) is not None)
        os.killpg(job.pid, signal.SIGINT)  # Ctrl-C, as a terminal sends it
        said = job.communicate()[0]
    assert job.returncode == 130, said
    assert re.search(r"stopped; the same command continues from step \d+\n", said), said
    with shell(train) as job:
        said = job.communicate()[0]
    assert job.returncode == 0, said
    assert re.search(r"goes on from runs/first/checkpoints/checkpoint-\d+\n", said), said
    losses = [float(one) for one in re.findall(r"'loss': '([\d.]+)'", said)]
    assert losses[-1] < 5.3 and "'eval_loss'" in said and said.count("\n--> ") == 3
    assert (out / "report.html").exists() and (out / "metrics.jsonl").exists()

    with shell(generate) as job:
        said = job.communicate()[0]
    assert job.returncode == 0 and "generated_text" in said, said
