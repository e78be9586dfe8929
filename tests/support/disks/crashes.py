"""Crash states: what a disk may hold when the power fails, at every point of a recording.

What was synced is there. Of what was not, any part may be: any of the names that changed, any
sectors of what was written, sizes or not, in any order. Changes of names that belong together (a
rename, an exchange) come together, and a sector (512 bytes) is whole.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.corpus import Find
from tests.support.disks.recording import ROOT, Log, Names, Note, Op, Resize, Sync, Write

SECTOR = 512
MOST_WHOLE = 5  # of this many changes every subset is tried

Pending = Names | Write | Resize
Kept = Sequence[Any]  # for every pending change: False, True, or the sectors that are there


@dataclass
class Disk:
    """What is on the disk, and what may be."""

    files: dict[int, bytearray] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    pending: list[Pending] = field(default_factory=list)

    def do(self, op: Op) -> None:
        if isinstance(op, Sync):
            for change in [c for c in self.pending if _touches(c, op.inode)]:
                _apply(self.files, self.folders, change, True)
                self.pending.remove(change)
        elif not isinstance(op, Note):
            self.pending.append(op)

    def after(self, kept: Kept) -> tuple[dict[int, bytearray], dict[int, dict[str, int]]]:
        """Files and folders if these of the pending changes came to the disk."""
        touched = {c.inode for c in self.pending if not isinstance(c, Names)}
        files = {
            inode: bytearray(data) if inode in touched else data
            for inode, data in self.files.items()
        }
        folders = {inode: dict(names) for inode, names in self.folders.items()}
        for change, part in zip(self.pending, kept, strict=True):
            if part is not False:
                _apply(files, folders, change, part)
        return files, folders


def _touches(change: Pending, inode: int) -> bool:
    if isinstance(change, Names):
        return any(folder == inode for folder, _, _ in change.entries)
    return change.inode == inode


def _apply(
    files: dict[int, bytearray], folders: dict[int, dict[str, int]], change: Pending, part: Any
) -> None:
    if isinstance(change, Names):
        for folder, name, inode in change.entries:
            names = folders.setdefault(folder, {})
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode
        return
    data = files.setdefault(change.inode, bytearray())
    if isinstance(change, Resize):
        if change.shrinks:
            del data[change.nbytes :]
        data.extend(bytes(max(0, change.nbytes - len(data))))
        return
    for sector in range(num_sectors(change)) if part is True else part:
        start = sector * SECTOR
        piece = change.data[start : start + SECTOR]
        at = change.offset + start
        data.extend(bytes(max(0, at + len(piece) - len(data))))
        data[at : at + len(piece)] = piece


def num_sectors(write: Write) -> int:
    return -(-len(write.data) // SECTOR)


def choices(pending: Sequence[Pending], rng: random.Random, samples: int) -> Iterator[Kept]:
    """Which of the pending changes came to the disk: every way where there are few, else each
    alone, each missing, each torn, and `samples` at random."""
    count = len(pending)
    if count <= MOST_WHOLE:
        yield from itertools.product((False, True), repeat=count)
    else:
        yield (False,) * count
        yield (True,) * count
        for i in range(count):
            yield tuple(i == j for j in range(count))
            yield tuple(i != j for j in range(count))
    writes = [i for i, change in enumerate(pending) if isinstance(change, Write)]
    for i in writes if samples else ():
        rest = rng.random() < 0.5
        yield tuple(_torn(pending[i], rng) if i == j else rest for j in range(count))
    for _ in range(samples):
        yield tuple(_any_part(change, rng) for change in pending)


def _torn(write: Pending, rng: random.Random) -> tuple[int, ...]:
    assert isinstance(write, Write)
    whole = range(num_sectors(write))
    cut = rng.randint(0, len(whole))
    kinds = (whole[:cut], whole[cut:], [s for s in whole if rng.random() < 0.5])
    return tuple(rng.choice(kinds))


def _any_part(change: Pending, rng: random.Random) -> Any:
    kind = rng.randrange(3 if isinstance(change, Write) else 2)
    return _torn(change, rng) if kind == 2 else bool(kind)


@dataclass(frozen=True)
class Crash:
    """One content that the disk may have, laid out in `folder`."""

    folder: Path
    notes: tuple[Any, ...]  # what had happened


def explore(
    log: Log,
    scratch: Path,
    check: Callable[[Crash], None],
    *,
    samples: int,
    most: int = 1000,
    seed: int = 0,
    after: Callable[[Op], bool] = lambda op: True,
) -> int:
    """`check` every different content after every call; how many there were.

    most: contents after one call, of those that `choices` gives.
    after: the calls after which to look.
    """
    rng = random.Random(seed)
    disk, notes, seen = Disk(), [], set()
    for at, op in enumerate(log.ops):
        disk.do(op)
        if isinstance(op, Note):
            notes.append(op.text)
        if not after(op):
            continue
        ways = list(choices(disk.pending, rng, samples))
        for kept in ways if len(ways) <= most else rng.sample(ways, most):
            tree = _tree_after(log, disk, kept)
            name = _digest(tree, len(notes))
            if name in seen:
                continue
            seen.add(name)
            try:
                _check(check, tree, scratch, notes)
            except BaseException as error:
                error.add_note(f"after {op!r:.200}, with {kept!r:.400} of {disk.pending!r:.800}")
                raise Find(at=at, kept=kept) from error
    return len(seen)


def replay(log: Log, scratch: Path, check: Callable[[Crash], None], at: int, kept: Kept) -> None:
    """`check` what `explore` found after the call number `at`. Where less is pending by now, the
    rest of `kept` is of nothing; what it does not speak of is there."""
    disk, ops = Disk(), log.ops[: at + 1]
    for op in ops:
        disk.do(op)
    kept = [
        [sector for sector in part if sector < num_sectors(change)]
        if isinstance(part, list) and isinstance(change, Write)
        else bool(part)
        for part, change in zip([*kept, *[True] * len(disk.pending)], disk.pending, strict=False)
    ]
    notes = [op.text for op in ops if isinstance(op, Note)]
    _check(check, _tree_after(log, disk, kept), scratch, notes)


def _check(
    check: Callable[[Crash], None], tree: dict[str, Any], scratch: Path, notes: list[Any]
) -> None:
    _lay_out(tree, scratch)
    check(Crash(scratch, tuple(notes)))


def _tree_after(log: Log, disk: Disk, kept: Kept) -> dict[str, Any]:
    files, folders = disk.after(kept)
    return dict(_tree(log, files, folders, ROOT, ""))


def _tree(
    log: Log, files: dict[int, bytearray], folders: dict[int, dict[str, int]], inode: int, path: str
) -> Iterator[tuple[str, Any]]:
    """(path, content): bytes of a file, a string for a link, None for a folder."""
    for name, inner in sorted(folders.get(inode, {}).items()):
        here = f"{path}{name}"
        if inner in log.folders:
            yield here, None
            yield from _tree(log, files, folders, inner, f"{here}/")
        elif inner in log.links:
            yield here, log.links[inner]
        else:
            yield here, files.get(inner, b"")


def _digest(tree: dict[str, Any], stage: int) -> bytes:
    found = hashlib.blake2b(str(stage).encode(), digest_size=16)
    for path, content in tree.items():
        found.update(f"{path}\0{type(content).__name__}".encode())
        if content is not None:
            found.update(content.encode() if isinstance(content, str) else content)
    return found.digest()


def _lay_out(tree: dict[str, Any], scratch: Path) -> None:
    """Make `scratch` hold `tree`. Files are written over in place: a file that is cut to nothing
    and written again goes to the disk at once, on file systems that fear a power loss."""
    scratch.mkdir(exist_ok=True)
    for path in sorted(scratch.rglob("*"), reverse=True):
        name = str(path.relative_to(scratch))
        if path.is_symlink() or not path.is_dir():
            if not isinstance(tree.get(name), (bytes, bytearray)):
                path.unlink()
        elif tree.get(name, "") is not None:
            path.rmdir()
    for name, content in tree.items():
        path = scratch / name
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.write(content)
                file.truncate()


def check_recording(log: Log) -> None:
    """Assert that all calls together have made what is there now."""
    disk = Disk()
    for op in log.ops:
        disk.do(op)
    tree = _tree_after(log, disk, (True,) * len(disk.pending))
    there = {
        str(path.relative_to(log.root)): path
        for path in log.root.rglob("*")
        if not log.ignores(path)
    }
    assert tree.keys() == there.keys()
    for name, content in tree.items():
        if isinstance(content, str):
            assert there[name].readlink() == Path(content)
        elif content is not None:
            assert there[name].read_bytes() == content, name
