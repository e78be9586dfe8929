"""Hugging Face's Trainer in its own loop: plain under bf16 autocast, or `GeminiTrainer`.

It runs in a thread that waits before each of its steps, and what is timed as `forward` is the whole
step: a Trainer does not show its parts.
"""

from __future__ import annotations

import threading
from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer


def load() -> None:
    from transformers import Trainer  # noqa: F401

    from gemini.integrations.transformers import GeminiTrainer  # noqa: F401


def settings(job: Job) -> dict[str, Any]:
    arguments = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": job.max_norm,
        "bf16": True,
    }
    return {"GeminiTrainer" if job.options["ours"] else "Trainer": arguments}


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import torch
    import transformers

    from gemini.integrations.transformers import GeminiTrainer

    batches = torch.load(job.batches)  # [steps, batch, seq]
    may_begin, has_ended = threading.Semaphore(0), threading.Semaphore(0)
    losses: list[Any] = []

    class Paced(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            may_begin.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            has_ended.release()

    base = GeminiTrainer if "GeminiTrainer" in given else transformers.Trainer

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        losses.append(base.training_step(self, *args, **kwargs))
        return losses[-1]

    kind = type("Watched", (base,), {"training_step": watched})
    arguments = transformers.TrainingArguments(
        output_dir=job.folder, max_steps=len(batches), per_device_train_batch_size=job.batch,
        lr_scheduler_type="constant", use_cpu=job.device == "cpu", report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", train_sampling_strategy="sequential",
        dataloader_pin_memory=job.device != "cpu", **next(iter(given.values())),
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in batches.flatten(0, 1)]
    trainer = kind(model, arguments, train_dataset=rows, callbacks=[Paced()])
    failures: list[BaseException] = []

    def train() -> None:
        torch.set_num_threads(job.threads)  # a thread has its own number
        try:
            trainer.train()
        except BaseException as error:
            failures.append(error)
            has_ended.release()

    threading.Thread(target=train, daemon=True).start()

    def whole_step(_: Any) -> Any:
        may_begin.release()
        has_ended.acquire()
        if failures:
            raise failures[0]
        return losses[-1]

    return Trainer(whole_step, lambda loss: None, lambda: None)
