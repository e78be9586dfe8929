"""Files and host memory of one engine's chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from gemini.chunk.gradient import GradientOffload
from gemini.chunk.layout import ChunkLayout, ChunkSpec
from gemini.chunk.storage import Chunk
from gemini.dtypes import DTYPES
from gemini.optim.rules.report import Traffic
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.placement.plan import Plan
from gemini.placement.tiers import Tier
from gemini.tickets import Ticket
from gemini.units import ChunkId

from .backend import Backend, FileConfig
from .originals import Originals, original_homes

if TYPE_CHECKING:
    from gemini.chunk.stack import RowCut
    from gemini.nvme import BlockStore, WriteMeter

    from .changed_weights import ChangedWeights
    from .files.blocks import Flat
    from .files.frozen_files import FrozenFiles
    from .files.tensor_files import TensorFiles
    from .gradient_homes import GradientFiles, HostGradients


class ShardStorage:
    """Shards, gradients and originals of one engine outside its device, in a plan's homes."""

    def __init__(
        self,
        layout: ChunkLayout,
        plan: Plan,
        backend: Backend,
        config: FileConfig,
    ) -> None:
        self._specs = layout.chunks
        self._names = _named(layout)
        # cuts of stacks, whose rows are read alone
        self.rows = _row_cuts(layout) if plan.kind == "eval" else {}
        self._straight = not plan.has_host_tier
        self._backend = backend
        self.config = config
        in_files = [shard.chunk for shard in plan.shards if shard.param_home is Tier.NVME]
        # shards whose home is NVMe: steps update the trained ones, and never the others
        trained, still = self._parted(in_files)
        self.params = self._versioned(trained) if trained else None
        self.frozen = self._unversioned(still) if still else None
        homes = original_homes(layout.chunks, plan)
        self.originals = Originals(layout.chunks, homes, backend.device, config)
        self.averages: list[Originals] = []  # of weights, each with values of its own
        self.changed: ChangedWeights | None = None  # of steps since a version; None: nobody asks
        self.gradient_files: GradientFiles | None = None
        self.host_gradients: HostGradients | None = None
        self._goes_on = False  # the last step does
        self._forgets = False  # gradients in files, which that may still read

    # ChunkFiles of `gemini.chunk.storage`

    def read(
        self, chunk: ChunkId, into: Tensor, behind: Ticket[None] | None = None, first: int = 0
    ) -> Ticket[None]:
        return self._home_of(chunk).read(chunk, into, behind, first)

    def block_numel(self, chunk: ChunkId) -> int:
        return self._home_of(chunk).block_numel(chunk)

    def replace(self, chunk: ChunkId, values: Tensor) -> None:
        self._home_of(chunk).replace(chunk, values)

    def keep_shards(self, chunks: Collection[ChunkId]) -> None:
        """Keep the shards of these chunks in files; all others live in memory from now on."""
        self.params = _keep(self.params, chunks)
        self.frozen = _keep(self.frozen, chunks)

    def take_in(self, shards: Mapping[ChunkId, Tensor], step: int) -> None:
        """Write shards [S] that lived in memory, and only these: they count in files too.

        Between steps; `step` is the one that the state has committed. On an error nothing has
        changed.
        """
        if not shards:
            return
        trained, still = self._parted(shards)
        before = [*(self.params or ()), *(self.frozen or ())]
        try:
            if still:
                if self.frozen is None:
                    self.frozen = self._unversioned(still)
                self.frozen.take_in({chunk: _flat(self._specs[chunk]) for chunk in still})
            for chunk in still:
                assert self.frozen is not None
                self.frozen.replace(chunk, shards[chunk])
            if trained:
                if self.params is None:
                    self.params = self._versioned(trained)
                elif not self.params.has_place_for(trained):  # some were frozen when it was made
                    self._make_again(self._versioned([*self.params]), ())
                self.params.take_in({chunk: shards[chunk] for chunk in trained}, step)
        except BaseException:
            with DeferredSignals():
                self.keep_shards(before)
            raise

    def unfreeze(self, chunks: Collection[ChunkId]) -> None:
        """Move frozen shards to versioned files, as steps update them from now on.

        No step is under way.
        """
        moving = [] if self.frozen is None else [c for c in self.frozen if c in chunks]
        if not moving:
            return
        assert self.frozen is not None
        self._make_again(self._versioned([*(self.params or ()), *moving]), moving)
        self.frozen = _keep(self.frozen, [c for c in self.frozen if c not in moving])

    def _make_again(self, after: TensorFiles, moving: Collection[ChunkId]) -> None:
        """Copy the shards of versioned files, and those `moving` there, to new ones."""
        before = self.params
        # The new files are whole and committed before the old ones go: an error keeps the old.
        try:
            for chunk in after:
                flat = _flat(self._specs[chunk])
                values = self._backend.allocate(flat.numel, flat.dtype)
                self._home_of(chunk).read(chunk, values).wait()
                after.write(chunk, values)
            after.commit(0 if before is None else before.store.committed_step)
        except BaseException:
            after.close()
            raise
        self.params = after
        if before is not None:
            before.close()

    def _parted(self, chunks: Iterable[ChunkId]) -> tuple[list[ChunkId], list[ChunkId]]:
        """Chunks that are trained, and others."""
        trained = [chunk for chunk in chunks if self._specs[chunk].trainable]
        return trained, [chunk for chunk in chunks if chunk not in trained]

    def _versioned(self, there: Collection[ChunkId]) -> TensorFiles:
        """New files for shards that steps update: `there`, and a place for each of the others."""
        from .files.tensor_files import TensorFiles

        config = replace(self.config, label=self.config.label + "parameters-")
        flats = {s.id: _flat(s) for s in self._specs if s.trainable or s.id in there}
        return TensorFiles(flats, config, versioned=True, there=there)

    def _unversioned(self, chunks: Collection[ChunkId]) -> FrozenFiles:
        """New files for shards that no step updates."""
        from .files.frozen_files import FrozenFiles

        flats = {chunk: _flat(self._specs[chunk]) for chunk in chunks}
        return FrozenFiles(flats, self.config, self._names, self.rows, straight=self._straight)

    def _home_of(self, chunk: ChunkId) -> TensorFiles | FrozenFiles:
        if self.frozen is not None and chunk in self.frozen:
            return self.frozen
        assert self.params is not None
        return self.params

    def close(self) -> None:
        """Remove all files."""
        self.originals.clear()
        for files in self.files:
            files.close()
        self.frozen = _keep(self.frozen, ())
        self.all_leave()
        self.params = self.gradient_files = self.host_gradients = None

    def layout_changed(self, layout: ChunkLayout) -> None:
        """Take over a layout in which frozen chunks are trained; sizes stay."""
        trained = (old.id for old, new in zip(self._specs, layout.chunks, strict=True)
                   if new.trainable and not old.trainable)  # fmt: skip
        self.originals.lost.difference_update(trained)
        self._specs = layout.chunks

    def new_gradient_files(self, plan: Plan) -> GradientFiles | None:
        """Make files for gradients whose home they are in a plan, and do not use them yet."""
        to_files = [shard.chunk for shard in plan.shards if shard.grad_home is Tier.NVME]
        if not to_files:
            return None
        from .gradient_homes import GradientFiles

        flats = {chunk: _flat(self._specs[chunk]) for chunk in to_files}
        return GradientFiles(flats, self.config)

    def place_gradients(
        self, plan: Plan, chunks: list[Chunk], files: GradientFiles | None = None
    ) -> None:
        """Send all gradients, present and future, to the plan's homes.

        files: of `new_gradient_files` for the same homes, where these were made before.
        """
        homes = {shard.chunk: shard.grad_home for shard in plan.shards}
        files = files or self.new_gradient_files(plan)
        # Gradients come back to the device first: the files and memory they lie in are dropped.
        for chunk in chunks:
            chunk.gradient.send(None)
        if self.gradient_files is not None:
            self.gradient_files.close()
        self.gradient_files = files
        self.all_leave()
        self.host_gradients = None
        if Tier.HOST in homes.values():
            from .gradient_homes import HostGradients

            own = self.host_gradients = HostGradients(self._backend)
            self.adopt_plan(plan)
            for chunk in chunks if self._backend.pin is not None else ():
                if homes[chunk.spec.id] is Tier.HOST and chunk.spec.trainable:
                    own.reserve(chunk.spec.id, chunk.spec.shard_numel, chunk.dtype)
        by_home: Mapping[Tier | None, GradientOffload | None] = {
            Tier.NVME: self.gradient_files,
            Tier.HOST: self.host_gradients,
        }
        for chunk in chunks:
            chunk.gradient.send(by_home.get(homes[chunk.spec.id]))

    def adopt_plan(self, plan: Plan) -> None:
        """Take from a plan with the same homes how many bytes of gradients may be on their way."""
        if self.host_gradients is not None:
            self.host_gradients.rooms = {s.chunk: s.leaving_bytes for s in plan.shards}

    def all_leave(self) -> None:
        """Order all gradients on their way to host memory before what the device does next."""
        if self.host_gradients is not None:
            self.host_gradients.all_leave()

    @property
    def leaving_bytes(self) -> int:
        """Bytes on the device of gradients on their way to host memory."""
        return 0 if self.host_gradients is None else self.host_gradients.leaving_nbytes

    def forget_gradients(self) -> None:
        """Forget gradients in files, which were dropped or could not be written.

        While a step goes on after `step()` it reads them: then this happens at its end.
        """
        self._forgets = self._goes_on
        if self.gradient_files is not None and not self._goes_on:
            for files in self.gradient_files.files:
                files.rollback()

    def step_goes_on(self) -> None:
        """Note that a step goes on after `step()`: parameters are read as it writes them."""
        self.all_leave()  # another thread would order the end of these copies before its own work
        self._goes_on = True
        if self.params is not None:
            self.params.reads_latest = True

    def step_has_ended(self) -> None:
        """Note that the step counts, or is about to be undone."""
        if not self._goes_on:
            return
        self._goes_on = False
        if self.params is not None:
            self.params.reads_latest = False
        if self._forgets:
            self.forget_gradients()

    def configure_files(self, block_numel: int, depth: int, meter: WriteMeter | None) -> None:
        """Adjust files to an optimizer: its read-ahead depth, and its budget of written bytes.

        The meter counts bytes of originals that were written before, too. Files of parameters have
        had the plan's block size since they were made.
        """
        assert self.params is None or block_numel == self.config.block_numel
        self.config = replace(self.config, block_numel=block_numel, depth=depth, meter=meter)
        if meter is not None:
            meter.written_bytes += self.originals.written_bytes
        for files in (self.params, self.frozen):
            if files is not None:
                files.configure(depth, meter)

    @property
    def files(self) -> list[TensorFiles]:
        found = [] if self.params is None else [self.params]
        if self.gradient_files is not None:
            found += self.gradient_files.files
        return found

    @property
    def staging_bytes(self) -> int:
        frozen = 0 if self.frozen is None else self.frozen.staging_bytes
        return frozen + sum(files.staging_bytes for files in self.files)

    @property
    def mark_bytes(self) -> tuple[int, int]:
        """Bytes of bits of what steps change: (on the device, on the host)."""
        marks = self.changed
        if marks is None:
            return 0, 0
        return (marks.nbytes, 0) if marks.on_device else (0, marks.nbytes)

    @property
    def average_bytes(self) -> tuple[int, int]:
        """Bytes of averages: (in memory, in files)."""
        return (
            sum(sum(kept.memory_bytes.values()) for kept in self.averages),
            sum(kept.file_bytes for kept in self.averages),
        )

    def traffic(self) -> Traffic:
        """Bytes moved since the present files were made."""
        moved = [files.store.traffic for files in self.files]
        own = Traffic(
            nvme_read=sum(t.read_bytes for t in moved),
            nvme_write=sum(t.written_bytes for t in moved),
        )
        return own if self.frozen is None else own + self.frozen.traffic

    @property
    def stores(self) -> list[BlockStore]:
        return [*(files.store for files in self.files), *self.originals.stores]

    @property
    def file_bytes(self) -> int:
        return sum(store.file_bytes for store in self.stores) + self.frozen_file_bytes

    @property
    def frozen_file_bytes(self) -> int:
        """Bytes of frozen shards in files, which other processes may share."""
        return 0 if self.frozen is None else self.frozen.file_bytes


F = TypeVar("F", "TensorFiles", "FrozenFiles")


def _keep(files: F | None, chunks: Collection[ChunkId]) -> F | None:
    """Cut files down to the shards of these chunks; None where none is left."""
    if files is None:
        return None
    there = list(files)
    gone = [chunk for chunk in there if chunk not in chunks]
    if gone == there:
        files.close()
        return None
    files.forget(gone)
    return files


def _row_cuts(layout: ChunkLayout) -> dict[ChunkId, RowCut]:
    from gemini.chunk.stack import row_cuts

    return row_cuts(layout)


def _named(layout: ChunkLayout) -> dict[ChunkId, str]:
    """Readable name of every chunk: its first parameter, and how many more it has."""
    found = {}
    for spec in layout.chunks:
        more = len(spec.slots) - 1
        first = layout.params[spec.slots[0].param].name
        found[spec.id] = f"parameter {first}" + f" and {more} more" * (more > 0)
    return found


def _flat(spec: ChunkSpec) -> Flat:
    from .files.blocks import Flat

    return Flat(spec.shard_numel, DTYPES[spec.dtype])
