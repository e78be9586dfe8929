"""Ranks end with status 0: threads of a group have ended before the interpreter does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import atexit, os
from pathlib import Path

def threads():
    names = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name.read_text() for name in names)

atexit.register(lambda: print(f"at the end {threads()}\\n", end=""))  # comes last

import torch, torch.distributed as dist, torch.distributed.nn
from gemini import GeminiDDP
from optim import HybridAdam

dist.init_process_group("gloo")
model = GeminiDDP(torch.nn.Linear(8, 8))
optimizer = HybridAdam(model.parameters())
for _ in range(2):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert threads()
print("destroyed\\n", end="")
dist.destroy_process_group()
assert threads()  # the model is still there
"""


@pytest.mark.ci
def test_a_group_that_was_destroyed_has_no_threads_when_python_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")])},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *["at the end 0"] * 2, *["destroyed"] * 2]
