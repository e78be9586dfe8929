"""Weights in files: versions in a folder, each written whole or not at all, for other processes.

    folder/000007/             a version; there from its rename on
        manifest.json          its number, the one it follows on, its files with their SHA-256
        00000.safetensors      a bucket: whole parameters by name, runs of deltas by name and number
    folder/.000008.partial     a version that is not whole, and that nobody reads

A version with `follows` is only what has changed since that one. A reader that has another one goes
back to the last version that follows on none, and on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini import strangers
from gemini.ddp import GeminiDDP
from gemini.nvme.files import calls
from gemini.transfer.deltas import Delta, Run
from gemini.transfer.outgoing import WeightBucket, WeightVersion

MANIFEST = "manifest.json"
GAPS, VALUES = "gaps", "values"


class WeightFiles:
    """Writer of versions of one model's weights into a folder.

    send: after a step; all ranks call, and rank 0 writes. The first version has all weights, and so
        has every `whole_every`-th; others have what has changed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], model: GeminiDDP, *, deltas: bool = False,
        whole_every: int = 16, bytes: int | str = "256MiB",
    ) -> None:  # fmt: skip
        """Raises ValueError for `whole_every` below 1."""
        if whole_every < 1:
            raise ValueError(f"whole_every={whole_every}; expected 1 or more")
        self._folder, self._model, self._deltas = Path(folder), model, deltas
        self._whole_every, self._bytes = whole_every, bytes
        self._since: WeightVersion | None = None
        self._last: int | None = None  # version that `_since` is, in the folder
        self._chain = 0

    def send(self) -> int:
        """Write a version; returns its number.

        Raises OSError or RuntimeError on every rank if rank 0 could not write, and then the folder
        is as it was, and the next version has all weights.
        """
        comm = self._model.engine.comm
        follows = self._last if self._chain % self._whole_every else None
        number, partial = 0, Path()
        error: OSError | None = None
        files: dict[str, str] = {}
        if comm.rank == 0:
            try:
                number, partial = self._begin()
            except OSError as raised:
                error = raised
        version = None
        for bucket in self._model.weights(
            bytes=self._bytes, since=None if follows is None else self._since, deltas=self._deltas
        ):
            version = bucket.version
            if comm.rank == 0 and error is None:
                # Others are in the collectives of the next bucket, so an error here waits.
                try:
                    _write(partial / f"{len(files):05}.safetensors", bucket, files)
                except OSError as raised:
                    error = raised
        if comm.rank == 0 and error is None:
            try:
                _finish(partial, self._folder / f"{number:06}", number, follows, files)
            except OSError as raised:
                error = raised
        failure: str | None
        said = comm.gather_objects((number, None if error is None else str(error)))
        number, failure = int(said[0][0]), said[0][1]
        if failure is not None:
            self._since = self._last = None
            self._chain = 0
            if comm.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            if error is not None:
                raise error
            raise RuntimeError(f"rank 0: {failure}; weights in the folder are those of before")
        if version is not None:
            self._since = version
        self._last, self._chain = number, self._chain + 1
        return number

    def _begin(self) -> tuple[int, Path]:
        calls.make_folders(self._folder)
        number = max(versions_in(self._folder), default=-1) + 1
        partial = self._folder / f".{number:06}.partial"
        if partial.exists():  # of a process that was killed
            shutil.rmtree(partial)
        calls.mkdir(partial)
        return number, partial


def versions_in(folder: Path) -> list[int]:
    """Numbers of the versions that are whole, rising."""
    paths = sorted(folder.iterdir())
    return sorted(int(path.name) for path in paths if path.is_dir() and path.name.isdigit())


def read_weights(
    folder: str | os.PathLike[str],
    weights: MutableMapping[str, Tensor],
    since: int | None = None,
) -> int:
    """Bring `weights`, by name, to the newest version of a folder; returns its number.

    since: the version that `weights` are of; None: of none, and tensors that are missing are made.
    Files of a stranger are data: names, dtypes, shapes and checksums are looked at.

    Raises ValueError for a folder without a version, and for files that are not as the manifest has
    them, before anything of that version is applied.
    """
    path = Path(folder)
    numbers = versions_in(path)
    if not numbers:
        raise ValueError(f"{path} has no version of weights; expected one by WeightFiles.send()")
    chain: list[tuple[int, dict[str, Any]]] = []
    wanted: int | None = numbers[-1]
    while wanted is not None and wanted != since:
        manifest = _manifest(path, wanted)
        chain.append((wanted, manifest))
        follows = manifest["follows"]
        if follows is not None and (not isinstance(follows, int) or not 0 <= follows < wanted):
            raise ValueError(f"{path}/{wanted:06} follows {follows!r}; expected an earlier version")
        wanted = follows
    for number, manifest in reversed(chain):
        place = path / f"{number:06}"
        for name, digest in manifest["files"].items():
            if Path(name).name != name or _sha256(place / name) != digest:
                raise ValueError(f"{place / name} is damaged; expected SHA-256 {digest!r:.80}")
        for name in manifest["files"]:
            _checked(place / name).apply(weights)
    return numbers[-1]


def _manifest(folder: Path, number: int) -> dict[str, Any]:
    place = folder / f"{number:06}" / MANIFEST
    found = strangers.read_json(place)
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise ValueError(f"{place} is no manifest; expected an object with files")
    found.setdefault("follows", None)
    return found


def _sha256(path: Path) -> str:
    with strangers.opened(path) as file:
        found = hashlib.sha256()
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def _write(path: Path, bucket: WeightBucket, files: dict[str, str]) -> None:
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket.tensors.items()}
    about: dict[str, Any] = {}
    for name, delta in bucket.deltas.items():
        about[name] = {"shape": list(delta.shape), "starts": [run.start for run in delta.runs]}
        for i, run in enumerate(delta.runs):
            tensors[f"{name}/{i}/{GAPS}"] = run.gaps.detach().cpu().clone()
            tensors[f"{name}/{i}/{VALUES}"] = run.values.detach().cpu().clone()
    content = save(tensors, {"deltas": json.dumps(about)})
    calls.write_whole(path, content)
    files[path.name] = hashlib.sha256(content).hexdigest()


def _finish(
    partial: Path, place: Path, number: int, follows: int | None, files: dict[str, str]
) -> None:
    manifest = {"version": number, "follows": follows, "files": files}
    calls.write_whole(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
    calls.sync_folder(partial)
    calls.rename(partial, place)
    calls.sync_folder(place.parent)


def _checked(path: Path) -> WeightBucket:
    """Bucket of a file. Raises ValueError for one that no `WeightFiles` has written."""
    from safetensors import SafetensorError

    try:
        return _read(path)
    except (SafetensorError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is no bucket of weights ({error}); expected one as sent"
        ) from None


def _read(path: Path) -> WeightBucket:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("deltas", "{}"))
        runs = {
            f"{name}/{i}/{kind}"
            for name, one in about.items()
            for i in range(len(one["starts"]))
            for kind in (GAPS, VALUES)
        }
        whole = {name: file.get_tensor(name) for name in file.keys() if name not in runs}  # noqa: SIM118
        deltas: dict[str, Delta] = {}
        for name, one in about.items():
            found = [
                Run(start, file.get_tensor(f"{name}/{i}/{GAPS}"),
                    file.get_tensor(f"{name}/{i}/{VALUES}"))
                for i, start in enumerate(one["starts"])
            ]  # fmt: skip
            dtype: torch.dtype = found[0].values.dtype
            deltas[name] = Delta(tuple(one["shape"]), dtype, tuple(found))
    return WeightBucket(whole, WeightVersion(()), deltas)
