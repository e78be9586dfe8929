"""LoRA adapters by trl's SFTTrainer over a model that is sharded and placed.

    python examples/sft_lora.py --model FOLDER_OR_HUB_ID --data chat.jsonl --out runs/lora

`python -m gemini train --lora 16` does this and more; here is what to write for a loop of your own.
Rows of the data have `messages`, `prompt` and `completion`, or `text`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from gemini import AutoPlacement
from gemini.integrations.transformers import GeminiTrainerMixin


class ShardedSFTTrainer(GeminiTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """The mixin goes first."""


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSONL")
    parser.add_argument("--out", required=True)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device-budget", help="as in 22GiB; what does not fit goes elsewhere")
    parser.add_argument("--nvme-dir", help="a folder on a fast disk")
    parser.add_argument("--plain", action="store_true", help="trl alone, to compare with")
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, save the adapter, and return the losses."""
    given = arguments(argv)
    args = SFTConfig(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        max_length=given.seq,
        learning_rate=2e-4,
        lr_scheduler_type="cosine",
        bf16=given.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": given.dtype},  # the frozen weights have no fp32 copy then
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_steps=given.steps,
        report_to="none",
    )
    placement = AutoPlacement(device_budget=given.device_budget, nvme_dir=given.nvme_dir)
    sharded = {} if given.plain else {"gemini": {"placement_policy": placement}}
    kind: Any = SFTTrainer if given.plain else ShardedSFTTrainer
    trainer = kind(
        given.model,
        args,
        train_dataset=load_dataset("json", data_files=given.data, split="train"),
        peft_config=LoraConfig(r=given.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        **sharded,
    )
    trainer.train()
    trainer.save_model()  # the adapter alone; all ranks call
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
