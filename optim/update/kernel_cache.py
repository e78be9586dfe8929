"""Folder of compiled kernels. This process runs its files, so no other user may write to it.

It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gemini.nvme.files import calls

FOLDER = "gemini-memory"  # in the user's folder for caches


class KernelBuildError(RuntimeError):
    """Error: the compiled CPU path is not possible here; the message says why."""


def cache_folder() -> Path:
    """Folder of compiled kernels, made if it does not exist; the path has no link in it.

    Raises KernelBuildError where another user could have written to the folder, or could put
    another in its place.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        parent = Path(base).absolute()
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = parent.resolve() / FOLDER
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except (OSError, RuntimeError) as error:  # also a user without a home
        raise KernelBuildError(
            f"there is no folder for compiled kernels ({error}); name one in XDG_CACHE_HOME"
        ) from error
    check_owned(folder, stat.S_ISDIR)
    for above in folder.parents:
        _check_parent(above, folder)
    return folder


def check_owned(path: Path, is_kind: Callable[[int], bool]) -> None:
    """Raise KernelBuildError for a link, or a path that others own or can write to."""
    found = path.lstat()
    if not is_kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise KernelBuildError(
            f"{path} is a link, belongs to another user or can be written by others, and code is "
            "loaded from it; make it yours alone (chmod go-w), or name another folder in "
            "XDG_CACHE_HOME"
        )


def _check_parent(path: Path, folder: Path) -> None:
    """Raise KernelBuildError where others than root and this user can replace what is in `path`."""
    found = path.stat()
    others_write = found.st_mode & stat.S_IWOTH or (
        found.st_mode & stat.S_IWGRP and not is_private_group(found.st_gid)
    )
    if found.st_uid not in (0, os.geteuid()) or (others_write and not found.st_mode & stat.S_ISVTX):
        raise KernelBuildError(
            f"others can put another folder in the place of {folder}, because they can write to "
            f"{path}, and code is loaded from it; change that (chmod go-w), or name another folder "
            "in XDG_CACHE_HOME"
        )


def is_private_group(gid: int) -> bool:
    """Whether this user is alone in a group, as where every user has one of the same name."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for one process of this machine; the kernel frees the lock of a dead one."""
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KernelBuildError(f"the folder for compiled kernels: {error}") from error
    try:
        calls.lock(handle, calls.LOCK_EX)
        yield
    finally:
        os.close(handle)
