"""LoRA adapters by trl's DPOTrainer; the frozen reference is the sharded base with adapters off.

    python examples/dpo_lora.py --model FOLDER_OR_HUB_ID --data pairs.jsonl --out runs/dpo

Rows have `prompt`, `chosen` and `rejected`. `python -m gemini train --method dpo` does this and
more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from gemini import AutoPlacement
from gemini.integrations.transformers import GeminiTrainerMixin


class ShardedDPOTrainer(GeminiTrainerMixin, DPOTrainer):  # type: ignore[misc]
    """The mixin goes first."""


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSONL")
    parser.add_argument("--out", required=True)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--beta", type=float, default=0.1, help="weight of the reference")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2, help="pairs of a rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device-budget", help="as in 22GiB; what does not fit goes elsewhere")
    parser.add_argument("--nvme-dir", help="a folder on a fast disk")
    parser.add_argument("--plain", action="store_true", help="trl alone, to compare with")
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, save the adapter, and return the losses."""
    given = arguments(argv)
    args = DPOConfig(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        max_length=given.seq,
        beta=given.beta,
        learning_rate=5e-5,
        bf16=given.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": given.dtype},  # the frozen weights have no fp32 copy then
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    placement = AutoPlacement(device_budget=given.device_budget, nvme_dir=given.nvme_dir)
    sharded = {} if given.plain else {"gemini": {"placement_policy": placement}}
    kind: Any = DPOTrainer if given.plain else ShardedDPOTrainer
    trainer = kind(
        given.model,
        args=args,
        train_dataset=load_dataset("json", data_files=given.data, split="train"),
        peft_config=LoraConfig(r=given.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        **sharded,
    )
    trainer.train()
    trainer.save_model()  # the adapter alone; all ranks call
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
