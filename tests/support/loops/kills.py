"""Processes that are killed while they train or save, and what is left of them.

Every run takes the folder of a test and the moments, as `kill_at` does.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gemini
import nvme
from bench.shared.models import token_batches, token_loss
from bench.shared.workers import run_processes
from gemini import AutoPlacement
from gemini.checkpoint.__main__ import main
from gemini.runtime.step.homes import MovingHomes
from optim import HybridAdam, NvmeConfig
from tests.support import checkpoints, spilled
from tests.support.checkpoints import make, train
from tests.support.disks.killing import counted, counted_in, kill_at
from tests.support.loops.lengths import Loop, assert_same
from tests.support.loops.tails import batches, has_tail, wrapped

Moments = int | Iterable[int] | None
STEPS = 6  # of a run whose changes are counted
ENDED = "ended"  # a file beside what a run makes


def ended(folder: str, count: int) -> None:
    """So much of a run has ended, whenever another thread ends the process."""
    new = Path(folder, f"{ENDED}.new")
    new.write_text(str(count), encoding="utf-8")
    new.replace(Path(folder, ENDED))


def num_ended(folder: Path) -> int:
    path = folder / ENDED
    return int(path.read_text(encoding="utf-8")) if path.exists() else 0


def digests(paths: Any, num_blocks: int | None = None) -> tuple[int, list[bytes]]:
    """The last step that counts in a store's files, and its first blocks."""
    with nvme.recover(paths) as found:
        count = num_blocks or found.layout.num_blocks
        return found.index.step, [digest(found.block(i)) for i in range(count)]


def digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=8).digest()


# -- steps of a wrapped module --------------------------------------------------------------------


def after_every_step(index: int, folder: str) -> dict[int, list[bytes]]:
    """What is in the file after each step of a run without kills, stepped serially."""
    torch.set_num_threads(1)
    model, optimizer = wrapped("serial", folder=folder)
    optimizer.bind()
    paths = optimizer.targets[0].tiered_state.nvme.store.paths
    found = [digests(paths)]
    for batch in batches(2 * STEPS):
        token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(digests(paths))
    optimizer.close()
    return dict(found)


def train_until_killed(last: int | None, folder: str, update: str) -> int:
    files = f"{folder}/files"
    Path(files).mkdir()
    model, optimizer = wrapped(update, folder=files)
    optimizer.bind()  # its file holds step 0
    with counted(last, files) as changes:
        # one that is killed trains on until it made so many, whichever were early
        for step, batch in enumerate(batches(STEPS if last is None else 2 * STEPS), start=1):
            token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            ended(folder, step)
        assert has_tail(optimizer)
    optimizer.close(keep_masters=False)
    return changes.count


def kill_training(update: str, folder: Path, moments: Moments) -> None:
    """What is left is a step with the bits of a serial run, no further behind than by the tail that
    was under way."""
    (folder / "serial").mkdir()
    (expected,) = run_processes(after_every_step, 1, str(folder / "serial"))

    def check(left: Path) -> None:
        step, blocks = digests(list((left / "files").iterdir()))
        assert blocks == expected[step], step
        assert abs(step - num_ended(left)) <= 1, (step, num_ended(left))

    kill_at(moments, check, folder, train_until_killed, update)


# -- steps that are gone back ---------------------------------------------------------------------

MOVES = (1, 1, 1, -2, 1, 1, 1, -3, 1, -1)  # a step, or back so many


def count_after(moves: int) -> int:
    return sum(MOVES[:moves])


def states_by_count(index: int, folder: str) -> list[list[bytes]]:
    torch.set_num_threads(1)
    model, optimizer = make("nvme", folder=folder)
    paths = optimizer.stores[0].paths
    found = [digests(paths)[1]]
    for batch in checkpoints.batches(0, len(MOVES)):
        train(model, optimizer, [batch])
        found.append(digests(paths)[1])
    optimizer.close()
    return found


def go_back_until_killed(last: int | None, folder: str) -> int:
    files = f"{folder}/files"
    Path(files).mkdir()
    model, optimizer = make("nvme", folder=files, keep_versions=3)
    with counted(last, files) as changes:
        for i, move in enumerate(MOVES):
            if move > 0:
                number = count_after(i)
                train(model, optimizer, checkpoints.batches(number, number + 1))
            else:
                model.rewind(-move)
            ended(folder, i + 1)
    return changes.count


def kill_going_back(folder: Path, moments: Moments) -> None:
    """What is left is what the last move left, or the next one."""
    (folder / "alone").mkdir()
    (expected,) = run_processes(states_by_count, 1, str(folder / "alone"))

    def check(left: Path) -> None:
        _, blocks = digests(list((left / "files").iterdir()))
        moves = num_ended(left)
        assert blocks in [expected[count_after(moves)], expected[count_after(moves + 1)]], moves

    kill_at(moments, check, folder, go_back_until_killed)


# -- steps of a plain parameter -------------------------------------------------------------------

BLOCK, NUM_BLOCKS = 1 << 10, 9
NOTES = ("gemini-mine.blocks", b"a person's notes")


def stepped(folders: Any, steps: int) -> Iterator[tuple[int, HybridAdam]]:
    """(step, optimizer) after each of them; state in `folders`, in memory without."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(NUM_BLOCKS * BLOCK, generator=generator))
    optimizer = HybridAdam(
        [param],
        nvme_offload_fraction=float(folders is not None),
        nvme_offload_dir=folders,
        # a made one, so that two folders are not measured
        nvme=NvmeConfig(block_numel=BLOCK, engine=nvme.make_engine("threads")),
    )
    for step in range(1, steps + 1):
        param.grad = torch.randn(len(param), generator=generator)
        optimizer.step()
        yield step, optimizer


def blocks_of(optimizer: HybridAdam) -> list[bytes]:
    """Digests of both planes of each, as its file has them."""
    state = optimizer.state_dict()["state"][0]
    planes = [state[name].view(-1, BLOCK) for name in ("exp_avg", "exp_avg_sq")]
    return [digest(torch.cat(both).numpy().tobytes()) for both in zip(*planes, strict=True)]


def step_until_killed(last: int | None, folder: str, num_folders: int) -> int:
    folders = [f"{folder}/files{i}" for i in range(num_folders)]
    for name in folders:
        Path(name).mkdir()
        Path(name, NOTES[0]).write_bytes(NOTES[1])
    with counted(last, f"{folder}/files") as changes:
        for step, _optimizer in stepped(folders, STEPS):
            ended(folder, step)
    return changes.count


def kill_steps(num_folders: int, folder: Path, moments: Moments) -> None:
    """The last step that ended is left, or the next one. Another run steps right, and leaves it
    where it is; when it is removed, files of others are there."""
    expected = {step: blocks_of(optimizer) for step, optimizer in stepped(None, STEPS)}
    expected[0] = [digest(bytes(8 * BLOCK))] * NUM_BLOCKS

    def check(left: Path) -> None:
        folders = sorted(left.glob("files*"))

        def orphans() -> list[Path]:
            return [path for folder in folders for path in nvme.orphans(folder)]

        def recovered() -> int:
            try:
                step, blocks = digests(orphans(), NUM_BLOCKS)
            except nvme.StoreFormatError:  # before the first filling was committed
                return 0
            assert blocks == expected[step], step
            return step

        files, step = orphans(), recovered()
        assert step in (num_ended(left), num_ended(left) + 1), (step, num_ended(left))
        for number, optimizer in stepped([str(path) for path in folders], 2):
            assert blocks_of(optimizer) == expected[number], number
        assert orphans() == (files if step else [])  # a first filling is no step
        assert not step or recovered() == step
        optimizer.close()
        for path in folders:
            nvme.remove_orphans(path)
            assert [(file.name, file.read_bytes()) for file in path.iterdir()] == [NOTES]

    kill_at(moments, check, folder, step_until_killed, num_folders)


# -- steps of a module whose parameters are in files ----------------------------------------------


def step_in_files_until_killed(last: int | None, folder: str) -> int:
    """Two steps behind one that counts."""
    three = token_batches(3, 1)
    model, optimizer = spilled.wrapped(AutoPlacement(spilled.LEAST.device_budget, nvme_dir=folder))
    assert spilled.homes(model)[0] == {spilled.N} == spilled.homes(model)[2]
    train(model, optimizer, three[:1])
    with counted(last, folder) as changes:
        train(model, optimizer, three[1:])
    return changes.count


def kill_steps_in_files(folder: Path, moments: Moments) -> None:
    """16-bit parameters are the fp32 masters, rounded, of the last step that both files have."""

    def check(left: Path) -> None:
        (params,) = left.glob("*parameters*")
        (state,) = (p for p in left.iterdir() if "parameters" not in p.name and
                    "gradients" not in p.name)  # fmt: skip
        with nvme.recover([params]) as mine, nvme.recover([state]) as other:
            step = min(mine.index.step, other.index.step)
            assert mine.index.step - step <= 1 and other.index.step == step and step in (1, 2)
        with nvme.recover([params], step) as mine, nvme.recover([state], step) as other:
            shards = [mine.block(i) for i in range(mine.layout.num_blocks)]
            masters = [other.block(i) for i in range(other.layout.num_blocks)]
        values = [torch.frombuffer(bytearray(b), dtype=torch.bfloat16) for b in shards]
        rounded = [
            torch.frombuffer(bytearray(b), dtype=torch.float32)[: len(b) // 12].bfloat16()
            for b in masters
        ]
        assert torch.equal(torch.cat(values), torch.cat(rounded)), step

    kill_at(moments, check, folder, step_in_files_until_killed)


# -- saves ----------------------------------------------------------------------------------------

SAVES = "abac"  # new; new, and `first` is deleted; replaced; new, and `b` is deleted


def save_until_killed(last: int | None, folder: str, async_save: bool) -> int:
    model, optimizer = make("mixed")
    runs = f"{folder}/runs"
    gemini.save_checkpoint(f"{runs}/first", model, optimizer, extra=0)
    with counted(last, runs) as changes:
        for k, (name, batch) in enumerate(zip(SAVES, batches(len(SAVES)), strict=True), start=1):
            train(model, optimizer, [[batch]])
            gemini.save_checkpoint(
                f"{runs}/{name}", model, optimizer, extra=k, async_save=async_save, keep_last=2
            ).wait()
            ended(folder, k)
    return changes.count


def kill_saves(async_save: bool, folder: Path, moments: Moments) -> None:
    """`latest` is of the last save that ended or of the next one, whole; what the dead one left is
    in nobody's way."""
    model, optimizer = make("resident")

    def check(left: Path) -> None:
        runs = left / "runs"
        k = gemini.load_checkpoint(runs, model, optimizer)
        assert main(["verify", str(runs)]) == 0
        assert k in (num_ended(left), num_ended(left) + 1), (k, num_ended(left))
        assert set(optimizer.targets[0].step_counts) == {k}, "all is of one save"
        gemini.save_checkpoint(runs / "next", model, optimizer)
        rest = [path for path in runs.iterdir() if path.name.startswith(".")]
        assert not [path for path in rest if path.is_symlink() or any(path.iterdir())]

    kill_at(moments, check, folder, save_until_killed, async_save)


def pin_until_killed(last: int | None, folder: str, async_save: bool) -> int:
    Path(folder, "files").mkdir()
    model, optimizer = make("nvme", folder=f"{folder}/files", keep_versions=3)
    runs = f"{folder}/runs"
    gemini.save_checkpoint(f"{runs}/first", model, optimizer, extra=0, pinned=True)
    with counted(last, folder) as changes:
        for k, name in enumerate(SAVES, start=1):
            train(model, optimizer, checkpoints.batches(k - 1, k + 1))
            model.rewind(1)
            gemini.save_checkpoint(
                f"{runs}/{name}",
                model,
                optimizer,
                extra=k,
                async_save=async_save,
                keep_last=2,
                pinned=True,
            ).wait()
            ended(folder, k)
    return changes.count


def kill_pinned_saves(async_save: bool, folder: Path, moments: Moments) -> None:
    """As `kill_saves`; files that a checkpoint is pinned to are not removed before it is."""
    model, optimizer = make("resident")

    def check(left: Path) -> None:
        runs = left / "runs"
        k = gemini.load_checkpoint(runs, model, optimizer)
        assert k in (num_ended(left), num_ended(left) + 1), (k, num_ended(left))
        assert set(optimizer.targets[0].step_counts) == {k}, "all is of one save"
        nvme.remove_orphans(left / "files")
        names = [path for path in runs.iterdir() if not path.name.startswith(".")]
        assert [main(["verify", str(path)]) for path in names] == [0] * len(names)
        for path in names:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        nvme.remove_orphans(left / "files")
        assert not list((left / "files").iterdir())

    kill_at(moments, check, folder, pin_until_killed, async_save)


# -- moves of homes -------------------------------------------------------------------------------

LENGTHS = (4, 4, 16, 16, *[4] * 7, 16)  # down, up, down


def looped(folder: Path, *budgets: str | None) -> Loop:
    files = folder / "files"
    files.mkdir(exist_ok=True)
    return Loop(460, *budgets, str(files), released=True)


def move_until_killed(last: int | None, folder: str) -> int:
    """Changes are those that moves make; a save follows each step."""
    loop = looped(Path(folder), "100KiB", None)  # which leaves the host staging alone
    runs = f"{folder}/runs"
    gemini.save_checkpoint(f"{runs}/0", loop.model, loop.optimizer, extra=0)
    with counted_in(MovingHomes, ("_demote", "_promote"), last, f"{folder}/files") as changes:
        for k, length in enumerate(LENGTHS, start=1):
            loop.train(length)
            gemini.save_checkpoint(f"{runs}/{k}", loop.model, loop.optimizer, extra=k, keep_last=2)
            ended(folder, k)
    assert all(loop.moves)
    return changes.count


def kill_moves(folder: Path, moments: Moments) -> None:
    """A run that goes on from its last save has the bits of one in which nothing moved."""
    free = Loop(1 << 20).train(*LENGTHS)

    def check(left: Path) -> None:
        loop = looped(left, "100KiB", None)
        k = gemini.load_checkpoint(left / "runs", loop.model, loop.optimizer)
        assert k == num_ended(left)
        for length in LENGTHS[:k]:
            loop.ids(length)
        assert_same(loop.train(*LENGTHS[k:]), free)

    kill_at(moments, check, folder, move_until_killed)


RUNS: dict[str, Callable[[Path, Moments], None]] = {
    "training with a tail": partial(kill_training, "tail"),
    "steps in one folder": partial(kill_steps, 1),
    "steps in two folders": partial(kill_steps, 2),
    "steps of parameters in files": kill_steps_in_files,
    "saves": partial(kill_saves, False),
    "saves in the background": partial(kill_saves, True),
    "pinned saves": partial(kill_pinned_saves, False),
    "pinned saves that are copied out": partial(kill_pinned_saves, True),
    "steps that are gone back": kill_going_back,
    "moves of homes": kill_moves,
}
