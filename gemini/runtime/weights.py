"""Weights of an engine between passes: who changes them, who follows, and their most exact form.

The most exact form is the optimizer's fp32 master; without one the fp32 original, from which the
master will start; without either the shard. User writes to the shard are in all three.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gemini.chunk.parameter import unwatch, watch
from gemini.chunk.storage import Chunk
from gemini.dtypes import BYTES
from gemini.placement.plan import Plan
from gemini.runtime.memory.originals import has_same_values
from gemini.runtime.memory.user_writes import UserWrites, refresh_master
from gemini.runtime.schedule.planning import PlanInUse
from gemini.runtime.schedule.regather import Regather
from gemini.runtime.schedule.updating import Updating
from gemini.units import ChunkId

from .passes import Passes
from .sharding import Sharding

if TYPE_CHECKING:
    from gemini.optim.state.parking import Parked

log = logging.getLogger("gemini")


class Attached(Protocol):
    """Optimizer's state, as the rest of an engine sees it; see `step.target`."""

    joint: Any  # what steps it with other modules; None: it steps alone

    @property
    def needs_wholes(self) -> bool:
        """Whether updates need more than one rank's part of a parameter."""
        ...

    @property
    def has_master(self) -> bool:
        """Whether state has fp32 weights."""
        ...

    @property
    def by_kernels(self) -> bool:
        """Whether kernels of a device update every element alike, in one pass."""
        ...

    @property
    def committed_step(self) -> int:
        """Step that files of state have; 0 where there are none."""
        ...

    def read_master(self, chunk: Chunk) -> Tensor:
        """Weights [S] fp32 of a trainable chunk's shard, as the optimizer has them."""
        ...

    def write_master(self, chunk: Chunk, values: Tensor) -> None:
        """Replace the weights of a trainable chunk's shard by `values` [S] fp32."""
        ...

    def settle(self) -> None:
        """Wait until the last step counts. Raises what ended it; then it is undone."""
        ...

    def refresh_masters(self, chunks: Set[ChunkId]) -> None:
        """Refresh masters from these shards, which the user wrote to."""
        ...

    def movable(self) -> Sequence[Tensor]:
        """Tensors of shards and state in memory, when nothing is under way."""
        ...

    def state_views(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Step counts by parameter."""
        ...

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Keep state of these chunks too, which were frozen."""
        ...

    def promote_state(self, plan: Plan) -> None:
        """Promote blocks of state to their homes in a plan."""
        ...

    def demote_state(self, plan: Plan) -> None:
        """Demote blocks of state to their homes in a plan."""
        ...

    def homes_changed(self) -> None:
        """Follow changed homes of shards and of state, also of chunks that are new."""
        ...

    def close(self, keep_masters: bool = True) -> None:
        """Remove files and threads."""
        ...


class Weights:
    """Weights of one engine. Between a step and the next gather the shards alone hold them.

    target: the optimizer's state, once there is one.
    parked: model data that `model.park` has moved; None: it is here.
    is_summoned: inside `summon_full_params`.
    viewed: chunks of which plain views left their modules since the last step.
    """

    def __init__(
        self,
        sharding: Sharding,
        in_use: PlanInUse,
        passes: Passes,
        *,
        keeping: Callable[[Chunk], None],
        overlap_allgather: bool,
    ) -> None:
        """keeping: sees a chunk that the user wrote to, before its shard follows."""
        self.sharding = sharding
        self._storage, self._manager = in_use.storage, in_use.manager
        self._ledger, self._passes = in_use.ledger, passes
        chunks, params, watches = sharding.chunks, sharding.params, sharding.all_gathered
        self.user_writes = UserWrites(params, keeping)
        self.regather = Regather(
            chunks, sharding.never_released, params, overlaps=overlap_allgather, watches=watches
        )
        self.updating = Updating(chunks, params, watches=watches)
        self.target: Attached | None = None
        self.parked: Parked | None = None
        self.is_summoned = False
        self.viewed: dict[ChunkId, None] = {}

    # -- the optimizer, and where they are --

    def attach(self, target: Attached | None) -> None:
        """Let an optimizer's state have the masters from now on; None: its state is closed."""
        self.target = target

    def settle(self) -> None:
        """Wait, before weights are read, until the last step counts, or is undone: raises its
        error."""
        self.refuse_parked()
        if self.target is not None:
            self.target.settle()

    def refuse_parked(self) -> None:
        """Raise RuntimeError where model data is not here."""
        if self.parked is not None:
            raise RuntimeError("model data is parked; call model.resume() first, on all ranks")

    def park(self, away: Parked) -> None:
        """Refuse reads from now on: model data has moved."""
        self.parked = away
        if self.sharding.all_gathered:  # nobody asks for what is never released
            for param in self.sharding.params:
                watch(param)

    def movable(self) -> list[Tensor]:
        """Tensors of all model data in memory, when nothing is under way."""
        self._manager.release_all()
        if self.target is None:
            found = [tensor for chunk in self.sharding.chunks for tensor in chunk.movable()]
        else:
            found = list(self.target.movable())
        for kept in (self._storage.originals, *self._storage.averages):
            found += kept.movable()
        if (marks := self._storage.changed) is not None:
            found += marks.bits.values()
        return found

    def is_back(self) -> None:
        """Give copies up: what was parked is back in its memory, on this rank."""
        away, self.parked = self.parked, None
        if self.sharding.all_gathered:
            for param in self.sharding.params:
                unwatch(param)
        if away is not None:
            away.close()

    # -- changes by the user and by a step --

    def take_replaced(self) -> None:
        """Write opaque parameters that their library has made anew, the same on all ranks."""
        layout = self.sharding.layout
        for param, one in self.sharding.opaque.items():
            new = one.take_back()
            if new is None:
                continue
            chunk, slot = self.sharding.place_of(param)
            shard = chunk.load_shard()
            for segment in layout.shard_segments(chunk.spec, chunk.rank):
                if segment.param == param:
                    start = segment.param_offset
                    own = shard[segment.offset : segment.offset + segment.numel]
                    own.copy_(new[start : start + segment.numel])
            chunk.store_shard(shard)
            if chunk.gathered:
                chunk.wait_gathered()
                chunk.view(chunk.payload, slot).copy_(new)

    def write_back_changes(self) -> None:
        """Make shards and masters follow what the user wrote to parameters."""
        self.settle()
        self.take_replaced()
        user_writes = self.user_writes
        self.regather.end()
        for chunk in self.sharding.chunks:
            if chunk.gathered:
                user_writes.write_back(chunk)
        if user_writes.stale and self.target is not None:
            self.target.refresh_masters(user_writes.stale)
            user_writes.stale.clear()

    def after_step(self, *, trained: bool = True) -> None:
        """Gather chunks again that stay gathered: all shards have changed, or only `trained`
        ones."""
        self.regather.begin(trained=trained)
        self.viewed.clear()

    def show(self, chunk: ChunkId) -> None:
        """Note that a plain view of a chunk's payload left its module."""
        self.viewed[chunk] = None

    @contextmanager
    def summoned(self, writeback: bool) -> Iterator[None]:
        """Gather all chunks and keep them so in the body; then shards follow writes, or not."""
        with self._passes.lock:
            self._passes.refuse_beside_pass("summon_full_params()")
            shards = self._summon(writeback)
        try:
            yield
        finally:
            with self._passes.lock:
                self._dismiss(shards)

    def _summon(self, writeback: bool) -> dict[Chunk, Tensor] | None:
        """Gather all chunks. Returns shards that are payloads, where writes are to be undone."""
        if self.is_summoned:
            raise RuntimeError("parameters are summoned already")
        self.write_back_changes()
        chunks = self.sharding.chunks
        everything = tuple(chunk.spec.id for chunk in chunks)
        self._ledger.stop_judging()  # it is the user who asks for all of it
        self._manager.pin(everything)
        self._manager.prepare(everything, in_cycle=False)
        shards = None if writeback else {c: c.shard.clone() for c in chunks if c.in_payload}
        self.is_summoned = True
        return shards

    def _dismiss(self, shards: Mapping[Chunk, Tensor] | None) -> None:
        """Release what was summoned. shards: those of before, where writes are undone."""
        self.is_summoned = False
        if shards is not None:
            for chunk in self.sharding.chunks:
                self.user_writes.forget(chunk)
                if chunk.in_payload:
                    chunk.shard.copy_(shards[chunk])
        self.write_back_changes()
        self._manager.release_all()
        self._ledger.judge_again()
        self.after_step(trained=False)

    # -- the most exact form --

    def master_of(self, chunk: Chunk) -> Tensor:
        """Copy of a chunk's weights, [S] fp32 on the CPU; of an opaque chunk its bytes."""
        if self.target is not None and chunk.spec.trainable:
            return self.target.read_master(chunk)
        dtype = torch.float32 if chunk.spec.dtype != BYTES else chunk.dtype
        return self.without_master(chunk).to("cpu", dtype, copy=True)

    def set_master(self, chunk: Chunk, values: Tensor) -> None:
        """Set a chunk's weights to `values` [S] fp32: the master or original, and the rounded
        shard."""
        if self.target is not None and chunk.spec.trainable:
            self.target.write_master(chunk, values)
        else:
            self.set_without_master(chunk, values)

    def exact_dtype(self, chunk: Chunk) -> torch.dtype:
        """Dtype in which a chunk's weights lose nothing: fp32 with masters or originals."""
        trained = self.target is not None and chunk.spec.trainable
        has_master = trained and self.sharding.precision_settings.master_weights
        in_fp32 = has_master or chunk.spec.id in self._storage.originals
        return torch.float32 if in_fp32 else chunk.dtype

    def full_chunk(self, chunk: Chunk) -> Tensor:
        """Masters of a chunk from all ranks, [S * W] fp32, on the device of collectives.
        Collective."""
        mine = self.master_of(chunk).to(self.sharding.comm.device)
        return self.sharding.links[chunk.spec.group].gather_for_all(mine, chunk.spec.id)

    def without_master(self, chunk: Chunk) -> Tensor:
        """Weights [S] of a chunk without masters: fp32 originals, or the shard in the chunk's
        dtype.

        The tensor is the stored one, or a copy of a file's content: after a change call
        `set_without_master`.
        """
        shard = chunk.load_shard()
        originals = self._storage.originals
        original = originals.get(chunk.spec.id)
        originals.release_staging()
        if original is None:
            return shard
        refresh_master(original, shard)
        return original

    def set_without_master(self, chunk: Chunk, values: Tensor) -> None:
        """Set the weights [S] of a chunk without masters: shard and original."""
        chunk.store_shard(values)
        originals = self._storage.originals
        if chunk.spec.id in originals:
            originals.put(chunk.spec.id, values)
            originals.release_staging()
        elif not chunk.spec.trainable and values.dtype.itemsize > chunk.dtype.itemsize:
            is_exact = has_same_values(values.to(chunk.dtype), values)
            (originals.lost.discard if is_exact else originals.lost.add)(chunk.spec.id)

    def warn_rounded(self, chunks: Collection[ChunkId], what: str) -> None:
        """Warn, on rank 0, of frozen weights among these chunks that have lost their fp32 values.

        what: has the rounded ones.
        """
        lost = sorted(self._storage.originals.lost & set(chunks))
        layout = self.sharding.layout
        names = [layout.params[s.param].name for c in lost for s in layout.chunks[c].slots]
        if names and self.sharding.comm.rank == 0:
            log.warning(
                "%s the values of %s and %d more frozen parameters as they were rounded to %s; "
                "wrap with keep_originals=True to keep what came in fp32, 4 bytes a parameter",
                what, names[0], len(names) - 1, self.sharding.precision_settings.dtype,
            )  # fmt: skip

    def warn_rounded_once(self) -> None:
        """`warn_rounded` of all chunks, before the first values that leave the engine."""
        originals = self._storage.originals
        if originals.lost and not originals.was_warned:
            originals.was_warned = True
            self.warn_rounded(originals.lost, "state dicts, checkpoints and unwrap() have")
