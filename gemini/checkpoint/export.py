"""Weights in Hugging Face's layout: gathered, written and read a tensor at a time.

A folder has files of weights and an index. A file of safetensors is the length of a JSON header
(u64), the header, and raw tensors: the header follows from shapes, so it is written first and
tensors are streamed after it. A file of torch.save stays in memory until it has all its tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gemini.arguments import by_name
from gemini.checkpoint.format.folder import (
    LOCK,
    locked_if_dead,
    make_locked,
    refuse,
    remove_folder,
)
from gemini.checkpoint.format.manifest import CheckpointError, is_plain_name, on_disk
from gemini.checkpoint.model.state import alone, inside, names_of
from gemini.checkpoint.ranks import Ranks
from gemini.checkpoint.untrusted.lazy_tensors import (
    DTYPE_NAMES,
    INDEX,
    TORCH_INDEX,
    LazyTensors,
    TensorSpec,
)
from gemini.chunk.local import region_of
from gemini.ddp import GeminiDDP
from gemini.nvme.files import calls
from gemini.runtime.engine import GeminiEngine
from gemini.runtime.inspect.full_parameters import full_parameters, opaque_as_saved
from gemini.saved_config import save_config, written_dtype
from gemini.saved_names import SavedNames, without_wrappers
from gemini.units import ParamId, parse_bytes


class _SafetensorsWeightFile:
    """A safetensors file that is being written, from contiguous tensors on the CPU."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._file = path.open("xb")
        self._file.write(_header(specs))

    def add(self, name: str, value: Tensor) -> None:
        self._file.write(value.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._file.close()

    abandon = close


class _TorchWeightFile:
    """A torch.save file, written when it is closed."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._path = path
        self._state: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        self._state[name] = value.clone()  # torch.save writes the whole storage of a view

    def close(self) -> None:
        torch.save(self._state, self._path)
        self._state = {}

    def abandon(self) -> None:
        self._state = {}


@dataclass(frozen=True, slots=True)
class Format:
    """Names of files of weights, and the class that writes one."""

    stem: str
    suffix: str
    index: str
    open: type[_SafetensorsWeightFile] | type[_TorchWeightFile]


SAFETENSORS = Format("model", ".safetensors", INDEX, _SafetensorsWeightFile)
TORCH = Format("pytorch_model", ".bin", TORCH_INDEX, _TorchWeightFile)


class WeightsWriter:
    """Writer of tensors, in the order of their specs, into files of limited size."""

    def __init__(
        self,
        target: Path,
        specs: Sequence[TensorSpec],
        limit: int,
        prefix: str = "",
        kind: Format = SAFETENSORS,
    ) -> None:
        """Make a locked temporary folder next to `target`.

        target: a new or empty folder. limit: bytes of tensors in a file.

        Raises CheckpointError for a folder that is not empty, for one with a file's suffix, and for
        a prefix with a slash.
        """
        before = f"{prefix}." if prefix else ""
        if before and not is_plain_name(before):
            raise CheckpointError(f"cannot export with prefix={prefix!r}; expected no slash in it")
        if target.suffix == kind.suffix:
            raise CheckpointError(
                f"cannot export to {target}: that names a file; expected a folder, where files of "
                "weights, their index and a config go"
            )
        self._index_name = f"{before}{kind.index}"
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"cannot export to {target}: it exists; give a new folder")
        self._target = target
        self._kind = kind
        self.folder = target.parent / f".{target.name}.exporting"
        with on_disk("export to", target):
            calls.make_folders(target.parent)
            with locked_if_dead(self.folder) as is_dead:
                if is_dead:
                    remove_folder(self.folder)
            try:
                self._lock = make_locked(self.folder)
            except FileExistsError:
                refuse(self.folder, target, "export")
        files = _files(specs, limit)
        names = [
            f"{before}{kind.stem}-{i + 1:05}-of-{len(files):05}{kind.suffix}"
            for i in range(len(files))
        ]
        self._files = dict(zip(names, files, strict=True))
        self._coming = [(n, spec, i) for n, file in self._files.items()
                        for i, spec in enumerate(file)][::-1]  # fmt: skip
        self._index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
            "weight_map": {spec.name: n for n, file in self._files.items() for spec in file},
        }
        self._open: _SafetensorsWeightFile | _TorchWeightFile | None = None

    def add(self, name: str, value: Tensor) -> None:
        """Write the next tensor of the specs."""
        file, spec, number = self._coming.pop()
        assert name == spec.name and tuple(value.shape) == spec.shape
        value = value.detach().to("cpu", spec.dtype).contiguous()
        with on_disk("write", self.folder / file):
            if number == 0:
                self._close()
                self._open = self._kind.open(self.folder / file, self._files[file])
            assert self._open is not None
            self._open.add(name, value)

    def commit(self) -> None:
        """Sync and rename the folder, after all tensors were added."""
        assert not self._coming
        # Files are synced before the rename, and the rename before the lock is removed: a folder
        # at `target` without a lock is complete, also after a power failure.
        with on_disk("export to", self._target):
            self._close()
            text = json.dumps(self._index, indent=2).encode()
            calls.write_whole(self.folder / self._index_name, text)
            for path in sorted(self.folder.iterdir()):
                calls.sync_file(path)
            calls.sync_folder(self.folder)
            calls.rename(self.folder, self._target)
            calls.sync_folder(self._target.parent)
            calls.unlink(self._target / LOCK)
        calls.close(self._lock)

    def write(
        self,
        values: Iterable[tuple[str, Tensor]],
        finish: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Write all tensors and commit; `finish` adds files to the folder. An error removes it."""
        try:
            for name, value in values:
                self.add(name, value)
            finish(self.folder)
            self.commit()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove the temporary folder, after an error."""
        if self._open is not None:
            self._open.abandon()
        remove_folder(self.folder)
        calls.close(self._lock)

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def spec_of(
    name: str, own: torch.dtype, shape: Sequence[int], asked: torch.dtype | None
) -> TensorSpec:
    """Spec of a tensor in a file; `asked` replaces a floating `own` dtype.

    Raises CheckpointError for a dtype that safetensors does not have.
    """
    dtype = asked if asked is not None and own.is_floating_point else own
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name} has dtype {dtype}, which safetensors does not hold")
    return TensorSpec(name, dtype, tuple(shape))


def _files(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Specs by file, in order; each file at most `limit` bytes, a larger tensor alone in one."""
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


# -- of a module --


@by_name
@alone()
def export_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    prefix: str = "",
) -> None:
    """Write weights (fp32 masters, rounded once) where `from_pretrained` finds them. Collective.

    Whole parameters are gathered a chunk at a time and written by rank 0. A `config` that can be
    saved goes into the same folder.

    path: a new or empty folder, which is complete when it appears.
    max_shard_size: bytes of tensors in one file, or text such as `"5GB"`.
    dtype: of floating tensors; None is the dtype that each had before it was wrapped.
    prefix: put before the names of files, with a dot.

    Raises CheckpointError on every rank.
    """
    export_weights(
        path, model, SAFETENSORS, max_shard_size=max_shard_size, dtype=dtype, prefix=prefix
    )


def export_weights(
    path: str | os.PathLike[str],
    model: nn.Module,
    kind: Format,
    *,
    max_shard_size: int | str,
    dtype: torch.dtype | None = None,
    prefix: str = "",
) -> None:
    """Write weights in files of `kind`; see `export_safetensors`. Collective."""
    model = inside(model)
    ranks = Ranks(model, "export_safetensors()" if kind is SAFETENSORS else "save_model()")
    target = Path(path).expanduser().absolute()
    limit = parse_bytes(max_shard_size)
    ranks.same("the path", str(target))
    specs, values = _content(model, dtype)
    writer = ranks.together(
        lambda: WeightsWriter(target, specs, limit, prefix, kind) if ranks.rank == 0 else None
    )
    failure: BaseException | None = None
    # Collective: every rank goes through all values. So rank 0 keeps an error until the end.
    for name, value in values:
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
            dtypes = {spec.name: spec.dtype for spec in specs}
            save_config(model, written_dtype(model, dtypes), writer.folder)
            writer.commit()
        except BaseException:
            writer.abandon()
            raise

    ranks.together(finish)


@alone("import_safetensors()")
def import_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True
) -> None:
    """Load weights of `export_safetensors` or `save_pretrained`, a tensor at a time. Collective.

    Values come from rank 0's files: safetensors, or else `pytorch_model*.bin`. Masters and shards
    take them; moments stay.
    Raises FormatError for a folder without weights, and the errors of `load_state_dict`.
    """
    model = inside(model)
    ranks = Ranks(model, "import_safetensors()")
    folder = Path(path).expanduser().absolute()
    with ExitStack() as stack:
        lazy = ranks.together(lambda: LazyTensors(folder, stack))
        names = names_of(model)
        lazy.rename(without_wrappers(name for alike in names for name in alike))
        lazy.tie(names)
        if not isinstance(model, GeminiDDP):  # which takes the names that are saved
            lazy.rename(SavedNames(model).found(model.state_dict()))
        model.load_state_dict(lazy, strict=strict)


def _content(
    model: nn.Module, dtype: torch.dtype | None
) -> tuple[list[TensorSpec], Iterator[tuple[str, Tensor]]]:
    """(specs of all tensors, the tensors in that order); only rank 0 gets a wrapped module's
    parameters."""
    if not isinstance(model, GeminiDDP):
        first: dict[int, tuple[str, Tensor]] = {}  # a tied tensor under its first name
        saved = SavedNames(model).saved
        for name, value in model.state_dict(keep_vars=True).items():
            first.setdefault(id(value), (saved(name), value))
        plain = first.values()
        specs = [spec_of(name, value.dtype, value.shape, dtype) for name, value in plain]
        return specs, ((name, _whole(value)) for name, value in plain)
    engine = model.engine
    buffers, opaque = list(model.saved_tensors()), opaque_as_saved(engine.weights)
    specs = [
        spec
        for chunk in engine.chunks
        for slot in chunk.spec.slots
        for spec in _specs_of(engine, slot.param, opaque, dtype)
    ]
    first_names = {spec.name for spec in specs}
    specs += [spec_of(name, buffer.dtype, buffer.shape, dtype) for name, buffer in buffers]

    def values() -> Iterator[tuple[str, Tensor]]:
        yield from ((n, value) for n, value in full_parameters(engine.weights) if n in first_names)
        yield from buffers

    return specs, values()


def _specs_of(
    engine: GeminiEngine,
    param: ParamId,
    opaque: Mapping[ParamId, Mapping[str, Tensor]],
    dtype: torch.dtype | None,
) -> Iterator[TensorSpec]:
    """Specs of the tensors that are written for one parameter; an opaque one keeps its dtypes."""
    if param not in opaque:
        shape = torch.Size(region_of(engine.params[param])[0])
        name = engine.layout.params[param].name
        yield spec_of(name, engine.sharding.original_dtypes[param], shape, dtype)
        return
    for name, value in opaque[param].items():
        if hasattr(value, "__tensor_flatten__"):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, which a file of weights does not hold; write "
                "model.state_dict() with torch.save on rank 0, or the adapters alone"
            )
        yield spec_of(name, value.dtype, value.shape, None)


def _whole(value: Tensor) -> Tensor:
    """Full tensor; for a DTensor, as of FSDP2, this is a collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value
