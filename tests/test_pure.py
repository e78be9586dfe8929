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
    "gemini.runtime.comm.ballot",
    "optim.rules.loss_scale",
    "optim.rules.clipping",
    "optim.state.machine",
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
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    return run.stdout.split(), run.stderr


@pytest.mark.parametrize("name", PURE)
def test_pure_file_imports_with_torch_blocked(name: str, imported: tuple[list[str], str]) -> None:
    names, said = imported
    assert name in names, said
