"""Pinned memory: exact, given back when it is dropped, and no error is left behind."""

import gc

import pytest
import torch

from optim import NvmeConfig
from optim.state import pinning
from optim.state.parking import park


def recorder():
    log = []

    def pin(address, nbytes):
        log.append(("pin", address, nbytes))
        return lambda: log.append(("unpin", address, nbytes))

    return log, pin


@pytest.mark.ci
def test_it_has_its_size_and_lives_as_long_as_its_last_view():
    log, pin = recorder()
    tensor = pinning.pinned(1001, torch.float32, pin)
    assert log == [("pin", tensor.data_ptr(), 4004)] and tensor.data_ptr() % 4096 == 0
    view = tensor[5:9].fill_(3.0)
    del tensor
    gc.collect()
    assert len(log) == 1 and view.tolist() == [3.0] * 4
    del view
    gc.collect()
    assert log[1] == ("unpin", *log[0][1:])


def test_nothing_is_pinned_for_nothing():
    log, pin = recorder()
    assert pinning.pinned(0, torch.bfloat16, pin).numel() == 0 and log == []


class Runtime:
    def __init__(self, status):
        self.status, self.unregistered = status, []

    def cudaHostRegister(self, address, nbytes, flags):
        return self.status

    def cudaHostUnregister(self, address):
        self.unregistered.append(address)


@pytest.mark.parametrize("status", [0, 2])
def test_a_refusal_is_said_and_leaves_no_error_for_the_next_check_of_torch(
    status, monkeypatch, caplog
):
    runtime, forgotten = Runtime(status), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(pinning, "forget_last_error", lambda: forgotten.append(True))
    pinning.pin_slab(4096, 8192)()
    assert forgotten == [True] * bool(status)
    assert runtime.unregistered == ([] if status else [4096])
    assert ("cannot pin 8192 bytes" in caplog.text) == bool(status)


def test_parking_on_disk_gives_pinned_memory_back_and_pins_it_again(tmp_path):
    log, pin = recorder()
    tensor = pinning.pinned(10_001, torch.float32, pin)
    tensor.copy_(torch.arange(10_001.0))
    parked = park([tensor[5:]], "nvme", NvmeConfig(folders=(str(tmp_path),)))
    assert [entry[0] for entry in log] == ["pin", "unpin"]
    assert bool((tensor == 0).all())  # the system has the pages
    parked.bring_back()
    parked.close()
    assert [entry[0] for entry in log] == ["pin", "unpin", "pin"]
    assert torch.equal(tensor, torch.arange(10_001.0))
