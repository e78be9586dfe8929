"""DeepSpeed ZeRO-3, tuned: everything that pipelines is on, buffers as large as the work.

What differs from its defaults, and why: small sub-groups, or there is nothing to pipeline; twelve
buffers of a sub-group's size, since with fewer both pipelines on end in an assertion (four are read
ahead, four updated, four written); buckets of the size of the largest parameter, or 2 GB of buckets
are set aside; four threads and a deep queue for the disk, with events overlapped; parameters that
are below the threshold are never partitioned, which at one rank saves every gather.

Its operators are compiled at first use, which takes minutes: `load` does it, into the environment
that runs, so that no row's start-up counts it. `make peers` calls it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer

BUCKET_NUMEL = 50_000_000
SUB_GROUP_NUMEL = 16_000_000
BUFFERS = 12
OPERATORS = ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder")


def load() -> None:
    """Import DeepSpeed. Raises RuntimeError where a killed build of its operators blocks them."""
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions"))
    for lock in sorted(folder.glob("**/lock")):
        raise RuntimeError(
            f"{lock} is left of a build of DeepSpeed's operators that was killed, or one is "
            "running: wait for it, or remove the file"
        )
    # its operators are loaded through ninja, which is beside the interpreter
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    import deepspeed  # noqa: F401


def prepare() -> None:
    """Compile the operators where that was not done."""
    from deepspeed.accelerator import get_accelerator

    for name in OPERATORS:
        try:
            get_accelerator().create_op_builder(name).load(verbose=False)
        except RuntimeError as error:
            if name != "AsyncIOBuilder":
                raise
            why = str(error).strip().splitlines()[-1:]
            raise SystemExit(
                "DeepSpeed's AsyncIO was not built; is libaio installed (Debian: apt install "
                f"libaio-dev)? {' '.join(why)}"
            ) from None


def settings(job: Job) -> dict[str, Any]:
    """DeepSpeed's own configuration. Options of the row: `offload`, "cpu", "nvme" or None;
    `offload_param`, whether parameters go there, too; `micro_batches` of a step."""
    offload, count = job.options.get("offload"), job.options.get("micro_batches", 1)
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET_NUMEL,
        "stage3_prefetch_bucket_size": BUCKET_NUMEL,
        "stage3_param_persistence_threshold": BUCKET_NUMEL,
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch // job.world_size // count,
        "gradient_clipping": job.max_norm,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": zero,
    }
    if count > 1:
        config["gradient_accumulation_steps"] = count
    if offload is not None:
        zero["sub_group_size"] = SUB_GROUP_NUMEL
        zero["offload_optimizer"] = {"device": offload, "pin_memory": True}
    if job.options.get("offload_param"):
        # parameters that stay whole are in no file
        zero["stage3_param_persistence_threshold"] = 0
        zero["offload_param"] = {
            "device": offload, "nvme_path": str(job.state_folder), "pin_memory": True,
            "buffer_size": BUCKET_NUMEL,
        }  # fmt: skip
    if offload == "nvme":
        zero["offload_optimizer"] |= {
            "nvme_path": str(job.state_folder),
            "buffer_count": BUFFERS,
            "pipeline_read": True,
            "pipeline_write": True,
        }
        config["aio"] = {
            "block_size": 4 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        }
    return config


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import deepspeed

    from bench.rows.ranks import join_group

    join_group(job)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=given
    )

    def forward(ids: Any) -> Any:
        return engine(input_ids=ids, labels=ids).loss

    def by_micro_batches(ids: Any) -> Any:
        """Forwards, backwards and, with the last of them, the update. Returns the mean loss."""
        losses = []
        for part in ids.chunk(job.options["micro_batches"]):
            loss = forward(part)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return sum(losses) / len(losses)

    if "micro_batches" in job.options:
        return Trainer(by_micro_batches, lambda loss: None, lambda: None)
    return Trainer(forward, engine.backward, engine.step)
