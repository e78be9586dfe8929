"""Pure files can be imported without torch: planners run on any laptop, and are fuzzed fast."""

import subprocess
import sys

import pytest

PURE = [
    "gemini.units",
    "gemini.tickets",
    "gemini.chunk.account",
    "gemini.chunk.sizing.repeated_layers",
    "gemini.chunk.layout",
    "gemini.chunk.sizing.model_specs",
    "gemini.chunk.sizing.packing",
    "gemini.chunk.sizing.search",
    "gemini.chunk.state",
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


@pytest.mark.parametrize("name", PURE)
def test_pure_file_imports_with_torch_blocked(name):
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['triton'] = None;"
        f"import {name}; assert 'torch.distributed' not in sys.modules"
    )
    path = ":".join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})
