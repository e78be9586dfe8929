"""Pure files can be imported without torch: planners run on any laptop, and are fuzzed fast."""

import subprocess
import sys

import pytest

PURE = [
    "gemini.units",
    "gemini.strangers",
    "gemini.optim.rules.saved",
    "gemini.arguments",
    "gemini.settings",
    "gemini.tickets",
    "gemini.embedding.planner",
    "gemini.transfer.buckets",
    "gemini.chunk.sizing.search",
    "gemini.chunk.layout",
    "gemini.chunk.sizing.packing",
    "gemini.placement.tiers",
    "gemini.placement.homes.budgets",
    "gemini.placement.fit",
    "gemini.placement.policy",
    "gemini.placement.timetable.gathers",
    "gemini.placement.timetable.belady",
    "gemini.placement.planner",
    "gemini.memtracer.trace",
    "gemini.mesh.roles",
    "gemini.placement.overruns",
    "gemini.placement.predict",
    "gemini.placement.picture",
    "gemini.placement.start",
    "gemini.placement.timeline",
    "gemini.doctor.report",
    "gemini.plan.machine",
    "gemini.plan.words",
    "gemini.comm.ballot",
    "optim.rules.loss_scale",
    "optim.rules.clipping",
    "optim.state.flow",
    "gemini.runtime.wrap.precision",
    "kernels_triton.control_fields",
    "nvme",
]


IMPORT_EACH = """
import importlib, os, sys, traceback

sys.modules["torch"] = sys.modules["triton"] = None
for name in sys.argv[1:]:
    if os.fork() == 0:  # each is the first import of its process
        try:
            importlib.import_module(name)
            assert "torch.distributed" not in sys.modules
        except BaseException:
            traceback.print_exc()
        else:
            os.write(1, f"{name}\\n".encode())
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def imported() -> tuple[list[str], str]:
    """Names of the files that one process imported without torch, and what the others said."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *PURE],
        check=True,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    return run.stdout.split(), run.stderr


@pytest.mark.parametrize("name", PURE)
def test_pure_file_imports_with_torch_blocked(name: str, imported: tuple[list[str], str]) -> None:
    names, said = imported
    assert name in names, said


WITHOUT_CALLS = """
import os, pathlib, sys, torch

absent = ("posix_fallocate", "fdatasync", "preadv", "pwritev", "O_DIRECT", "sched_getaffinity")
for name in absent:
    delattr(os, name)
sys.modules["fcntl"] = None
read = pathlib.Path.read_text

def read_text(path, *args, **options):
    if str(path).startswith("/proc/"):
        raise FileNotFoundError(path)
    return read(path, *args, **options)

pathlib.Path.read_text = read_text
from gemini import GeminiDDP, HybridAdam
from gemini.__main__ import main

param = torch.nn.Parameter(torch.ones(8))
param.grad = torch.ones(8)
try:
    HybridAdam([param], nvme_offload_fraction=1.0, nvme_offload_dir=sys.argv[1]).step()
except Exception as error:
    print(error)
try:
    GeminiDDP(torch.nn.Linear(2, 2))
except ValueError as error:
    print(error)
raise SystemExit(main(["plan", "gpt2", "--gpu", "l4", "--host-mem", "6GiB", "--seq", "16"]))
"""


@pytest.mark.ci
def test_a_system_without_our_calls_plans_and_is_told_what_cannot_work(tmp_path):
    """As macOS has it; without torch blocked, which `plan` traces with."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_CALLS, str(tmp_path)],
        capture_output=True, text=True, encoding="utf-8", env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "gpt2 fits" in run.stdout
    assert "is not on this system: files of state and checkpoints need Linux" in run.stdout
    assert "no /proc/meminfo: wrapping needs Linux; expected it, or plan --gpu" in run.stdout
