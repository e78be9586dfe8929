"""Every kernel compiles for every target, and the assembly is what was meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

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
        capture_output=True, text=True,
        encoding="utf-8", env={**environment, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout)


# by parts of names, the first that is found: what a full tile does 128 bits at a time
LOADS, STORES = "ld.global.v4.b32", "st.global.v4.b32"
WIDE = {
    "-state-": (),  # of bytes; with 16-bit parameters nothing is of 32
    "gfx942/float8-pack": (LOADS,),  # 256 threads: 8 bytes of float8 each
    "gfx942/float8-unpack": (STORES,),
    "/float8-largest": (LOADS,),
    **dict.fromkeys(("/update-", "/pack-", "/rows-norm", "-backward"), (LOADS, STORES)),
    **dict.fromkeys(("/float8-pack", "/float8-unpack"), (LOADS, STORES)),
    **dict.fromkeys(("/norm-", "/direction-", "/rows-loss"), (LOADS,)),
}


def test_full_tiles_are_read_and_written_128_bits_at_a_time(report):
    for name, entry in report.items():
        accesses = entry["accesses"]
        for kind in next((kinds for part, kinds in WIDE.items() if part in name), ()):
            if name.startswith("gfx942"):
                kind = {LOADS: "load_dwordx4", STORES: "store_dwordx4"}[kind]
            assert any(kind in access for access in accesses), (name, kind, accesses)


# Registers of 128 threads a tile, of 256 for norm and pack (waves of gfx942: twice as many).
# Columns: sm_80 and later targets with this Triton, any of them with Triton 3.6, gfx942; rows:
# the first name that a kernel's begins with. 80 leave room for 6 tiles on a multiprocessor of
# 65536 registers (37 % of its warps on sm_90), 96 for 5; 64 for 4 of norm's (50 %), where 179 of
# 128 threads left 2. Of quantised state 4 tiles, as its bytes are fewer
ADAMS = ("update-adam-bf16-bf16", "update-adam-bf16-bf16-split")
REGISTERS = {
    "update-adam-bf16-bf16-stochastic": (80, 115, 96, 64),
    "update-adam-bf16-bf16-split": (72, 96, 88, 64),
    "update-adam-8bit-state": (96, 136, 136, 72),
    "update-adam-bf16-state-bf16-bf16-split": (92, 112, 112, 64),
    "update-adam-bf16-state": (80, 112, 112, 64),
    "update-adam-amsgrad": (96, 124, 112, 64),
    "update-adam-fp32-fp32": (72, 90, 72, 64),
    "update-adamax-bf16-bf16-split": (72, 84, 80, 64),
    "update-adam": (72, 80, 72, 64),
    "update-sgd": (64, 64, 56, 64),
    "update-lion": (64, 64, 56, 64),
    "update-lamb-bf16-bf16-split": (80, 116, 96, 64),  # a remainder in flight beside four operands
    "update-schedule_free-bf16-bf16-split": (80, 121, 96, 64),
    "update-rmsprop-centered": (128, 128, 128, 64),  # three planes, as all with two fit 4 tiles
    "update": (112, 110, 112, 64),
    "prologue-nadam": (128, 128, 128, 96),  # one program, with logarithms
    "prologue-schedule_free": (128, 128, 128, 124),
    "pack": (123, 124, 160, 80),
    "segment": (80, 80, 80, 64),  # a program for a segment: few
    "norm--1": (61, 87, 80, 64),
    "lines": (128, 98, 128, 64),  # of 256 threads: two levels of 2048 squares in fp64
    "gram": (250, 177, 250, 144),  # of 256 threads: 64 fp32 sums, and tiles on their way
    "rows-backward": (128, 128, 128, 64),  # of 256 threads: a row of 4096 and the sums of two
    "rows-loss": (80, 80, 80, 72),
    "": (64, 64, 64, 64),  # norm, prologue, finish, tally
}


def most_registers(target, kernel):
    column = 3 if target == "gfx942" else 2 if triton.__version__ < "3.7" else target != "sm_80"
    return next(most[column] for name, most in REGISTERS.items() if kernel.startswith(name))


def test_registers_leave_room_for_enough_tiles_on_a_multiprocessor(report):
    for name, entry in report.items():
        target, kernel = name.split("/")
        used = entry["resources"]
        registers = used["REG" if "REG" in used else "vgpr_count"]
        assert registers <= most_registers(target, kernel), (name, used)


def test_planes_and_gradients_are_read_4_elements_at_a_time(report):
    """16-bit ones with 64 bits, beside fp32 ones with 128: no conversion between the two."""
    for name, entry in report.items():
        target, kernel = name.split("/")
        if target.startswith("sm_") and kernel in ADAMS:
            widths = {a.split(".")[-2] for a in entry["accesses"] if "global.v" in a}
            assert widths == {"v4", "v2"}, (name, entry["accesses"])


def test_full_tiles_have_no_access_of_16_bits(report):
    """Those are masked. A remainder whose alignment was folded away came 2 bytes at a time."""
    for name, entry in report.items():
        if name.startswith("sm_") and ("/update-" in name or "/direction-" in name):
            narrow = [access for access in entry["unmasked"] if "16" in access.split(".")[-1]]
            assert entry["unmasked"] and not narrow, (name, entry["unmasked"])


def test_nothing_is_contracted_into_a_fused_multiply_add(report):
    """In PTX. AMD's assembly uses fma inside its exact square root and division, and the norm of
    any exponent p, losses and coefficients with one inside the library's logarithm."""
    with_powers = ("/norm--1", "/prologue-nadam", "/prologue-schedule_free", "/rows-loss")
    for name, entry in report.items():
        if name.startswith("sm_") and not name.endswith(with_powers):
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
