"""Runs of Hugging Face's Trainer over a small GPT-2, plain and sharded, and what they logged."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini import GeminiDDP

SMALL = {"min_chunk_size_m": 0.004, "search_range_m": 0.004}
STEPS = 6
# eps so large that an update shows the gradient and not its sign alone
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1,
    "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 1e-2,
    "adam_epsilon": 1e-3, "weight_decay": 0.1, "report_to": [], "save_strategy": "no",
    "use_cpu": True, "disable_tqdm": True, "seed": 3, "dataloader_pin_memory": False,
    "log_level": "error", "ddp_find_unused_parameters": False,
}  # fmt: skip


@dataclass
class Run:
    """What one run logged; and its trainer."""

    steps: Tensor  # fp64 [steps, 3]: loss, norm of the gradient, learning rate
    eval_loss: float
    trainer: Any

    def differs(self, other: Run) -> float:
        """The largest relative difference of any figure."""
        mine = torch.cat([self.steps.flatten(), torch.tensor([self.eval_loss]).double()])
        theirs = torch.cat([other.steps.flatten(), torch.tensor([other.eval_loss]).double()])
        assert mine.shape == theirs.shape, (self.steps, other.steps)
        return float(((mine - theirs).abs() / theirs.abs().clamp(min=1e-12)).max())


def model_and_data() -> tuple[Any, list[dict[str, Tensor]]]:
    """GPT-2 with tied weights and no dropout, and rows of its length."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=2, vocab_size=97, n_positions=16, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(97, (16,), generator=generator) for _ in range(80)]
    return model, [{"input_ids": row, "labels": row} for row in rows]


def run(
    folder: Path,
    model: Any = None,
    *,
    cls: Any = None,
    resume: Path | None = None,
    gemini: dict[str, Any] | None = None,
    adam: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    **arguments: Any,
) -> Run:
    """`cls` is plain Trainer; else it takes `gemini` and `adam`. given: to the constructor."""
    from transformers import Trainer, TrainingArguments

    found, data = model_and_data()
    model = found if model is None else model
    if not isinstance(model, GeminiDDP):  # used again
        model = copy.deepcopy(model)
    options = dict(given or {})
    if cls is not None:
        options["adam"] = adam
        if not isinstance(model, GeminiDDP):
            options["gemini"] = {**SMALL, **(gemini or {})}
    trainer = (cls or Trainer)(
        model,
        TrainingArguments(str(folder), **{**ARGUMENTS, **arguments}),
        **{"train_dataset": data, "eval_dataset": data[:6], **options},
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    figures = [[log["loss"], log["grad_norm"], log["learning_rate"]] for log in logs]
    steps = torch.tensor(figures, dtype=torch.float64)
    return Run(steps, float(trainer.evaluate()["eval_loss"]), trainer)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """As `from_pretrained` finds them."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder, dtype="auto").state_dict()


def checkpoints(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("checkpoint-"))
