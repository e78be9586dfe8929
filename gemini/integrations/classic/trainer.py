"""Trainer by the name of `colossalai.trainer.Trainer`: epochs of an engine, with hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from gemini.api import rank

from .engine import LoopEngine
from .hooks import BaseHook
from .tools import MultiTimer


class Trainer:
    """Trainer of old scripts.

    cur_epoch, cur_step: number of the current epoch, and of iterations so far. metrics: values
    that hooks have measured, by name; step_metrics: those of the last iteration.
    """

    def __init__(
        self,
        engine: LoopEngine,
        timer: MultiTimer | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """Take an engine. timer: measures `Train-step`, `Train-epoch` and `Test-epoch`."""
        self.engine, self.logger = engine, logger
        self.timer = MultiTimer(on=False) if timer is None else timer
        self.cur_epoch = self.cur_step = 0
        self.metrics: dict[str, float] = {}
        self.step_metrics: dict[str, float] = {}
        self._hooks: list[BaseHook] = []

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] = (),
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train `epochs` epochs, or `max_steps` iterations; test every `test_interval` epochs.

        display_progress: the first rank shows it, by the package tqdm. return_output_label: hooks
            get outputs and labels of training iterations.
        """
        self._hooks = sorted(hooks, key=lambda hook: hook.priority)
        self._tell("before_train")
        for self.cur_epoch in range(epochs):
            left = None if max_steps is None else max_steps - self.cur_step
            if left is not None and left <= 0:
                break
            batches = islice(train_dataloader, left)
            self._epoch("train", batches, display_progress, return_output_label)
            if test_dataloader is not None and (self.cur_epoch + 1) % test_interval == 0:
                self.evaluate(test_dataloader, hooks, display_progress)
        self._tell("after_train")

    def evaluate(
        self,
        dataloader: Iterable[Any],
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
    ) -> None:
        """Run one epoch without backwards. hooks: get its outputs; None: those of the last fit."""
        if hooks is not None:
            self._hooks = sorted(hooks, key=lambda hook: hook.priority)
        self._tell("before_test")
        self._epoch("test", dataloader, display_progress, True)
        self._tell("after_test")

    def _epoch(
        self, part: str, batches: Iterable[Any], display_progress: bool, with_output: bool
    ) -> None:
        trains, engine = part == "train", self.engine
        engine.train() if trains else engine.eval()
        name = part.capitalize()
        self.timer.start(f"{name}-epoch")
        self._tell(f"before_{part}_epoch")
        if display_progress and rank() == 0:
            from tqdm import tqdm

            batches = tqdm(batches, desc=f"{name} {self.cur_epoch}")
        for batch in batches:
            self._tell(f"before_{part}_iter")
            self.timer.start(f"{name}-step")
            if trains:
                engine.zero_grad()
            found = engine.execute_schedule(
                iter([batch]), forward_only=not trains, return_output_label=with_output
            )
            if trains:
                engine.step()
                self.cur_step += 1
            self.timer.stop(f"{name}-step", keep_in_history=True)
            self._tell(f"after_{part}_iter", *found)
        self._tell(f"after_{part}_epoch")
        self.timer.stop(f"{name}-epoch", keep_in_history=True)

    def _tell(self, event: str, *args: Any) -> None:
        for hook in self._hooks:
            getattr(hook, event)(self, *args)
