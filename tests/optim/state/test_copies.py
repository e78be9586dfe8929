"""Copies beside threads that feed a disk."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gemini
from gemini import GeminiDDP
from gemini.units import SERIAL_NUMEL
from optim import HybridAdam, NvmeConfig
from optim.state.memory import copy_alone


@pytest.mark.ci
def test_copies_beside_a_disk_start_no_threads_of_torch_and_count_as_changes(tmp_path):
    """In a process of its own: torch starts its team at the first operator that takes one."""
    code = """
import os, torch
from pathlib import Path
from gemini.checkpoint.format.data_file import UnitWriter
from optim import HybridAdam, NvmeConfig
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


class Large(TorchDispatchMode):
    """Operators, views aside, for which torch would wake a team of threads."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        is_large = any(t.numel() > SERIAL_NUMEL and not t.is_meta for t in tensors)
        if is_large and not func.is_view and func is not torch.ops.aten.empty_like.default:
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision, state", [
    ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"),
    ("bf16", "8bit"), ("fp16", "8bit"), ("bf16", "bf16"),
])  # fmt: skip
def test_a_save_and_a_load_of_state_on_disk_compute_in_one_thread(precision, state, tmp_path):
    """Of split masters, of whole ones, and of weights without one; of planes that are coded."""
    # an odd number of elements, in blocks that are larger than what one thread computes
    model = GeminiDDP(nn.Linear(301, 307), placement_policy="static", precision=precision)
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path,
        nvme=NvmeConfig(block_numel=2 * SERIAL_NUMEL), state=state,
    )  # fmt: skip
    torch.manual_seed(0)
    for _ in range(2):
        model(torch.randn(3, 301)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state_dict()["state"]
    with Large() as large:
        gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    assert not large.found
    model(torch.randn(3, 301)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    with Large() as large:
        gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert not large.found
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(moments[number][name])), name


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_load_leaves_nothing_of_other_blocks_between_parameters(precision, tmp_path):
    """A block is written from a buffer that another one was in."""
    module = nn.Sequential(nn.Linear(64, 160), nn.Linear(160, 7))
    model = GeminiDDP(module, placement_policy="static", precision=precision)
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path,
        nvme=NvmeConfig(block_numel=1024),
    )  # fmt: skip
    model(torch.randn(3, 64)).float().square().mean().backward()
    optimizer.step()
    gemini.save_checkpoint(tmp_path / "saved", model, optimizer)
    gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
    gaps = []

    def look(block, planes):
        free = torch.ones(block.numel, dtype=torch.bool)
        for part in block.segments:
            free[part.offset : part.offset + part.numel] = False
        gaps.extend(plane[free].clone() for plane in planes.values())

    model.engine.target.tiered_state.nvme.load(model.engine.target.tiered_state.nvme.blocks, look)
    assert sum(gap.numel() for gap in gaps) > 0
    assert all(not gap.count_nonzero() for gap in gaps)
