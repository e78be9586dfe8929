"""GeminiFabricStrategy: `Fabric(strategy=GeminiFabricStrategy(...))`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import (
    _BackwardSyncControl,
    _validate_keys_for_strict_loading,
)
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from gemini import GeminiDDP, init_empty
from gemini.api import Placement, TieredOptimizer
from gemini.integrations.torch_optimizers import convert

from .checkpoint import decoded, full_optimizer_state, full_weights, load_folder, pop, save_folder
from .shared import Asked, GeminiFabricPrecision, StepCasts, inner, precision_of


class GeminiFabricStrategy(DDPStrategy):
    """Lightning's Fabric over `gemini.GeminiDDP`; see `GeminiStrategy` for the arguments.

    `fabric.setup(model, optimizer)` wraps the model and converts the optimizer in place. Arguments
    of the model's forward are cast to the compute dtype; those of the steps of a LightningModule
    keep their own. `fabric.save` of a model writes a folder with the model, its optimizer and the
    rest of the state, or one file with `checkpoint="full"`. `model.state_dict()` has the compute
    dtype, as it is the inner module's: save with `fabric.save`.
    """

    def __init__(
        self,
        placement_policy: str | Placement = "auto",
        *,
        adam: Mapping[str, Any] | None = None,
        checkpoint: str = "sharded",
        precision: str | Precision | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        own = precision if isinstance(precision, str) else None
        self._asked = Asked(placement_policy, dict(adam or {}), checkpoint, own, options)
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision if isinstance(precision, Precision) else None,
            process_group_backend=process_group_backend, timeout=timeout,
            start_method=start_method,  # type: ignore[arg-type]
        )  # fmt: skip
        self._backward_sync_control = _NoSync()  # type: ignore[assignment]

    @property
    def precision(self) -> GeminiFabricPrecision:
        plugin = self._precision
        return plugin if isinstance(plugin, GeminiFabricPrecision) else GeminiFabricPrecision()

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, GeminiFabricPrecision):
            plugin = GeminiFabricPrecision(precision_of(plugin))
        self._precision = plugin

    # -- set-up --

    def setup_module(self, module: nn.Module) -> GeminiDDP:  # type: ignore[override]
        precision = self._asked.precision_by(self.precision)
        has_steps = isinstance(module, LightningModule)
        wrapped = self._asked.wrap(module, self.root_device, precision, cast_inputs=not has_steps)
        if has_steps:
            StepCasts(module, precision, raises=self._asked.raises_outputs)
        return wrapped

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return convert(optimizer, **self._asked.adam)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: wrapping moves the module, chunk by chunk."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Context that makes modules on the CPU, in their dtypes; `empty_init`: without memory."""
        return init_empty() if empty_init else nullcontext()

    # -- a step --

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        return inner(optimizer).clip_grad_norm_(float(max_norm), norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        inner(optimizer).clip_grad_by_value(float(clip_val))

    # -- checkpoints --

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_weights(module)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return full_optimizer_state(optimizer)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        model, optimizer, keys = _trained(state)
        if model is None or not self._asked.saves_folders:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if storage_options is not None or any(key in (filter or {}) for key in keys):
            raise ValueError(
                "storage_options, and a filter of what ranks stream, are for a file; expected "
                'none, or the strategy with checkpoint="full"'
            )
        rest = self._convert_stateful_objects_in_state(pop(state, *keys), filter or {})
        # rank 0's name counts: all ranks write into one folder
        target = Path(self.broadcast(str(path)))
        save_folder(target, model, optimizer, rest, is_writer=self.is_global_zero)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        where = Path(self.broadcast(str(path)))
        if not where.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        state = {"model": state} if isinstance(state, GeminiDDP) else state
        model, optimizer, keys = _trained(state if isinstance(state, dict) else {})
        if model is None:
            raise ValueError(
                f"{where} is a sharded checkpoint; expected the model that takes it: "
                'fabric.load(path, {"model": model, "optimizer": optimizer})'
            )
        blob = load_folder(where, model, optimizer, strict=strict)
        found = decoded(self.broadcast(blob), where, weights_only)
        wanted = [key for key in state if key not in keys]
        _validate_keys_for_strict_loading(wanted, found.keys(), strict=strict)
        for key in wanted:
            if key in found and hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(found.pop(key))
            elif key in found:
                state[key] = found.pop(key)
        return found


def _trained(
    state: Mapping[str, Any],
) -> tuple[GeminiDDP | None, TieredOptimizer | None, list[str]]:
    """Wrapped model of a state, its optimizer, and their keys. Raises ValueError for several."""
    models = {key: value for key, value in state.items() if isinstance(value, GeminiDDP)}
    optimizers = {key: value for key, value in state.items() if isinstance(value, TieredOptimizer)}
    if len(models) > 1 or (models and len(optimizers) > 1):
        raise ValueError(
            f"{', '.join((*models, *optimizers))}: a sharded checkpoint holds one model with one "
            "optimizer; expected a folder for each"
        )
    model, optimizer = next(iter(models.values()), None), next(iter(optimizers.values()), None)
    return model, optimizer, [*models, *optimizers]


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        assert isinstance(module, GeminiDDP)
        return module.no_sync() if enabled else nullcontext()
