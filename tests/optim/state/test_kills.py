"""A process killed at any point of a run: its last completed step is on disk, whole."""

import hashlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import nvme
from bench.shared.workers import run_processes, start_process
from optim import HybridAdam, NvmeConfig

pytestmark = pytest.mark.ci

NUMEL, BLOCK = 9 * (1 << 13), 1 << 13
MAX_STEPS = 400
NUM_KILLS = 100


def make(folders, fraction):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(NUMEL))
    optimizer = HybridAdam(
        [param],
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folders,
        nvme=NvmeConfig(block_numel=BLOCK, engine="threads"),
    )
    return param, optimizer


def run(param, optimizer, steps):
    grads = torch.randn(7, NUMEL, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        param.grad = grads[step % 7]
        optimizer.step()
        yield step + 1


def digest(data):
    return hashlib.blake2b(data, digest_size=8).digest()


def all_digests(index):
    """Digest of every block's state after every step, from a run in memory."""
    torch.set_num_threads(1)
    param, optimizer = make(None, 0.0)
    found = {0: [digest(bytes(8 * BLOCK))] * (NUMEL // BLOCK)}
    for step in run(param, optimizer, MAX_STEPS):
        planes = [
            optimizer.state[param][name].view(-1, BLOCK) for name in ("exp_avg", "exp_avg_sq")
        ]
        found[step] = [
            digest(a.numpy().tobytes() + b.numpy().tobytes()) for a, b in zip(*planes, strict=True)
        ]
    return found


def train_until_killed(folders):
    torch.set_num_threads(1)
    param, optimizer = make(folders, 1.0)
    for _ in run(param, optimizer, MAX_STEPS):
        pass
    time.sleep(60)


def kill_after(folders, delay):
    """Begin to train, and kill it `delay` seconds after its file appeared, or before."""
    process = start_process(train_until_killed, [str(folder) for folder in folders])
    deadline = time.monotonic() + 30
    while delay > 0.01 and not list(folders[0].glob("gemini-plain-*")):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_the_last_completed_step_survives_a_kill_at_any_point(tmp_path):
    (expected,) = run_processes(all_digests, 1)
    pair = [tmp_path / "a", tmp_path / "b"]
    for folder in pair:
        folder.mkdir()
        (folder / "gemini-mine.blocks").write_bytes(b"a person's notes")
    steps, longest = [], 0.3  # until a kill: in seconds
    for seed in range(NUM_KILLS):
        rng = random.Random(seed)
        folders = pair if seed % 4 == 0 else pair[:1]
        kill_after(folders, rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, longest)]))
        files = [path for folder in folders for path in nvme.orphans(folder)]
        try:
            with nvme.recover(files) as found:
                step = found.index.step
                blocks = [digest(found.block(i)) for i in range(NUMEL // BLOCK)]
            assert blocks == expected[step], f"seed {seed}, step {step}"
            steps.append(step)
        except nvme.FormatError:  # killed before the first filling was committed
            steps.append(None)
        if seed % 10 == 9:  # the next run is right, and leaves a step where it is
            param, optimizer = make([str(folder) for folder in folders], 1.0)
            for _ in run(param, optimizer, 2):
                pass
            state = optimizer.state_dict()["state"][0]["exp_avg"].view(-1, BLOCK)
            assert [digest(a.numpy().tobytes()) for a in state] == first_plane(2)
            kept = [path for folder in folders for path in nvme.orphans(folder)]
            assert kept == (files if steps[-1] else [])
            if kept:
                with nvme.recover(kept) as found:
                    assert found.index.step == steps[-1]
            optimizer.close()
            if max((step for step in steps if step is not None), default=0) <= 10:
                longest *= 2  # a machine that is slow, or has other work
        for folder in folders:
            nvme.remove_orphans(folder)
        for folder in pair:
            assert [path.name for path in folder.iterdir()] == ["gemini-mine.blocks"]
            assert (folder / "gemini-mine.blocks").read_bytes() == b"a person's notes"
    reached = [step for step in steps if step is not None]
    assert len(set(reached)) > 10 and max(reached) > 10, steps  # kills fell all over the run


def first_plane(steps):
    param, optimizer = make(None, 0.0)
    for _ in run(param, optimizer, steps):
        pass
    return [digest(a.numpy().tobytes()) for a in optimizer.state[param]["exp_avg"].view(-1, BLOCK)]


# -- what a state dict costs ----------------------------------------------------------------------


def peak_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def save_and_load(index, folder):
    """MiB of peak memory that state_dict() and load_state_dict() take, with state on disk."""
    torch.set_num_threads(1)
    param = nn.Parameter(torch.zeros(32 << 20))
    optimizer = HybridAdam([param], nvme_offload_fraction=1.0, nvme_offload_dir=folder)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad = None

    def peak_of(work):
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_mib()
        return work(), peak_mib() - before

    saved, saving = peak_of(optimizer.state_dict)
    total = sum(t.nbytes for t in saved["state"][0].values()) >> 20
    _, loading = peak_of(lambda: optimizer.load_state_dict(saved))
    optimizer.close()
    return total, saving, loading


def test_a_state_dict_is_never_held_twice(tmp_path):
    """Saving holds the copy that it answers; loading holds staging and nothing else."""
    ((total, saving, loading),) = run_processes(save_and_load, 1, str(tmp_path))
    assert total == 256
    assert saving < total + 24 and loading < 24  # a block is 8 MiB
