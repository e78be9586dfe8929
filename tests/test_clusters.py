"""examples/slurm.sbatch over a stand-in for srun; examples/Dockerfile names what there is."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# Two nodes, both here
SRUN = """#!/bin/sh
"$@" & first=$!
"$@" || exit 1
wait $first
"""
# Its cleaning is written down, and done by no process
PYTHON = """#!/bin/sh
case "$*" in *"gemini clean"*) echo "$@" >> {cleaned} ;; *) exec {python} "$@" ;; esac
"""
JOB = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(ranks)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {ranks.item()} {sys.argv[1:]}")
dist.destroy_process_group()
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """A folder in which srun, scontrol and python are found first."""
    programs = {
        "srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho other\n",
        "python": PYTHON.format(cleaned=tmp_path / "cleaned", python=sys.executable),
    }  # fmt: skip
    for name, text in programs.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    values = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")]), "NVME_DIR": "/fast",
        "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_NODELIST": "node[1-2]",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.ci
def test_ranks_of_two_nodes_meet_and_each_cleans_its_disk(nodes):
    command = ["bash", str(EXAMPLES / "slurm.sbatch"), "job.py", "--x", "a b"]
    done = subprocess.run(command, cwd=nodes, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"rank \d of .*?\]", done.stdout))
    assert said == [f"rank {rank} of 2: 3 ['--x', 'a b']" for rank in (0, 1)]
    assert (nodes / "cleaned").read_text(encoding="utf-8") == "-m gemini clean /fast --remove\n" * 2


def test_the_image_copies_what_there_is_and_installs_an_extra_that_there_is():
    text = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert len(copied) > 5 and all((ROOT / name).exists() for name in copied)
    (extra,) = re.findall(r"pip install .*\[(\w+)\]", text)
    assert extra in project["optional-dependencies"]
    assert re.search(r"^FROM python:3\.(\d+)$", text, re.M)[1] >= project["requires-python"][-2:]
