"""Pure files can be imported without torch: planners run on any laptop, and are fuzzed fast."""

import subprocess
import sys

import pytest

PURE = [
    "gemini.units",
    "gemini.tickets",
    "gemini.chunk.account",
    "gemini.chunk.blocks",
    "gemini.chunk.layout",
    "gemini.chunk.model_specs",
    "gemini.chunk.packing",
    "gemini.chunk.search",
    "gemini.chunk.state",
    "gemini.placement.tiers",
    "gemini.placement.budgets",
    "gemini.placement.fit",
    "gemini.placement.policy",
    "gemini.placement.gather",
    "gemini.placement.opt",
    "gemini.placement.planner",
    "gemini.memtracer.trace",
    "gemini.memtracer.overruns",
    "gemini.memtracer.predict",
    "gemini.memtracer.timeline",
    "gemini.doctor.report",
    "gemini.runtime.agreement",
    "optim.loss_scale",
    "optim.clipping",
    "gemini.runtime.numerics",
    "kernels_triton.fields",
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
