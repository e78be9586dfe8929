"""State of a module and its optimizer as runs, to save and to load.

`RunState` is the base; `ShardedState` is for a wrapped module, `StagesState` for the parts of a
pipeline, `plain.PlainRuns` for a plain module whose optimizer is ours. State on disk is read and
written one block at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from gemini.checkpoint.dcp.boxes import FlatRuns, Region
from gemini.checkpoint.dcp.reader import RunFiller
from gemini.checkpoint.format.manifest import CheckpointError
from gemini.chunk.layout import saved_params
from gemini.chunk.local import region_of
from gemini.ddp import GeminiDDP
from gemini.dtypes import BYTES, DTYPES
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.state_stream import RunSpec, StateRun, StateSnapshot
from gemini.optim.target import Shared, Target
from gemini.runtime.inspect.weights import set_without_master, weights_without_master
from gemini.runtime.pipeline.joint_target import JointTarget
from gemini.runtime.step.state.saved_state import PinnedRuns
from gemini.saved_names import peeled
from gemini.units import BLOCK_NUMEL

from .keys import Keys

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
RunVisitor = Callable[[str, Region, int, Tensor], None]  # (key, region, first element of it, [n])


@dataclass(frozen=True, slots=True)
class WeightRun:
    """A run of a weight without a master, and its place in memory."""

    name: str
    start: int  # in the parameter
    numel: int
    home: Any  # key of a flat tensor; see `RunState._weights_at`
    offset: int  # in that tensor


@dataclass(frozen=True, slots=True)
class StatePart:
    """Optimizer state of some parameters."""

    target: Target
    names: Sequence[str]  # of its parameters, with those whose shards are in other processes
    name_of: Callable[[str], str]  # the target's name of a parameter -> its name here


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
        parts: Sequence[StatePart],
        weights: Sequence[WeightRun],
        dtypes: Mapping[str, torch.dtype],
        *,
        with_optimizer: bool,
        with_weights: bool = True,
        silent: Collection[str] = (),
    ) -> None:
        """Describe the runs of `parts` and `weights` as tensors for DCP.

        dtypes: of every weight without a master, by the parameter's name.
        silent: parameters whose runs another rank shows.
        with_weights: False for subclasses that give no buffers, runs or dtypes of weights.
        """
        self._keys = keys
        self._weights = weights
        self._parts = parts
        self._with_optimizer = with_optimizer
        self._with_weights = with_weights
        self._silent = frozenset(silent)
        runs = [
            replace(run, name=part.name_of(run.name))
            for part in parts
            for run in part.target.state_runs()
            if self._shows(run, part)
        ]
        planes = [plane.name for part in parts for plane in part.target.planes]
        some: dict[str, Collection[str]] = {}
        for part in parts:
            planes_of = part.target.some_planes
            some |= {part.name_of(name): only for name, only in planes_of.items()}
        self.planes = tuple(dict.fromkeys(plane for plane in planes if plane != MASTER))
        by_key: dict[str, list[tuple[int, int, int]]] = {}  # (start, numel, place in the stream)
        found = {keys.weight(name): dtype for name, dtype in dtypes.items()}
        found |= {
            self._key(name, plane.name): DTYPES[plane.dtype]
            for part in parts
            for name in part.names
            for plane in part.target.planes
            if (with_weights if plane.name == MASTER else with_optimizer)
            and plane.name in some.get(name, (plane.name,))
        }
        listed = [(keys.weight(run.name), run.start, run.numel) for run in weights]
        listed += [(self._key(run.name, run.plane), run.start, run.numel) for run in runs]
        for place, (key, start, numel) in enumerate(listed):
            by_key.setdefault(key, []).append((start, numel, place))
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
        self.visit_weights(look)
        for part in self._parts:
            part.target.visit_state(self.shown(part, look))

    def snapshot(self) -> Snapshot:
        """Snapshot of this state, to be shown while training continues."""
        return Snapshot([self])

    def snapshot_parts(self) -> list[tuple[StatePart, StateSnapshot]]:
        return [(part, part.target.snapshot_state()) for part in self._parts]

    def visit_weights(self, look: RunVisitor) -> None:
        """Show the weights without masters."""
        for home, runs in groupby(self._weights, key=lambda run: run.home):
            values = self._weights_at(home)
            for run in runs:
                mine = values[run.offset : run.offset + run.numel]
                look(self._keys.weight(run.name), self.region(run.name), run.start, mine)

    def _weights_at(self, home: Any) -> Tensor:
        """Flat tensor of weights at `home`, in the dtype of the checkpoint."""
        raise NotImplementedError

    def _set_weights(self, home: Any, values: Tensor) -> None:
        """Take back `values`, the tensor of `_weights_at`, after it was filled."""

    def shown(self, part: StatePart, look: RunVisitor) -> Callable[[StateRun], None]:
        def show(run: StateRun) -> None:
            if self._shows(run, part):
                name = part.name_of(run.name)
                look(self._key(name, run.plane), self.region(name), run.start, run.values)

        return show

    def _shows(self, run: RunSpec | StateRun, part: StatePart) -> bool:
        if part.name_of(run.name) in self._silent:
            return False
        return self._with_weights if run.plane == MASTER else self._with_optimizer

    def _key(self, name: str, plane: str) -> str:
        return self._keys.weight(name) if plane == MASTER else self._keys.plane(name, plane)

    def visit_pinned(
        self, pinned: PinnedRuns, look: Callable[[str, Region, RunSpec, int], None]
    ) -> None:
        """Show every pinned run of the state with the byte at which it begins."""
        (part,) = self._parts
        for run, at in pinned.runs:
            if self._shows(run, part):
                name = part.name_of(run.name)
                look(self._key(name, run.plane), self.region(name), run, at)

    # -- back --

    @torch.no_grad()
    def fill(self, put: RunFiller, given: Set[str] = frozenset()) -> None:
        """Ask `put` for every run; runs that it does not have stay. Weights follow masters.

        given: keys of which `put` has every run.
        """
        self._fill_weights(put)
        for part in self._parts:

            def key_of(run: RunSpec | StateRun, part: StatePart = part) -> str | None:
                name = part.name_of(run.name)
                return self._key(name, run.plane) if self._shows(run, part) else None

            def source(run: StateRun, key_of: Callable[[StateRun], str | None] = key_of) -> None:
                key = key_of(run)
                if key is not None:
                    put(key, run.start, run.values)

            # A load that replaces all state need not read the old state from disk first.
            whole = all(key_of(run) in given for run in part.target.state_runs())
            part.target.fill_state(source, whole=whole)

    def _fill_weights(self, put: RunFiller) -> None:
        for home, runs in groupby(self._weights, key=lambda run: run.home):
            there = self._weights_at(home)
            for run in runs:
                values = torch.empty(run.numel, dtype=there.dtype)
                if put(self._keys.weight(run.name), run.start, values):
                    there[run.offset : run.offset + run.numel].copy_(values)
            self._set_weights(home, there)


class Snapshot:
    """States at the moment when this was made, readable while training continues."""

    def __init__(self, states: Sequence[RunState]) -> None:
        self._states = [(state, state.snapshot_parts()) for state in states]

    def visit_memory(self, look: RunVisitor) -> None:
        """Show all runs that the next step changes in place: weights, and state in memory."""
        for state, parts in self._states:
            state.visit_weights(look)
            for part, snapshot in parts:
                snapshot.visit_resident(state.shown(part, look))

    def visit_disk(self, look: RunVisitor) -> None:
        """Show state on disk, whose version is kept until then. Any thread may call."""
        for state, parts in self._states:
            for part, snapshot in parts:
                snapshot.visit_disk(state.shown(part, look))

    def close(self) -> None:
        for _, parts in self._states:
            for _, snapshot in parts:
                snapshot.close()


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
        has_masters = self._target is not None and self._target.has_master
        chunks = [chunk for chunk in engine.chunks if chunk.spec.dtype != BYTES]
        shown = [chunk for chunk in chunks if chunk.counts or not once]
        bare = [chunk for chunk in shown if weights and not (has_masters and chunk.spec.trainable)]
        segments = [(c, part) for c in bare for part in layout.shard_segments(c.spec, c.rank)]
        dtypes: dict[str, torch.dtype] = {}
        trained: list[str] = []
        for chunk in chunks:
            dtype = torch.float32 if chunk.spec.id in engine.originals else chunk.dtype
            names = [layout.params[slot.param].name for slot in chunk.spec.slots]
            if weights:
                dtypes |= dict.fromkeys(names, dtype)
            trained += names if chunk.spec.trainable else []
        parts = []
        if self._target is not None:
            parts.append(StatePart(self._target, trained, lambda name: name))
        super().__init__(
            keys,
            parts,
            [
                run
                for chunk, part in segments
                for run in cut(
                    layout.params[part.param].name,
                    part.param_offset,
                    part.numel,
                    chunk,
                    part.offset,
                )
            ],
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

    def _weights_at(self, home: Any) -> Tensor:
        return weights_without_master(self._engine, home)

    def _set_weights(self, home: Any, values: Tensor) -> None:
        set_without_master(self._engine, home, values)


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
        id(owner)
        for target in optimizer.targets
        if isinstance(target, JointTarget)
        for owner in target.owners
    }
    if stepped != {id(part.engine) for part in parts}:
        raise CheckpointError(
            f"the optimizer is over {len(stepped)} parts of a pipeline, and {len(parts)} were "
            "given, not all the same; give all parts of this process: nn.ModuleList([part, ...])"
        )


def cut(name: str, start: int, numel: int, home: Any, offset: int) -> Iterator[WeightRun]:
    """Cut a run of a weight into runs of at most one block."""
    for first in range(0, numel, BLOCK_NUMEL):
        yield WeightRun(name, start + first, min(BLOCK_NUMEL, numel - first), home, offset + first)


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
