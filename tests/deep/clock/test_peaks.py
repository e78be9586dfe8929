"""Peaks of resident memory, each in a process of its own: what counting in a process does not see,
as C++ takes it."""

import pytest
import torch
from torch import nn

import gemini
from bench.shared.workers import run_processes
from gemini.checkpoint import CheckpointError
from optim import HybridAdam
from optim.update.built_kernels import compiler
from tests.support import corpus
from tests.support.disks.hostile import MOST, small, unpacked
from tests.support.disks.sealed import put_metadata
from tests.support.memory import peak_bytes, resident_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_and_load(index, folder):
    """Bytes of a state dict, and what `state_dict` and `load_state_dict` take."""
    torch.set_num_threads(1)
    param = nn.Parameter(torch.zeros(32 << 20))
    optimizer = HybridAdam([param], nvme_offload_fraction=1.0, nvme_offload_dir=folder)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad = None
    found = {}
    saving = peak_bytes(lambda: found.update(optimizer.state_dict()))
    loading = peak_bytes(lambda: optimizer.load_state_dict(found))
    optimizer.close()
    return sum(t.nbytes for t in found["state"][0].values()), saving, loading


def test_a_state_dict_is_never_held_twice(tmp_path):
    """Saving holds the copy that it answers; loading holds staging and nothing else."""
    ((total, saving, loading),) = run_processes(save_and_load, 1, str(tmp_path))
    assert total >= 256 << 20
    assert saving < total + (24 << 20) and loading < 24 << 20  # a block is 8 MiB


def park(index, folder, fraction):
    """Bytes that parking frees, and by how much there are more after it."""
    torch.set_num_threads(1)
    param = nn.Parameter(torch.ones(12 << 20))
    optimizer = HybridAdam([param], nvme_offload_fraction=fraction, nvme_offload_dir=folder)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = resident_bytes()
    with optimizer.parked("nvme"):
        parked = resident_bytes()
    after = resident_bytes()
    optimizer.close()
    return before - parked, after - before


@pytest.mark.parametrize(("fraction", "freed"), [(0.0, 4 * 48), (1.0, 2 * 48 + 3 * 12)])
def test_parking_on_disk_frees_memory(fraction, freed, tmp_path):
    """Parameter and gradient and what is resident of two moments, 48 MiB each; used staging."""
    ((gain, growth),) = run_processes(park, 1, str(tmp_path), fraction)
    assert gain > 0.9 * freed * (1 << 20)
    assert growth < 8 << 20


def load(index, folder):
    pair = small()

    def attempt():
        with pytest.raises(CheckpointError):
            gemini.load_checkpoint(folder, *pair)

    return peak_bytes(attempt)


@pytest.mark.parametrize("name", corpus.read("hostile"))
def test_a_pickle_takes_no_memory_that_its_files_do_not_have(name, tmp_path):
    folder = tmp_path / "a"
    gemini.save_checkpoint(folder, *small())
    data = unpacked(corpus.read("hostile")[name]["data"])
    put_metadata(folder, data)
    (taken,) = run_processes(load, 1, str(folder))
    assert taken < sum(path.stat().st_size for path in folder.iterdir()) + MOST


def load_compiled(index):
    from optim.adam import AdamRule
    from optim.update.compiled_update import CompiledUpdate

    return peak_bytes(lambda: CompiledUpdate(AdamRule(), [(torch.bfloat16, torch.bfloat16, True)]))


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_loading_a_kernel_takes_little():
    run_processes(load_compiled, 1)  # built by this one, if nobody did before
    assert run_processes(load_compiled, 1)[0] < 20 << 20
