"""Trainers of trl on a small Llama with adapters, plain or over `GeminiTrainerMixin`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig

from gemini.integrations.transformers import GeminiTrainerMixin
from tests.support.model_folder import TEXT

STEPS = 3
METHODS = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO"}
_MORE: dict[str, dict[str, Any]] = {
    "grpo": {"max_completion_length": 6, "num_generations": 2, "beta": 0.1},
}


def letters(completions: list[str], **_: Any) -> list[float]:
    """Reward that differs among completions."""
    return [float(len(set(text))) for text in completions]


def rows(method: str) -> Dataset:
    cut = [TEXT[60 * i : 60 * i + 60] for i in range(24)]
    if method == "sft":
        return Dataset.from_list([{"prompt": t[:20], "completion": t[20:]} for t in cut])
    if method == "grpo":
        return Dataset.from_list([{"prompt": t[:20]} for t in cut])
    return Dataset.from_list(
        [{"prompt": t[:20], "chosen": t[20:40], "rejected": t[40:]} for t in cut]
    )


def run(
    method: str, folder: Path, *, ours: bool = False, checkpointing: bool = False
) -> torch.Tensor:
    """Loss and gradient norm of each step."""
    name = METHODS[method]
    base = getattr(importlib.import_module(f"trl.trainer.{method}_trainer"), f"{name}Trainer")
    options = getattr(importlib.import_module(f"trl.trainer.{method}_config"), f"{name}Config")
    kind = type("Ours", (GeminiTrainerMixin, base), {}) if ours else base
    args = options(
        output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=2,
        learning_rate=1e-2, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        save_strategy="no", gradient_checkpointing=checkpointing, **_MORE.get(method, {}),
    )  # fmt: skip
    transformers.set_seed(0)
    task, options = "CAUSAL_LM", {}
    model_class = transformers.AutoModelForCausalLM
    if method == "reward":
        task, options = "SEQ_CLS", {"num_labels": 1}
        model_class = transformers.AutoModelForSequenceClassification
    model = model_class.from_pretrained(folder / "model", dtype=torch.float32, **options)
    given = {"reward_funcs": letters} if method == "grpo" else {}
    trainer = kind(
        model=model, args=args, train_dataset=rows(method),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=task),
        **({"gemini": {"precision": "fp32"}} if ours else {}), **given,
    )  # fmt: skip
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor([[entry["loss"], entry["grad_norm"]] for entry in log], dtype=torch.float64)
