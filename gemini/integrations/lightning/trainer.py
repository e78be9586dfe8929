"""GeminiStrategy, a strategy of Lightning's Trainer; GeminiMetrics, a callback that logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout

from gemini import GeminiDDP, Metrics, init_empty
from gemini.api import Placement, TieredOptimizer
from gemini.checkpoint.format.folder import LATEST
from gemini.integrations.torch_optimizers import convert

from .checkpoint import (
    Streamed,
    decoded,
    full_optimizer_state,
    full_weights,
    load_folder,
    pop,
    refuse_changed,
    save_folder,
)
from .shared import Asked, GeminiPrecision, StepCasts, inner, precision_of


class GeminiStrategy(DDPStrategy):
    """Strategy of Lightning's Trainer over `gemini.GeminiDDP`, with DDP's launchers and samplers.

    placement_policy: as in `GeminiDDP`.
    adam: options of this project's optimizers for the torch optimizer that `configure_optimizers`
        returns (AdamW, Adam, SGD), which is converted: `dict(nvme_offload_fraction=1.0)`.
    checkpoint: `"sharded"` saves a folder to which every rank streams its part. `"full"` saves one
        file that a Trainer without this strategy loads; rank 0 gathers everything for it. Both
        kinds are loaded, at any world size.
    precision: `"fp32"`, `"bf16"`, `"fp16"`; None is `Trainer(precision=)`. On a CPU Lightning makes
        bf16 of its "16-mixed", with a warning: there fp16 is said here.
    empty_init: `configure_model` runs under `gemini.init_empty`, so modules that initialise
        themselves are never whole on a rank. Values that it loads or sets there are lost.
    unwrap_at_end: False leaves the module wrapped after a fit or an evaluation, and the next one
        uses it as it is: for models too large for one rank. `strategy.model` is the wrapper.
    options: of `GeminiDDP`: `max_norm`, `loss_scale`, `keep_fp32`, ...

    Other arguments are those of Lightning's DDPStrategy. Inside a step the batch has its own
    dtypes, and the modules that a step calls get their arguments in the compute dtype.

    After a fit or an evaluation, the module is a plain one on the CPU again, with fp32 values, and
    no file is left; the optimizer's state is gone, so save within the fit. After an error with
    several ranks the module stays wrapped: unwrapping is collective, and other ranks may be gone.

    Raises TypeError for an unknown option, ValueError for a request of Lightning that this strategy
    cannot fulfil, and MemoryError at the very end if a plain module has no room.
    """

    strategy_name = "gemini"
    is_distributed = True  # else all ranks would be given the same batches

    def __init__(
        self,
        placement_policy: str | Placement = "auto",
        *,
        adam: Mapping[str, Any] | None = None,
        checkpoint: str = "sharded",
        precision: str | None = None,
        empty_init: bool = False,
        unwrap_at_end: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        self._asked = Asked(placement_policy, dict(adam or {}), checkpoint, precision, options)
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend=process_group_backend,
            timeout=timeout, start_method=start_method,  # type: ignore[arg-type]
        )  # fmt: skip
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        self._empty_init = empty_init
        self._unwraps_at_end = unwrap_at_end
        self._wrapped_before: GeminiDDP | None = None  # wrapped, from what ran before
        self._casts: StepCasts | None = None
        self._has_failed = self._had_no_room = False
        self._was_streamed = False  # the checkpoint that was loaded last

    # -- what Lightning sets --

    @property
    def precision_plugin(self) -> GeminiPrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, GeminiPrecision) else GeminiPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, GeminiPrecision):
            plugin = GeminiPrecision(precision_of(plugin))
        self._precision_plugin = plugin

    @property
    def checkpoint_io(self) -> Any:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if self._asked.saves_folders:
            raise ValueError(
                f"a {type(io).__name__} would not be asked: ranks stream a sharded checkpoint "
                'themselves; expected none, or checkpoint="full"'
            )
        self._checkpoint_io = io

    # -- set-up --

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self._has_failed = self._had_no_room = False
        self._refuse(trainer)
        self._reset_optimizers_and_schedulers()  # those of a fit before this
        self.model = self._setup_model(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _refuse(self, trainer: Trainer) -> None:
        """Raise ValueError for options of the Trainer that would have no effect, or another."""
        precision = self._asked.precision_by(self.precision_plugin)
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True is not done by GeminiStrategy; convert the model with "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm before it is given to the Trainer"
            )
        if trainer.gradient_clip_val and self._asked.options.get("max_norm"):
            raise ValueError(
                f"gradient_clip_val={trainer.gradient_clip_val} and the strategy's max_norm="
                f"{self._asked.options['max_norm']}: a step clips once; expected one of the two"
            )
        if precision == "fp16" and not trainer.lightning_module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False in fp16: a backward inside training_step carries no "
                'loss scale; expected precision="bf16-mixed" or "32-true"'
            )
        averaging = [
            type(callback).__name__ for callback in getattr(trainer, "callbacks", ())
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging))
        ]  # fmt: skip
        if averaging and precision != "fp32":
            raise ValueError(
                f"{averaging[0]} reads and writes weights of {precision}, and would round the fp32 "
                'masters; expected Trainer(precision="32-true")'
            )

    def _setup_model(self, model: nn.Module) -> GeminiDDP:  # type: ignore[override]
        precision = self._asked.precision_by(self.precision_plugin)
        wrapped, self._wrapped_before = self._wrapped_before, None
        if wrapped is None or wrapped.module is not model:
            wrapped = self._asked.wrap(model, self.root_device, precision, cast_inputs=False)
        self._casts = StepCasts(model, precision, raises=self._asked.raises_outputs)
        return wrapped

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ValueError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers ({names}); "
                "GeminiStrategy updates a module by one, with a param group for each part"
            )
        (optimizer,) = self.optimizers
        if isinstance(optimizer, _MockOptimizer):
            return
        self.optimizers = [convert(optimizer, **self._asked.adam)]

    def model_to_device(self) -> None:
        """Do nothing: wrapping moves the module, chunk by chunk."""

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Context that makes modules on the CPU, in their dtypes; `empty_init`: without memory."""
        return init_empty() if empty_init else nullcontext()

    def model_sharded_context(self) -> Any:
        """Context of `configure_model` and `configure_sharded_model`."""
        return self.tensor_init_context(self._empty_init)

    # -- a step --

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context whose backwards reduce nothing: all but the last of an accumulation."""
        if isinstance(self.model, GeminiDDP):
            with self.model.no_sync():
                yield
        else:
            yield

    # -- checkpoints --

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._was_streamed

    def lightning_module_state_dict(self, rank_zero_only: bool = True) -> dict[str, Any]:
        """State of the module for a checkpoint. All ranks call.

        With `checkpoint="full"` it has all weights, on the CPU of rank 0, and of every rank if
        `rank_zero_only` is false. With `"sharded"` it is empty: ranks stream their parts later.
        """
        assert self.model is not None
        if self._asked.saves_folders:
            return Streamed()
        state = full_weights(self.model)
        return state if rank_zero_only else self.broadcast(state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if isinstance(optimizer, _MockOptimizer):
            return Streamed() if self._asked.saves_folders else {}
        if not isinstance(self.model, GeminiDDP):
            raise ValueError(
                "the optimizer's state went when the fit ended; expected a save within it "
                "(ModelCheckpoint(save_last=True)), or save_checkpoint(path, weights_only=True)"
            )
        return Streamed() if self._asked.saves_folders else full_optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if not self._asked.saves_folders:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ValueError(
                f"storage_options={storage_options!r} is for a file; expected None, or "
                'checkpoint="full"'
            )
        for key in ("state_dict", "optimizer_states"):
            refuse_changed(checkpoint, key)
        with_state = bool(checkpoint.get("optimizer_states"))  # else weights alone were asked for
        assert self.model is not None
        # rank 0's name counts: all ranks write into one folder
        save_folder(
            Path(self.broadcast(str(filepath))), self.model, self._tiered if with_state else None,
            pop(checkpoint, "state_dict", "optimizer_states"), is_writer=self.is_global_zero,
        )  # fmt: skip

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        self._was_streamed = path.is_dir()
        if not self._was_streamed:
            return super().load_checkpoint(checkpoint_path, weights_only)
        module = self.lightning_module
        assert module is not None and self.model is not None
        blob = load_folder(path, self.model, self._tiered, strict=module.strict_loading)
        found = decoded(self.broadcast(blob), path, weights_only)
        return {**found, "state_dict": Streamed()}

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        # the link to the newest checkpoint may point to the one that was removed
        latest = Path(filepath).parent / LATEST
        if self.is_global_zero and latest.is_symlink() and not latest.exists():
            latest.unlink()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._was_streamed:
            assert self.model is not None
            self.model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    @property
    def _tiered(self) -> TieredOptimizer | None:
        """Optimizer of this fit, None if it has none of this project's."""
        return next((one for one in self.optimizers if isinstance(one, TieredOptimizer)), None)

    # -- the end --

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        if self._casts is not None:
            self._casts.remove()
            self._casts = None
        try:
            if not self._had_no_room:  # raised once: Lightning tears down again after an error
                self._let_go()
        finally:
            for plugin in (self.cluster_environment, self.precision_plugin, self.accelerator):
                assert plugin is not None
                plugin.teardown()
            self.checkpoint_io.teardown()

    def _let_go(self) -> None:
        """Unwrap the module and close the optimizer.

        Raises MemoryError if a plain module has no room; the module stays wrapped then.
        """
        # unwrapping is collective, and after an error other ranks may never come to it
        together = not (self._has_failed and self.world_size > 1)
        wrapped = self.model if isinstance(self.model, GeminiDDP) else None
        try:
            if wrapped is not None and together and self._unwraps_at_end:
                wrapped.unwrap()
                wrapped, self.model = None, self.lightning_module
        except MemoryError as error:
            self._had_no_room = True
            raise MemoryError(
                f"{error}; or give the strategy unwrap_at_end=False, which leaves it wrapped"
            ) from error
        finally:
            self._wrapped_before = wrapped
            if self._tiered is not None:
                self._tiered.close(keep_masters=wrapped is not None and together)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: Lightning calls it for its own classes, the package registers these."""


class GeminiMetrics(Callback):
    """Callback that logs `gemini.Metrics` every `log_every_n_steps` steps of a Trainer."""

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
