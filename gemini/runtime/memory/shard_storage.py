"""Everything of one engine's chunks that is not on the device: files and host memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gemini.chunk.layout import ChunkLayout, ChunkSpec
from gemini.chunk.storage import Chunk
from gemini.dtypes import DTYPES
from gemini.placement.plan import Plan
from gemini.placement.tiers import Tier
from gemini.tickets import Ticket
from gemini.units import ChunkId
from nvme import WriteMeter
from optim.rules.report import Traffic

from .backend import Backend
from .gradient_homes import MAX_LEAVING, GradientFiles, GradientHome, HostGradients
from .tensor_files import FileConfig, Flat, TensorFiles


class ShardStorage:
    """Follows a plan's homes, until another plan."""

    def __init__(
        self,
        layout: ChunkLayout,
        plan: Plan,
        backend: Backend,
        config: FileConfig,
        *,
        limited: bool,
    ) -> None:
        """`limited`: by a budget, so that what nothing reads in a step lives in files."""
        self._specs = layout.chunks
        self._backend = backend
        self.config = config
        self._limited = limited
        on_nvme = [shard.chunk for shard in plan.shards if shard.param_home is Tier.NVME]
        self.params: TensorFiles | None = None  # shards whose home is NVMe
        if on_nvme:
            self.params = TensorFiles(
                {chunk: _flat(self._specs[chunk]) for chunk in on_nvme},
                replace(config, label=config.label + "parameters-"),
                versioned=True,
            )
        in_file = [
            shard.chunk for shard in plan.shards
            if Tier.NVME in shard.state_homes
            or (limited and not self._specs[shard.chunk].trainable)
        ]  # fmt: skip
        on_host = [shard.chunk for shard in plan.shards if Tier.HOST in shard.state_homes]
        self.originals = Originals(
            {c: Flat(self._specs[c].shard_numel, torch.float32) for c in in_file},
            replace(config, label=config.label + "originals-"),
            on_host=frozenset(on_host),
        )
        self.gradient_files: GradientFiles | None = None
        self.host_gradients: HostGradients | None = None

    # ChunkFiles of `gemini.chunk.storage`

    def read(self, chunk: ChunkId, into: Tensor) -> Ticket[None]:
        assert self.params is not None
        return self.params.read(chunk, into)

    def replace(self, chunk: ChunkId, values: Tensor) -> None:
        assert self.params is not None
        self.params.replace(chunk, values)

    def keep_shards(self, chunks: Collection[ChunkId]) -> None:
        """Shards of these chunks are still in files; the others live in memory from now on."""
        if self.params is None:
            return
        if chunks:
            self.params.forget([chunk for chunk in self.params if chunk not in chunks])
        else:
            self.params.close()
            self.params = None

    def close(self) -> None:
        """Remove all files."""
        self.originals.clear()
        for files in self.files:
            files.close()
        self.params = self.gradient_files = self.host_gradients = None

    def layout_changed(self, layout: ChunkLayout) -> None:
        """Chunks are trained that were frozen; sizes stay."""
        self._specs = layout.chunks

    def place_gradients(self, plan: Plan, chunks: list[Chunk]) -> None:
        """Send gradients, those of the future and those there are, to the plan's homes."""
        homes = {shard.chunk: shard.grad_home for shard in plan.shards}
        to_files = [chunk for chunk, home in homes.items() if home is Tier.NVME]
        for chunk in chunks:
            chunk.gradient.send(None)
        if self.gradient_files is not None:
            self.gradient_files.close()
        self.gradient_files = None
        if to_files:
            flats = {chunk: _flat(self._specs[chunk]) for chunk in to_files}
            self.gradient_files = GradientFiles(flats, self.config)
        self.host_gradients = None
        if Tier.HOST in homes.values():
            self.host_gradients = HostGradients(
                self._backend, self.config.block_numel, 0 if self._limited else MAX_LEAVING
            )
        by_home: Mapping[Tier | None, GradientHome | None] = {
            Tier.NVME: self.gradient_files,
            Tier.HOST: self.host_gradients,
        }
        for chunk in chunks:
            chunk.gradient.send(by_home.get(homes[chunk.spec.id]))

    @property
    def leaving_bytes(self) -> int:
        """On the device, of gradients on their way to host memory."""
        return 0 if self.host_gradients is None else self.host_gradients.leaving_nbytes

    def forget_gradients(self) -> None:
        """Those in files were dropped, or could not be written."""
        if self.gradient_files is not None:
            for files in self.gradient_files.files:
                files.rollback()

    def serve(self, block_numel: int, depth: int, meter: WriteMeter | None) -> None:
        """An optimizer is there: cut files anew as it cuts its state, since a block is read and
        written as one, and count what they write, and have written, to its budget."""
        same = (block_numel, depth) == (self.config.block_numel, self.config.depth)
        self.config = replace(self.config, block_numel=block_numel, depth=depth, meter=meter)
        if meter is not None:
            meter.written_bytes += self.originals.written_bytes
        if self.params is None:
            return
        if meter is not None:
            meter.written_bytes += self.params.store.meter.written_bytes
            self.params.store.meter = meter
        if same:
            return
        before = self.params
        flats = {chunk: _flat(self._specs[chunk]) for chunk in before}
        self.params = TensorFiles(
            flats, replace(self.config, label=self.config.label + "parameters-"), versioned=True
        )
        for chunk, flat in flats.items():
            shard = torch.empty(flat.numel, dtype=flat.dtype)
            before.read(chunk, shard).wait()
            self.params.replace(chunk, shard)
        before.close()

    @property
    def files(self) -> list[TensorFiles]:
        found = [] if self.params is None else [self.params]
        if self.gradient_files is not None:
            found += self.gradient_files.files
        return found

    @property
    def staging_bytes(self) -> int:
        return sum(files.staging_bytes for files in self.files)

    def traffic(self) -> Traffic:
        """Bytes moved since the files there are were made."""
        moved = [files.store.traffic for files in self.files]
        return Traffic(
            nvme_read=sum(t.read_bytes for t in moved),
            nvme_write=sum(t.written_bytes for t in moved),
        )

    @property
    def file_bytes(self) -> int:
        return sum(files.file_bytes for files in self.files)


class Originals:
    """fp32 [S] of 16-bit chunks: for masters to start from, and what is given back of frozen ones.

    In memory, of the host where their state will be there; or in a file: of chunks with state on
    NVMe, and under a budget of frozen ones.
    """

    def __init__(
        self,
        in_file: Mapping[ChunkId, Flat],
        config: FileConfig,
        *,
        on_host: Collection[ChunkId] = (),
    ) -> None:
        self._wanted = in_file
        self._on_host = on_host
        self._config = config
        self._file: TensorFiles | None = None
        self._memory: dict[ChunkId, Tensor] = {}
        self._in_file: set[ChunkId] = set()
        self._last: tuple[ChunkId, Tensor] | None = None  # read from the file; asked for by block

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._memory or chunk in self._in_file

    def get(self, chunk: ChunkId) -> Tensor | None:
        """[S], or None; `put` takes changes back."""
        if chunk not in self._in_file:
            return self._memory.get(chunk)
        if self._last is None or self._last[0] != chunk:
            self._last = None  # give its memory back first
            values = torch.empty(self._wanted[chunk].numel, dtype=torch.float32)
            assert self._file is not None
            self._file.read(chunk, values).wait()
            self._last = (chunk, values)
        return self._last[1]

    def put(self, chunk: ChunkId, values: Tensor) -> None:
        if chunk not in self._wanted:
            self._memory[chunk] = values.cpu() if chunk in self._on_host else values
            return
        if self._file is None:
            self._file = TensorFiles(self._wanted, self._config, versioned=False)
        self._file.write(chunk, values)
        self._in_file.add(chunk)

    def drop(self, chunk: ChunkId) -> None:
        self._memory.pop(chunk, None)
        self._in_file.discard(chunk)
        if self._last is not None and self._last[0] == chunk:
            self._last = None

    @property
    def memory_bytes(self) -> int:
        return sum(values.nbytes for values in self._memory.values())

    def keep(self, chunks: Collection[ChunkId]) -> None:
        """Drop those of all other chunks."""
        for chunk in [*self._memory, *self._in_file]:
            if chunk not in chunks:
                self.drop(chunk)
        if not (self._memory or self._in_file):
            self.clear()

    @property
    def written_bytes(self) -> int:
        return 0 if self._file is None else self._file.store.traffic.written_bytes

    def clear(self) -> None:
        """Give memory and file back."""
        self._memory.clear()
        self._in_file.clear()
        self._last = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _flat(spec: ChunkSpec) -> Flat:
    return Flat(spec.shard_numel, DTYPES[spec.dtype])
