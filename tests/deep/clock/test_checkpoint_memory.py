"""What a save and a load take: a few blocks, whatever the model."""

import os
import subprocess
import sys

import pytest

from bench.support.machine import MALLOC_ENVIRONMENT

MEASURE = """
import gc, sys, tempfile, torch, gemini
from bench.checkpoint import extra_ram, network, step, wrapped
from optim import HybridAdam
from pathlib import Path
how, fraction, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
if how == "wrapped":
    model, optimizer = wrapped(8, fraction, folder)
else:
    model = network(8)
    offload = {"nvme_offload_fraction": fraction, "nvme_offload_dir": folder}
    optimizer = HybridAdam(model.parameters(), **offload)
    step(model, optimizer)
save = lambda name: gemini.save_checkpoint(folder / name, model, optimizer)
load = lambda name: gemini.load_checkpoint(folder / name, model, optimizer)
save("first")  # imports
load("first")
block = 12 << 20
saving, loading = (  # the heap has holes or not: it adds some MiB, or none
    min(extra_ram(lambda: work(name)) for name in ("second", "third", "fourth"))
    for work in (save, load)
)
print(saving / block, loading / block, optimizer.nvme_bytes)
"""


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("how", ["wrapped", "plain"])
def test_a_save_and_a_load_take_a_few_blocks_of_memory(how, fraction, tmp_path):
    """State is 32 blocks; measured as resident memory, in a process of its own."""
    environment = {**os.environ, **MALLOC_ENVIRONMENT, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, how, str(fraction), str(tmp_path)],
        env=environment, check=True, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    saving, loading, on_disk = done.stdout.split()
    assert (int(on_disk) > 0) == (fraction > 0)
    assert float(saving) <= 3
    assert float(loading) <= 4  # it reads ahead
