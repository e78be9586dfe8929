"""State of a module and its optimizer as runs, to save and to load.

`RunState` is the base; `ShardedState` is for a wrapped module, `StagesState` for the parts of a
pipeline, `plain.PlainRuns` for a plain module whose optimizer is ours. State on disk is read and
written one block at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from gemini.checkpoint.dcp.boxes import FlatRuns, Region
from gemini.checkpoint.dcp.reader import RunFiller
from gemini.checkpoint.format.manifest import CheckpointError
from gemini.chunk.layout import ShardSegment, saved_params
from gemini.chunk.local import region_of
from gemini.ddp import GeminiDDP
from gemini.dtypes import BYTES, DTYPES
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.disk.state_version import StateVersion
from gemini.optim.state.state_stream import StateRun, StateSource, StateStream, StateVisitor
from gemini.optim.target import Shared
from gemini.runtime.inspect.weights import (
    set_without_master,
    tell_rounded_once,
    weights_without_master,
)
from gemini.runtime.step.target import ShardTarget
from gemini.saved_names import peeled
from gemini.units import BLOCK_NUMEL

from .keys import Keys

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H")
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


class RunState:
    """One process's part of a module and its optimizer: runs of weights, runs of planes.

    A weight with an fp32 master in the optimizer is saved as that master, and has no run of its
    own. Subclasses know where the other weights are.
    """

    names: Sequence[tuple[str, ...]]  # of every parameter; a tied one has several
    shapes: Mapping[str, torch.Size]  # of every parameter, whole, by its first name
    buffers: Mapping[str, Tensor]
    on_other_ranks: frozenset[str] = frozenset()  # names that other ranks have, of other parts

    def __init__(
        self,
        keys: Keys,
        weights: WeightStream[Any],
        states: Sequence[StateStream],
        dtypes: Mapping[str, torch.dtype],
        *,
        with_optimizer: bool,
        with_weights: bool = True,
        silent: Collection[str] = (),
    ) -> None:
        """Describe the runs of `weights` and `states` as tensors for DCP.

        dtypes: of every weight without a master, by the parameter's name.
        silent: parameters whose runs another rank shows.
        with_weights: False for subclasses that give no buffers, runs or dtypes of weights.
        """
        self._keys = keys
        self.weights, self.states = weights, states
        self._with_optimizer = with_optimizer
        self._with_weights = with_weights
        self._silent = frozenset(silent)
        columns = [column for stream in states for column in stream.columns()]
        names = dict.fromkeys(plane.name for _, plane in columns)
        self.planes = tuple(name for name in names if name != MASTER)
        found = {keys.weight(name): dtype for name, dtype in dtypes.items()}
        found |= {
            self._key(name, plane.name): DTYPES[plane.dtype]
            for name, plane in columns
            if self._has(plane.name)
        }
        by_key: dict[str, list[tuple[int, int, int]]] = {}  # (start, numel, place in the stream)
        place = 0
        for run in [run for stream in self._streams for run in stream.runs()]:
            if (key := self._key_of(run)) is not None:
                by_key.setdefault(key, []).append((run.start, run.values.numel(), place))
                place += 1
        region_of_key = {
            self._key(name, plane): self.region(name)
            for name in self.shapes
            for plane in (MASTER, *self.planes)
        }
        self.tensors = {
            key: FlatRuns(
                region_of_key[key],
                dtype,
                [(start, numel) for start, numel, _ in by_key.get(key, ())],
                [place for _, _, place in by_key.get(key, ())],
            )
            for key, dtype in found.items()
        }

    @property
    def _streams(self) -> Sequence[WeightStream[Any] | StateStream]:
        return [self.weights, *self.states]

    def region(self, name: str) -> Region:
        """Region of a parameter in this process: all of it, unless torch has split it."""
        return Region.whole(self.shapes[name])

    @property
    def nbytes(self) -> int:
        """Bytes of all runs of this rank."""
        return sum(
            numel * tensor.dtype.itemsize
            for tensor in self.tensors.values()
            for _, numel in tensor.runs
        )

    @property
    def num_items(self) -> int:
        """Upper bound of the number of boxes of all runs."""
        return sum(
            len(tensor.runs) * max(1, 2 * tensor.ndim - 1) * tensor.region.num_boxes
            for tensor in self.tensors.values()
        )

    @property
    def aliases(self) -> dict[str, str]:
        """Key of a tied name -> key under which the parameter is saved."""
        return {
            self._keys.weight(alias): self._keys.weight(first)
            for first, *others in self.names
            for alias in others
            if self._with_weights
        }

    def small_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """State that every process has whole, by the name of an optimized parameter, as in torch's
        optimizers: `step`, [] fp32, and lines of matrices."""
        raise NotImplementedError

    def set_small_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy `state` into `small_state`; parameters without an entry keep theirs."""
        for name, whole in self.small_state().items():
            for plane, value in state.get(name, {}).items():
                whole[plane].copy_(value)

    # -- out --

    def visit(self, look: RunVisitor) -> None:
        """Show every run, state on disk a block at a time. The visitor copies values it keeps."""
        for stream in self._streams:
            stream.visit(self.shown(look))

    def snapshot(self) -> Snapshot:
        """Snapshot of this state, to be shown while training continues."""
        return Snapshot([self])

    def shown(self, look: RunVisitor) -> StateVisitor:
        """Visitor of streams that shows their runs to `look`."""

        def show(run: StateRun) -> None:
            if (key := self._key_of(run)) is not None:
                look(key, self.region(run.name), run.start, run.values)

        return show

    def _has(self, plane: str) -> bool:
        return self._with_weights if plane == MASTER else self._with_optimizer

    def _key_of(self, run: StateRun) -> str | None:
        """Key under which a run is saved; None: it is not."""
        shows = run.name not in self._silent and self._has(run.plane)
        return self._key(run.name, run.plane) if shows else None

    def _key(self, name: str, plane: str) -> str:
        return self._keys.weight(name) if plane == MASTER else self._keys.plane(name, plane)

    def visit_pinned(
        self, version: StateVersion, look: Callable[[str, Region, StateRun, int], None]
    ) -> None:
        """Show every run of the state, without values, with the byte at which it begins in a
        version."""
        (stream,) = self.states
        for run, at in stream.places(version):
            if (key := self._key_of(run)) is not None:
                look(key, self.region(run.name), run, at)

    # -- back --

    def fill(self, put: RunFiller, given: Set[str] = frozenset()) -> None:
        """Ask `put` for every run; runs that it does not have stay. Weights follow masters.

        given: keys of which `put` has every run.
        """

        def source(run: StateRun) -> None:
            if (key := self._key_of(run)) is not None:
                put(key, run.start, run.values)

        for stream in self._streams:
            # A load that replaces all state need not read the old state from disk first.
            stream.fill(source, whole={self._key_of(run) for run in stream.runs()} <= given)


class Snapshot:
    """States at the moment when this was made, readable while training continues. Close it."""

    def __init__(self, states: Sequence[RunState]) -> None:
        self._states = states
        self._pins = [(s, stream, stream.pin()) for s in states for stream in s.states]

    def visit_memory(self, look: RunVisitor) -> None:
        """Show all runs that the next step changes in place: weights, and state in memory."""
        for state in self._states:
            state.weights.visit(state.shown(look))
            for stream in state.states:
                stream.visit_memory(state.shown(look))

    def visit_disk(self, look: RunVisitor) -> None:
        """Show state on disk, whose version is kept until then. Any thread may call."""
        for state, stream, pin in self._pins:
            if pin is not None:
                stream.visit(state.shown(look), pin)

    def close(self) -> None:
        """Let go of what was not shown. Any number of times."""
        for *_, pin in self._pins:
            if pin is not None:
                pin.close()


class ShardedState(RunState):
    """One rank's part of a wrapped module and its optimizer. Nothing is gathered.

    optimizer: None saves and loads weights alone, as masters if the module has an optimizer, else
        as fp32 originals.
    weights: False leaves weights and masters out.
    once: True for a save: one of the ranks that have the same shard shows it.
    """

    def __init__(
        self,
        model: GeminiDDP,
        optimizer: TieredOptimizer | None,
        keys: Keys,
        *,
        weights: bool = True,
        once: bool = False,
    ) -> None:
        engine = model.engine
        if optimizer is not None:
            optimizer.bind_to(engine)
        engine.write_back_changes()
        self._engine = engine
        self._target = engine.target
        layout = engine.layout
        # an opaque base is in no checkpoint: only its digest is, see `save.base_of`
        self.names = [spec.names for spec in layout.params if spec.form is None]
        self._regions = {
            spec.name: Region(*region_of(param))
            for spec, param in zip(layout.params, engine.params, strict=True)
            if spec.form is None
        }
        self.shapes = {name: torch.Size(region.shape) for name, region in self._regions.items()}
        self.buffers = dict(model.saved_tensors()) if weights else {}
        if once and weights:
            tell_rounded_once(engine)
        has_masters = self._target is not None and self._target.has_master
        chunks = [chunk for chunk in engine.chunks if chunk.spec.dtype != BYTES]
        shown = [chunk for chunk in chunks if chunk.counts or not once]
        bare = [chunk for chunk in shown if weights and not (has_masters and chunk.spec.trainable)]
        dtypes: dict[str, torch.dtype] = {}
        for chunk in chunks if weights else ():
            dtype = torch.float32 if chunk.spec.id in engine.originals else chunk.dtype
            names = [layout.params[slot.param].name for slot in chunk.spec.slots]
            dtypes |= dict.fromkeys(names, dtype)
        super().__init__(
            keys,
            WeightStream(
                [spec.name for spec in layout.params],
                [(chunk, layout.shard_segments(chunk.spec, chunk.rank)) for chunk in bare],
                partial(weights_without_master, engine),
                partial(set_without_master, engine),
            ),
            [] if self._target is None else self._target.streams(self._target.names),
            dtypes,
            with_optimizer=optimizer is not None,
            with_weights=weights,
            silent={
                layout.params[slot.param].name
                for chunk in chunks
                if chunk not in shown
                for slot in chunk.spec.slots
            },
        )

    def region(self, name: str) -> Region:
        return self._regions[name]

    def small_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        target = self._target
        if target is None:
            return {}
        shown: Mapping[Any, dict[str, Tensor]] = target.shown_state()
        whole = {target.names[id(param)]: state for param, state in shown.items()}
        silent = self._silent  # a copy of a tied weight: another stage shows it
        return {n: state for n, state in whole.items() if n in self.shapes and n not in silent}

    def fill(self, put: RunFiller, given: Set[str] = frozenset()) -> None:
        super().fill(put, given)
        # Payloads that are gathered still have the values from before the load.
        self._engine.manager.release_all()
        self._engine.shards_changed()


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


class StagesState(RunState):
    """One process's parts of a pipeline and their optimizer: a `ShardedState` for each part.

    A checkpoint of a pipeline has the whole model: each rank streams the runs of its parts, under
    the names that their parameters have in the whole model. So it loads at any number of stages.
    """

    def __init__(
        self,
        parts: Sequence[GeminiDDP],
        optimizer: TieredOptimizer | None,
        keys: Keys,
        *,
        weights: bool,
        once: bool = False,
    ) -> None:
        """Raise CheckpointError if the optimizer has other parts."""
        if optimizer is not None:
            _check_parts(parts, optimizer)
        self._states = [
            ShardedState(part, optimizer, keys, weights=weights, once=once) for part in parts
        ]
        self._keys, self._with_weights = keys, weights
        self.names = [names for state in self._states for names in state.names]
        self.shapes: Mapping[str, torch.Size] = _merged([s.shapes for s in self._states])
        self.buffers: Mapping[str, Tensor] = _merged([s.buffers for s in self._states])
        self.planes = self._states[0].planes
        self.tensors: dict[str, FlatRuns] = {}
        before = 0  # runs in the stream
        for state in self._states:
            for key, tensor in state.tensors.items():
                order = [before + place for place in tensor.order]
                runs = tensor.runs
                if (other := self.tensors.get(key)) is not None:  # of a weight that stages tie
                    runs, order = other.runs + runs, [*other.order, *order]
                self.tensors[key] = FlatRuns(tensor.region, tensor.dtype, runs, order)
            before += sum(len(tensor.runs) for tensor in state.tensors.values())

    def small_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return _merged([state.small_state() for state in self._states])

    def set_small_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for part in self._states:  # two may have copies of one weight
            part.set_small_state(state)

    def visit(self, look: RunVisitor) -> None:
        for state in self._states:
            state.visit(look)

    def snapshot(self) -> Snapshot:
        return Snapshot(self._states)

    def fill(self, put: RunFiller, given: Set[str] = frozenset()) -> None:
        for state in self._states:
            state.fill(put, given)


def _merged(found: Sequence[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in found for name, value in part.items()}


def _check_parts(parts: Sequence[GeminiDDP], optimizer: TieredOptimizer) -> None:
    stepped = {
        id(target.parts)
        for target in optimizer.targets
        if isinstance(target, ShardTarget) and target.joint is not None
    }
    if stepped != {id(part.engine) for part in parts}:
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
