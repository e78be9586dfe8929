"""python -m gemini.checkpoint inspect | verify | export PATH ..."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from gemini.checkpoint.dcp.ranks import in_dcp
from gemini.checkpoint.dcp.reader import Reader, SafePlanner
from gemini.checkpoint.format.data_file import UnitReader
from gemini.checkpoint.format.errors import CheckpointError, FormatError
from gemini.checkpoint.format.folder import find
from gemini.checkpoint.format.keys import Keys
from gemini.checkpoint.format.manifest import Manifest
from gemini.checkpoint.format.small_files import read_manifest
from gemini.checkpoint.untrusted.metadata import read_metadata
from gemini.units import format_bytes, parse_bytes

from .weight_files import WeightsWriter, spec_of


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def verify(path: Path) -> None:
    """Read every byte. Raises CheckpointError for the first file that is not as it was written."""
    folder = find(path)
    manifest = read_manifest(folder)
    if manifest is None:
        raise FormatError(f"{folder} has no manifest, so there is nothing to verify it with")
    read_metadata(folder, manifest)
    reader = UnitReader(folder, manifest.files)
    try:
        reader.verify(lambda name, nbytes: say(f"{name}: {format_bytes(nbytes)}, as written"))
    finally:
        reader.close()


def inspect(path: Path) -> None:
    """Tensors, sizes, world size and digest; then `verify`."""
    folder = find(path)
    manifest, metadata = _opened(folder)
    for key, entry in sorted(metadata.state_dict_metadata.items()):
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            nbytes = format_bytes(entry.size.numel() * entry.properties.dtype.itemsize)
            say(f"{key}  {dtype}{list(entry.size)}  {nbytes}  in {len(entry.chunks)} parts")
        else:
            say(f"{key}  a value")
    if manifest is None:
        say("written by torch.distributed.checkpoint itself: no checksums")
        return
    say(f"world size {manifest.world_size}, {format_bytes(manifest.nbytes)}, "
        f"digest {manifest.digest}, saved {manifest.about.get('saved')}")  # fmt: skip
    verify(folder)


def export(path: Path, out: Path, max_shard_size: str, dtype: str | None) -> None:
    """Weights as safetensors, one tensor in memory at a time."""
    folder = find(path)
    manifest, metadata = _opened(folder)
    prefix = Keys().model
    wanted = None if dtype is None else getattr(torch, dtype)
    places: dict[str, set[tuple[str, int]]] = {}
    for index, place in metadata.storage_data.items():
        places.setdefault(index.fqn, set()).add((place.relative_path, place.offset))
    specs, seen = [], set()
    for key, entry in metadata.state_dict_metadata.items():
        if not key.startswith(prefix) or not isinstance(entry, TensorStorageMetadata):
            continue
        found = frozenset(places.get(key, ()))
        if found and found in seen:
            continue  # a tied parameter, under another name
        seen.add(found)
        own = entry.properties.dtype
        specs.append((spec_of(key.removeprefix(prefix), own, entry.size, wanted), own))
    if not specs:
        raise FormatError(f"{folder} has no weights under {prefix!r}")
    writer = WeightsWriter(out.absolute(), [s for s, _ in specs], parse_bytes(max_shard_size))
    reader = Reader(folder, manifest, metadata)
    try:
        for spec, own in specs:
            state: dict[str, Any] = {prefix + spec.name: torch.empty(spec.shape, dtype=own)}
            in_dcp(partial(load, state, storage_reader=reader, planner=SafePlanner(), no_dist=True))
            writer.add(spec.name, state[prefix + spec.name])
        writer.commit()
    except BaseException:
        writer.abandon()
        raise
    say(f"{len(specs)} tensors in {out}")


def _opened(folder: Path) -> tuple[Manifest | None, Metadata]:
    manifest = read_manifest(folder)
    return manifest, read_metadata(folder, manifest)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gemini.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, work in (("inspect", inspect), ("verify", verify), ("export", export)):
        command = commands.add_parser(name, help=(work.__doc__ or "").splitlines()[0])
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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            work_of(**options)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
