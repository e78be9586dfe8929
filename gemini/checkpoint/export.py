"""Hugging Face safetensors: sharded, with an index, written and read a tensor at a time.

A file is the length of a JSON header (u64), the header, and raw tensors. The header is known from
shapes, so tensors are streamed behind it as they are gathered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.format.errors import CheckpointError, on_disk
from gemini.checkpoint.format.manifest import is_plain_name
from gemini.checkpoint.untrusted.lazy_tensors import DTYPE_NAMES, INDEX, LazyTensors, TensorSpec
from gemini.ddp import GeminiDDP
from gemini.runtime.inspect.full_parameters import full_parameters
from gemini.units import parse_bytes
from nvme.files import calls

from .format import unfinished


def export_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    prefix: str = "",
) -> None:
    """Write weights (fp32 masters, rounded once) where `from_pretrained` finds them. Collective.

    path: a new or empty folder, which is complete when it appears. Whole parameters are gathered a
        chunk at a time and written by rank 0. A `config` that can be saved is saved beside them.
    dtype: of floating tensors; None is what each had before it was wrapped.
    prefix: before the names of files, and a dot.

    Raises CheckpointError on every rank.
    """
    ranks = Ranks(model, "export_safetensors()")
    target = Path(path).expanduser().absolute()
    limit = parse_bytes(max_shard_size)
    ranks.same("the path", str(target))
    specs, values = _content(model, dtype)
    writer = ranks.together(
        lambda: SafetensorsWriter(target, specs, limit, prefix) if ranks.rank == 0 else None
    )
    failure: BaseException | None = None
    for name, value in values:  # collective: every rank goes through all of it
        if writer is not None and failure is None:
            try:
                writer.add(name, value)
            except Exception as error:
                failure = error

    def finish() -> None:
        if writer is None:
            return
        try:
            if failure is not None:
                raise failure
            save_config(model, writer.folder)
            writer.commit()
        except BaseException:
            writer.abandon()
            raise

    ranks.together(finish)


def import_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True
) -> None:
    """Load what `export_safetensors` or `save_pretrained` wrote, a tensor at a time. Collective.

    Rank 0's files count. Masters and shards take the values; moments stay.
    Raises FormatError for a folder without safetensors, and as `load_state_dict` does.
    """
    ranks = Ranks(model, "import_safetensors()")
    folder = Path(path).expanduser().absolute()
    with ExitStack() as stack:
        lazy = ranks.together(lambda: LazyTensors(folder, stack))
        if isinstance(model, GeminiDDP):
            lazy.tie([spec.names for spec in model.engine.layout.params])
        else:
            tied: dict[int, list[str]] = {}
            for name, param in model.named_parameters(remove_duplicate=False):
                tied.setdefault(id(param), []).append(name)
            lazy.tie(list(tied.values()))
        model.load_state_dict(lazy, strict=strict)


class SafetensorsWriter:
    """Writes tensors in the order of their specs into as many files as it takes."""

    def __init__(
        self, target: Path, specs: Sequence[TensorSpec], limit: int, prefix: str = ""
    ) -> None:
        before = f"{prefix}." if prefix else ""
        if before and not is_plain_name(before):
            raise CheckpointError(f"cannot export with prefix={prefix!r}; expected no slash in it")
        self._index_name = f"{before}{INDEX}"
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"cannot export to {target}: it exists; give a new folder")
        self._target = target
        self.folder = target.parent / f".{target.name}.exporting"
        with on_disk("export to", target):
            calls.make_folders(target.parent)
            with unfinished.held_if_dead(self.folder) as is_dead:
                if is_dead:
                    unfinished.remove(self.folder)
            try:
                self._lock = unfinished.make(self.folder)
            except FileExistsError:
                unfinished.refuse(self.folder, target, "export")
        files = _files(specs, limit)
        self._names = [
            f"{before}model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
        ]
        self._coming = [
            (name, spec, i) for name, file in zip(self._names, files, strict=True)
            for i, spec in enumerate(file)
        ][::-1]  # fmt: skip
        self._headers = {name: _header(file) for name, file in zip(self._names, files, strict=True)}
        self._index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
            "weight_map": {
                spec.name: name
                for name, file in zip(self._names, files, strict=True)
                for spec in file
            },
        }
        self._open: Any = None

    def add(self, name: str, value: Tensor) -> None:
        """The next tensor."""
        file, spec, number = self._coming.pop()
        assert name == spec.name and tuple(value.shape) == spec.shape
        flat = value.detach().to("cpu", spec.dtype).contiguous().reshape(-1)
        with on_disk("write", self.folder / file):
            if number == 0:
                self._close()
                self._open = (self.folder / file).open("xb")
                self._open.write(self._headers[file])
            self._open.write(flat.view(torch.uint8).numpy())

    def commit(self) -> None:
        """Everything was added: sync and rename."""
        assert not self._coming
        with on_disk("export to", self._target):
            self._close()
            text = json.dumps(self._index, indent=2).encode()
            calls.write_whole(self.folder / self._index_name, text)
            for path in self.folder.iterdir():
                calls.sync_file(path)
            calls.sync_folder(self.folder)
            calls.rename(self.folder, self._target)
            calls.sync_folder(self._target.parent)
            calls.unlink(self._target / unfinished.LOCK)
        calls.close(self._lock)

    def abandon(self) -> None:
        if self._open is not None:
            self._open.close()
        unfinished.remove(self.folder)
        calls.close(self._lock)

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _content(
    model: nn.Module, dtype: torch.dtype | None
) -> tuple[list[TensorSpec], Iterator[tuple[str, Tensor]]]:
    """Specs of all tensors, and the tensors in that order (on rank 0)."""
    if not isinstance(model, GeminiDDP):
        first: dict[int, tuple[str, Tensor]] = {}  # a tied tensor under its first name
        for name, value in model.state_dict(keep_vars=True).items():
            first.setdefault(id(value), (name, value))
        plain = first.values()
        specs = [spec_of(name, value.dtype, value.shape, dtype) for name, value in plain]
        return specs, ((name, _whole(value)) for name, value in plain)
    engine = model.engine
    buffers = list(model.saved_buffers())
    specs = [
        spec_of(
            engine.layout.params[slot.param].name,
            engine.original_dtypes[slot.param],
            engine.layout.params[slot.param].shape,
            dtype,
        )
        for chunk in engine.chunks
        for slot in chunk.spec.slots
    ]
    first_names = {spec.name for spec in specs}
    specs += [spec_of(name, buffer.dtype, buffer.shape, dtype) for name, buffer in buffers]

    def values() -> Iterator[tuple[str, Tensor]]:
        yield from ((n, value) for n, value in full_parameters(engine) if n in first_names)
        yield from buffers

    return specs, values()


def _whole(value: Tensor) -> Tensor:
    """Of what FSDP2 has sharded, all of it. Collective then."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def spec_of(
    name: str, own: torch.dtype, shape: Sequence[int], asked: torch.dtype | None
) -> TensorSpec:
    dtype = asked if asked is not None and own.is_floating_point else own
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name} has dtype {dtype}, which safetensors does not hold")
    return TensorSpec(name, dtype, tuple(shape))


def _files(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Specs in order, cut where a file would pass `limit`; a larger tensor has its own."""
    files: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if files[-1] and filled + spec.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(spec)
        filled += spec.nbytes
    return files


def _header(specs: Sequence[TensorSpec]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        fields[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def save_config(model: nn.Module, folder: Path) -> None:
    """What Hugging Face's models save beside their weights."""
    for attribute in ("config", "generation_config"):
        config: Any = getattr(model, attribute, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
