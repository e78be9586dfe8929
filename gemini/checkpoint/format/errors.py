"""What can be wrong with a checkpoint, as types."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemini.nvme import cause_of


class CheckpointError(RuntimeError):
    """Base of every error of this package; the same text on every rank."""


class MismatchError(CheckpointError, ValueError):
    """The checkpoint is of another model or optimizer; lists every difference."""


class CorruptError(CheckpointError):
    """A file that is missing or does not read back as it was written; names the file."""


class FormatError(CheckpointError, ValueError):
    """No checkpoint, or one of a format that this code does not read."""


@contextmanager
def on_disk(what: str, path: Path) -> Iterator[None]:
    """An OSError inside becomes a CheckpointError: what could not be done, where, and why."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {what} {path}: {cause_of(error.errno)}") from error
