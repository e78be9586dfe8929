"""Lives of stores and of folders of checkpoints, recorded; and what a crash may leave of them.

Every life has arguments that JSON has, so that a find of one can be kept.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import gemini
import nvme
from gemini.checkpoint.__main__ import main
from gemini.checkpoint.format.folder import remove_dead
from nvme import BlockStore, BufferPool, StoreLayout
from tests.support.disks.crashes import Crash, check_recording
from tests.support.disks.hostile import small
from tests.support.disks.recording import Log, Op, Write, recorded

Check = Callable[[Crash], None]
SIZES = [5000, 1, 4096, 9000, 700]
MANY = "many blocks"  # whose index has several sectors
COMES = "a block that comes and goes"
LAYOUTS = {
    "one file": (StoreLayout.plan("d", SIZES), (".",)),
    "two folders": (StoreLayout.plan("d", SIZES, [1.0, 1.0]), (".", "b")),
    "a folder without blocks": (StoreLayout.plan("d", SIZES, [1.0, 1e-9]), (".", "b")),
    MANY: (StoreLayout.plan("d", [3] * 130), (".",)),
    COMES: (StoreLayout.plan("d", SIZES), (".",)),
}


def recorded_life(folder: Path, life: str, *args: Any) -> tuple[Log, Check]:
    """Of a new folder: what the disk was told, and what to demand of what is left."""
    disk = folder / "disk"
    disk.mkdir()
    return {"store": store_life, "saves": save_life}[life](disk, *args)


# -- a store --------------------------------------------------------------------------------------


def content(nbytes: int, block: int, step: int) -> bytes:
    return random.Random(f"{block} {step}").randbytes(nbytes)


def store_life(folder: Path, kind: str, steps: int, seed: int) -> tuple[Log, Check]:
    """Filled, stepped, once rolled back; a block that comes and goes is there in two steps of
    three."""
    layout, folders = LAYOUTS[kind]
    rng, sizes = random.Random(seed), layout.block_nbytes
    moving = {len(sizes) - 1} if kind == COMES else set()
    there = set(range(len(sizes))) - moving
    with recorded(folder) as log:
        nvme.files.calls.make_folders(folder / "b")
        store = BlockStore([folder / name for name in folders], layout, blocks=there)
        pool = BufferPool(len(sizes), max(sizes))
        now: list[Any] = [None] * len(sizes)
        expected, used = {}, []
        for step in range(steps):
            failed = step == 3
            new = moving - there if step % 3 else set()
            if new:
                store.remember(sorted(new))
                there |= new
            elif moving & there and step % 3 == 0:
                log.note(("leave", sorted(moving)))
                store.forget(sorted(moving))
                there -= moving
            written = [b for b in sorted(there) if step < 2 or b in new or rng.random() < 0.7]
            for block in written:
                buffer = pool.take()
                data = content(sizes[block], block, -1 if failed else step)
                buffer.view[: len(data)] = data
                store.write(block, buffer.view)
                used.append(buffer)
            if failed:
                store.rollback()
            else:
                store.flush()
            while used:
                pool.give(used.pop())
            if failed:
                continue
            now = [step if b in written else now[b] for b in range(len(sizes))]
            made = {b: content(sizes[b], b, now[b]) for b in sorted(there)}
            expected[step] = [made.get(b) for b in range(len(sizes))]
            log.note(("begins", step))
            store.commit(step)
            log.note(("ends", step))
            if moving:
                log.note(("leave", []))
        check_recording(log)
        names = [str(path.relative_to(folder)) for path in store.paths]
        ops = len(log.ops)
        store.close()
        del log.ops[ops:]
    return log, lambda crash: _check_store(crash, names, expected)


def _check_store(crash: Crash, names: Sequence[str], expected: dict[int, list[Any]]) -> None:
    """One whole step: the last that was committed, or one whose commit had begun. But for blocks
    that are not there, or were forgotten since."""
    begun = [step for kind, step in crash.notes if kind == "begins"]
    ended = [step for kind, step in crash.notes if kind == "ends"]
    try:
        with nvme.recover([crash.folder / name for name in names]) as found:
            step = found.index.step
            left = [blocks for kind, blocks in crash.notes if kind == "leave"]
            gone = set(left[-1] if left else ())
            gone |= {b for b, data in enumerate(expected.get(step, ())) if data is None}
            blocks = {b: found.block(b) for b in range(found.layout.num_blocks) if b not in gone}
    except nvme.StoreFormatError:
        assert not ended, "a step that was committed is gone"
        return
    assert step in expected and step in (ended[-1:] or begun) + begun[-1:]
    assert blocks == {b: data for b, data in enumerate(expected[step]) if b in blocks}


def of_interest(kind: str) -> Callable[[Op], bool]:
    """After which calls to look: where there are many blocks, not after each of them."""
    blocks_begin = LAYOUTS[kind][0].extents()[0][0].offset
    return lambda op: not (kind == MANY and isinstance(op, Write) and op.offset >= blocks_begin)


# -- checkpoints ----------------------------------------------------------------------------------

Save = Sequence[Any]  # (name, keep_last, in the background)
# the first one, replaced, more of them, deleted, replaced
SAVES: list[Save] = [
    ("a", None, False), ("a", None, True), ("b", None, False), ("c", 2, False), ("c", 1, True),
    ("d", 1, False),
]  # fmt: skip


def drawn_saves(count: int, seed: int) -> list[Save]:
    rng = random.Random(seed)
    return [
        (rng.choice("abcd"), rng.choice([None, 1, 2, 3]), rng.random() < 0.3) for _ in range(count)
    ]


def save_life(folder: Path, which: Sequence[Save]) -> tuple[Log, Check]:
    """Every weight of the k-th save is k."""
    model, optimizer = small()
    with recorded(folder) as log:
        for k, (name, keep_last, in_background) in enumerate(which, start=1):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(k)
            log.note(("begins", k))
            gemini.save_checkpoint(
                folder / "runs" / name,
                model,
                optimizer,
                extra=k,
                async_save=in_background,
                keep_last=keep_last,
            ).wait()
            log.note(("ends", k))
        check_recording(log)
    return log, SaveChecker(which)


class SaveChecker:
    """Demands what was promised of a save that had ended, and wholeness of whatever is there."""

    def __init__(self, which: Sequence[Save]) -> None:
        self._which = which
        self._model, self._optimizer = small()
        self._known: dict[bytes, int] = {}  # content of a folder -> which save it is

    def __call__(self, crash: Crash) -> None:
        begun = max((k for kind, k in crash.notes if kind == "begins"), default=0)
        ended = max((k for kind, k in crash.notes if kind == "ends"), default=0)
        runs = crash.folder / "runs"
        if not ended and not runs.exists():
            return
        found = self._look(runs, begun, ended)
        if runs.exists():
            remove_dead(runs)
            assert self._look(runs, begun, ended) == found
            left = [path for path in runs.iterdir() if path.name.startswith(".")]
            assert not [path for path in left if path.is_symlink() or any(path.iterdir())]

    def _look(self, runs: Path, begun: int, ended: int) -> dict[str, int]:
        there = {
            path.name: self._load(path)
            for path in sorted(runs.iterdir())
            if not path.name.startswith(".") and not path.is_symlink()
        }
        for name, k in there.items():
            assert self._which[k - 1][0] == name and k <= begun
        promised: dict[str, int] = {}
        for k, (name, keep_last, _) in enumerate(self._which[:ended], start=1):
            promised.pop(name, None)  # the newest is the last
            promised[name] = k
            promised = dict(list(promised.items())[-(keep_last or len(promised)) :])
        if begun > ended and (last := self._which[begun - 1][1]) is not None:
            promised = dict(list(promised.items())[max(0, len(promised) + 1 - last) :])
        for name, k in promised.items():
            assert there[name] >= k, f"save {k} had ended, and {name} is save {there.get(name)}"
        latest = runs / "latest"
        assert latest.is_symlink() or not ended
        if latest.is_symlink():
            assert max(ended, 1) <= there[latest.readlink().name] <= begun
        return there

    def _load(self, folder: Path) -> int:
        content = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            content.update(path.name.encode() + path.read_bytes())
        key = content.digest()
        if key not in self._known:
            assert main(["verify", str(folder)]) == 0
            k = gemini.load_checkpoint(folder, self._model, self._optimizer)
            weights = self._model.state_dict().values()
            assert all((value == k).all() for value in weights)
            self._known[key] = k
        return self._known[key]
