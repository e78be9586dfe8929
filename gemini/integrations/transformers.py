"""Door of Hugging Face's Trainer: `GeminiTrainer`, and a mixin for trainers built on Trainer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini import GeminiDDP, Metrics, load_checkpoint, save_checkpoint
from gemini.accumulation.windows import AccumulationWindow, check_order
from gemini.api import check_passed_on
from gemini.checkpoint.adapters import is_adapted, load_adapter, write_adapter
from gemini.checkpoint.export import import_safetensors
from gemini.checkpoint.ranks import Ranks
from gemini.optim import HybridAdafactor, HybridAdam, HybridLion, HybridScheduleFreeAdamW
from gemini.plan.words import OPTIMIZERS, check_optim

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import TRAINING_ARGS_NAME

    from .accelerate import GeminiAccelerator
except ImportError as error:
    raise ImportError(
        "gemini.integrations.transformers needs transformers and accelerate; "
        "pip install transformers accelerate"
    ) from error

from gemini.checkpoint.pretrained import check_readable, write_weights

log = logging.getLogger("gemini")

CHECKPOINT = "gemini"  # in a checkpoint of the trainer's: weights and optimizer, sharded
_TORCH_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
# optimizers of other packages in transformers; here they are this project's from the start
_OTHERS = tuple(name for name in OPTIMIZERS if name not in _TORCH_OPTIMIZERS)
EIGHT_BITS = tuple(name for name, (_, state) in OPTIMIZERS.items() if state == "8bit")
_Base: Any = Trainer if TYPE_CHECKING else object


class GeminiTrainerMixin(_Base):  # type: ignore[misc]
    """Mixin for trainers on `transformers.Trainer`: `class T(GeminiTrainerMixin, SFTTrainer)`.

    The model is a `GeminiDDP` while it trains and evaluates, and its optimizer is this project's.
    Saving is collective: it writes weights for `from_pretrained`, a chunk at a time, and a sharded
    checkpoint that resumes at any world size. All else stays the trainer's own.

    gemini, adam: as in `GeminiAccelerator`.

    accumulate_order: of `gradient_accumulation_steps` micro-batches, as `gemini.accumulate` has it;
        both give the same bits. `"layers"` raises NoChainError for a model that is no chain of
        layers, or for a trainer whose step calls it more than once.

    model: also a `GeminiDDP`. Changes that the trainer makes to a model, such as another forward,
        are made to the inner module.

    Raises ValueError for an `args.optim` that has no sharded form, for `save_on_each_node`, and as
    `GeminiAccelerator` does.
    """

    model: Any
    model_wrapped: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    _asked: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
    _window: AccumulationWindow | None = None
    _metrics: Any

    def __init__(
        self,
        model: Any = None,
        *args: Any,
        gemini: Mapping[str, Any] | None = None,
        adam: Mapping[str, Any] | None = None,
        accumulate_order: str = "batches",
        **kwargs: Any,
    ) -> None:
        check_order(accumulate_order)
        self._asked, self._order = (gemini, adam), accumulate_order
        check_passed_on(
            type(self).__name__, super().__init__, GeminiTrainerMixin.__init__, [*kwargs]
        )
        wrapped = model if isinstance(model, GeminiDDP) else None
        super().__init__(model if wrapped is None else wrapped.module, *args, **kwargs)
        if wrapped is not None:
            self.model_wrapped = self.accelerator.prepare_model(wrapped)

    def create_accelerator_and_postprocess(self) -> None:
        _check_arguments(self.args)
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # one process has one device, and no DataParallel
        super().create_accelerator_and_postprocess()
        GeminiAccelerator.of(self.accelerator, *self._asked)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the whole model need not fit on the device, and wrapping places shards."""

    @property
    def _sharded(self) -> GeminiDDP | None:
        """Wrapped model, None before wrapping and after unwrapping."""
        wrapped = getattr(self, "model_wrapped", None)
        if isinstance(wrapped, GeminiDDP) and not wrapped.is_unwrapped:
            return wrapped
        return None

    def _shard(self) -> GeminiDDP:
        """Wrapped model, wrapped now if it is not yet; `self.model` becomes the inner module."""
        wrapped = self._sharded
        if wrapped is None:
            wrapped = self.model_wrapped = self.accelerator.prepare_model(self.model)
            self.model = wrapped.module
        assert isinstance(wrapped, GeminiDDP)
        return wrapped

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer over the wrapped model. Raises ValueError for an unknown `optim`."""
        self._shard()
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            check_optim(str(self.args.optim.value))
            if str(self.args.optim.value) in _OTHERS:
                return self._create_other()
        found: torch.optim.Optimizer = super().create_optimizer(self.model)
        return found

    def _create_other(self) -> torch.optim.Optimizer:
        # the pair is set for this call alone: Trainer makes the optimizer of it, in its own groups
        kind, options = _other(self.args)
        self.optimizer_cls_and_kwargs = (kind, options | dict(self._asked[1] or {}))
        made = super().create_optimizer(self.model)
        self.optimizer_cls_and_kwargs = None
        self.optimizer = self.accelerator.accept(made)
        prepared: torch.optim.Optimizer = self.optimizer
        return prepared

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Wrapped model, for training and for evaluation."""
        if isinstance(model, GeminiDDP) or model is self.model:
            return self._shard()
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
        return wrapped

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Take a smaller batch after memory ran out: the model stays wrapped, gradients go."""
        self._train_batch_size = batch_size
        if self._sharded is not None:
            self._sharded.zero_grad()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Micro-batches of a step, of which none has run."""
        self._window = None
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a micro-batch, or with the last one all, by `accumulate_order`. Returns the loss of
        those that ran."""
        if self._order != "layers" or self.args.gradient_accumulation_steps == 1:
            own: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
            return own
        if self._window is None:
            self._window = AccumulationWindow(model, self.current_gradient_accumulation_steps)

        def run(trainer: GeminiTrainerMixin) -> torch.Tensor:
            step = super().training_step
            found: torch.Tensor = step(model, copy.copy(inputs), *args, **kwargs)
            return found

        def loss(counts: bool) -> torch.Tensor:
            trainer = self if counts else self._without_counts()
            found: torch.Tensor = self.accelerator.loss_of(lambda: run(trainer))
            return found

        return self._window.add(loss)

    def _without_counts(self) -> GeminiTrainerMixin:
        """Copy of this trainer, so that a loss that is computed once more is counted once."""
        made = copy.copy(self)
        if "_metrics" in vars(self):  # trl's lists for the log
            made._metrics = copy.deepcopy(self._metrics)
        return made

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save weights, or an adapter's, for `from_pretrained`. All ranks call."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        model = self._shard()
        if is_adapted(model.module):
            write_adapter(folder, model)
        else:
            write_weights(folder, model)
        # an error of the rank that writes is raised on all ranks
        Ranks(model, "save_model()").together(lambda: self._save_beside(folder))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_beside(self, folder: Path) -> None:
        """Save the tokenizer and the arguments next to the weights, on the rank that writes."""
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer.optimizer
        save_checkpoint(Path(output_dir) / CHECKPOINT, self._shard(), optimizer, self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint) / CHECKPOINT
        if checkpoint is not None:
            check_readable(Path(checkpoint))  # and its folder, which is no link to outside
        if folder is None or not folder.is_dir():  # none, weights alone, or plain Trainer's
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_checkpoint(folder, self._shard(), self.optimizer.optimizer, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_readable(Path(resume_from_checkpoint))  # Trainer reads files of it by name
        if not (Path(resume_from_checkpoint) / CHECKPOINT).is_dir():
            self._load_weights(Path(resume_from_checkpoint))
        # else they come with the optimizer

    def _load_best_model(self) -> None:
        self._load_weights(Path(self.state.best_model_checkpoint))

    def _load_weights(self, folder: Path) -> None:
        model = self._shard()
        if is_adapted(model.module):
            load_adapter(folder, model)
        else:
            import_safetensors(folder, model)


class GeminiTrainer(GeminiTrainerMixin, Trainer):  # type: ignore[misc]
    """Trainer of transformers with `gemini=` and `adam=`; see `GeminiTrainerMixin`."""


class MetricsCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that logs `gemini.Metrics` whenever the trainer logs a loss.

    `trainer.add_callback(MetricsCallback(trainer))`; the log goes to the trainer's history and to
    all that `report_to` names.
    """

    def __init__(self, trainer: GeminiTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._metrics = Metrics(self._trainer.model_wrapped, self._trainer.optimizer.optimizer)

    def on_log(self, *_: Any, **given: Any) -> None:
        if "loss" in given["logs"]:
            self._trainer.log(self._metrics.as_dict())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._metrics.close()


def _other(args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Optimizer of this project for `args.optim`, and the options that transformers gives it."""
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    name = str(args.optim.value)
    if name == "lion_32bit":
        return HybridLion, options
    if name == "adafactor":  # as transformers asks its own
        options = {"lr": args.learning_rate, "eps": (1e-30, 1e-3)}
        return HybridAdafactor, options | {"scale_parameter": False, "relative_step": False}
    if name == "paged_adamw_32bit" or name in EIGHT_BITS:
        state = "8bit" if name in EIGHT_BITS else "fp32"
        log.warning(
            "args.optim=%r is HybridAdam(state=%r): moments are %s, where the placement puts them",
            name, state, "companded codes of 64 elements" if name in EIGHT_BITS else "fp32",
        )  # fmt: skip
        return HybridAdam, options | {"eps": args.adam_epsilon, "state": state}
    given = dict(pair.split("=") for pair in (args.optim_args or "").replace(" ", "").split(",")
                 if pair)  # fmt: skip
    options |= {"eps": args.adam_epsilon, "warmup_steps": args.warmup_steps}
    options |= {name: float(given[name]) for name in ("r", "weight_lr_power") if name in given}
    return HybridScheduleFreeAdamW, options


def _check_arguments(args: Any) -> None:
    names = ("deepspeed", "fsdp", "parallelism_config")
    given = [name for name in names if getattr(args, name, None)]
    if given:
        raise ValueError(
            f"args.{given[0]} with a GeminiTrainer; expected none: GeminiDDP shards the model "
            "itself, by gemini=dict(placement_policy=...)"
        )
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True with a GeminiTrainer; expected False: a checkpoint is one "
            "folder that all ranks write to, on a disk they share"
        )
    if args.fp16_full_eval or args.bf16_full_eval:
        raise ValueError(
            "fp16_full_eval or bf16_full_eval with a GeminiTrainer; expected neither: it evaluates "
            "in the precision it trains in, gemini=dict(precision=...)"
        )
