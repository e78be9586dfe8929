"""Hooks of `Trainer`: they measure, log and save during a fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini.api import rank

if TYPE_CHECKING:
    from .trainer import Trainer


class BaseHook:
    """Base of hooks, called through a fit in the order of `priority`, lowest first.

    A subclass overrides the methods that it needs.
    """

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def before_train(self, trainer: Trainer) -> None: ...

    def after_train(self, trainer: Trainer) -> None: ...

    def before_train_epoch(self, trainer: Trainer) -> None: ...

    def after_train_epoch(self, trainer: Trainer) -> None: ...

    def before_train_iter(self, trainer: Trainer) -> None: ...

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Take the values of a training iteration; those that nobody asked for are None."""

    def before_test(self, trainer: Trainer) -> None: ...

    def after_test(self, trainer: Trainer) -> None: ...

    def before_test_epoch(self, trainer: Trainer) -> None: ...

    def after_test_epoch(self, trainer: Trainer) -> None: ...

    def before_test_iter(self, trainer: Trainer) -> None: ...

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Take the values of an iteration of an evaluation."""


class Accuracy(nn.Module):
    """Number of rows of `logits` [n, classes] whose largest is at `targets` [n]: 0-d."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.argmax(-1) == targets).sum()


class _MeanHook(BaseHook):
    """Hook that writes `trainer.metrics[name]`: the mean of an epoch, over ranks with a value."""

    name = ""

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)

    before_test_epoch = before_train_epoch

    def _add(self, value: Any, count: int) -> None:
        self._sums += torch.tensor([float(value), float(count)], dtype=torch.float64)

    def _say(self, trainer: Trainer, part: str) -> None:
        total = self._sums.clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            # every rank takes part, also one without a value, whose count is 0
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            total = total.to(device)
            dist.all_reduce(total)
        if total[1] > 0:
            trainer.metrics[f"{part} {self.name}"] = float(total[0] / total[1])

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._say(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._say(trainer, "test")


class LossHook(_MeanHook):
    """Hook that measures the mean loss of an epoch."""

    name = "loss"

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if loss is not None:
            trainer.metrics["loss"] = float(loss)
            self._add(loss, 1)

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if loss is not None:
            self._add(loss, 1)


class AccuracyHook(_MeanHook):
    """Hook that measures an evaluation's accuracy. accuracy_func: (output, label) -> number of
    right rows."""

    name = "accuracy"

    def __init__(self, accuracy_func: Callable[[Any, Any], Any], priority: int = 0) -> None:
        super().__init__(priority)
        self._func = accuracy_func

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if output is not None:
            self._add(self._func(output, label), len(label))


class LRSchedulerHook(BaseHook):
    """Hook that calls `lr_scheduler.step()` after every epoch, or after every iteration."""

    def __init__(self, lr_scheduler: Any, by_epoch: bool, priority: int = 1) -> None:
        super().__init__(priority)
        self._schedule, self._by_epoch = lr_scheduler, by_epoch

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if not self._by_epoch:
            self._step(trainer)

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self._by_epoch:
            self._step(trainer)

    def _step(self, trainer: Trainer) -> None:
        self._schedule.step()
        trainer.metrics["lr"] = self._schedule.get_last_lr()[0]


class ThroughputHook(BaseHook):
    """Rows a second of all ranks in an iteration, where labels are returned."""

    def before_train_iter(self, trainer: Trainer) -> None:
        self._began = time.perf_counter()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if label is not None:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            rows = len(label) * ranks
            trainer.metrics["rows a second"] = rows / (time.perf_counter() - self._began)


class LogMetricByEpochHook(BaseHook):
    """Hook that logs the metrics after every `interval` epochs; by default after other hooks."""

    def __init__(self, logger: logging.Logger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self._logger, self._interval = logger, interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "test")

    def _log(self, trainer: Trainer, part: str) -> None:
        if rank() == 0 and trainer.cur_epoch % self._interval == 0:
            said = ", ".join(f"{name} {value:.5g}" for name, value in trainer.metrics.items())
            self._logger.info("epoch %d, %s: %s", trainer.cur_epoch, part, said)


class LogMetricByStepHook(BaseHook):
    """Hook that copies metrics to `trainer.step_metrics` each iteration, for a progress bar."""

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        trainer.step_metrics = dict(trainer.metrics)


class LogMemoryByEpochHook(BaseHook):
    """Hook that logs the model's `memory_report()`, if it has one, after every epoch."""

    def __init__(self, logger: logging.Logger, priority: int = 10) -> None:
        super().__init__(priority)
        self._logger = logger

    def after_train_epoch(self, trainer: Trainer) -> None:
        report = getattr(trainer.engine.model, "memory_report", None)
        if report is not None and rank() == 0:
            self._logger.info("epoch %d, memory\n%s", trainer.cur_epoch, report())


class SaveCheckpointHook(BaseHook):
    """Hook that saves every `interval` epochs, into `checkpoint_dir/epoch_N`. Collective."""

    def __init__(
        self, interval: int = 1, checkpoint_dir: str = ".", model: Any = None, priority: int = 10
    ) -> None:
        """Take a folder. model: without effect; the fit's is saved."""
        super().__init__(priority)
        self._interval, self._folder = interval, Path(checkpoint_dir)

    def after_train_epoch(self, trainer: Trainer) -> None:
        if (trainer.cur_epoch + 1) % self._interval == 0:
            engine, folder = trainer.engine, self._folder / f"epoch_{trainer.cur_epoch}"
            engine.booster.save_model(engine.model, folder / "model", shard=True)
            engine.booster.save_optimizer(engine.optimizer, folder / "optimizer", shard=True)


class TensorboardHook(BaseHook):
    """Hook that writes metrics for TensorBoard, by `cur_step` or `cur_epoch`.

    Each of `ranks` (None is all) writes to its own folder, `log_dir/rank_N`.
    """

    def __init__(
        self, log_dir: str | Path, ranks: Sequence[int] | None = None, priority: int = 10
    ) -> None:
        """Open the writer. Raises ImportError without the package tensorboard."""
        super().__init__(priority)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorboardHook needs tensorboard: pip install tensorboard"
            ) from error
        writes = ranks is None or rank() in ranks
        self._writer: Any = SummaryWriter(str(Path(log_dir) / f"rank_{rank()}")) if writes else None

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._write(trainer, trainer.cur_step, ("loss", "lr", "rows a second"))

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._write(trainer, trainer.cur_epoch, ("train loss",))

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._write(trainer, trainer.cur_epoch, ("test loss", "test accuracy"))

    def after_train(self, trainer: Trainer) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, trainer: Trainer, step: int, names: Sequence[str]) -> None:
        if self._writer is not None:
            for name in names:
                if name in trainer.metrics:
                    self._writer.add_scalar(name, trainer.metrics[name], step)
