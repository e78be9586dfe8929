"""Lightning's Trainer over the same model: on one device as it is, or with GeminiStrategy.

The Trainer owns the loop, so it runs in a thread of its own and is fed one batch a step. All of a
step is under `forward`: its parts cannot be told apart from outside.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from bench.rows.job import LEARNING_RATE, WEIGHT_DECAY, Job, Trainer


def load() -> None:
    import lightning.pytorch  # noqa: F401

    import gemini.integrations.lightning  # noqa: F401


def settings(job: Job) -> dict[str, Any]:
    """Option of the row: `strategy`, by name."""
    return {
        "Trainer": {
            "strategy": job.options["strategy"],
            "precision": "bf16-mixed",
            "gradient_clip_val": job.max_norm,
        },
        "AdamW": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
    }


def wrap(model: Any, job: Job, given: dict[str, Any]) -> Trainer:
    import torch
    from lightning.pytorch import Trainer as Lightning
    from torch import optim

    device = torch.device(job.device).type
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    fit = Lightning(
        accelerator="gpu" if device == "cuda" else device, devices=1, max_epochs=1,
        use_distributed_sampler=False, default_root_dir=job.folder, **quiet,
        **given["Trainer"],
    )  # fmt: skip
    module = _module(model, lambda params: optim.AdamW(params, **given["AdamW"]))
    stepper = _Stepper(lambda batches: fit.fit(module, batches), module)
    stepper.begin()
    return Trainer(stepper.step, lambda loss: None, lambda: None)


def _module(model: Any, make_optimizer: Callable[[Any], Any]) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.on_begun: Callable[[], None] = lambda: None
            self.on_done: Callable[[Any], None] = lambda loss: None

        def training_step(self, ids: Any, batch_idx: int) -> Any:
            return self.model(input_ids=ids, labels=ids).loss

        def on_train_start(self) -> None:
            self.on_begun()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.on_done(outputs["loss"])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.model.parameters())

    return Module()


class _Stepper:
    """Runs a fit in a thread, one batch at a time. An error of the fit is raised by the step."""

    def __init__(self, fit: Callable[[Any], None], module: Any) -> None:
        self._batches: queue.Queue[Any] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        module.on_begun = lambda: self._answers.put(None)
        module.on_done = self._answers.put
        self._fit = fit
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Return when the Trainer is ready for a batch."""
        self._thread.start()
        self._answer()

    def step(self, ids: Any) -> Any:
        self._batches.put(ids)
        return self._answer()

    def _answer(self) -> Any:
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self) -> None:
        try:
            self._fit(_Fed(self._batches))
        except BaseException as error:
            self._answers.put(error)


class _Fed:
    """Batches as they come. Of a known length, else the Trainer would wait for one more."""

    def __init__(self, batches: queue.Queue[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batches.get()

    def __len__(self) -> int:
        return 2**30
