"""Parts shared by the Trainer's and Fabric's strategies: precision, options, casts, names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from gemini import GeminiDDP, LossScale
from gemini.api import (
    Placement,
    TieredOptimizer,
    as_precision,
    map_tensors,
    nearest,
    parse_placement,
)
from gemini.integrations.options import TORCH_SCALE
from gemini.integrations.parts import PRECISIONS as ENGINES

# Lightning's name -> the engine's. Masters are fp32, so "true" and "mixed" bf16 are the same here
PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}
# registered names, with the options of the strategy that they stand for
REGISTERED: dict[str, dict[str, Any]] = {
    "gemini": {},
    "gemini_nvme": {"adam": {"nvme_offload_fraction": 1.0}},
    "zero1": {"placement_policy": "zero1"},
    "zero2": {"placement_policy": "zero2"},
}
REDIRECTED = "wrapped_forward"  # what Lightning calls the forward that leads to a step
# a GradScaler as Lightning makes one, by its own names
_SCALER = {
    "scale": TORCH_SCALE.initial_scale,
    "growth_factor": TORCH_SCALE.growth_factor,
    "backoff_factor": TORCH_SCALE.backoff_factor,
    "growth_interval": TORCH_SCALE.growth_interval,
    "_growth_tracker": 0,
}
# parameters of GeminiDDP that the strategies fill themselves
_TAKEN = ("module", "device", "placement_policy", "precision", "process_group", "cast_inputs")
_OPTIONS = frozenset(inspect.signature(GeminiDDP).parameters) - set(_TAKEN)


class _NamedPrecision(FabricPrecision):
    """Precision by Lightning's name of it. Raises ValueError for one that has no meaning here."""

    def __init__(self, precision: str = "32-true") -> None:
        engine_precision(precision)
        self.precision = precision  # type: ignore[assignment]


class GeminiPrecision(_NamedPrecision, Precision):
    """Precision plugin of a Trainer for `GeminiStrategy`: which dtype modules compute in.

    The engine casts, scales losses and clips, so in a step this only hands clipping on.
    precision: "32-true", "bf16-mixed", "bf16-true" or "16-mixed"; raises ValueError for others.
    """

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        inner(optimizer).clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        inner(optimizer).clip_grad_by_value(float(clip_val))


class GeminiFabricPrecision(_NamedPrecision):
    """Precision plugin of a Fabric for `GeminiFabricStrategy`; see `GeminiPrecision`."""


def engine_precision(name: str) -> str:
    """Name of the engine for Lightning's name of a precision. Raises ValueError."""
    if name not in PRECISIONS:
        instead = {"16-true": ' (weights of fp16 have fp32 masters here: write "16-mixed")'}
        raise ValueError(
            f"precision={name!r} is not possible with Gemini{instead.get(name, '')}; expected one "
            f"of {', '.join(PRECISIONS)}"
        )
    return PRECISIONS[name]


def precision_of(plugin: FabricPrecision) -> str:
    """Name of the precision of one of Lightning's own plugins.

    Raises ValueError for a plugin that does more than choose a dtype.
    """
    if type(plugin).__name__ not in ("Precision", "HalfPrecision", "MixedPrecision"):
        raise ValueError(
            f"a {type(plugin).__name__} does what Gemini does itself; expected one of "
            f"{', '.join(PRECISIONS)} as the Trainer's precision=, or a GeminiPrecision"
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and _SCALER | scaler.state_dict() != _SCALER:
        raise ValueError(
            "a GradScaler with options of its own does nothing here; expected none, and the "
            "strategy's loss_scale=optim.LossScale(...)"
        )
    return str(plugin.precision)


@dataclass(frozen=True)
class Asked:
    """Arguments of a strategy, checked; see `GeminiStrategy`.

    Raises TypeError for an unknown option, ValueError for a wrong value.
    """

    placement: str | Placement
    adam: Mapping[str, Any]
    checkpoint: str
    precision: str | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.checkpoint not in ("sharded", "full"):
            raise ValueError(f'checkpoint={self.checkpoint!r}; expected "sharded" or "full"')
        check_options(self.options)
        parse_placement(self.placement)

    @property
    def saves_folders(self) -> bool:
        return self.checkpoint == "sharded"

    @property
    def raises_outputs(self) -> bool:
        return bool(self.options.get("force_outputs_fp32"))

    def precision_by(self, plugin: FabricPrecision) -> str:
        """Precision of the strategy, or else of the plugin. Raises ValueError if they differ."""
        asked = engine_precision(str(plugin.precision))
        given = asked if self.precision is None else as_precision(self.precision)
        if given == asked:
            return asked
        if asked != "fp32":
            raise ValueError(
                f"the strategy has precision={self.precision!r} and Lightning "
                f"{plugin.precision!r}; expected one of the two"
            )
        return given

    def wrap(
        self, module: nn.Module, device: torch.device, precision: str, *, cast_inputs: bool
    ) -> GeminiDDP:
        """Wrap a module. A loss scale equal to the default is dropped unless it is fp16's."""
        options = dict(self.options)
        if precision != "fp16" and options.get("loss_scale") == LossScale():
            del options["loss_scale"]
        _move_what_has_no_parameters(module, device)
        return GeminiDDP(
            module, device, self.placement, precision=precision, cast_inputs=cast_inputs, **options
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that GeminiDDP lacks, or that the strategy fills itself."""
    for name in options:
        if name in _OPTIONS:
            continue
        if name in _TAKEN:
            raise TypeError(f"{name}= is the strategy's own to give to GeminiDDP; leave it away")
        near = nearest(name, _OPTIONS)
        meant = f"did you mean {near}? " if near else ""
        raise TypeError(
            f"{name}= is no option of this strategy; {meant}expected its own, or one of "
            f"GeminiDDP's: {', '.join(sorted(_OPTIONS))}"
        )


def _move_what_has_no_parameters(module: nn.Module, device: torch.device) -> None:
    """Move children without parameters: metrics keep tensors that are no buffers, and only their
    own `to` finds these."""
    for child in module.children():
        if next(child.parameters(), None) is None:
            child.to(device)
        else:
            _move_what_has_no_parameters(child, device)


def inner(optimizer: Any) -> TieredOptimizer:
    """Optimizer of this project, out of Lightning's wrapper."""
    found = getattr(optimizer, "_optimizer", optimizer)
    if not isinstance(found, TieredOptimizer):
        raise ValueError(
            f"the optimizer is a {type(found).__name__}; expected the one that this strategy set up"
        )
    return found


class StepCasts:
    """Casts at the modules that a step calls, so that the step's own tensors keep their dtypes.

    A training step runs inside GeminiDDP's forward, with its batch as it came: targets stay fp32.
    Floating-point arguments of the outermost modules with parameters, and of the module's own
    `forward`, are cast to the compute dtype. With `raises` or fp16 the outputs of those modules
    are cast to fp32: fp16's loss scale needs an fp32 loss.
    """

    def __init__(self, module: nn.Module, precision: str, *, raises: bool) -> None:
        self._dtype = next(dtype for dtype, name in ENGINES.items() if name == precision)
        self._handles: list[Any] = []
        if precision == "fp32":
            return
        self._handles.append(module.register_forward_pre_hook(self._enter_root, with_kwargs=True))
        raises = raises or precision == "fp16"
        for child in outermost_callables(module):
            self._handles.append(child.register_forward_pre_hook(self._enter, with_kwargs=True))
            if raises:
                self._handles.append(child.register_forward_hook(_raise_outputs))

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if getattr(module.forward, "__name__", "") == REDIRECTED:  # a step
            return None
        return map_tensors((args, kwargs), self._cast)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not any(param.dtype == self._dtype for param in module.parameters()):
            return None  # it is kept in fp32
        return map_tensors((args, kwargs), self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _raise_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    return map_tensors(output, lambda t: t.float() if t.is_floating_point() else t)


def outermost_callables(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost modules below `module` with parameters; lists and dicts count as their members,
    because nobody calls them."""
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from outermost_callables(child)
        else:
            yield child


def register(registry: Any, strategy: Callable[..., Any]) -> None:
    """Register the names of `REGISTERED`; a later call overrides them."""
    for name, options in REGISTERED.items():
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        registry.register(
            name, strategy, description=f"Gemini ({given or 'auto'})", override=True, **options
        )
