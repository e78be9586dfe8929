"""`python -m tests.cuda_stub MODULE ...`: run a module on torch's CUDA build, over a stub of CUDA.

    .venv-cuda/bin/python -m tests.cuda_stub pytest -m "gpu and not values" tests/optim/update
    .venv-cuda/bin/python -m tests.cuda_stub tests.cuda_stub.steps --check
    .venv-cuda/bin/python -m tests.cuda_stub tests.cuda_stub.hazards

torch's own allocators, streams, events and debug mode run as on a GPU, Triton compiles for sm_90,
and no kernel does anything: exceptions, waits, copies and launches are real, values are not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.cuda_stub.build import folder_with_stub

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gemini-cuda-stub"

if __name__ == "__main__":
    folder = folder_with_stub(CACHE)
    environment = os.environ | {
        "LD_PRELOAD": str(folder / "libstub.so"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")]),
        "OMP_NUM_THREADS": "1",
    }
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "tests.cuda_stub.over", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)
