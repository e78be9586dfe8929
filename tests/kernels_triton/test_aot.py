"""Every kernel compiles for every target, and the assembly is what was meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "sm_100", "gfx942"])
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


def test_nothing_is_contracted_into_a_fused_multiply_add(report):
    """In PTX. AMD's assembly uses fma inside its exact square root and division, and the norm of
    any exponent p inside the library's logarithm."""
    for name, entry in report.items():
        if name.startswith("sm_") and not name.endswith("/norm--1"):
            assert not [a for a in entry["accesses"] if a.startswith("fma")], name


def test_no_kernel_spills(report):
    for name, entry in report.items():
        if name.startswith("sm_"):
            assert entry["resources"] == {"STACK": 0, "LOCAL": 0}, name
        assert not [a for a in entry["accesses"] if a.startswith("scratch_")], name
