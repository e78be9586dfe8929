"""Lightning's launchers start ranks of GeminiStrategy: popen, torchrun, fork. And how one ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, os, sys
from tests.integrations.cases.lightning_runs import SMALL, Net, SaveAt, loader, trainer
from gemini.integrations.lightning import GeminiStrategy

class Fails(Net):
    def training_step(self, batch, i):
        if i == 1 and self.trainer.global_rank == 1:
            raise KeyError("rank 1 alone")
        return super().training_step(batch, i)

if __name__ == "__main__":
    how, folder = sys.argv[1:]
    given = GeminiStrategy(start_method="fork" if how == "fork" else "popen", **SMALL)
    path = f"{folder}/{how}"
    module = Fails() if how == "fails" else Net()
    run = trainer(given, folder, devices=2, callbacks=[SaveAt(path, 3)])
    run.fit(module, loader(), loader())
    if os.environ.get("LOCAL_RANK", "0") == "0":
        weights = {name: value.tolist() for name, value in module.state_dict().items()}
        found = {"weights": weights, "evals": module.evals, "saved": os.path.isdir(path)}
        open(f"{folder}/{how}.json", "w").write(json.dumps(found))
"""


def started(folder, how):
    """A process that runs the script; what runs it is `how`."""
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*(torchrun if how == "torchrun" else []), str(script), how, str(folder)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", start_new_session=True,
    )  # fmt: skip


def ended(process):
    """Its exit code and all that it said."""
    try:
        said, _ = process.communicate()
    except BaseException:  # pytest's time-out
        os.killpg(process.pid, signal.SIGKILL)  # and the ranks that it started
        raise
    return process.returncode, said


def test_ranks_that_popen_torchrun_and_fork_start_train_alike(tmp_path):
    found = {}
    for how in ("popen", "torchrun", "fork"):
        code, said = ended(started(tmp_path, how))
        assert code == 0, said
        found[how] = json.loads((tmp_path / f"{how}.json").read_text(encoding="utf-8"))
    want = found["popen"]  # as DDP: test_lightning_ranks.py
    assert want["weights"] and want["evals"]
    for how, got in found.items():
        assert got["saved"] and got["weights"] == want["weights"], how
        if how != "fork":  # whose parent, which writes this, has seen no batch
            assert got["evals"] == want["evals"]


def test_an_error_of_one_rank_ends_all(tmp_path):
    code, said = ended(started(tmp_path, "fails"))
    assert code != 0 and "rank 1 alone" in said
    assert not (tmp_path / "fails.json").exists()
