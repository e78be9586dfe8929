"""Booster: one call that wraps the objects of a training loop by a plugin."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gemini import load_checkpoint, save_checkpoint
from gemini.api import Ticket, by_name
from gemini.checkpoint import whole_files as files
from gemini.checkpoint.adapters import save_lora
from gemini.checkpoint.export import SAFETENSORS, TORCH, export_weights
from gemini.checkpoint.format.manifest import FormatError
from gemini.checkpoint.model.keys import check_schedule
from gemini.checkpoint.ranks import Ranks
from gemini.checkpoint.untrusted.torch_files import load_mapped
from gemini.integrations.parts import accept, inner_of
from gemini.integrations.plugins import lora
from gemini.integrations.plugins.float8 import in_float8
from gemini.integrations.plugins.optimizers import scale_of, set_scale
from gemini.integrations.plugins.plugin import Plugin
from gemini.integrations.plugins.precision import FP8MixedPrecision, MixedPrecision
from gemini.integrations.plugins.torch_plugins import PlainPlugin
from gemini.parallel.pipelined import Pipelined

Checkpoint = str | os.PathLike[str]
_NO_LIMIT = 1 << 62  # bytes of a file
Boosted = tuple[nn.Module, Any, Any, Any, Any]


@by_name
class Booster:
    """Wrapper of modules and optimizers by a plugin, which also runs backwards, saves and loads.

    device: where a module computes, for plugins that do not choose the device.
    mixed_precision: `"fp16"`, `"bf16"`, `"fp16_naive"` or an object of
        `gemini.integrations.plugins.precision`, for plugins without a precision of their own.
    plugin: None trains in this process alone, in plain torch.

    Raises ValueError for a device or precision that the plugin chooses itself.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        mixed_precision: str | MixedPrecision | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise ValueError(
                f"plugin is a {type(plugin).__name__}; expected a plugin of gemini.integrations, "
                "such as GeminiPlugin()"
            )
        self.plugin = plugin or PlainPlugin()
        self._precision, self._device = self.plugin.checked(mixed_precision, device)
        # an optimizer's state is saved by its module's names. Weak: a Booster keeps no model alive
        self._models: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[nn.Module]]
        self._models = weakref.WeakKeyDictionary()

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Wrap the model; returns (model, optimizer, criterion, dataloader, lr_scheduler).

        The optimizer stays the same object, so that schedulers and hooks of it go on working.
        Raises TypeError for arguments in another order, ValueError for what the plugin cannot wrap.
        """
        _check_order(model, optimizer, criterion, dataloader)
        if lr_scheduler is not None and optimizer is not None:
            _check_drives(lr_scheduler, optimizer)
        if isinstance(self._precision, FP8MixedPrecision):
            in_float8(model, self._device)
        wrapped = self.plugin.wrap(model, optimizer, self._precision, self._device)
        if optimizer is not None:
            self._models[optimizer] = weakref.ref(wrapped)
        return wrapped, optimizer, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Run `loss.backward()` with the optimizer's loss scale."""
        run: Callable[[Tensor], None] | None = getattr(optimizer, "backward", None)
        if run is None:
            loss.backward()
        else:
            run(loss)

    def no_sync(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Context whose backwards reduce nothing: gradients add up until a backward outside.

        Raises ValueError without a model and an optimizer.
        """
        if model is None and optimizer is None:
            raise ValueError("no_sync() of nothing; expected the boosted model, or its optimizer")
        return self.plugin.no_sync(self._model_of(optimizer) if model is None else model)  # type: ignore[arg-type]

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[..., Any],
        optimizer: torch.optim.Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> Any:
        """Run one batch through a model that `HybridParallelPlugin(pp_size=)` has cut into stages.

        data_iter: of this rank's data-parallel place; the next batch is taken from it, on every
            place of the pipeline. For transformers `input_ids`, or a dict with them; for
            `nn.Sequential` a tensor, or a tuple that begins with what the first layer takes.
        criterion: loss of (what the model gives, the micro-batch), 0-d; the mean over micro-batches
            is differentiated. Gradients of several calls add up until `optimizer.step()`.
        optimizer: None, under `torch.no_grad()`, runs no backward.

        Returns `{"loss": 0-d, "outputs": ...}` with what was asked for on the ranks of the last
        stage, and None for both on others. Outputs have the rows of all micro-batches.
        Raises ValueError for another model, and for a batch that cannot be cut.
        """
        if not isinstance(model, Pipelined):
            raise ValueError(
                f"execute_pipeline() of a {type(model).__name__}; expected a model that was "
                "boosted with HybridParallelPlugin(pp_size > 1). Call others themselves, then "
                "booster.backward and optimizer.step"
            )
        backward = torch.is_grad_enabled()
        if backward and (optimizer is None or self._model_of(optimizer) is not model):
            raise ValueError(
                "execute_pipeline() without the optimizer that was boosted with the model; "
                "expected it, or torch.no_grad() around a call that evaluates"
            )
        return model.execute(
            next(data_iter), criterion, backward=backward, return_loss=return_loss,
            return_outputs=return_outputs,
        )  # fmt: skip

    # -- checkpoints; all ranks call --

    def save_model(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> Ticket[None]:
        """Save the weights, fp32 masters where there are any, in the dtypes they had.

        shard: a new folder that Hugging Face's `from_pretrained` reads, in files of
            `size_per_shard` MiB; else one file.
        use_safetensors: safetensors; else torch.save (`pytorch_model-*.bin` in a folder), but for
            one file whose name ends in `.safetensors`.
        prefix: before the names of the files in the folder, and a dot.
        use_async: return when the values are in rank 0's memory, and write in a thread; the ticket
            says when it is done, and the next save or load waits for it.

        Raises ValueError for options that contradict each other, CheckpointError on every rank.
        """
        _check_gathers(gather_dtensor)
        model, path = inner_of(model), _absolute(checkpoint)
        if not size_per_shard > 0:
            raise ValueError(f"size_per_shard={size_per_shard} MiB must be positive")
        if prefix and not shard:
            raise ValueError(
                f"prefix={prefix!r} without shard=True; expected none: a file has the name it is "
                "given"
            )
        ranks = files.begin(model, "save_model()")
        limit = size_per_shard << 20 if shard else _NO_LIMIT
        as_safetensors = use_safetensors or (path.suffix == ".safetensors" and not shard)
        kind = SAFETENSORS if as_safetensors else TORCH
        is_cut = isinstance(model, Pipelined)  # whose weights come as copies, tied ones one tensor
        # written a chunk at a time; a thread, and a cut model, need all weights on rank 0 first
        if (shard or as_safetensors) and not (use_async or is_cut):
            folder = path if shard else files.beside(path)
            export_weights(folder, model, kind, max_shard_size=limit, prefix=prefix or "")
            taken = None if shard else lambda: files.take_out(folder, path)
            return files.written(ranks, path, taken)
        state = files.full_weights(model, ranks)
        # a thread writes copies: the next step may change the tensors themselves meanwhile
        if use_async and not is_cut:
            state = files.copied(state)

        def write() -> None:
            if shard or as_safetensors:
                files.write_folder(model, state, path, limit, prefix, kind, one=not shard)
            else:
                files.write_file(path, state)

        return files.written(ranks, path, write, use_async)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> nn.Module:
        """Load a checkpoint into a boosted model or a plain one. Returns the model.

        checkpoint: written by `save_model`, by Hugging Face, by gemini or by
            torch.distributed.checkpoint.

        Values are read one by one, whatever `low_cpu_mem_mode` and `num_threads` are.
        Raises CheckpointError or RuntimeError for a checkpoint of another model (`strict`).
        """
        _check_reading(low_cpu_mem_mode, num_threads)
        load_checkpoint(checkpoint, inner_of(model), strict=strict)
        return model

    def save_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: Checkpoint,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> Ticket[None]:
        """Save the optimizer's state and groups, by the names of its parameters.

        shard: a folder into which each rank writes what it has (`gemini.save_checkpoint`); else one
            file of torch.save with all of it. Either loads under any plugin, at any world size.

        Raises ValueError for an optimizer that was not boosted here, CheckpointError on every rank.
        """
        _check_gathers(gather_dtensor)
        if prefix:
            raise ValueError(f"prefix={prefix!r} of an optimizer's files; expected none")
        if size_per_shard != 1024:
            raise ValueError(
                f"size_per_shard={size_per_shard} of an optimizer's files; expected 1024, which "
                "does nothing: each rank writes one file with what it has"
            )
        model, path = inner_of(self._model_of(optimizer)), _absolute(checkpoint)
        if shard:
            scale = scale_of(optimizer)
            return save_checkpoint(
                path, model, optimizer, extra=scale, async_save=use_async, weights=False
            )
        if isinstance(model, Pipelined):
            raise ValueError(
                "save_optimizer() of a pipeline in one file; expected shard=True: each rank writes "
                "what it has, and it loads at any pp_size"
            )
        ranks = files.begin(model, "save_optimizer()")
        state = files.full_state(model, optimizer)
        scale = scale_of(optimizer)
        state = state if scale is None else {**state, "counters": scale}
        state = files.copied(state) if use_async else state
        return files.written(ranks, path, lambda: files.write_file(path, state), use_async)

    def load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: Checkpoint,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load a checkpoint of `save_optimizer` under any plugin, or a whole checkpoint's state.

        Raises ValueError for an optimizer that was not boosted here, CheckpointError on every rank.
        """
        _check_reading(low_cpu_mem_mode, num_threads)
        model, path = inner_of(self._model_of(optimizer)), _absolute(checkpoint)
        if path.is_file() and not isinstance(model, Pipelined):
            ranks = files.begin(model, "load_optimizer()")
            scale = files.load_full_state(path, model, optimizer, ranks)
        else:
            scale = load_checkpoint(path, model, optimizer, weights=False)
        set_scale(optimizer, scale)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: Checkpoint) -> None:
        """Save the scheduler's state dict; rank 0 writes. All ranks call."""
        path, state = _absolute(checkpoint), lr_scheduler.state_dict()
        ranks = Ranks(nn.Module(), "save_lr_scheduler()")
        files.written(ranks, path, lambda: files.write_file(path, state))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: Checkpoint) -> None:
        """Load a file of `save_lr_scheduler`. Raises FormatError."""
        path = _absolute(checkpoint)
        try:
            state = load_mapped(path)
            check_schedule(lr_scheduler, state)
        except Exception as error:
            raise FormatError(f"{path} holds no schedule: {error}") from error
        lr_scheduler.load_state_dict(state)

    # -- LoRA --

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: Checkpoint | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Add LoRA layers of peft to a module, before `boost`. Returns the new module.

        lora_config: a `peft.LoraConfig`; or pretrained_dir: a folder that was saved before.
        bnb_quantization_config: the base's linear layers become bitsandbytes' first, of a
            `BitsAndBytesConfig` of transformers, or one of Colossal-AI's or accelerate's names;
            quantize alone is NF4 with quantised statistics.
        """
        return lora.enable_lora(
            model, pretrained_dir, lora_config, bnb_quantization_config, quantize
        )

    def save_lora_as_pretrained(
        self, model: nn.Module, checkpoint: Checkpoint, use_safetensors: bool = False
    ) -> None:
        """Save the LoRA layers alone, as peft does. All ranks call."""
        save_lora(inner_of(model), checkpoint, use_safetensors=use_safetensors)

    def _model_of(self, optimizer: torch.optim.Optimizer | None) -> nn.Module:
        held = None if optimizer is None else self._models.get(optimizer)
        model = None if held is None else held()
        if model is None:
            raise ValueError(
                "this optimizer was not boosted by this Booster, or its model is gone; expected "
                "the one that booster.boost returned"
            )
        return model


def _absolute(checkpoint: Checkpoint) -> Path:
    return Path(checkpoint).expanduser().absolute()


def _check_gathers(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        accept({"gather_dtensor=False": "nothing is gathered that need not be"})


def _check_reading(low_cpu_mem_mode: bool, num_threads: int) -> None:
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}; expected 1 or more")
    if not low_cpu_mem_mode:
        accept({"low_cpu_mem_mode=False": "values are read one by one, from mapped files"})
    if num_threads > 1:
        accept({"num_threads": "ranks read what they keep, from mapped files"})


def _check_order(model: object, optimizer: object, criterion: object, dataloader: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer: "
            "boost(model, optimizer, criterion, dataloader, lr_scheduler)"
        )
    if isinstance(criterion, DataLoader):
        raise TypeError(
            "criterion is a DataLoader; write dataloader=: "
            "boost(model, optimizer, criterion, dataloader, lr_scheduler)"
        )
    if criterion is not None and not callable(criterion):
        raise TypeError(f"criterion is a {type(criterion).__name__}; expected a function")
    if isinstance(dataloader, nn.Module) or hasattr(dataloader, "last_epoch"):
        raise TypeError(
            f"dataloader is a {type(dataloader).__name__}; write criterion= or lr_scheduler=: "
            "boost(model, optimizer, criterion, dataloader, lr_scheduler)"
        )


def _check_drives(lr_scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    driven = getattr(lr_scheduler, "optimizer", optimizer)
    if driven is not optimizer:
        raise ValueError(
            "lr_scheduler drives another optimizer; expected one that was made from the optimizer "
            "that is boosted"
        )
