"""Speeds of this machine from one run to the next: `doctor` keeps them, and wrapping reads them.

A file of each host in the user's folder for caches, or the file that GEMINI_SPEEDS names. With
GEMINI_SPEEDS=usual nothing is kept and nothing read. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import torch

from gemini.placement.speeds import NOT_MEASURED, KeptSpeeds, Speeds, usual_speeds

VARIABLE = "GEMINI_SPEEDS"
_NONE = "usual"
_MOST_BYTES = 1 << 20


def file_of_speeds() -> Path | None:
    """The file of this machine; None: speeds are usual ones, by the variable or without a home."""
    named = os.environ.get(VARIABLE)
    if named:
        return None if named == _NONE else Path(named)
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    return caches / "gemini-memory" / f"speeds-{socket.gethostname()}.json"


def keep(speeds: KeptSpeeds) -> Path | None:
    """Keep speeds, beside the folders that were measured before. Returns the file; None: it is off.

    Raises OSError where the file cannot be written.
    """
    path = file_of_speeds()
    if path is None:
        return None
    before = None
    with contextlib.suppress(OSError, ValueError):  # what cannot be read is written anew
        before = _read(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(speeds.beside(before).as_json(), indent=1), encoding="utf-8")
        new.replace(path)  # whoever reads meanwhile has one or the other
    finally:
        new.unlink(missing_ok=True)
    return path


def speeds_here(
    device: torch.device, folder: str | None, ranks_per_node: int, *, has_host_tier: bool
) -> Speeds:
    """Speeds of one rank on this machine, for a device and for files in `folder`.

    folder: None: the default one.
    """
    path = file_of_speeds()
    usual = usual_speeds(has_host_tier)
    if path is None:
        return Speeds(usual, "usual ones" if os.environ.get(VARIABLE) else NOT_MEASURED)
    if not path.exists():
        return Speeds(usual)
    try:
        kept = _read(path)
    except (OSError, ValueError) as error:
        return Speeds(usual, f"usual ones: {path} cannot be read: {error}")
    if device.type == "cuda" and torch.cuda.get_device_name(device) not in kept.devices:
        name = torch.cuda.get_device_name(device)
        return Speeds(usual, f"usual ones: {path} has none of {name}")
    disk = _measured_folder(folder, kept.folders)
    return kept.of_rank(disk, ranks_per_node, has_host_tier=has_host_tier)


def _read(path: Path) -> KeptSpeeds:
    from gemini import strangers  # only where there is a file

    return KeptSpeeds.from_json(strangers.read_json(path, _MOST_BYTES))


def _measured_folder(folder: str | None, measured: Iterable[str]) -> str | None:
    """Folder on the disk of `folder` that was measured: itself, or another of its file system."""
    from gemini import nvme

    try:
        here = nvme.local_folder(folder) if folder is not None else nvme.default_folder()
        if str(here.resolve()) in measured:
            return str(here.resolve())
        disk = here.stat().st_dev
    except (OSError, nvme.NvmeError):
        return None
    for other in measured:
        with contextlib.suppress(OSError):
            if Path(other).stat().st_dev == disk:
                return other
    return None
