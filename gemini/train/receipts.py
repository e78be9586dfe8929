"""Receipts of a run of `python -m gemini train`: a callback that takes one behind each step.

A micro-batch is seen as the trainer is given it, before it is padded or moved any further. What the
trainer evaluates is not: it changes nothing but random numbers, which each receipt has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gemini.receipts.chain import Receipt
from gemini.receipts.taking import Receipts

from .config import OF_THE_MACHINE, TrainConfig

SEQUENCES, MICRO_BATCHES = "sequences of a micro-batch", "micro-batches of a step"


def facts_of(config: TrainConfig, ranks: int) -> dict[str, str]:
    """Facts of a run: its flags but for those of the machine, and the number of ranks.

    With `--canonical` bits are those of any number of ranks that have the same micro-batches.
    """
    flags = asdict(config)
    said = {f"--{name}": repr(flags[name]) for name in flags if name not in OF_THE_MACHINE}
    if not config.canonical:
        return {**said, "ranks": str(ranks)}
    del said["--batch"], said["--accumulate"]
    each, number = config.batch_of_rank(ranks), ranks * config.accumulate
    return {**said, SEQUENCES: str(each), MICRO_BATCHES: str(number)}


def at_ranks(config: TrainConfig, facts: Mapping[str, str], ranks: int) -> TrainConfig:
    """Config of a run whose first receipt has these facts, for so many ranks.

    Raises ValueError if they cannot share its micro-batches.
    """
    if not config.canonical or MICRO_BATCHES not in facts:
        return config
    number = int(facts[MICRO_BATCHES])
    if number < 1 or number % ranks or number % config.accumulate:
        raise ValueError(
            f"{number} micro-batches of a step, on {ranks} ranks; expected a number of ranks that "
            "divides them"
        )
    had = number // config.accumulate
    batch = config.batch_of_rank(had) * ranks
    return replace(config, batch=batch, accumulate=number // ranks)


class Following(TrainerCallback):  # type: ignore[misc]
    """Callback that takes a receipt behind each step, with state at each checkpoint.

    folder: of the run; None leaves receipts in `made`. last: step behind which training stops;
    None: where it ends by itself.
    """

    def __init__(
        self, trainer: Any, config: TrainConfig, folder: Path | None, last: int | None = None
    ) -> None:
        self._trainer, self._config, self._folder, self._last = trainer, config, folder, last
        self._receipts: Receipts | None = None
        trainer.saw = lambda inputs: self._receipts is None or self._receipts.saw(inputs)

    @property
    def made(self) -> list[Receipt]:
        """Receipts so far; of steps since it began, if `folder` is None."""
        return [] if self._receipts is None else self._receipts.made

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model = self._trainer.model_wrapped
        self._receipts = Receipts(
            self._folder, model, self._trainer.optimizer.optimizer,
            facts_of(self._config, args.world_size), state.global_step,
        )  # fmt: skip
        if self._folder is None and state.global_step:  # what the checkpoint has
            self._receipts.take(state=True, alone=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._receipts is not None
        self._receipts.stepped(state=state.global_step % args.save_steps == 0)
        if self._last is not None and state.global_step >= self._last:
            control.should_training_stop = True
