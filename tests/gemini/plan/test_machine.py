"""Numbers of a machine: given, measured, of a data sheet, or assumed."""

import json
from dataclasses import replace

import pytest

from gemini.plan.machine import CARDS, TYPICAL, machine_of
from gemini.units import GIB

REPORT = {
    "ram_bytes": 70 << 30, "ram_left_bytes": 60 << 30, "bandwidths": {"nvme_read": 7e9},
    "devices": [{"free_bytes": 22 << 30}, {"free_bytes": 23 << 30}],
    "folders": [
        {"path": "/a", "error": None, "free_bytes": 1 << 40},
        {"path": "/b", "error": "in RAM", "free_bytes": 2 << 40},
    ],
}  # fmt: skip


def test_measured_bandwidths_replace_the_typical_ones(tmp_path):
    links = tmp_path / "links.json"
    links.write_text('{"nvme_read": 1e6}', encoding="utf-8")
    machine = machine_of({}, device="cpu", speeds=links)
    assert machine.bandwidths == replace(TYPICAL["cpu"], nvme_read=1e6)
    said = list(machine.assumptions({"nvme_read": "reads", "nvme_write": "writes"}))
    assert said == [f"reads: 0.001 GB/s ({links})", "writes: 2 GB/s (assumed)"]
    links.write_text('{"disk": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"\['disk'\] are unknown"):
        machine_of({}, speeds=links)


def test_a_number_is_what_was_given_else_measured_else_of_the_card_else_assumed(tmp_path):
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps(REPORT), encoding="utf-8")
    machine = machine_of({"host_mem": 8 << 30}, gpu="h100", report=file)
    assert (machine.device_mem, machine.nvme, machine.folder) == (22 << 30, 1 << 40, "/a")
    names = ("host_mem", "device_mem", "nvme_read", "host_to_device", "nvme_write")
    assert [line.partition(": ")[2] for line in machine.assumptions(dict.fromkeys(names, "x"))] == [
        "8.00 GiB (given)", f"22.00 GiB (measured, {file})", f"7 GB/s (measured, {file})",
        "50 GB/s (data sheet of h100)", "3 GB/s (assumed)",
    ]  # fmt: skip
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="is no report; expected that of"):
        machine_of({}, report=file)
    with pytest.raises(ValueError, match="--gpu tpu with --device cuda; expected"):
        machine_of({}, gpu="tpu")
    assert machine_of({}, gpu="h100").device_mem == CARDS["h100"].usable_bytes == 79 * GIB
