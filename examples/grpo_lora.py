"""LoRA adapters by trl's GRPOTrainer over a sharded model, which also writes the completions.

    python examples/grpo_lora.py --model FOLDER_OR_HUB_ID --data sums.jsonl --out runs/grpo

Rows have `prompt` and `answer`; a completion that ends with the answer earns 1. Write your own
reward below. `python -m gemini train --method grpo --reward FILE.py:FUNCTION` does this and more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gemini import AutoPlacement
from gemini.integrations.transformers import GeminiTrainerMixin


class ShardedGRPOTrainer(GeminiTrainerMixin, GRPOTrainer):  # type: ignore[misc]
    """The mixin goes first."""


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 if a completion ends with the answer, and up to 0.1 for being short."""
    return [
        float(text.strip().endswith(right)) + 0.1 / (1 + len(text))
        for text, right in zip(completions, answer, strict=True)
    ]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSONL")
    parser.add_argument("--out", required=True)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the reference; 0: none")
    parser.add_argument("--completions", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a completion")
    parser.add_argument("--batch", type=int, default=8, help="completions of a rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device-budget", help="as in 22GiB; what does not fit goes elsewhere")
    parser.add_argument("--nvme-dir", help="a folder on a fast disk")
    parser.add_argument("--plain", action="store_true", help="trl alone, to compare with")
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, save the adapter, and return the norms of the gradients: the loss begins at 0."""
    given = arguments(argv)
    args = GRPOConfig(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        num_generations=given.completions,
        max_completion_length=given.tokens,
        beta=given.beta,
        learning_rate=1e-5,
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
    kind: Any = GRPOTrainer if given.plain else ShardedGRPOTrainer
    trainer = kind(
        given.model,
        is_right,
        args=args,
        train_dataset=load_dataset("json", data_files=given.data, split="train"),
        peft_config=LoraConfig(r=given.rank, target_modules="all-linear", task_type="CAUSAL_LM"),
        **sharded,
    )
    trainer.train()
    trainer.save_model()  # the adapter alone; all ranks call
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


if __name__ == "__main__":
    main()
