"""State of a module and its optimizer as runs, to save and to load.

`sharded_runs` names those of a wrapped module, `plain.plain_runs` those of a plain module whose
optimizer is ours; `RunState` is one of them, or all of the stages of a pipeline that this process
has. State on disk is read and written one block at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from gemini.checkpoint.format.boxes import FlatRun, Region, StreamedRuns
from gemini.checkpoint.format.manifest import CheckpointError
from gemini.checkpoint.format.source import RunFiller
from gemini.chunk.layout import ShardSegment, saved_params
from gemini.chunk.local import region_of
from gemini.ddp import GeminiDDP
from gemini.dtypes import BYTES, DTYPES
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.disk.state_version import StateVersion
from gemini.optim.state.state_stream import StateRun, StateSource, StateStream, StateVisitor
from gemini.optim.target import Shared
from gemini.runtime.step.target import ShardTarget
from gemini.saved_names import peeled
from gemini.units import BLOCK_NUMEL

from .keys import Keys

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H")
SmallState = Mapping[str, Mapping[str, Tensor]]  # by parameter and plane
RunVisitor = Callable[[str, Region, int, Tensor], None]  # (key, region, first element of it, [n])


class WeightStream(Generic[H]):
    """Runs of weights of which no state has a master, at most a block each; their plane is
    `MASTER`, too.

    names[i]: of parameter i. segments: of each flat tensor. flat: that tensor, in the dtype of the
    checkpoint. put: takes it back after it was filled.
    """

    def __init__(
        self,
        names: Sequence[str],
        segments: Sequence[tuple[H, Sequence[ShardSegment]]],
        flat: Callable[[H], Tensor],
        put: Callable[[H, Tensor], None] = lambda home, values: None,
    ) -> None:
        self._segments = [(home, parts) for home, parts in segments if parts]
        self._names, self._flat, self._put = names, flat, put

    def runs(self) -> list[StateRun]:
        """Runs as `visit` shows them, without values."""
        found = []
        for _, segments in self._segments:
            end = max(part.offset + part.numel for part in segments)
            found += self._runs_of(segments, torch.empty(end, device="meta"))
        return found

    def visit(self, look: StateVisitor) -> None:
        """Show every run."""
        for home, segments in self._segments:
            for run in self._runs_of(segments, self._flat(home)):
                look(run)

    @torch.no_grad()
    def fill(self, source: StateSource, *, whole: bool = False) -> None:
        """Ask `source` to fill every run."""
        for home, segments in self._segments:
            values = self._flat(home)
            for run in self._runs_of(segments, values):
                source(run)
            self._put(home, values)

    def _runs_of(self, segments: Sequence[ShardSegment], flat: Tensor) -> list[StateRun]:
        names = self._names
        return [
            StateRun(names[part.param], MASTER, part.param_offset + first, values)
            for part in segments
            for first in range(0, part.numel, BLOCK_NUMEL)
            for values in [flat[part.offset + first :][: min(BLOCK_NUMEL, part.numel - first)]]
        ]


@dataclass(frozen=True, slots=True)
class ModuleRuns:
    """Runs of one module's weights, and of its optimizer's state, that this process has.

    names: of every parameter; a tied one has several.
    regions: of every parameter, by its first name: all of it, unless torch has split it.
    weights: of parameters without an fp32 master; one with a master is saved as that master.
    dtypes: of every weight without a master, by the parameter's name.
    whole: returns state that every process has whole, by the name of an optimized parameter, as in
        torch's optimizers: `step`, [] fp32, and lines of matrices.
    silent: parameters whose runs another rank shows.
    filled: called once all runs have their new values.
    """

    names: Sequence[tuple[str, ...]]
    regions: Mapping[str, Region]
    buffers: Mapping[str, Tensor]
    weights: WeightStream[Any]
    states: Sequence[StateStream]
    dtypes: Mapping[str, torch.dtype]
    whole: Callable[[], SmallState]
    silent: frozenset[str] = frozenset()
    filled: Callable[[], None] = lambda: None

    @property
    def streams(self) -> Sequence[WeightStream[Any] | StateStream]:
        return [self.weights, *self.states]


class RunState:
    """Runs of this process under the keys of a checkpoint: of a module, or of stages of a pipeline.

    A checkpoint of a pipeline has the whole model: each rank streams the runs of its parts, under
    the names that their parameters have in the whole model. So it loads at any number of stages.

    shapes: of every parameter, whole, by its first name.
    tensors: this process's runs by key.
    on_other_ranks: names that other ranks have, of other parts.
    """

    on_other_ranks: frozenset[str] = frozenset()

    def __init__(
        self,
        modules: Sequence[ModuleRuns],
        keys: Keys,
        *,
        with_optimizer: bool,
        with_weights: bool = True,
    ) -> None:
        """with_weights: False for modules that give no buffers, runs or dtypes of weights."""
        self.modules, self._keys = modules, keys
        self._with_optimizer, self._with_weights = with_optimizer, with_weights
        self.names = [names for module in modules for names in module.names]
        self.buffers = _merged([module.buffers for module in modules])
        regions = _merged([module.regions for module in modules])
        self.shapes = {name: torch.Size(region.shape) for name, region in regions.items()}
        found: dict[str, tuple[Region, torch.dtype]] = {}
        planes: dict[str, None] = {}
        for module in modules:
            for name, dtype in module.dtypes.items():
                found[keys.weight(name)] = module.regions[name], dtype
            for name, plane in (column for one in module.states for column in one.columns()):
                planes[plane.name] = None
                if self._has(plane.name):
                    key = self._key(name, plane.name)
                    found[key] = module.regions[name], DTYPES[plane.dtype]
        self.planes = tuple(name for name in planes if name != MASTER)
        runs: dict[str, list[FlatRun]] = {}
        order: dict[str, list[int]] = {}
        for place, (key, run) in enumerate(self._keyed()):
            runs.setdefault(key, []).append((run.start, run.values.numel()))
            order.setdefault(key, []).append(place)
        self.tensors = {
            key: StreamedRuns(region, dtype, tuple(runs.get(key, ())), tuple(order.get(key, ())))
            for key, (region, dtype) in found.items()
        }

    def _keyed(self) -> Iterator[tuple[str, StateRun]]:
        """(key, run without values) of all, in the order in which `visit` shows them."""
        for module in self.modules:
            for run in (run for stream in module.streams for run in stream.runs()):
                if (key := self._key_of(module, run)) is not None:
                    yield key, run

    @property
    def nbytes(self) -> int:
        """Bytes of all runs of this rank."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def num_items(self) -> int:
        """Upper bound of the number of boxes of all runs."""
        return sum(tensor.most_boxes for tensor in self.tensors.values())

    @property
    def aliases(self) -> dict[str, str]:
        """Key of a tied name -> key under which the parameter is saved."""
        return {
            self._keys.weight(alias): self._keys.weight(first)
            for first, *others in self.names
            for alias in others
            if self._with_weights
        }

    def small_state(self) -> SmallState:
        """State that every process has whole; see `ModuleRuns`."""
        return _merged([module.whole() for module in self.modules])

    def set_small_state(self, state: SmallState) -> None:
        """Copy `state` into `small_state`; parameters without an entry keep theirs."""
        for module in self.modules:  # two stages may have copies of one weight
            for name, whole in module.whole().items():
                for plane, value in state.get(name, {}).items():
                    whole[plane].copy_(value)

    # -- out --

    def visit(self, look: RunVisitor) -> None:
        """Show every run, state on disk a block at a time. The visitor copies values it keeps."""
        for module in self.modules:
            for stream in module.streams:
                stream.visit(self.visitor(module, look))

    def visit_weights(self, look: RunVisitor) -> None:
        """Show the runs of weights without a master."""
        for module in self.modules:
            module.weights.visit(self.visitor(module, look))

    def snapshot(self) -> Snapshot:
        """Snapshot of this state, to be shown while training continues."""
        return Snapshot(self)

    def visitor(self, module: ModuleRuns, look: RunVisitor) -> StateVisitor:
        """Visitor of a module's streams that shows their runs to `look`."""

        def show(run: StateRun) -> None:
            if (key := self._key_of(module, run)) is not None:
                look(key, module.regions[run.name], run.start, run.values)

        return show

    def _has(self, plane: str) -> bool:
        return self._with_weights if plane == MASTER else self._with_optimizer

    def _key_of(self, module: ModuleRuns, run: StateRun) -> str | None:
        """Key under which a run is saved; None: it is not."""
        shows = run.name not in module.silent and self._has(run.plane)
        return self._key(run.name, run.plane) if shows else None

    def _key(self, name: str, plane: str) -> str:
        return self._keys.weight(name) if plane == MASTER else self._keys.plane(name, plane)

    def visit_pinned(
        self, version: StateVersion, look: Callable[[str, Region, StateRun, int], None]
    ) -> None:
        """Show every run of the state, without values, with the byte at which it begins in a
        version."""
        (module,) = self.modules
        (stream,) = module.states
        for run, at in stream.places(version):
            if (key := self._key_of(module, run)) is not None:
                look(key, module.regions[run.name], run, at)

    # -- back --

    def fill(self, put: RunFiller, given: Set[str] = frozenset()) -> None:
        """Ask `put` for every run; runs that it does not have stay. Weights follow masters.

        given: keys of which `put` has every run.
        """
        for module in self.modules:
            for stream in module.streams:
                # A load that replaces all state need not read the old state from disk first.
                whole = {self._key_of(module, run) for run in stream.runs()} <= given
                stream.fill(self._source(module, put), whole=whole)
            module.filled()

    def _source(self, module: ModuleRuns, put: RunFiller) -> StateSource:
        def source(run: StateRun) -> None:
            if (key := self._key_of(module, run)) is not None:
                put(key, run.start, run.values)

        return source


class Snapshot:
    """State at the moment when this was made, readable while training continues. Close it."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._pins = [(m, stream, stream.pin()) for m in state.modules for stream in m.states]

    def visit_memory(self, look: RunVisitor) -> None:
        """Show all runs that the next step changes in place: weights, and state in memory."""
        self._state.visit_weights(look)
        for module, stream, _ in self._pins:
            stream.visit_memory(self._state.visitor(module, look))

    def visit_disk(self, look: RunVisitor) -> None:
        """Show state on disk, whose version is kept until then. Any thread may call."""
        for module, stream, pin in self._pins:
            if pin is not None:
                stream.visit(self._state.visitor(module, look), pin)

    def close(self) -> None:
        """Let go of what was not shown. Any number of times."""
        for *_, pin in self._pins:
            if pin is not None:
                pin.close()


def sharded_runs(
    model: GeminiDDP,
    optimizer: TieredOptimizer | None,
    *,
    weights: bool = True,
    once: bool = False,
) -> ModuleRuns:
    """Runs of a wrapped module and its optimizer on this rank. Nothing is gathered.

    optimizer: None for weights alone, as masters if the module has an optimizer, else as fp32
        originals.
    weights: False leaves weights and masters out.
    once: True for a save: one of the ranks that have the same shard shows it.
    """
    engine = model.engine
    if optimizer is not None:
        optimizer.bind_to(engine.params)
    engine.write_back_changes()
    target, layout = engine.target, engine.layout
    # an opaque base is in no checkpoint: only its digest is, see `save.base_of`
    regions = {
        spec.name: Region(*region_of(param))
        for spec, param in zip(layout.params, engine.params, strict=True)
        if spec.form is None
    }
    if once and weights:
        engine.weights.warn_rounded_once()
    has_masters = target is not None and target.has_master
    chunks = [chunk for chunk in engine.chunks if chunk.spec.dtype != BYTES]
    shown = [chunk for chunk in chunks if chunk.counts or not once]
    bare = [chunk for chunk in shown if weights and not (has_masters and chunk.spec.trainable)]
    dtypes: dict[str, torch.dtype] = {}
    for chunk in chunks if weights else ():
        dtype = torch.float32 if chunk.spec.id in engine.originals else chunk.dtype
        names = [layout.params[slot.param].name for slot in chunk.spec.slots]
        dtypes |= dict.fromkeys(names, dtype)
    silent = {
        layout.params[slot.param].name
        for chunk in chunks
        if chunk not in shown
        for slot in chunk.spec.slots
    }

    def whole() -> SmallState:
        if target is None:
            return {}
        found: Mapping[Any, dict[str, Tensor]] = target.state_views()
        by_name = {target.names[id(param)]: state for param, state in found.items()}
        # a copy of a tied weight: another stage shows it
        return {n: state for n, state in by_name.items() if n in regions and n not in silent}

    def filled() -> None:
        # Payloads that are gathered still have the values from before the load.
        engine.manager.release_all()
        engine.shards_changed()

    return ModuleRuns(
        names=[spec.names for spec in layout.params if spec.form is None],
        regions=regions,
        buffers=dict(model.saved_tensors()) if weights else {},
        weights=WeightStream(
            [spec.name for spec in layout.params],
            [(chunk, layout.shard_segments(chunk.spec, chunk.rank)) for chunk in bare],
            engine.weights.without_master,
            engine.weights.set_without_master,
        ),
        states=[] if target is None else target.streams(target.names),
        dtypes=dtypes,
        whole=whole,
        silent=frozenset(silent),
        filled=filled,
    )


def inside(model: nn.Module) -> nn.Module:
    """Wrapped module that torch.compile or the like is around; any other module as it is."""
    inner = peeled(model)
    return inner if isinstance(inner, GeminiDDP) else model


def parts_of(model: nn.Module) -> list[GeminiDDP]:
    """Wrapped modules of this process: `model` itself, or the parts in an `nn.ModuleList`."""
    if isinstance(model, GeminiDDP):
        return [model]
    if isinstance(model, nn.ModuleList):
        parts = [part for part in model if isinstance(part, GeminiDDP)]
        if parts and len(parts) == len(model) and all(p.engine.together for p in parts):
            return parts
    return []


def alone(changes: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function of a model and an optimizer; see `ParameterOwner`."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def taking_turns(*args: P.args, **kwargs: P.kwargs) -> R:
            given = (*args, *kwargs.values())
            models = [one for one in given if isinstance(one, nn.Module)]
            shared: list[Shared] = [part for model in models for part in parts_of(inside(model))]
            shared += [one for one in given if isinstance(one, TieredOptimizer)]
            if not shared:
                return function(*args, **kwargs)
            with shared[0]._turns:  # the others have the same lock
                for one in shared if changes else ():
                    one._refuse_beside_pass(changes)
                return function(*args, **kwargs)

        return taking_turns

    return decorated


def _merged(found: Sequence[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in found for name, value in part.items()}


def check_parts(parts: Sequence[GeminiDDP], optimizer: TieredOptimizer) -> None:
    """Raise CheckpointError if the optimizer has other parts of a pipeline."""
    stepped = {
        id(target.sharding)
        for target in optimizer.targets
        if isinstance(target, ShardTarget) and target.joint is not None
    }
    if stepped != {id(part.engine.sharding) for part in parts}:
        raise CheckpointError(
            f"the optimizer is over {len(stepped)} parts of a pipeline, and {len(parts)} were "
            "given, not all the same; give all parts of this process: nn.ModuleList([part, ...])"
        )


def _named(model: nn.Module) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """Parameters with all their names, in registration order."""
    if isinstance(model, GeminiDDP):
        engine = model.engine
        specs = engine.layout.params
        return [(p, spec.names) for p, spec in zip(engine.params, specs, strict=True)]
    if isinstance(model, nn.ModuleList) and all(isinstance(part, GeminiDDP) for part in model):
        return [named for part in model for named in _named(part)]
    return saved_params(model)


def names_of(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of every parameter, in registration order; a tied one has several."""
    return [names for _, names in _named(model)]


def first_names(model: nn.Module) -> dict[int, str]:
    """First name of every parameter, by the parameter's id()."""
    return {id(param): names[0] for param, names in _named(model)}
