"""What the doctor finds, and what it says of it."""

import json
import os
from dataclasses import replace

import pytest

from gemini.__main__ import main
from gemini.doctor.measure import examine
from gemini.doctor.report import FolderFacts, judge, render
from gemini.placement.sizes import Bandwidths
from tests.support.doctored import DISK, GOOD, GPU, NO_TRITON


def test_speeds_of_a_busy_machine_are_not_judged():
    slow = {
        "ram_copy_bytes_per_s": 2e9, "devices": (replace(GPU, host_to_device=3e9),),
        "folders": (replace(DISK, read=1e8, write=1e8),),
    }  # fmt: skip
    assert [finding.level for finding in judge(replace(GOOD, **slow)).findings] == ["slow"] * 3
    (finding,) = judge(replace(GOOD, load_average=9.0, **slow)).findings
    assert finding.what == "the load average is 9.0 on 8 cores" and "not judged" in finding.remedy
    gone = replace(GOOD, load_average=9.0, huge_pages="never")
    assert [finding.level for finding in judge(gone).findings] == ["slow", "note"]


def test_a_good_machine_has_no_findings():
    report = judge(GOOD)
    assert report.findings == () and report.ok


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"versions": NO_TRITON}, "error", "triton is not installed"),
        ({"versions": NO_TRITON, "devices": ()}, "note", "triton is not installed"),
        ({"c_compiler": None}, "error", "no C compiler"),
        ({"cxx_compiler": None}, "note", "no C++ compiler"),
        ({"memlock_bytes": 8 << 20}, "note", "locked memory is 8.00 MiB"),
        ({"load_average": 9.0}, "note", "load average is 9.0"),
        ({"ram_copy_bytes_per_s": 2e9}, "slow", "RAM copies at 2.00 GB/s"),
        ({"huge_pages": "never"}, "slow", "huge pages are off"),
        ({"malloc_tuned": False, "devices": ()}, "note", "8 to 14 %"),
        ({"restarts_cleanly": False, "devices": ()}, "note", "torchrun --max-restarts fails once"),
        ({"shadowed": {"optim": "/user/optim.py"}}, "note", "import optim finds /user/optim.py"),
        ({"temporary_file_system": "tmpfs"}, "note", "which is RAM"),
        ({"devices": ()}, "note", "no CUDA device"),
        (
            {"devices": (), "cpu_flops": {"bf16": 9e8, "fp32": 7.46e10}},
            "slow",
            "of bf16 at 0.9 GFLOP/s, of fp32 at 74.6 GFLOP/s",
        ),
        ({"devices": (replace(GPU, host_to_device=3e9),)}, "slow", "to the device run at 3.00"),
        ({"devices": (replace(GPU, device_to_host=3e9),)}, "slow", "from the device run at 3.00"),
        ({"folders": (FolderFacts("/x", error="/x is a file"),)}, "error", "/x is a file"),
        ({"folders": (replace(DISK, direct=False),)}, "slow", "refuses O_DIRECT"),
        ({"folders": (replace(DISK, left_bytes=3 << 30),)}, "note", "has 3.00 GiB in files of"),
        ({"folders": (replace(DISK, read=0.5e9, write=0.5e9),)}, "slow", "44 s a step"),
        ({"folders": (replace(DISK, free_bytes=2_400_000_000),)}, "slow", "100 million"),
    ],
)
def test_each_thing_that_is_slow_or_missing_is_said_with_a_remedy(change, level, words):
    report = judge(replace(GOOD, **change))
    (finding,) = [f for f in report.findings if words in f.what]
    assert finding.level == level and finding.remedy
    assert report.ok == (level != "error")
    assert finding.what in render(report) and finding.remedy in render(report)


def test_the_worst_comes_first():
    report = judge(replace(GOOD, huge_pages="never", c_compiler=None, cxx_compiler=None))
    assert [f.level for f in report.findings] == ["error", "slow", "note"]


def test_the_slowest_device_and_folder_are_what_a_planner_counts_with():
    slow = replace(DISK, read=1e9)
    report = judge(replace(GOOD, folders=(DISK, slow, FolderFacts("/x", error="no"))))
    links = Bandwidths.from_json(report.bandwidths())
    assert (links.nvme_read, links.nvme_write) == (1e9, 2e9)
    assert (links.host_to_device, links.device_to_host) == (45e9, 40e9)  # both at once
    assert (links.device_memory, links.host_memory, links.flops) == (3e12, 30e9, 4e14)


def test_a_real_machine_is_measured_and_nothing_is_left(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    facts = examine([tmp_path, tmp_path / "none"], copy_bytes=1 << 20, probe_seconds=0.1)
    assert facts.ram_copy_bytes_per_s > 0 and facts.cores >= 1
    assert facts.cpu_flops.keys() == {"bf16", "fp32"} and min(facts.cpu_flops.values()) > 0
    assert 0 < facts.ram_left_bytes <= facts.ram_bytes
    assert dict(facts.versions)["torch"]
    here, missing = facts.folders
    if here.error is None:  # a folder for temporary files may be in RAM
        assert here.read > 1e6 and here.write > 1e6 and here.free_bytes > 0
    else:
        assert "which is RAM" in here.error
    assert "does not exist" in missing.error
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) <= before  # threads of what other tests dropped end


def test_a_folder_in_ram_is_refused():
    (facts,) = examine(["/dev/shm"], copy_bytes=1 << 20, probe_seconds=0.1).folders
    assert "which is RAM" in facts.error


def test_the_command_prints_json_and_fails_where_a_folder_cannot_be_used(tmp_path, capsys):
    status = main(["doctor", "--json", "--dir", str(tmp_path / "none")])
    found = json.loads(capsys.readouterr().out)
    assert status == 1 and not found["ok"]
    assert "does not exist" in found["folders"][0]["error"]
    assert any("does not exist" in finding["what"] for finding in found["findings"])
    Bandwidths.from_json(found["bandwidths"])
