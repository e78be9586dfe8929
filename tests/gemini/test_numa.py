"""Pinned memory is on its device's NUMA node: a fake sysfs, and what the system is asked for."""

import ctypes
import mmap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gemini import numa
from gemini.doctor.report import judge, render
from optim.state import pinning
from tests.support.doctored import GOOD, GPU

PCI = "0000:17:00.0"


@pytest.fixture
def sysfs(tmp_path):
    """Makes a machine of so many nodes, with a device on one of them."""

    def made(nodes, node):
        for i in range(nodes):
            (tmp_path / f"devices/system/node/node{i}").mkdir(parents=True)
        (tmp_path / "devices/system/node/online").write_text(f"0-{nodes - 1}\n", encoding="ascii")
        device = tmp_path / "bus/pci/devices" / PCI
        device.mkdir(parents=True)
        if node is not None:
            (device / "numa_node").write_text(f"{node}\n", encoding="ascii")
        return tmp_path

    return made


@pytest.mark.parametrize(
    ("nodes", "node", "found"),
    [(2, 1, 1), (2, 0, 0), (8, 5, 5), (2, -1, None), (2, "?", None), (2, None, None), (1, 0, None)],
)  # fmt: skip
def test_the_node_of_a_device_is_known_where_there_are_several(nodes, node, found, sysfs):
    folder = sysfs(nodes, node)
    assert numa.num_nodes(folder) == nodes
    assert numa.node_of(PCI, folder) == found
    assert numa.node_of("0000:99:00.0", folder) is None


def test_a_system_without_nodes_has_one(tmp_path):
    assert numa.num_nodes(tmp_path) == 1 and numa.node_of(PCI, tmp_path) is None


@pytest.fixture
def machine(monkeypatch):
    """A machine of two nodes, whose second one has the current device; what is asked of it."""
    asked = []
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: asked.append("pinned") or 0,
        cudaHostUnregister=lambda address: None,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(numa, "num_nodes", lambda: 2)
    monkeypatch.setattr(numa, "has_policy", lambda: False)
    monkeypatch.setattr(numa, "node_of", lambda pci: {PCI: 1}[pci])
    monkeypatch.setattr(
        numa, "prefer", lambda address, nbytes, node: asked.append((nbytes, node)) or True
    )
    numa.node_of_device.cache_clear()
    yield asked
    numa.node_of_device.cache_clear()


def test_pages_have_their_node_before_they_are_pinned(machine):
    """Pinning touches them, and then they are where they are."""
    tensor = pinning.pinned(1000, torch.float32)
    assert machine == [(4000, 1), "pinned"]
    pages = pinning.pages_of(tensor.data_ptr())
    pages.give_back()
    pages.take_back()
    assert machine == [(4000, 1), "pinned"] * 2


@pytest.mark.parametrize(
    ("name", "says"),
    [("num_nodes", lambda: 1), ("has_policy", lambda: True), ("node_of", lambda pci: None),
     ("pci_of", lambda index: None)],
)  # fmt: skip
def test_nothing_is_asked_of_one_node_nor_against_numactl(name, says, machine, monkeypatch):
    monkeypatch.setattr(numa, name, says)
    pinning.pinned(1000, torch.float32)
    assert machine == ["pinned"]


def test_nothing_is_asked_before_there_is_a_device(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not numa.place(0, 4096) and machine == []


def test_the_system_takes_a_node_that_it_has_and_refuses_others():
    pages = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert not numa.prefer(address, len(pages), 1000)
    if numa.has_policy():  # of whoever started this, or in a sandbox that refuses such calls
        pytest.skip("this process has a policy for memory already")
    assert numa.prefer(address, len(pages), 0)
    pages[:] = bytes(len(pages))
    assert not numa.has_policy()  # of the thread: it is as it was


def test_the_doctor_says_where_pinned_memory_is():
    two = replace(GOOD, devices=(GPU, replace(GPU, numa_node=1)))
    lines = [line for line in render(judge(two)).splitlines() if line.startswith("device")]
    assert [line.endswith("; pinned host memory on its NUMA node, 1") for line in lines] == [
        False, True,
    ]  # fmt: skip
    assert judge(two).as_json()["devices"][1]["numa_node"] == 1
