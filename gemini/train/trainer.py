"""Trainer of trl over a sharded model, with seconds and memory of steps in its log."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from gemini import strangers
from gemini.integrations.transformers import CHECKPOINT, GeminiTrainerMixin
from gemini.metrics import Metrics

from .config import TrainConfig

METRICS = "metrics.jsonl"
PADDED_PARTS = 8  # sequences are padded to so many lengths, each of which is planned once


class Clock(TrainerCallback):  # type: ignore[misc]
    """Callback that sums the seconds of steps by phase, since `take` was called last."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self._seconds = dict.fromkeys(("passes", "update", "between"), 0.0)
        self._steps = 0

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name] += now - self._at
        self._at = now

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._at = time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._lap("between")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._lap("passes")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._lap("update")
        self._steps += 1

    def take(self) -> dict[str, float]:
        """Mean seconds of a step by phase; begin anew."""
        steps = max(1, self._steps)
        found = {f"seconds_{name}": value / steps for name, value in self._seconds.items()}
        self._seconds, self._steps = dict.fromkeys(self._seconds, 0.0), 0
        return found


def metrics_file(args: Any) -> Path:
    """File of a run's log, one entry a line."""
    return Path(args.output_dir).parent / METRICS


def append(file: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Add entries of a log to a file, a line of JSON each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines(f"{json.dumps(entry)}\n" for entry in entries)


class TuningTrainer(GeminiTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """Trainer `SFTTrainer` with the mixin, whose log also has seconds and memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._clock = Clock()
        self._numbers: Metrics | None = None
        super().__init__(*args, callbacks=[self._clock], **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            seconds = self._clock.take()
            logs["seconds"] = sum(seconds.values())
        super().log(logs, start_time)
        if "loss" in logs:  # for the report, and not for the screen
            if self._numbers is None:
                self._numbers = Metrics(self.model_wrapped, self.optimizer.optimizer)
            self.state.log_history[-1].update(**seconds, **self._numbers.as_dict())
        if self.is_world_process_zero():
            append(metrics_file(self.args), self.state.log_history[-1:])


def arguments(config: TrainConfig, world_size: int, *, on_cpu: bool) -> SFTConfig:
    """Arguments of trl for a config. Raises ValueError if ranks do not divide the batch."""
    batch = config.batch_of_rank(world_size)
    evaluates = bool(config.held_out or config.eval_data)
    return SFTConfig(
        output_dir=str(Path(config.out) / "checkpoints"),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=config.accumulate,
        max_length=config.seq,
        packing=config.packing,
        packing_strategy="wrapped",  # all of one length
        pad_to_multiple_of=-(-config.seq // PADDED_PARTS),
        gradient_checkpointing=config.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.checkpointing else None,
        num_train_epochs=config.epochs,
        max_steps=config.steps or -1,
        learning_rate=config.lr,
        lr_scheduler_type=config.schedule,
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_norm,
        optim=config.optim,
        bf16=True,
        use_cpu=on_cpu,
        seed=config.seed,
        logging_steps=config.log_every,
        logging_first_step=True,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=config.keep,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=config.save_every,
        report_to=config.report_to,
        trust_remote_code=config.trust_remote_code,
        dataloader_pin_memory=not on_cpu,
    )


def last_checkpoint(out: Path) -> Path | None:
    """Newest complete checkpoint, or None.

    A checkpoint that was cut short lacks the state of Trainer, which is written last.
    """
    found = [
        (int(path.name.rpartition("-")[2]), path)
        for path in sorted((out / "checkpoints").glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
        if path.name.rpartition("-")[2].isdigit() and _is_whole(path)
    ]
    return max(found)[1] if found else None


def _is_whole(path: Path) -> bool:
    try:
        strangers.read_json(path / TRAINER_STATE_NAME, strangers.TEXT_BYTES)
    except (OSError, ValueError):
        return False
    return (path / CHECKPOINT).is_dir()
