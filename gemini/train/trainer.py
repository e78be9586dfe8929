"""Trainer of trl over a sharded model, with seconds and memory of steps in its log."""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

from gemini import strangers
from gemini.ddp import GeminiDDP
from gemini.integrations.transformers import CHECKPOINT, GeminiTrainerMixin
from gemini.metrics import Metrics

from .config import ANSWERS, TrainConfig

METRICS = "metrics.jsonl"


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

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log |= state.global_step >= state.max_steps  # whatever --log-every

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


class PackedRows(DataCollatorForLanguageModeling):  # type: ignore[misc]
    """Collator of packed rows whose documents do not see each other.

    Positions begin again with each document. Without a mask transformers takes them for where
    documents end; a mask of ones would hide that. No token is asked for the next document's first.
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = super().torch_call(examples)
        del found["attention_mask"]
        found["labels"][found["position_ids"] == 0] = -100
        return found


@dataclass(frozen=True)
class PaddedRows:
    """Collator of trl's whose batches are padded to the next of a few lengths.

    A multiple would do only where it divides --seq: else the longest is beyond what was planned.
    """

    own: Any
    lengths: Sequence[int]

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        self.own.pad_to_multiple_of = None
        found: dict[str, Any] = self.own(examples)
        longest = found["input_ids"].shape[1]
        padded = next((length for length in self.lengths if length >= longest), longest)
        if padded == longest:
            return found
        self.own.pad_to_multiple_of = padded
        again: dict[str, Any] = self.own(examples)
        return again


class Tuning(GeminiTrainerMixin):
    """Mixin whose log also has seconds and memory."""

    _metrics: Any
    data_collator: Any
    saw: Callable[[Any], object] | None = None  # is shown each micro-batch

    def __init__(self, *args: Any, padded_lengths: Sequence[int] = (), **kwargs: Any) -> None:
        self._clock = Clock()
        self._numbers: Metrics | None = None
        super().__init__(*args, callbacks=[self._clock], **kwargs)
        if padded_lengths:
            self.data_collator = PaddedRows(self.data_collator, padded_lengths)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.saw is not None:
            self.saw(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write none: trl's names the model after the folder of checkpoints, and its base None."""

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        if self.args.should_save:  # a pickle of what config.yaml says, and peft's empty card
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            (folder / "README.md").unlink(missing_ok=True)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            seconds = self._clock.take()
            logs["seconds"] = sum(seconds.values())
            if getattr(self.args, "packing", False):  # which trl counts of one row
                self._metrics["train"].pop("num_tokens", None)
        super().log(logs, start_time)
        if "loss" in logs:  # for the report, and not for the screen
            if self._numbers is None:
                self._numbers = Metrics(self.model_wrapped, self.optimizer.optimizer)
            self.state.log_history[-1].update(**seconds, **self._numbers.as_dict())
        if self.is_world_process_zero():
            append(metrics_file(self.args), self.state.log_history[-1:])


class TuningTrainer(Tuning, SFTTrainer):  # type: ignore[misc]
    """Trainer `SFTTrainer`, whose packed documents do not see each other."""

    args: SFTConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own: Any = self.data_collator
        if self.args.packing:
            # rows stay apart: trl's own is one row of a whole batch, with a mask of its square
            self.data_collator = PackedRows(
                own.pad_token_id, return_position_ids=True,
                pad_to_multiple_of=self.args.max_length,
            )  # fmt: skip


@contextmanager
def _base_as_reference(model: nn.Module) -> Iterator[None]:
    """Keep trl from copying the adapters of a model as its reference: they are new, so the base
    with adapters off is the same."""
    made: Any = model
    nothing = SimpleNamespace(data=SimpleNamespace(copy_=lambda _: None))
    made.add_adapter, made.get_parameter = lambda *_: None, lambda _: nothing
    try:
        yield
    finally:
        del made.add_adapter, made.get_parameter


def make_trainer(config: TrainConfig, model: GeminiDDP, args: Any, **given: Any) -> Any:
    """Trainer of trl for `--method`; that of grpo takes `reward_funcs`."""
    if config.method != "grpo" and not config.packing:
        given["padded_lengths"] = config.padded_lengths
    if config.method in ("sft", "reward"):  # a micro-batch of others runs several forwards
        given["accumulate_order"] = config.accumulate_order
    if config.method == "sft":
        return TuningTrainer(model, args, **given)
    base: Any
    if config.method == "dpo":
        from trl.trainer.dpo_trainer import DPOTrainer as base
    elif config.method == "reward":
        from trl.trainer.reward_trainer import RewardTrainer as base
    else:
        from trl.trainer.grpo_trainer import GRPOTrainer as base
    kind: Any = type(f"Tuning{base.__name__}", (Tuning, base), {})
    has_reference = config.lora and config.method != "reward"
    with _base_as_reference(model.module) if has_reference else nullcontext():
        return kind(model, args=args, **given)


def reward_of(given: str) -> Callable[..., list[float]]:
    """Function of a file, `FILE.py:FUNCTION`, which is run. Raises ValueError if there is none."""
    file, _, name = given.rpartition(":")
    try:
        found = runpy.run_path(file)[name]
    except (OSError, KeyError, SyntaxError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"--reward {given} cannot be read ({said}); expected FILE.py:FUNCTION"
        ) from None
    if not callable(found):
        raise ValueError(f"--reward {given} is no function; expected one that takes completions")
    made: Callable[..., list[float]] = found
    return made


def arguments(config: TrainConfig, world_size: int, *, on_cpu: bool) -> Any:
    """Arguments of trl for a config. Raises ValueError if ranks do not divide the batch."""
    batch = config.batch_of_rank(world_size)
    # layer by layer activations of one layer are there at a time: checkpoints would save nothing
    checkpoints = config.checkpointing and not config.by_layers
    evaluates = bool(config.held_out or config.eval_data)
    common = dict[str, Any](
        output_dir=str(Path(config.out) / "checkpoints"),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=config.accumulate,
        pad_to_multiple_of=config.padded_lengths[0],  # of grpo, which pads in its trainer
        gradient_checkpointing=checkpoints,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpoints else None,
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
        dataloader_pin_memory=not on_cpu,
        disable_tqdm=not sys.stderr.isatty(),  # a file and `run` have lines
    )
    trusts = config.trust_remote_code
    if config.method == "sft":
        return SFTConfig(
            max_length=config.seq, packing=config.packing, trust_remote_code=trusts,
            completion_only_loss=None if config.loss == ANSWERS else False, **common,
        )  # fmt: skip
    if config.method == "reward":
        from trl.trainer.reward_config import RewardConfig

        return RewardConfig(max_length=config.seq, trust_remote_code=trusts, **common)
    common |= {} if config.beta is None else {"beta": config.beta}
    if config.method == "dpo":
        from trl.trainer.dpo_config import DPOConfig

        return DPOConfig(max_length=config.seq, trust_remote_code=trusts, **common)
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        max_completion_length=max(1, config.seq // 2), num_generations=config.completions,
        trust_remote_code=trusts, **common,
    )  # fmt: skip


def last_checkpoint(out: Path, before: int | None = None) -> Path | None:
    """Newest complete checkpoint, of a step below `before`, or None.

    A checkpoint that was cut short lacks the state of Trainer, which is written last.
    """
    found = [
        (int(path.name.rpartition("-")[2]), path)
        for path in sorted((out / "checkpoints").glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
        if path.name.rpartition("-")[2].isdigit() and _is_whole(path)
    ]
    found = [one for one in found if before is None or one[0] < before]
    return max(found)[1] if found else None


def _is_whole(path: Path) -> bool:
    try:
        strangers.read_json(path / TRAINER_STATE_NAME, strangers.TEXT_BYTES)
    except (OSError, ValueError):
        return False
    return (path / CHECKPOINT).is_dir()
