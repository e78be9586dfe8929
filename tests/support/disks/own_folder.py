"""One folder for all that a run of the tests writes, on a disk and its own alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from multiprocessing import util
from pathlib import Path

import nvme

PREFIX = "gt-"  # short: sockets lie in it
_LOCK = "gemini-tests.lock"  # says whose the folder is, whatever it is called


def make() -> None:
    """Make it the folder for temporary files until this process ends; what killed runs left is
    removed."""
    parent = _parent()
    _remove_dead(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)  # as long as this process lives
        if os.fstat(lock).st_nlink:  # and nobody took it for dead before
            break
        os.close(lock)
    folder.chmod(0o711)  # a test becomes another user
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # it is looked up again
    # after multiprocessing has removed its own sockets, which is at -100
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


def _parent() -> Path:
    """On a disk, where there is one: files of optimizer state belong on no other."""
    try:
        return nvme.default_folder()
    except nvme.FolderError:
        return Path(tempfile.gettempdir())


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
