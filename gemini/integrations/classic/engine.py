"""Function `colossalai.initialize` and its engine: a Booster by a configuration's plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gemini.integrations.booster import Booster
from gemini.integrations.config import AMP_TYPE, global_context, plugin_of
from gemini.integrations.plugins.precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from gemini.parallel.pipelined import Pipelined

from .handlers import GRADIENT_HANDLER
from .schedules import PipelineSchedule


class LoopEngine:
    """Engine of an old script's loop: model, optimizer and criterion.

    accumulation: backwards of one step. Before the last of them `step` and `zero_grad` do nothing,
    and each loss is divided by their number.
    """

    def __init__(
        self,
        booster: Booster,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[..., Any] | None,
        accumulation: int = 1,
    ) -> None:
        """Take a model and an optimizer that `booster.boost` returned."""
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.booster = booster
        self._accumulation, self._backwards = accumulation, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        with self._sync():
            return self.model(*args, **kwargs)

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()

    def zero_grad(self) -> None:
        if self._backwards == 0:
            self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        with self._sync():
            self.booster.backward(loss / self._accumulation, self.optimizer)
        self._backwards += 1

    def step(self) -> bool:
        """Step after the last backward of an accumulation; returns whether it did."""
        if self._backwards < self._accumulation:
            return False
        self.optimizer.step()
        self._backwards = 0
        return True

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Tensor | None]:
        """Run the next (data, label), with its backward; returns (output, label, loss).

        Values that are not asked for are None. With a pipeline all values are None on ranks
        without the last stage.
        """
        with torch.no_grad() if forward_only else nullcontext():
            if isinstance(self.model, Pipelined):
                found = self._through_stages(data_iter, return_output_label)
            else:
                data, label = next(data_iter)
                output = self(data)
                found = output, label, self._loss(output, label)
                if not forward_only and found[2] is not None:
                    self.backward(found[2])
        output, label, loss = found
        shown = (output, label) if return_output_label else (None, None)
        return *shown, None if loss is None or not return_loss else loss.detach()

    def _through_stages(
        self, data_iter: Iterator[Any], with_output: bool
    ) -> tuple[Any, Any, Tensor | None]:
        labels: list[Any] = []

        def loss_of(output: Any, part: Any) -> Any:
            labels.append(part[1])
            loss = self._loss(output, part[1])
            return None if loss is None else loss / self._accumulation

        found = self.booster.execute_pipeline(
            data_iter, self.model, loss_of, self.optimizer, return_outputs=with_output
        )
        if torch.is_grad_enabled():
            self._backwards += 1
        loss = None if found["loss"] is None else found["loss"] * self._accumulation
        return found["outputs"], torch.cat(labels) if labels else None, loss

    def _loss(self, output: Any, label: Any) -> Tensor | None:
        loss: Tensor | None = None if self.criterion is None else self.criterion(output, label)
        return loss

    def _sync(self) -> AbstractContextManager[None]:
        """Context of a forward or backward: only the last backward of a step reduces gradients."""
        is_last = self._backwards + 1 >= self._accumulation
        if is_last or not torch.is_grad_enabled() or isinstance(self.model, Pipelined):
            return nullcontext()
        return self.booster.no_sync(self.model)


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Any] | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    schedule: PipelineSchedule | None = None,
) -> tuple[LoopEngine, Any, Any, Any]:
    """Wrap a model and an optimizer by the configuration that the process was launched with.

    Returns (engine, train_dataloader, test_dataloader, lr_scheduler). `parallel`, `fp16` and
    `clip_grad_norm` are those of `plugin_of`, with optimizer state sharded (ZeRO-1).
    `gradient_accumulation` is the number of backwards of a step, and `gradient_handler` names
    classes of `GRADIENT_HANDLER`. schedule: of a pipeline, in place of `NUM_MICRO_BATCHES`.
    Raises ValueError for what the plugin cannot wrap.
    """
    config = global_context.config
    chunks = getattr(model, "num_chunks", 1)
    style: dict[str, Any] = {}
    if schedule is not None:
        style = schedule.options
    elif chunks > 1:
        style = {"pp_style": "interleaved", "num_model_chunks": chunks}
    booster = Booster(plugin=plugin_of(config, zero_stage=1, **style))
    model, optimizer, *_ = booster.boost(model, optimizer)  # type: ignore[assignment]
    for handler in config.get("gradient_handler", ()):
        GRADIENT_HANDLER.get_module(handler["type"])(model, optimizer)
    accumulation = int(config.get("gradient_accumulation", 1))
    engine = LoopEngine(booster, model, optimizer, criterion, accumulation)
    return engine, train_dataloader, test_dataloader, lr_scheduler


_AMP = {AMP_TYPE.TORCH: FP16TorchMixedPrecision, AMP_TYPE.NAIVE: FP16NaiveMixedPrecision}


def convert_to_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Any] | None,
    mode: str,
    amp_config: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any] | None]:
    """Wrap a model for fp16 by a Booster without a plugin; `optimizer.backward` scales the loss.

    Returns (model, optimizer, criterion).
    amp_config: options of `FP16TorchMixedPrecision` or `FP16NaiveMixedPrecision`.
    Raises ValueError for another mode than `AMP_TYPE.TORCH` and `AMP_TYPE.NAIVE`.
    """
    if mode not in _AMP:
        raise ValueError(f"mode={mode!r}; expected AMP_TYPE.TORCH or AMP_TYPE.NAIVE")
    booster = Booster(mixed_precision=_AMP[mode](**(amp_config or {})))
    return booster.boost(model, optimizer, criterion)[:3]  # type: ignore[return-value]
