"""Base of plugins over this project's engine: their loss scale, and how they wrap."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from gemini import GeminiDDP, LossScale, fuse
from gemini.api import Placement, TieredOptimizer, parse_placement, rank
from gemini.integrations.options import FP16, SCALE_NAMES, Case
from gemini.integrations.torch_optimizers import TAKEN, convert
from gemini.parallel.experts import share_experts
from gemini.parallel.plans import TensorParallel, split
from gemini.parallel.shared_sequence import (
    SequenceParallel,
    SharedSequence,
    share_sequence,
)

from .float8 import in_float8
from .plugin import Plugin, check_over
from .precision import MixedPrecision


class Ignored:
    """Reasons why options change nothing, under any door."""

    PINNED = "what is staged is always pinned"
    DATA = "there is data parallelism alone"
    FLASH = "models that call torch's scaled_dot_product_attention have it"
    JIT = "nothing is compiled; call .compile() on the blocks of the model"
    OVERLAP = (
        "a ring passes keys on while it computes in any case; torch overlaps the collectives of "
        "split layers with matrix products in code compiled for GPUs alone"
    )


TENSOR = Case(lambda own: own.tp_size > 1, "it is for tp_size above 1")
SEQUENCE = Case(
    lambda own: own.enable_sequence_parallelism, "it is for enable_sequence_parallelism=True"
)
UNSPLIT = Case(
    lambda own: own.tp_size == 1, "experts are split whole, of layers that are: it is for tp_size=1"
)
_OF_ENGINE = frozenset(inspect.signature(GeminiDDP).parameters)


class EnginePlugin(Plugin):
    """Base of plugins that wrap modules in `GeminiDDP`.

    A subclass is a dataclass with `precision`, `max_norm` and the seven fields of the loss scale.
    """

    precision: str
    max_norm: float

    @property
    def own_precision(self) -> str:  # type: ignore[override]
        return self.precision

    def check_together(self) -> None:
        self.loss_scale()

    def loss_scale(self) -> LossScale | None:
        """Loss scale for fp16, None for another precision. Raises ValueError."""
        if not FP16.holds(self):
            return None
        return LossScale(**{name: getattr(self, name) for name in SCALE_NAMES})

    def options(self, device: torch.device) -> dict[str, Any]:
        """Options for `GeminiDDP`: the fields that both have by one name. Subclasses add theirs."""
        names = [one.name for one in fields(self) if one.name in _OF_ENGINE]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names} | {"loss_scale": self.loss_scale()}

    def prepare(self, model: nn.Module, device: torch.device) -> None:
        """Change the layers of a model before it is split, cut or wrapped: norms into fused ones,
        and into float8, if asked.

        Raises ValueError.
        """
        asked = ("enable_fused_normalization", "enable_all_optimization")
        if any(getattr(self, name, False) for name in asked):
            fuse(model, loss=False)
        if getattr(self, "use_fp8", False):
            in_float8(model, device)

    def wrap(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        precision: MixedPrecision | None,
        device: torch.device,
    ) -> nn.Module:
        self.prepare(model, device)
        verbose = getattr(self, "verbose", False)
        return wrap_gemini(model, optimizer, verbose=verbose, **self.options(device))


def parse_named(policy: str | Placement) -> Placement:
    """Placement policy by its old name. Raises ValueError."""
    if policy == "const":
        raise ValueError(
            "placement_policy='const' has no bytes; expected gemini.ConstPlacement('8GiB')"
        )
    return parse_placement(policy)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Parts of a model that ranks share in addition to its state.

    layers over "tp" of the mesh, sequence over "cp", experts over "ep".
    """

    layers: TensorParallel | None = None
    sequence: SequenceParallel | None = None
    experts: bool = False

    def share(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        mesh: Any,
        stages: Sequence[nn.Module] = (),
    ) -> SharedSequence | None:
        """Share the model, or this rank's stages of it, in place; the optimizer gets the new
        parameters. Collective. Raises ValueError."""
        if self.layers is not None:
            split(model, optimizer, mesh["tp"], self.layers, stages)
        if self.experts:
            share_experts(model, optimizer, mesh["ep"], stages)
        if self.sequence is None:
            return None
        return share_sequence(model, mesh["cp"], self.sequence, stages)


def wrap_gemini(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    verbose: bool,
    shared: Parallelism = Parallelism(),
    **options: Any,
) -> GeminiDDP:
    """Wrap a module. The optimizer becomes one of this project's, and updates the shards."""
    # the optimizer first: one that is refused leaves the model unchanged
    if optimizer is not None:
        made_ours(optimizer, model)
    # shared before it is wrapped, as chunks are made of the split parameters
    shared.share(model, optimizer, options.get("mesh"))
    wrapped = GeminiDDP(model, **options)
    if isinstance(optimizer, TieredOptimizer):
        optimizer.bind_to(wrapped.parameters())
    if verbose:
        print_search(wrapped)
        if isinstance(optimizer, TieredOptimizer):
            print_skips(optimizer, wrapped)
    return wrapped


def made_ours(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Convert an optimizer over a plain module in place into one of this project's.

    Raises ValueError, before anything is changed, for one that has stepped or has no such form.
    """
    check_over(optimizer, model)
    ours = isinstance(optimizer, TieredOptimizer)
    if optimizer.state or (ours and not optimizer.waits_for(_ids(model))):  # type: ignore[attr-defined]
        raise ValueError(
            f"this {type(optimizer).__name__} has state of the plain module; expected one that "
            f"has not stepped (boost first, then load its state), of {TAKEN}"
        )
    convert(optimizer)


def _ids(model: nn.Module) -> set[int]:
    return {id(param) for param in model.parameters()}


def print_search(model: GeminiDDP) -> None:
    """Print on rank 0 what the search for chunks found."""
    if rank() == 0:
        sys.stdout.write(model.chunk_configuration.summary() + "\n")


def print_skips(optimizer: TieredOptimizer, model: GeminiDDP) -> None:
    """Print on rank 0 every step that is skipped from now on."""
    if rank():
        return
    # weak: the hook lives as long as the optimizer, which must not keep the model alive
    held = weakref.ref(model)

    def say(stepped: torch.optim.Optimizer, *_: Any) -> None:
        assert isinstance(stepped, TieredOptimizer)
        module, report = held(), stepped.last_report
        if module is not None and report is not None and report.skipped:
            scale = module.engine.control_vector.read().scale
            sys.stdout.write(
                f"step skipped: the gradient of {report.nonfinite} is not finite; "
                f"loss scale {scale:g}\n"
            )

    optimizer.register_step_post_hook(say)
