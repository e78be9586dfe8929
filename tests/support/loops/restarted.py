"""Training that begins again from its last checkpoint: a script for torchrun and `gemini run`.

python restarted.py OUT STEPS: writes OUT/attempts (torchrun's number of each, by all ranks),
OUT/pid-RANK, OUT/said (a line of rank 0 for each attempt that has begun to train), OUT/losses
(step, ranks and loss) and OUT/digest. DIES, "rank 1 3" or "host 3", kills rank 1, or
this host with all its ranks, behind step 3 of the first attempt. It goes on until NEEDS ranks take
part. Checkpoints are those of every EVERYth step, and files of state are in DISK.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gemini import GeminiDDP, HybridAdam, load_checkpoint, save_checkpoint

ROOT = Path(__file__).resolve().parents[3]
BATCH = 12  # sequences of all ranks, which 1 to 4 ranks divide
STARTERS = {
    "gemini run": ["gemini", "run"],
    "torchrun": ["torch.distributed.run", "--standalone"],
}


def started(
    out: Path,
    starter: str,
    *flags: str,
    steps: int = 6,
    dies: str = "rank -1 -1",
    needs: int = 1,
    every: int = 1,
    precision: str = "bf16",
) -> subprocess.Popen[str]:
    """A process of its own session that runs `main` on ranks."""
    out.mkdir(exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "io")]), "DIES": dies,
        "NEEDS": str(needs), "EVERY": str(every), "PRECISION": precision,
        # so long others may still join before those that are left go on; torch's own is 30 s
        "PET_RDZV_CONF": "last_call_timeout=2",
    }  # fmt: skip
    if starter == "torchrun":
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.Popen(
        [sys.executable, "-m", *STARTERS[starter], *flags, __file__, str(out), str(steps)],
        env=environment, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", start_new_session=True,
    )  # fmt: skip


def ended_well(process: subprocess.Popen[str]) -> None:
    printed, _ = process.communicate()
    assert process.returncode == 0, printed


def read(out: Path, name: str) -> str:
    return (out / name).read_text(encoding="utf-8")


def main() -> None:
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    who, *numbers = os.environ["DIES"].split()
    with (out / "attempts").open("a", encoding="utf-8") as attempts:
        attempts.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (out / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 4))
    model = GeminiDDP(inner, precision=os.environ.get("PRECISION", "bf16"))
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, nvme_offload_fraction=1.0,
        nvme_offload_dir=os.environ.get("DISK", f"{out}/{{node}}-{{rank}}"),
    )  # fmt: skip
    checkpoint, step = out / "checkpoint", 0
    if checkpoint.exists():
        step = load_checkpoint(checkpoint, model, optimizer)["step"]
    if rank == 0:
        with (out / "said").open("a", encoding="utf-8") as said:
            said.write(f"from {step} with {ranks}\n")
    while step < steps or ranks < int(os.environ["NEEDS"]):
        drawn = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(step))
        inputs, targets = drawn[rank::ranks].split([8, 4], 1)
        loss = (model(inputs).float() - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        dist.all_reduce(mean := loss.detach().double() / ranks)
        if rank == 0:
            with (out / "losses").open("a", encoding="utf-8") as losses:
                losses.write(f"{step} {ranks} {mean.item()}\n")
        if step % int(os.environ.get("EVERY", "1")) == 0:
            save_checkpoint(checkpoint, model, optimizer, extra={"step": step})
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == int(numbers[-1]):
            if who == "host":
                os.kill(os.getppid(), signal.SIGKILL)  # torchrun of this host
            if who == "host" or rank == int(numbers[0]):
                os.kill(os.getpid(), signal.SIGKILL)
    digest = model.digest()
    if rank == 0:
        (out / "digest").write_text(digest, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
