"""Every script of examples/ for a plugin trains under torchrun, within a minute."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted((ROOT / "examples").glob("booster_*.py"))


def test_there_is_one_for_each_plugin():
    from gemini import integrations

    plugins = {name for name in integrations.__all__ if name.endswith("Plugin")}
    imported = re.compile(r"import Booster, (\w+)")
    assert {imported.search(script.read_text())[1] for script in SCRIPTS} == plugins


@pytest.mark.ci
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_loss_falls(script):
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         str(script)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
