"""The optimizer state of an engine's shards as others see it: run by run, and as whole planes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gemini.optim.rules.state_layout import MASTER
from gemini.optim.state.pieces import Planes
from gemini.optim.state.space import Block
from gemini.optim.state.state_stream import BlockFiller, StateStream, inside
from gemini.runtime.step.weights import after_step, write_back_changes
from gemini.units import ChunkId

from .shard_blocks import Shards
from .shard_state import ShardState

if TYPE_CHECKING:
    from gemini.optim.state.disk.state_version import StateVersion


log = logging.getLogger("gemini")


class SavedShards(ShardState):
    """State and step counts of an engine's parameters, for saving and loading.

    Counts are the executor's, of all parameters on every rank; planes are those of this rank's
    shards.
    """

    # -- run by run --

    def streams(self, names: Mapping[int, str]) -> Sequence[StateStream]:
        """Stream of this rank's state. What is filled is followed by weights. Not collective."""
        slots = (slot for chunk in self._chunks for slot in chunk.spec.slots)
        own = [names[id(param)] for param in self._parts.params]
        params = [slot.param for slot in slots]
        return [StateStream(self.tiered_state, own, params, self._overwrite)]

    def pin_state(self, witness: Path) -> tuple[StateVersion, Callable[[], None]]:
        """Keep this rank's state on disk as it is now, while `witness` is there. Not collective.

        Returns its version, and what is to be called when the witness is there, or nobody will make
        it. Raises OSError where that cannot be said beside the store's files.
        """
        nvme = self.tiered_state.nvme
        assert nvme is not None
        pin = nvme.store.pin_last(witness)
        return nvme.version(pin.index), partial(nvme.store.versions.settle, pin)

    @contextmanager
    def _changing(self) -> Iterator[Shards]:
        """Context that changes masters, and shards with them: all of it or nothing."""
        self._parts.manager.release_all()
        shards = Shards(self._chunks)
        try:
            with self.shards_with_masters():
                yield shards
            shards.end()
        finally:
            after_step(self._parts)

    def _overwrite(self, fill: BlockFiller, whole: bool) -> None:
        """Overwrite all blocks. Weights follow the masters."""
        self._loading()
        with self._changing() as shards:

            def fill_and_follow(block: Block, planes: Planes) -> None:
                fill(block, planes)
                shards.follow_master(block, planes)

            self.tiered_state.overwrite(fill_and_follow, whole=whole)
        self._tiered_state.torn = None

    @torch.no_grad()
    def blend(self, plane: str, weights: Sequence[float]) -> None:
        """See `Target.blend`: masters where they are, and shards follow. Not collective."""
        write_back_changes(self._parts)
        shares = self._shares(weights)
        with self._changing() as shards:

            def move(block: Block, planes: Planes) -> None:
                exact = shards.exact(block, planes)
                for part in block.segments:
                    if shares[part.param]:
                        here = exact[inside(part)]
                        here.add_(planes[plane][inside(part)].sub(here).mul_(shares[part.param]))
                shards.follow(block, exact)

            self.tiered_state.overwrite(move)

    @torch.no_grad()
    def rewind(self, steps: int) -> None:
        """See `GeminiDDP.rewind`. Collective."""
        parts, steps_kept = self._parts, self.kept_steps
        write_back_changes(parts)
        state, error = self.tiered_state, None
        try:
            if steps_kept is None:
                raise RuntimeError(
                    "rewind() of an optimizer that keeps no steps; make it with "
                    "nvme_offload_fraction=1.0 and nvme=NvmeConfig(keep_versions=...)"
                )
            commits, memory = steps_kept.check(steps)
        except Exception as raised:
            error = raised
        raise_first(parts.comm.gather_objects(None if error is None else str(error)), error)
        assert steps_kept is not None
        parts.manager.release_all()
        try:
            shards = Shards(self._chunks)
            steps_kept.nvme.rewind(steps)
            state.visit(shards.follow_master)
            steps_kept.nvme.load_weights(commits, shards.follow)
            shards.end()
            steps_kept.put_back(memory, self._small_state)
            state.torn = None
        except BaseException as raised:
            state.torn = raised
            raise
        finally:
            after_step(parts)

    def _loading(self) -> None:
        self._was_loaded = True
        if self.kept_steps is not None:
            self.kept_steps.forget()

    # -- whole planes --

    def offloaded_state(self, cut: bool) -> Mapping[Tensor, dict[str, Tensor]]:
        """Whole planes of parameters in groups on rank 0, nothing elsewhere; or DTensors on every
        rank. Collective."""
        from .full_state import gather_state

        self._calls.meet("optimizer.state_dict()")
        whole = gather_state(self._parts, self.tiered_state, self._chunks, cut=cut)
        return {
            param: whole[self._names[i]]
            for i, param in enumerate(self._parts.params)
            if self._group_of[i] is not None and self._names[i] in whole
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Rank 0's whole planes and step counts; no weight changes. Collective."""
        comm = self._parts.comm
        if self.untouched and not comm.gather_objects(bool(state))[0]:
            return
        self._loading()
        self._load_planes(state)
        self._tiered_state.torn = None
        names = ("step", *self._rule.carried)
        whole = {
            i: {name: value for name, value in state[param].items() if name in names}
            for i, param in enumerate(self._parts.params)
            if param in state
        }
        self._load_small(comm.gather_objects(whole)[0])

    def _load_planes(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Rank 0's whole planes to all shards. Collective."""
        from .full_state import scatter_state

        parts = self._parts
        self._calls.meet("optimizer.load_state_dict()")
        by_name = {
            name: state[param]
            for param, name in zip(parts.params, self._names, strict=True)
            if param in state
        }
        shards, given = scatter_state(parts, self.tiered_state, self._chunks, by_name)

        write_back_changes(parts)
        other = self._of_other_weights(shards, {n for n, keys in given.items() if MASTER in keys})

        def fill(block: Block, planes: Planes) -> None:
            chunk = self._chunks[block.shard].spec.id
            for part in block.segments:
                at = slice(block.shard_offset + part.offset, None)
                param = self._names[part.param]
                for name in given.get(param, ()):
                    if name in planes and not (name == MASTER and param in other):
                        planes[name][inside(part)] = shards[chunk, name][at][: part.numel]

        self.tiered_state.overwrite(fill)

    def _of_other_weights(
        self, planes: Mapping[tuple[ChunkId, str], Tensor], given: Set[str]
    ) -> Set[str]:
        """Names of `given` whose masters in `planes` do not round to the weights that are there, on
        any rank: they are left out, since state moves no weight. Collective; rank 0 says so."""
        parts, found = self._parts, set[str]()
        if not (given and self.has_master):
            return found
        for chunk in self._chunks:
            masters = planes.get((chunk.spec.id, MASTER))
            if masters is None:
                continue
            weights = chunk.load_shard()
            differs = masters.to(weights.device, weights.dtype) != weights
            for part in parts.layout.shard_segments(chunk.spec, chunk.rank):
                if differs[part.offset : part.offset + part.numel].any():
                    found.add(self._names[part.param])
        found = set[str]().union(*parts.comm.gather_objects(found)) & given
        if found and parts.comm.rank == 0:
            log.warning(
                "optimizer.load_state_dict() left fp32 masters out that do not round to the "
                "weights that are there; load the weights that were saved with this state first "
                "(%d parameters, %s the first)",
                len(found),
                min(found),
            )
        return found


def raise_first(said: Sequence[str | None], error: BaseException | None) -> None:
    """This rank's own error, or one that says what the first that failed had."""
    if error is not None:
        raise error
    for rank, text in enumerate(said):
        if text is not None:
            raise RuntimeError(f"rank {rank}: {text}")
