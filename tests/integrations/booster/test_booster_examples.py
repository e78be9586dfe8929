"""Every script of examples/ for a plugin trains under torchrun."""

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


# One after the other in one pair of processes: most of each is the import of torch.
IN_TURN = """
import contextlib, os, pathlib, runpy, sys
for script in map(pathlib.Path, sys.argv[1:]):
    with open(f"{script.stem}-{os.environ['RANK']}.txt", "w") as said:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(script), run_name="__main__")
"""


@pytest.mark.ci
def test_the_loss_of_each_falls(tmp_path):
    (tmp_path / "in_turn.py").write_text(IN_TURN)
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "in_turn.py", *map(str, SCRIPTS)],
        env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for script in SCRIPTS:
        said = "".join((tmp_path / f"{script.stem}-{rank}.txt").read_text() for rank in range(2))
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
        assert len(losses) == 6 and losses[-1] < 0.8 * losses[0], (script, said)
