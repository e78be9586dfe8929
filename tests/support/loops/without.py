"""Training in all homes with modules that cannot be imported: without.py FOLDER MODULE...

Prints a digest of the weights for each home.
"""

import sys
import warnings
from copy import deepcopy

FOLDER, *MISSING = sys.argv[1:]


class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{one}.") for one in MISSING):
            raise ModuleNotFoundError(f"{name} is made missing", name=name)


sys.meta_path.insert(0, Missing())

import torch  # noqa: E402
from torch import nn  # noqa: E402

from bench.shared.workers import run_ranks  # noqa: E402
from gemini import AutoPlacement, GeminiDDP, HybridAdam  # noqa: E402

warnings.simplefilter("ignore")  # of budgets, which are as low as they may be
torch.manual_seed(0)
MODULE = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
INPUTS = torch.randn(4, 2, 64)
CASES = {
    "resident": {},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "state in files": {"nvme": 1.0},
    "a tail": {"nvme": 1.0, "update": "tail"},
    "all in files": {
        "nvme": 1.0,
        "placement_policy": AutoPlacement("150KiB", "1MiB", "1GiB", FOLDER),
    },
}


def train(rank, nvme=0.0, **options):
    """Four steps with micro-batches, a clip, an evaluation, and one step that is skipped."""
    module = deepcopy(MODULE)
    options = {"max_norm": 0.1, "min_chunk_size_m": 2**12 / 2**20, "search_range_m": 0, **options}
    model = GeminiDDP(module, **options)
    places = {"nvme_offload_fraction": nvme, "nvme_offload_dir": FOLDER} if nvme else {}
    optimizer = HybridAdam(model.parameters(), lr=1e-2, **places)
    for i, x in enumerate(INPUTS + rank):
        with model.no_sync():
            model(x).float().square().sum().backward()
        loss = model(x + 1).float().square().sum()
        (loss * (float("inf") if i == 2 else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval()(INPUTS[0])
    str(model.memory_report()), model.explain("0.weight")
    found = model.digest()
    optimizer.close()
    return found


for name, options in CASES.items():
    print(name, train(0, **options))
print("two ranks", *run_ranks(train, 2))
