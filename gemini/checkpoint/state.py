"""What a wrapped module and its optimizer have to save, as runs; and the way back.

The truth of a parameter is its fp32 master where it has one, its fp32 original before there is an
optimizer, and its shard else. Nothing is gathered: each rank shows and fills its own runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gemini.chunk.dtypes import DTYPES
from gemini.chunk.layout import ShardPart
from gemini.chunk.storage import Chunk
from gemini.runtime.engine import Engine
from gemini.units import BLOCK_NUMEL, ParamId
from optim.base import TieredOptimizer
from optim.state_layout import MASTER
from optim.state_stream import RunSpec, StateRun, StateSnapshot

from .keys import Keys
from .reader import Put
from .sharded import FlatRuns

Look = Callable[[str, torch.Size, int, Tensor], None]  # (key, shape, first element, [n])


@dataclass(frozen=True, slots=True)
class _WeightRun:
    """A run whose truth lies in a chunk's shard."""

    name: str
    chunk: Chunk
    start: int  # in the parameter
    numel: int
    offset: int  # in the shard


class ShardedState:
    """One rank's part of a wrapped module and its optimizer.

    optimizer: None saves and loads weights alone, from and to masters where there are any.
    """

    def __init__(self, engine: Engine, optimizer: TieredOptimizer | None, keys: Keys) -> None:
        if optimizer is not None:
            optimizer.bind_to(engine)
        engine.adopt_changes()
        self._engine = engine
        self._keys = keys
        self._with_optimizer = optimizer is not None
        self._target = engine.target
        layout = engine.layout
        self.shapes = {spec.name: torch.Size(spec.shape) for spec in layout.params}
        self._runs: list[RunSpec] = []
        if self._target is not None:
            self._runs = [run for run in self._target.state_runs() if self._shows(run)]
        masters = {run.name for run in self._runs if run.plane == MASTER}
        has_masters = self._target is not None and self._target.has_master
        self._weights = [
            run
            for chunk in engine.chunks
            if not (has_masters and chunk.spec.trainable)
            for part in layout.shard_parts(chunk.spec, engine.comm.rank)
            for run in _cut(layout.params[part.param].name, chunk, part)
        ]
        assert not masters & {run.name for run in self._weights}
        self.tensors = self._describe()

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
        """At most this many boxes."""
        return sum(
            len(tensor.runs) * max(1, 2 * tensor.ndim - 1) for tensor in self.tensors.values()
        )

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the optimizer's planes, without masters."""
        return tuple(dict.fromkeys(run.plane for run in self._runs if run.plane != MASTER))

    @property
    def aliases(self) -> dict[str, str]:
        """Key of a tied name -> key under which the parameter is saved."""
        return {
            self._keys.weight(alias): self._keys.weight(spec.name)
            for spec in self._engine.layout.params
            for alias in spec.aliases
        }

    # -- out --

    def visit(self, look: Look) -> None:
        """Show every run, state on disk a block at a time. What is to be kept is copied."""
        self._visit_weights(look)
        if self._target is not None:
            self._target.visit_state(self._shown(look))

    def snapshot(self) -> Snapshot:
        """The same as it is now, to be shown while training goes on."""
        inner = self._target.snapshot_state() if self._target is not None else None
        return Snapshot(self, inner)

    def _visit_weights(self, look: Look) -> None:
        for chunk, runs in groupby(self._weights, key=lambda run: run.chunk):
            original = self._engine.originals.get(chunk.spec.id)
            source = chunk.load_shard() if original is None else original
            for run in runs:
                values = source[run.offset : run.offset + run.numel]
                look(self._keys.weight(run.name), self.shapes[run.name], run.start, values)

    def _shown(self, look: Look) -> Callable[[StateRun], None]:
        def show(run: StateRun) -> None:
            if self._shows(run):
                look(self._key(run.name, run.plane), self.shapes[run.name], run.start, run.values)

        return show

    def _shows(self, run: RunSpec | StateRun) -> bool:
        return self._with_optimizer or run.plane == MASTER

    def _key(self, name: str, plane: str) -> str:
        return self._keys.weight(name) if plane == MASTER else self._keys.plane(name, plane)

    # -- back --

    @torch.no_grad()
    def fill(self, put: Put) -> None:
        """Ask `put` for every run; what it does not have stays. Weights follow masters."""
        engine = self._engine
        for chunk, runs in groupby(self._weights, key=lambda run: run.chunk):
            original = engine.originals.get(chunk.spec.id)
            shard = chunk.load_shard()
            source = shard if original is None else original
            for run in runs:
                values = torch.empty(run.numel, dtype=source.dtype)
                if put(self._keys.weight(run.name), run.start, values):
                    shard[run.offset : run.offset + run.numel].copy_(values)
                    if original is not None:
                        original[run.offset : run.offset + run.numel].copy_(values)
            chunk.store_shard(shard)
            if original is not None:
                engine.originals.put(chunk.spec.id, original)
        if self._target is not None:

            def source(run: StateRun) -> Tensor | None:
                if not self._shows(run):
                    return None
                values = torch.empty(run.values.shape, dtype=run.values.dtype)
                there = put(self._key(run.name, run.plane), run.start, values)
                return values if there else None

            self._target.fill_state(source)
        engine.manager.release_all()
        engine.after_step()

    def _describe(self) -> dict[str, FlatRuns]:
        """Every tensor by its key, also those of which this rank has nothing."""
        runs: dict[str, list[tuple[int, int]]] = {}
        order: dict[str, list[int]] = {}
        dtypes: dict[str, torch.dtype] = {}
        engine = self._engine
        for number, spec in enumerate(engine.layout.params):
            chunk = engine.chunks[engine.chunk_of[ParamId(number)]]
            original = engine.originals.get(chunk.spec.id)
            dtypes[self._keys.weight(spec.name)] = (
                original.dtype if original is not None else chunk.dtype
            )
            if self._target is not None and chunk.spec.trainable:
                for plane in self._target.planes:
                    if self._with_optimizer or plane.name == MASTER:
                        dtypes[self._key(spec.name, plane.name)] = DTYPES[plane.dtype]
        listed = [(self._keys.weight(run.name), run.start, run.numel) for run in self._weights]
        listed += [(self._key(run.name, run.plane), run.start, run.numel) for run in self._runs]
        for place, (key, start, numel) in enumerate(listed):
            runs.setdefault(key, []).append((start, numel))
            order.setdefault(key, []).append(place)
        planes = self._target.planes if self._target is not None else ()
        shapes = {
            key: shape
            for name, shape in self.shapes.items()
            for key in (
                self._keys.weight(name), *(self._keys.plane(name, p.name) for p in planes)
            )
        }  # fmt: skip
        return {
            key: FlatRuns(shapes[key], dtype, runs.get(key, ()), order.get(key, ()))
            for key, dtype in dtypes.items()
        }


class Snapshot:
    """See `ShardedState.snapshot`."""

    def __init__(self, state: ShardedState, inner: StateSnapshot | None) -> None:
        self._state = state
        self._inner = inner

    def visit_memory(self, look: Look) -> None:
        """What the next step changes in place."""
        self._state._visit_weights(look)
        if self._inner is not None:
            self._inner.visit_resident(self._state._shown(look))

    def visit_disk(self, look: Look) -> None:
        """What keeps its version until it was shown; in any thread."""
        if self._inner is not None:
            self._inner.visit_disk(self._state._shown(look))

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


def _cut(name: str, chunk: Chunk, part: ShardPart) -> Iterator[_WeightRun]:
    """A segment in runs of at most a block."""
    for first in range(0, part.numel, BLOCK_NUMEL):
        numel = min(BLOCK_NUMEL, part.numel - first)
        yield _WeightRun(name, chunk, part.param_offset + first, numel, part.offset + first)


def step_counts(engine: Engine) -> Mapping[str, Tensor]:
    """0-d fp32 by parameter name, as torch's optimizers have them; what is optimized only."""
    target = engine.target
    if target is None:
        return {}
    shown: Mapping[Any, dict[str, Tensor]] = target.shown_state()
    return {target.names[id(param)]: state["step"] for param, state in shown.items()}
