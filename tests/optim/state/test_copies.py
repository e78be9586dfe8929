"""Copies beside threads that feed a disk."""

import os
import subprocess
import sys

import pytest
import torch

from optim.state.memory import copy_alone


@pytest.mark.ci
def test_copies_beside_a_disk_start_no_threads_of_torch_and_count_as_changes(tmp_path):
    """In a process of its own: torch starts its team at the first operator that takes one."""
    code = """
import os, torch
from pathlib import Path
from gemini.checkpoint.format.data_file import UnitWriter
from optim.state.memory import copy_alone
from tests.support.until import until
torch.set_num_threads(4)
threads = lambda: len(os.listdir("/proc/self/task"))
values, there, before = torch.empty(1 << 20), torch.empty(1 << 20), threads()
copy_alone(there, values)
writer = UnitWriter(Path("units"))
writer.append(b"header", values)
writer.finish()
until(lambda: threads() <= before)  # one that has ended leaves the list a moment later
assert threads() == before, (before, threads())
assert there._version == 1
there.copy_(values)
assert threads() > before  # what it would have been
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float64])
def test_a_copy_alone_is_a_copy(dtype):
    values = torch.randn(7, 3).to(dtype)
    sources = [values, values[::2], values.t(), values[:0], values[1, 1], values.conj()]
    sources.append(torch.rand(7, 3))  # of another dtype, for most
    for source in sources:
        there = torch.zeros(source.shape, dtype=dtype)
        copy_alone(there, source)
        assert torch.equal(there, source.to(dtype))
        there.untyped_storage().resize_(0)
