"""Train with Ray Train: workers that Ray starts, and checkpoints that it keeps.

    pip install "ray[train]"
    python examples/ray_train.py --workers 2 --steps 30 --out /shared/runs

Ray runs `train` in a thread of each worker, and makes the process group. If a worker dies, all
begin again from the last checkpoint that was reported. `--out` is a folder that all nodes share;
`--nvme` a folder on a disk of each node.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemini import GeminiDDP, load_checkpoint, save_checkpoint
from gemini.optim import HybridAdam

BATCH, FEATURES = 12, 16  # sequences of all workers together


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every worker: [BATCH, FEATURES] and what to say of it."""
    drawn = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
    return drawn, drawn.cumsum(1)


def train(
    settings: dict[str, Any],
    folder: Path,
    newest: Path | None,
    report: Callable[[dict[str, Any], Path], object],
) -> str:
    """Train in a thread of this worker, and return the digest of the weights.

    folder: of checkpoints, the same for all workers. newest: the checkpoint to go on from.
    report: called by every worker with metrics and the folder of a checkpoint that is whole.
    """
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64), torch.nn.Tanh(), torch.nn.Linear(64, FEATURES)
    )
    model = GeminiDDP(inner)
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, nvme_offload_dir=settings["nvme"],
        nvme_offload_fraction=0.0 if settings["nvme"] is None else 1.0,
    )  # fmt: skip
    step = 0 if newest is None else load_checkpoint(newest, model, optimizer)["step"]
    while step < settings["steps"]:
        inputs, targets = batch(step)
        outputs = model(inputs[rank::workers])
        loss = (outputs - targets[rank::workers].to(outputs)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % settings["every"] == 0 or step == settings["steps"]:
            saved = folder / f"step-{step:06d}"
            save_checkpoint(saved, model, optimizer, extra={"step": step})
            report({"step": step, "loss": loss.item(), "workers": workers}, saved)
    digest = model.digest()
    optimizer.close()  # Ray may keep the process, and files would stay as long
    return digest


def loop(settings: dict[str, Any]) -> None:
    """What Ray runs on each worker."""
    from ray import train as ray_train
    from ray.train import Checkpoint, CheckpointUploadMode

    def report(metrics: dict[str, Any], saved: Path) -> None:
        # Ranks have written one folder together, where Ray keeps checkpoints: it copies nothing
        ray_train.report(
            metrics, Checkpoint(str(saved)), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
        )

    kept = ray_train.get_checkpoint()
    folder = Path(settings["out"], ray_train.get_context().get_experiment_name())
    train(settings, folder, None if kept is None else Path(kept.path), report)


def main() -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--name", default="gemini", help="of the run: the same goes on")
    parser.add_argument("--nvme", help="a folder on a disk of each node, as /scratch/{node}")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    trainer = TorchTrainer(
        loop,
        train_loop_config=vars(given) | {"out": str(given.out.absolute())},
        torch_config=TorchConfig("nccl" if cuda else "gloo"),
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=cuda),
        run_config=RunConfig(
            name=given.name,
            storage_path=str(given.out.absolute()),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"{result.metrics} at {result.checkpoint}")


if __name__ == "__main__":
    main()
