"""The main job as people run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.ci


def run(folder, *flags, ranks=1):
    out = folder / "out.json"
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks),
            "--master_port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
        ]  # fmt: skip
    command = [
        *launcher, str(ROOT / "examples/train_gpt.py"), "--model", "tiny", "--steps", "6",
        "--device", "cpu", "--nvme-dir", str(folder), "--json", str(out), *flags,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "io")])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    return json.loads(out.read_text())


def test_two_ranks_have_the_losses_of_one_process_at_the_same_global_batch(tmp_path):
    one, two = run(tmp_path), run(tmp_path, ranks=2)
    assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-3)
    assert one["val_loss"] == pytest.approx(two["val_loss"], rel=1e-3)
    assert one["val_loss"] < one["train_loss"][0] - 0.3


def test_every_way_of_running_it_ends_with_a_loss_and_leaves_nothing(tmp_path):
    resident = run(tmp_path, "--plot", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").stat().st_size > 1000
    on_disk = run(tmp_path, "--nvme-fraction", "1.0")
    assert on_disk["train_loss"] == resident["train_loss"] and on_disk["nvme_bytes"] > 0
    assert run(tmp_path, "--device-budget", "60MiB")["train_loss"] == resident["train_loss"]
    for flag in ("--baseline", "--plain", "--floor"):
        assert run(tmp_path, flag)["val_loss"] > 0
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox " * 2000)
    assert run(tmp_path, "--data", str(data), "--precision", "fp32")["val_loss"] < 5.5
    assert [p for p in tmp_path.iterdir() if p.suffix == ".blocks"] == []
