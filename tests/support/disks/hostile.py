"""Small checkpoints that are changed as a stranger might, and read."""

from __future__ import annotations

import base64
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import gemini
from gemini.checkpoint import CheckpointError
from gemini.checkpoint.__main__ import main
from tests.support.checkpoints import assert_same, bits, make
from tests.support.disks.sealed import put_metadata
from tests.support.disks.taken import taken_bytes

MOST = 64 << 20  # bytes that reading a file may take beside what it has


def small() -> Any:
    return make(module=nn.Linear(7, 3))


def packed(data: bytes) -> str:
    """Bytes of a file, for JSON."""
    return base64.b85encode(zlib.compress(data, 9)).decode()


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


def assert_takes_little(work: Callable[[], object], path: Path) -> None:
    """`work`, which reads files, takes no more memory than these have and a bit."""
    nbytes = sum(p.stat().st_size for p in [path, *path.rglob("*")] if p.is_file())
    assert taken_bytes(work) < nbytes + MOST


def refused(path: Path, kind: Any = CheckpointError, match: str | None = None) -> list[int]:
    """Assert that loading fails in words of ours, within the memory that it may take, and changes
    nothing.

    Returns the exit status of verify, inspect and export.
    """
    pair = small()
    before = bits(*pair)

    def load() -> None:
        with pytest.raises(kind, match=match):
            gemini.load_checkpoint(path, *pair)

    assert_takes_little(load, path)
    assert_same(bits(*pair), before)
    if path.is_dir():
        arguments = (["verify"], ["inspect"], ["export", f"{path}-out"])
        found = [main([name, str(path), *rest]) for name, *rest in arguments]
        assert 1 in found and not os.path.exists(f"{path}-out")
        return found
    return [1]


def change(saved: Path, edit: Callable[[Any], object]) -> None:
    """Change what `.metadata` says, and seal it."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    edit(metadata)
    put_metadata(saved, pickle.dumps(metadata))
