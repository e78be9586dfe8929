"""python -m gemini.checkpoint inspect | verify | export PATH ..."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from gemini.arguments import Parser
from gemini.checkpoint.foreign.metadata import read_metadata
from gemini.checkpoint.format.data_file import UnitReader, verify_pinned
from gemini.checkpoint.format.folder import find
from gemini.checkpoint.format.manifest import (
    CheckpointError,
    FormatError,
    SavedPart,
    read_manifest,
)
from gemini.checkpoint.model.keys import Keys
from gemini.checkpoint.reader import Reader
from gemini.checkpoint.untrusted.lazy_tensors import TensorSpec
from gemini.units import format_bytes, parse_bytes

from .export import WeightsWriter, spec_of


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def verify(path: Path) -> None:
    """Read every byte. Raises CheckpointError for the first file with another content."""
    folder = find(path)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FormatError(f"{folder} has no manifest, so there is nothing to verify it with")
    read_metadata(folder, manifest)

    def as_written(name: str, nbytes: int) -> None:
        say(f"{name}: {format_bytes(nbytes)}, as written")

    with closing(UnitReader(folder, manifest.files)) as reader:
        reader.verify(as_written)
    for file in manifest.pinned:
        verify_pinned(folder, file, as_written)


def inspect(path: Path) -> None:
    """Print tensors, sizes, world size and digest; then `verify`."""
    folder = find(path)
    with closing(Reader(folder)) as reader:
        index, manifest = reader.index, reader.manifest
    for key, entry in sorted(index.items()):
        if entry.dtype is not None:
            dtype = str(entry.dtype).removeprefix("torch.")
            nbytes = format_bytes(entry.size.numel() * entry.dtype.itemsize)
            say(f"{key}  {dtype}{list(entry.size)}  {nbytes}  in {len(entry.parts)} parts")
        else:
            say(f"{key}  a value")
    if manifest is None:
        say("written by torch.distributed.checkpoint itself: no checksums")
        return
    say(f"world size {manifest.world_size}, {format_bytes(manifest.nbytes)}, "
        f"digest {manifest.digest}, saved {manifest.about.get('saved')}")  # fmt: skip
    verify(folder)


def export(path: Path, out: Path, max_shard_size: str, dtype: str | None) -> None:
    """Export weights as safetensors, one tensor in memory at a time."""
    prefix = Keys().model
    wanted = None if dtype is None else getattr(torch, dtype)
    with closing(Reader(find(path))) as reader:
        specs, seen = [], set[tuple[SavedPart, ...]]()
        for key, entry in reader.index.items():
            own, known = entry.dtype, entry.parts in seen  # a tied parameter, under another name
            if own is None or known or not key.startswith(prefix):
                continue
            seen |= {entry.parts} - {()}
            specs.append((spec_of(key.removeprefix(prefix), own, entry.size, wanted), own))
        if not specs:
            raise FormatError(f"{reader.path} has no weights under {prefix!r}")
        writer = WeightsWriter(out.absolute(), [s for s, _ in specs], parse_bytes(max_shard_size))

        def read(spec: TensorSpec, own: torch.dtype) -> Tensor:
            value = torch.empty(spec.shape, dtype=own)
            reader.load_into({prefix + spec.name: value})
            return value

        writer.write((spec.name, read(spec, own)) for spec, own in specs)
    say(f"{len(specs)} tensors in {out}")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gemini.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, work in (("inspect", inspect), ("verify", verify), ("export", export)):
        command = commands.add_parser(name, help=(work.__doc__ or "").partition("\n")[0])
        command.add_argument("path", type=Path)
        command.set_defaults(work=work)
        if name == "export":
            command.add_argument("out", type=Path)
            command.add_argument("--max-shard-size", default="5GB")
            command.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    options = vars(parser.parse_args(arguments))
    work_of: Callable[..., None] = options.pop("work")
    options.pop("command")
    try:
        work_of(**options)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
