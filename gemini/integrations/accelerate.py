"""Door of accelerate: `GeminiAccelerator` in place of `Accelerator`, over a sharded model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gemini import GeminiDDP, LossScale, load_checkpoint, save_checkpoint
from gemini.accumulation.chain import refuse
from gemini.api import TieredOptimizer, as_precision, passes_on
from gemini.checkpoint.pretrained import check_readable, write_weights

from .parts import PRECISIONS
from .torch_optimizers import convert

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, DynamoBackend
except ImportError as error:
    raise ImportError(
        "gemini.integrations.accelerate needs accelerate; pip install accelerate"
    ) from error

# options of accelerate that shard or scale the model themselves
_REFUSED = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin",
    "torch_tp_plugin", "parallelism_config",
)  # fmt: skip
_ALONE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class GeminiOptimizerOfAccelerate(AcceleratedOptimizer):  # type: ignore[misc]
    """Optimizer of accelerate for which a step skipped by an overflow moves no schedule."""

    @property
    def step_was_skipped(self) -> bool:
        report = self.optimizer.last_report
        return report is not None and bool(report.skipped)


class GeminiAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerator whose `prepare` shards models and places their state.

    Models become `GeminiDDP`; torch's optimizers become this project's (`torch_optimizers`), and
    their state is not moved. The training loop stays as it is.

    gemini: options of `GeminiDDP`. Its precision is `mixed_precision`, with outputs in fp32;
        without `mixed_precision` it is the dtype of the model's parameters. As under torch's DDP,
        buffers are rank 0's.
    adam: where state lives, see `torch_optimizers.PLACES`; `nvme_offload_fraction=1.0`, say.

    Raises ValueError for plugins that shard too, for fp8, for two different precisions, and if
    accelerate and torch.distributed do not see the same ranks.
    """

    _models: list[Any]
    _optimizers: list[Any]
    _save_model_state_pre_hook: dict[Any, Any]
    _load_model_state_pre_hook: dict[Any, Any]
    _given: list[torch.Tensor] | None = None  # to `backward`, inside `loss_of`

    @passes_on(Accelerator)
    def __init__(
        self,
        *args: Any,
        gemini: Mapping[str, Any] | None = None,
        adam: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = [name for name in _REFUSED if kwargs.get(name) is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)} given to GeminiAccelerator; expected none: GeminiDDP shards "
                "the model itself, by gemini=dict(placement_policy=...)"
            )
        super().__init__(*args, **kwargs)
        self._shard_with(gemini, adam)

    @classmethod
    def of(
        cls,
        accelerator: Any,
        gemini: Mapping[str, Any] | None = None,
        adam: Mapping[str, Any] | None = None,
    ) -> GeminiAccelerator:
        """Turn an Accelerator that has prepared nothing yet into this class. Raises ValueError."""
        if type(accelerator) is not Accelerator:
            raise ValueError(
                f"a {type(accelerator).__name__} cannot be taken over; expected accelerate's own "
                "Accelerator"
            )
        accelerator.__class__ = cls
        taken: GeminiAccelerator = accelerator
        taken._shard_with(gemini, adam)
        return taken

    def _shard_with(self, gemini: Mapping[str, Any] | None, adam: Mapping[str, Any] | None) -> None:
        if self.distributed_type not in _ALONE:
            raise ValueError(
                f"accelerate is set up for {self.distributed_type}; expected plain processes: "
                "GeminiDDP shards the model itself"
            )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != self.num_processes:
            raise ValueError(
                f"torch.distributed has {ranks} ranks and accelerate {self.num_processes}, so each "
                "would train on all data; expected as many: on CPUs, cpu=True"
            )
        if self.autocast_handler is not None:
            raise ValueError(
                "AutocastKwargs given to GeminiAccelerator; expected none: modules compute in one "
                "precision, but for those of gemini=dict(keep_fp32=...)"
            )
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r}; expected 'no', 'bf16' or 'fp16'"
            )
        self._gemini = dict(gemini or {})
        self._adam = dict(adam or {})
        own = self._gemini.get("precision", self.mixed_precision)
        own = own if own == "no" else as_precision(own)
        if self.mixed_precision not in ("no", own):
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r} and gemini=dict(precision={own!r}); "
                "expected one of them, or the same"
            )
        self.native_amp, self.scaler = False, None  # the engine casts, and scales the loss

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of accelerate; inside `loss_of` the loss is kept, and no gradient formed."""
        if self._given is None:
            super().backward(loss, **kwargs)
        else:
            self._given.append(loss / self.gradient_accumulation_steps)

    def loss_of(self, step: Callable[[], Any]) -> torch.Tensor:
        """Loss that `step()` gives to `backward`, as it is divided there. Raises NoChainError
        unless it gives one."""
        self._given = given = list[torch.Tensor]()
        try:
            step()
        finally:
            self._given = None
        if len(given) != 1:
            refuse(f"one micro-batch has {len(given)} backwards")
        return given[0]

    def _options(self, model: nn.Module) -> dict[str, Any]:
        """Options of `GeminiDDP` for this model. Raises ValueError for a `comm_hook`."""
        options: dict[str, Any] = {"broadcast_buffers": any(True for _ in model.buffers())}
        handler = self.ddp_handler
        if handler is not None:
            options["broadcast_buffers"] &= handler.broadcast_buffers
            if handler.comm_hook.value != "no":
                raise ValueError(
                    f"comm_hook={handler.comm_hook.value!r} of DistributedDataParallelKwargs; "
                    "expected none: gradients are reduced by chunks"
                )
        options["precision"] = self.mixed_precision
        options["force_outputs_fp32"] = self.mixed_precision != "no"  # as accelerate's autocast
        if self.mixed_precision == "no":
            dtypes = [p.dtype for p in model.parameters() if p.dtype in PRECISIONS]
            widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
            options["precision"] = PRECISIONS[widest]
        if self.scaler_handler is not None and self.mixed_precision == "fp16":
            options["loss_scale"] = _loss_scale(self.scaler_handler.to_kwargs())
        return options | self._gemini

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Wrap a model once; accelerate places one without parameters. Returns a `GeminiDDP`.

        Raises ValueError for options with a model that was wrapped without them.
        """
        if not any(True for _ in model.parameters()):
            plain: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return plain
        if not isinstance(model, GeminiDDP):
            self._compile(model)
            model = GeminiDDP(model, self.device, **self._options(model))
        elif not getattr(model, "_is_accelerate_prepared", False):
            self._check_options_of(model)
        if not any(model is known for known in self._models):
            self._models.append(model)
        model.__dict__["_is_accelerate_prepared"] = True
        return model

    def _compile(self, model: nn.Module) -> None:
        """Compile the inner module in place, if the dynamo plugin says so. Raises ValueError."""
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO:
            return
        if plugin.use_regional_compilation:
            raise ValueError(
                "use_regional_compilation=True; expected False: call block.compile() of each block "
                "before prepare"
            )
        model.compile(**plugin.to_kwargs())

    def _check_options_of(self, model: GeminiDDP) -> None:
        """Raise ValueError if a model that its user wrapped has other options than these."""
        precision = model.engine.precision_settings.precision
        if self._gemini or self.mixed_precision not in ("no", precision):
            raise ValueError(
                f"the model is a GeminiDDP of precision {precision!r}, and was wrapped without "
                f"mixed_precision={self.mixed_precision!r} and gemini={self._gemini!r}; expected "
                "the same precision and no options, or a model that is not wrapped"
            )

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Convert an optimizer into one of this project's; see `torch_optimizers.convert`."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        return self.accept(convert(optimizer, **self._adam))

    def accept(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        """Wrap an optimizer of this project in accelerate's class. No state is moved."""
        prepared = GeminiOptimizerOfAccelerate(optimizer, device_placement=False)
        prepared._is_accelerate_prepared = True
        self._optimizers.append(prepared)
        return prepared

    @contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Join of accelerate for plain models. For a sharded one it does nothing, and raises
        ValueError for uneven batches."""
        if not any(isinstance(model, GeminiDDP) for model in joinables):
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        even = self.even_batches if even_batches is None else even_batches
        if not even and self.num_processes > 1:
            raise ValueError(
                "join_uneven_inputs with a sharded model; expected even batches "
                "(even_batches=True): a rank without a batch takes no part in gathers"
            )
        yield

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Inner module, still wrapped and in its compute dtype.

        `get_state_dict(model)` returns fp32 values. `model.unwrap()` ends the wrapping.
        """
        inner = model.module if isinstance(model, GeminiDDP) else model
        unwrapped: nn.Module = super().unwrap_model(inner, *args, **kwargs)
        return unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Weights in fp32, whole on rank 0 and empty on the others. All ranks call."""
        if isinstance(model, GeminiDDP):
            return model.state_dict()
        found: dict[str, Any] = super().get_state_dict(model, unwrap)
        return found

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save weights for `from_pretrained`; safetensors are written a chunk at a time."""
        if isinstance(model, GeminiDDP) and safe_serialization:
            write_weights(save_directory, model, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save accelerate's own small files, and every model with its optimizer as a checkpoint.

        The folders `gemini_0`, `gemini_1`, ... are of `gemini.save_checkpoint`: sharded, and loaded
        at any world size. All ranks call.
        """
        # hooks run after it: inside they would be given the plain models alone
        hooks, self._save_model_state_pre_hook = self._save_model_state_pre_hook, {}
        try:
            with self._ours_aside():
                where = Path(
                    super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
                )
        finally:
            self._save_model_state_pre_hook = hooks
        for hook in hooks.values():
            hook(self._models, [], str(where))
        for i, model in enumerate(self._sharded()):
            save_checkpoint(where / f"gemini_{i}", model, self._optimizer_of(model))
        return where

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a folder of `save_state`, at any world size. All ranks call."""
        found: list[str] = []
        hooks = self._load_model_state_pre_hook

        def look(_: Any, folder: str) -> None:
            check_readable(Path(folder))  # accelerate reads files of it by name
            found.append(folder)

        # accelerate may choose the folder itself, and tells it to hooks alone
        self._load_model_state_pre_hook = {0: look}
        try:
            with self._ours_aside():
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        finally:
            self._load_model_state_pre_hook = hooks
        waiting = list(self._models)
        for hook in hooks.values():
            hook(waiting, found[0])  # may load some by itself, and takes them out
        for i, model in enumerate(self._sharded()):
            if any(model is other for other in waiting):
                folder = Path(found[0]) / f"gemini_{i}"
                load_checkpoint(folder, model, self._optimizer_of(model))

    def _sharded(self) -> list[GeminiDDP]:
        return [model for model in self._models if isinstance(model, GeminiDDP)]

    def _optimizer_of(self, model: GeminiDDP) -> TieredOptimizer | None:
        """Optimizer whose state is of the model's shards; None if there is none."""
        for prepared in self._optimizers:
            optimizer = prepared.optimizer
            if isinstance(optimizer, TieredOptimizer) and optimizer.is_over(model.parameters()):
                return optimizer
        return None

    @contextmanager
    def _ours_aside(self) -> Iterator[None]:
        """Context that hides sharded models and their optimizers from accelerate, which would
        gather them whole to save them."""
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if not isinstance(model, GeminiDDP)]
        self._optimizers = [
            prepared
            for prepared in optimizers
            if not isinstance(prepared.optimizer, TieredOptimizer)
        ]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def _loss_scale(scaler: Mapping[str, Any]) -> LossScale:
    """Loss scale from accelerate's options for torch's GradScaler. Raises ValueError."""
    if not scaler.get("enabled", True):
        raise ValueError(
            "GradScalerKwargs(enabled=False) with fp16; expected a loss scale: a fixed one is "
            "gemini=dict(loss_scale=1.0)"
        )
    names = {"init_scale": "initial_scale"}
    return LossScale(**{names.get(n, n): value for n, value in scaler.items() if n != "enabled"})
