"""Training that begins again from its last checkpoint: a script for torchrun and `gemini run`.

python restarted.py OUT STEPS [KILLED_RANK AT_STEP]: writes OUT/pid-RANK, OUT/said (a line for each
attempt of rank 0) and, at the end, OUT/digest. The named rank kills itself after the checkpoint of
that step, in the first attempt alone.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gemini import GeminiDDP, HybridAdam, load_checkpoint, save_checkpoint

BATCH = 12  # sequences of all ranks, which 1 to 4 ranks divide


def main() -> None:
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    dies, at = (int(word) for word in sys.argv[3:5] or ("-1", "-1"))
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (out / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 4))
    model = GeminiDDP(inner, precision="bf16")
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, nvme_offload_fraction=1.0,
        nvme_offload_dir=f"{out}/{{node}}-{{rank}}",
    )  # fmt: skip
    checkpoint, step = out / "checkpoint", 0
    if checkpoint.exists():
        step = load_checkpoint(checkpoint, model, optimizer)["step"]
    if rank == 0:
        with (out / "said").open("a", encoding="utf-8") as said:
            said.write(f"from {step} with {ranks}\n")
    while step < steps:
        drawn = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
        model(drawn[rank::ranks]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        save_checkpoint(checkpoint, model, optimizer, extra={"step": step})
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if (rank, step) == (dies, at) and first:
            os.kill(os.getpid(), signal.SIGKILL)
    digest = model.digest()
    if rank == 0:
        (out / "digest").write_text(digest, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
