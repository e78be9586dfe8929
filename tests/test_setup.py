"""What `make` installs, with a python3 and a pip that only say what they were asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = """#!/bin/sh
echo "$*" >> {calls}
case "$*" in
    "-m venv "*) mkdir -p $3/bin && cp $0 $3/bin/python;;
    *"pip install"*+cpu*) echo "No matching distribution found" >&2; exit {cpu};;
    *"pip show -q triton") exit {triton};;
    *"-c "*constraints.txt*) while [ "$1" != -c ]; do shift; done; cat $2 > {constraints};;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def make(tmp_path):
    """`make TARGET` in a copy: what python was called with, the constraints, what was printed."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bench/peers").mkdir(parents=True)
    (tmp_path / "bench/peers/requirements.txt").touch()
    tools = tmp_path / "tools"
    tools.mkdir()

    def run(target, *, has_cpu_build, brings_triton, torch="torch==2.13.0+cpu"):
        calls, constraints = tmp_path / "calls", tmp_path / "constraints-used"
        (tools / "python3").write_text(
            PYTHON.format(
                calls=calls, constraints=constraints, cpu=int(not has_cpu_build),
                triton=int(not brings_triton),
            ), encoding="utf-8"
        )  # fmt: skip
        (tools / "python3").chmod(0o755)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        done = subprocess.run(
            ["make", target], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8",
            env={**inherited, "PATH": f"{tools}:{os.environ['PATH']}", "TORCH": torch},
        )  # fmt: skip
        used = constraints.read_text(encoding="utf-8") if constraints.exists() else ""
        return done, calls.read_text(encoding="utf-8").splitlines(), used

    return run


def installed(calls):
    return [call.split()[-1] for call in calls if " torch==" in call]


@pytest.mark.parametrize("target", ["demo", ".venv/ok", "peers"])
def test_where_pip_has_no_cpu_build_the_plain_one_is_taken_and_its_cost_told(make, target):
    """Its Triton is the one that it asks for: with another pip finds no solution."""
    done, calls, constraints = make(target, has_cpu_build=False, brings_triton=True)
    assert done.returncode == 0, done.stderr
    assert installed(calls) == ["torch==2.13.0+cpu", "torch==2.13.0"]
    assert "2.6 GiB" in done.stdout and "PIP_EXTRA_INDEX_URL=https://" in done.stdout
    assert "numpy==" in constraints and "triton==" not in constraints


@pytest.mark.parametrize("target", ["demo", ".venv/ok", "peers"])
def test_where_pip_has_it_the_cpu_build_is_taken_with_our_triton(make, target):
    done, calls, constraints = make(target, has_cpu_build=True, brings_triton=False)
    assert done.returncode == 0, done.stderr
    assert installed(calls) == ["torch==2.13.0+cpu"]
    assert "GiB" not in done.stdout
    assert constraints == (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_a_plain_build_that_cannot_be_had_ends_the_make(make):
    done, calls, _ = make(
        "demo", has_cpu_build=False, brings_triton=False, torch="torch==2.13.0+cpu.other+cpu"
    )
    assert done.returncode != 0
    assert not any("bench.demo" in call for call in calls)


@pytest.mark.parametrize("target", ["quick", "tests", "tests-ci", "test-oldest"])
def test_where_there_is_a_gpu_the_tests_of_the_interpreter_do_not_see_it(target):
    """CPU tensors would meet kernels that are compiled, and modules would be wrapped on the GPU."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    printed = subprocess.run(
        ["make", "-n", target],
        cwd=ROOT,
        env=inherited,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout.replace("\\\n", "")
    lines = [line for line in printed.splitlines() if "-m pytest" in line]
    assert lines
    for line in lines:
        assert "CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1" in line, line
