"""What a run of GeminiStrategy has to log, by Lightning's own loggers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gemini.ddp import GeminiDDP
from gemini.metrics import Metrics

from .shared import inner


class GeminiMetrics(Callback):
    """`Trainer(callbacks=[GeminiMetrics()])`: `gemini.Metrics`, every `log_every_n_steps`."""

    _metrics: Metrics | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if isinstance(model, GeminiDDP):
            self._metrics = Metrics(model, inner(trainer.optimizers[0]))

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        every = trainer.log_every_n_steps
        if self._metrics is not None and every and not trainer.global_step % every:
            pl_module.log_dict(self._metrics.as_dict())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._metrics = None
