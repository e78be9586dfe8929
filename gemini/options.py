"""Options of `GeminiDDP` in groups: frozen values that a project makes once and passes everywhere.

    bf16 = PrecisionPolicy("bf16", cast_buffers=True)
    model = GeminiDDP(module, precision=bf16, chunks=ChunkSearch(hidden_dim=4096))

Each field is an argument of `GeminiDDP` of the same name; its default, type and meaning are written
only here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from textwrap import indent
from typing import Any, ParamSpec, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.arguments import by_name, check_arguments
from gemini.chunk.sizing.search import ChunkConfiguration, search_chunk_configuration
from gemini.memtracer.module_calls import GatherWhole, has_experts
from gemini.memtracer.trace import Trace
from gemini.optim.rules.loss_scale import LossScale
from gemini.optim.rules.report import MOST_SKIPPED
from gemini.placement.policy import AutoPlacement, Placement, StaticPlacement
from gemini.runtime.memory.backend import Backend
from gemini.runtime.wrap.keep_fp32 import KeepFp32, find_fp32_modules, param_dtypes
from gemini.runtime.wrap.materialise import InitFn
from gemini.runtime.wrap.precision import (
    DTYPE_OF,
    PrecisionSettings,
    as_loss_scale,
    as_precision,
)
from gemini.runtime.wrap.specs import IgnoredParams, collect_params

P = ParamSpec("P")
T = TypeVar("T")


class Unasked(str):
    """A default that changes what a module gives back, and so is told to who did not ask for it."""


@by_name
@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Dtypes of computing, of communication and of masters, and the reaction to an overflow.

    precision: `"bf16"`, `"fp16"` or `"fp32"`, or that dtype of torch: dtype of parameters,
        activations and gradients. Floating inputs are cast to it; buffers keep their dtype, except
        in spectral norms. fp16 has a dynamic loss scale, and its outputs are cast to fp32. Where
        it is not given, a warning says that a module with fp32 parameters gives back bf16.
    keep_fp32: predicate of (qualified name, module): true for modules that stay in fp32 with all
        modules below them; their inputs and outputs are cast. Batch norms always stay in fp32,
        except with `cast_buffers`.
    cast_buffers: floating buffers are cast to the precision too.
    cast_inputs: False leaves floating tensors in the arguments as they are, such as timesteps and
        targets of a loss; modules then cast for themselves. True warns, once, if the cast changes a
        number in them: an integer, or one for each sample.
    force_outputs_fp32: floating outputs are cast to fp32.
    master_weights: fp32 masters for 16-bit weights, made from the original weights. Without them
        (bf16 only) an update is rounded at random, up or down, by `rounding_seed`, the step and the
        element: the same run has the same bits in every home of its state.
    keep_originals: frozen weights that came in fp32 and compute in 16 bits keep their fp32 values
        too, 4 bytes a parameter: `unwrap()`, state dicts and checkpoints then have these, and
        masters start from them after unfreezing. Without, all of these have the rounded values.
    communication_dtype: `"bf16"`, `"fp16"` or `"fp32"`: dtype of gradients between ranks; they have
        their own dtype before and after. None is that dtype: the precision, or fp32 for gradients
        that several backwards have added up.
    fp8_communication: parameters of that precision are gathered as float8 (e4m3), with one scale a
        parameter, and computing uses the gathered values; gradients, masters and checkpoints keep
        their dtype.
    loss_scale: options of the loss scale of fp16; None is `optim.LossScale()`, a number is a scale
        that never changes.
    on_nonfinite: a NaN or an Inf in a gradient of any rank makes all ranks skip the step, which
        changes nothing. So many skipped steps in a row raise `optim.NonFiniteGradientError`; in
        fp16 those count at which the loss scale falls no further. `"skip"`: none raise. `"raise"`:
        each raises (and every step is waited for).
    canonical: gradients of micro-batches are summed in one order: (ranks x backwards) of one
        product give the same bits at 1, 2, 4, ... ranks, micro-batch j of rank r being number
        j * W + r. It costs fp32 sums, a reduction in every backward, also under `no_sync` and in
        ZeRO-1, and a norm that the host waits for; see docs/numerics.md.

    Raises ValueError for options that exclude each other.
    """

    precision: str = Unasked("bf16")
    keep_fp32: KeepFp32 | None = None
    cast_buffers: bool = False
    cast_inputs: bool = True
    force_outputs_fp32: bool = False
    master_weights: bool = True
    keep_originals: bool = False
    rounding_seed: int = 0
    communication_dtype: str | None = None
    fp8_communication: bool = False
    loss_scale: LossScale | float | None = None
    on_nonfinite: int | str = MOST_SKIPPED
    canonical: bool = False

    def __post_init__(self) -> None:
        settings = self.settings()
        for name in ("precision", "communication_dtype"):
            if not isinstance(getattr(self, name), Unasked):
                object.__setattr__(self, name, getattr(settings, name))

    def settings(self, max_norm: float = 0.0, norm_type: float = 2.0) -> PrecisionSettings:
        """Settings of every step, with clipping. Raises ValueError."""
        return PrecisionSettings(
            precision=self.precision,
            max_norm=max_norm,
            norm_type=norm_type,
            loss_scale=as_loss_scale(self.loss_scale),
            on_nonfinite=self.on_nonfinite,
            master_weights=self.master_weights,
            rounding_seed=self.rounding_seed,
            communication_dtype=self.communication_dtype,
            fp8_communication=self.fp8_communication,
            canonical=self.canonical,
        )


@by_name
@dataclass(frozen=True, slots=True)
class ChunkSearch:
    """Bounds of the search for chunk capacities, or its result.

    search_range_m, hidden_dim, min_chunk_size_m: see `search_chunk_configuration`.
    chunks: an earlier result of that function for this module, with `dtype=` of the precision;
        nothing is searched then.
    """

    search_range_m: float | None = None
    hidden_dim: int | None = None
    min_chunk_size_m: float = 32
    chunks: ChunkConfiguration | None = None

    def of(self, module: nn.Module, precision: str = "bf16") -> ChunkConfiguration:
        """Result of the search for a module that computes in `precision`, but for what stays in
        fp32. Raises ValueError for an unknown precision, and as `GeminiDDP` for the module."""
        dtype = DTYPE_OF[as_precision(precision)]
        dtypes = param_dtypes(module, find_fp32_modules(module, None, cast_buffers=False), dtype)
        return search_chunk_configuration(
            collect_params(module, dtypes).specs,
            self.search_range_m,
            self.hidden_dim,
            self.min_chunk_size_m,
        )


@by_name
@dataclass(frozen=True, slots=True)
class Communication:
    """Ranks between which parameters, gradients and buffers travel, and the times when they do.

    process_group: None is the default group, or no group if torch.distributed is not set up.
    mesh: of all ranks, in place of a group. Parameters are sharded over one dimension (`"shard"`,
        `"fsdp"`, `"dp"`) and replicated over another (`"replicate"`, `"dp_replicate"`); torch has
        split some over further dimensions, such as experts over `"ep"`; see docs/meshes.md. A 1-D
        mesh is its group. With `"pp"` the module is a part of a pipeline, see `gemini.pipeline`,
        and is sharded over the other dimensions.
    max_prefetch: number of chunks that are gathered before their use.
    overlap_allgather: chunks that are never released (ZeRO-1 and 2) are gathered after a step while
        the next forward runs; each module waits for its own parameters.
    broadcast_buffers: every forward begins with rank 0's buffers on all ranks, as DDP's default.

    Raises ValueError for a number of chunks that is negative.
    """

    process_group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    max_prefetch: int = 1
    overlap_allgather: bool = False
    broadcast_buffers: bool = False

    def __post_init__(self) -> None:
        if self.max_prefetch < 0:
            raise ValueError(f"max_prefetch={self.max_prefetch} is negative; 0 does not prefetch")


@by_name
@dataclass(frozen=True, slots=True)
class Wrapping:
    """Initial values of a wrapped module, modules gathered as one, and ignored parameters.

    gather_whole: modules whose parameters are gathered all together, because the modules that run
        below them depend on data and so differ between ranks; by default those with a child
        `experts`.
    init_fn: initialises a module on the meta device that cannot do it itself; see
        `gemini.init_empty`.
    init_state_dict: values on rank 0 that replace those of the parameters.
    ignored_params: parameters, or a predicate of (qualified name, parameter), that are left as they
        are, as in FSDP2: in no chunk, plan or optimizer, not moved, cast or broadcast; their
        gradients are this rank's own. They are in state dicts; see docs/frozen.md.
    """

    gather_whole: GatherWhole = has_experts
    init_fn: InitFn | None = None
    init_state_dict: Mapping[str, Tensor] | None = None
    ignored_params: IgnoredParams | None = None


GROUPS = {
    "precision": PrecisionPolicy(),
    "chunks": ChunkSearch(),
    "communication": Communication(),
    "wrapping": Wrapping(),
}


_INSIDE = {
    one.name: f"{argument}={kind.__name__}({one.name}=...)"
    for argument, kind in (
        ("loss_scale", LossScale),
        ("placement_policy", StaticPlacement),
        ("placement_policy", AutoPlacement),
    )
    for one in fields(kind)
}


class Options(TypedDict, total=False):
    """Keywords of `GeminiDDP` beside its own, as editors and type checkers see them.

    They are the fields of `PrecisionPolicy`, `ChunkSearch`, `Communication` and `Wrapping`, where
    each is described. `precision`, `chunks`, `communication` and `wrapping` also take all fields
    of a class in one value.
    """

    precision: str | torch.dtype | PrecisionPolicy
    keep_fp32: KeepFp32 | None
    cast_buffers: bool
    cast_inputs: bool
    force_outputs_fp32: bool
    master_weights: bool
    keep_originals: bool
    rounding_seed: int
    communication_dtype: str | None
    fp8_communication: bool
    loss_scale: LossScale | float | None
    on_nonfinite: int | str
    canonical: bool
    chunks: ChunkConfiguration | ChunkSearch | None
    search_range_m: float | None
    hidden_dim: int | None
    min_chunk_size_m: float
    communication: Communication
    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    max_prefetch: int
    overlap_allgather: bool
    broadcast_buffers: bool
    wrapping: Wrapping
    gather_whole: GatherWhole
    init_fn: InitFn | None
    init_state_dict: Mapping[str, Tensor] | None
    ignored_params: IgnoredParams | None


class ModuleOptions(Options, total=False):
    """Keywords of what makes a `GeminiDDP` of a module that it makes, too."""

    device: torch.device | str | Backend | None
    placement_policy: str | Placement
    max_norm: float
    norm_type: float
    trace: Trace | None
    update: str


def takes_options(init: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a constructor with `**options: Unpack[Options]`.

    `inspect.signature` shows each option. Raises TypeError for an unknown one, with the name that
    was probably meant.
    """
    signature = inspect.signature(init)
    *own, _ = signature.parameters.values()
    grouped = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in GROUPS]
    shown = _with_fields(signature.replace(parameters=[*own, *grouped]), GROUPS)
    called = init.__qualname__.removesuffix(".__init__")

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        asked = [key for key in kwargs if key not in GROUPS]
        check_arguments(called, shown, args, asked, _INSIDE)
        return init(*args, **kwargs)

    checked.__signature__ = shown  # type: ignore[attr-defined]
    checked.whole_values = GROUPS.keys(), _INSIDE  # type: ignore[attr-defined]
    return checked


def groups_of(
    options: Options,
) -> tuple[PrecisionPolicy, ChunkSearch, Communication, Wrapping]:
    """The four groups, with given fields in place of defaults.

    Raises ValueError for a field together with a value that has it.
    """
    given = dict(options)
    precision, chunks, communication, wrapping = (
        _group(given, name, usual) for name, usual in GROUPS.items()
    )
    return precision, chunks, communication, wrapping


def takes_fields(**groups: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator of a function with frozen values as arguments: it also takes their fields.

    groups: parameter name -> default value, in which given fields are replaced. A value of its
        class is taken as it is.

    `inspect.signature` shows the fields. Raises ValueError for a field together with a value that
    has it.
    """

    def decorator(function: Callable[..., T]) -> Callable[..., T]:
        shown = _with_fields(inspect.signature(function), groups)
        places = [p.name for p in shown.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @wraps(function)
        def with_fields(*args: Any, **kwargs: Any) -> T:
            check_arguments(called, shown, args, [key for key in kwargs if key not in groups])
            given = dict(zip(places, args, strict=False))
            if given.keys() & kwargs.keys():
                shown.bind(*args, **kwargs)  # says what is wrong
            given |= kwargs
            for name, usual in groups.items():
                given[name] = _group(given, name, usual)
            return function(**given)

        with_fields.__signature__ = shown  # type: ignore[attr-defined]
        return with_fields

    return decorator


def _with_fields(signature: inspect.Signature, groups: dict[str, Any]) -> inspect.Signature:
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        usual = groups.get(parameter.name)
        parameters += (
            [parameter]
            if usual is None
            else [
                inspect.Parameter(
                    one.name, parameter.kind, default=getattr(usual, one.name), annotation=one.type
                )
                for one in fields(usual)
            ]
        )
    return signature.replace(parameters=parameters)


def _group(given: dict[str, Any], name: str, usual: Any) -> Any:
    """Value of one group; its fields are removed from `given`."""
    names = [one.name for one in fields(usual)]
    value = given.get(name)
    if not isinstance(value, type(usual)):
        if value is not None and name not in names:
            raise TypeError(f"{name}={value!r}; expected a {type(usual).__name__}")
        return replace(usual, **{one: given.pop(one) for one in names if one in given})
    for field in names:
        if field in given and field != name:
            kind = type(usual).__name__
            raise ValueError(
                f"{field}={given[field]!r} beside a {kind}, which has it; expected one of the "
                f"two: {kind}({field}=...)"
            )
    return value


def field_docs() -> str:
    """Descriptions of all fields, from the docstrings of the groups: their second paragraphs."""
    told = (inspect.getdoc(type(group)) or "" for group in GROUPS.values())
    fields = [text.split("\n\n")[1] for text in told]
    return indent("\n".join(fields), "    ") + "\n"
