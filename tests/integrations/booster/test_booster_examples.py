"""examples/booster.py trains under torchrun with each plugin."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from gemini import integrations

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples/booster.py"
NAMES = ["gemini", "zero", "ddp", "fsdp", "hybrid", "pipeline"]


def test_it_has_each_plugin():
    found = runpy.run_path(str(SCRIPT))
    assert list(found["PLUGINS"]) == NAMES
    plugins = {name for name in integrations.__all__ if name.endswith("Plugin")}
    assert plugins <= found.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.deep, pytest.mark.ci][n in ("gemini", "hybrid")])
        for n in NAMES
    ],
)
def test_the_loss_falls(name):
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         str(SCRIPT), "--plugin", name],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
