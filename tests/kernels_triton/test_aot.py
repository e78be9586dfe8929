"""Every kernel compiles for every target, and the assembly is what was meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = {"sm_90": "ci", "gfx942": "ci", "sm_80": "deep", "sm_100": "deep"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(target, marks=getattr(pytest.mark, mark))
            for target, mark in TARGETS.items()],
)  # fmt: skip
def report(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "aot.py"), request.param],
        capture_output=True, text=True, env={**environment, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout)


def test_full_tiles_are_read_and_written_128_bits_at_a_time(report):
    for name, entry in report.items():
        accesses = entry["accesses"]
        if "/update-" in name or "/pack-" in name:
            wide = ["ld.global.v4.b32", "st.global.v4.b32"]
        elif "/norm-" in name:
            wide = ["ld.global.v4.b32"]
        else:
            continue
        if name.startswith("gfx942"):
            wide = [w.replace("ld.global.v4.b32", "load_dwordx4") for w in wide]
            wide = [w.replace("st.global.v4.b32", "store_dwordx4") for w in wide]
        for kind in wide:
            assert any(kind in access for access in accesses), (name, kind, accesses)


# by target: registers of Adam's update, 128 threads a tile (64-wide waves of gfx942: 256). 80 leave
# room for 6 tiles on a multiprocessor of 65536 registers (37 % of its warps on sm_90), 96 for 5;
# before, 155 left 3. Triton 3.6 takes 72 where 3.9 takes 64 on sm_80: 7 tiles and not 8
ADAMS = ("update-adam-bf16-bf16", "update-adam-bf16-bf16-split")
REGISTERS = {
    "sm_80": (72, 72, 72), "sm_90": (80, 80, 96), "sm_100": (80, 80, 96), "gfx942": (64, 64, 64)
}  # fmt: skip


def test_registers_leave_room_for_enough_tiles_on_a_multiprocessor(report):
    for name, entry in report.items():
        target, kernel = name.split("/")
        if target in REGISTERS and kernel in (*ADAMS, "update-adam-fp32-fp32"):
            most = REGISTERS[target][[*ADAMS, kernel].index(kernel)]
            used = entry["resources"]
            assert used["REG" if "REG" in used else "vgpr_count"] <= most, (name, used)


def test_planes_and_gradients_are_read_4_elements_at_a_time(report):
    """16-bit ones with 64 bits, beside fp32 ones with 128: no conversion between the two."""
    for name, entry in report.items():
        target, kernel = name.split("/")
        if target.startswith("sm_") and kernel in ADAMS:
            widths = {a.split(".")[-2] for a in entry["accesses"] if "global.v" in a}
            assert widths == {"v4", "v2"}, (name, entry["accesses"])


def test_nothing_is_contracted_into_a_fused_multiply_add(report):
    """In PTX. AMD's assembly uses fma inside its exact square root and division, and the norm of
    any exponent p inside the library's logarithm."""
    for name, entry in report.items():
        if name.startswith("sm_") and not name.endswith("/norm--1"):
            assert not [a for a in entry["accesses"] if a.startswith("fma")], name


def test_no_kernel_spills(report):
    for name, entry in report.items():
        if name.startswith("sm_"):
            held = {key: entry["resources"][key] for key in ("STACK", "LOCAL")}
            assert held == {"STACK": 0, "LOCAL": 0}, name
        else:
            held = {key: n for key, n in entry["resources"].items() if "spill" in key}
            assert held == {"sgpr_spill_count": 0, "vgpr_spill_count": 0}, name
        assert not [a for a in entry["accesses"] if a.startswith("scratch_")], name
