"""Files of processes that died: kept where they hold a step, removed where they hold none."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nvme
from gemini.__main__ import main
from nvme import BlockStore, StoreLayout
from nvme.files import calls
from tests.support.disks.faults import failing

ONE = StoreLayout.plan("d", [5000])

DIE = """
import os, sys, nvme
num_versions, commits, *folders = sys.argv[1:]
layout = nvme.StoreLayout.plan("d", [5000] * 4, [1.0] * len(folders), int(num_versions))
store = nvme.BlockStore(folders, layout)
pool = nvme.BufferPool(1, 5000)
buffer = pool.take()
for step in range(int(commits)):
    for block in range(4):
        buffer.view[:] = bytes([step]) * buffer.view.nbytes
        store.write(block, buffer.view).wait()
    store.commit(step)
print(*store.paths)
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


def die(*folders, num_versions=2, commits=5):
    """Files of a process that was killed after its last commit, which was of step `commits - 1`."""
    arguments = [str(num_versions), str(commits), *map(str, folders)]
    done = subprocess.run(
        [sys.executable, "-c", DIE, *arguments],
        env={"PYTHONPATH": ":".join(sys.path)}, stdout=subprocess.PIPE, text=True, encoding="utf-8",
    )  # fmt: skip
    return [Path(path) for path in done.stdout.split()]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_step_of_a_killed_process_outlives_every_store_made_after_it(tmp_path, caplog, capsys):
    (path,) = die(tmp_path)
    with caplog.at_level(logging.WARNING, "gemini.nvme"):
        for _ in range(2):
            BlockStore([tmp_path], ONE).close()
    said = [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]
    assert len(said) == 1, "said once"
    assert said[0].startswith("kept") and "it holds step 4" in said[0]
    assert nvme.orphans(tmp_path) == (path,)
    with nvme.recover([path]) as found:
        assert found.index.step == 4
        assert [found.block(i) for i in range(4)] == [b"\4" * 5000] * 4
    (left,) = nvme.left_in(tmp_path)
    assert (left.path, left.step) == (path, 4) and left.nbytes >= 4 * 2 * 5000
    for flags, after in (((), [path.name]), (("--remove",), [])):
        assert main(["clean", *flags, str(tmp_path)]) == 0
        assert f"{path}: step 4, " in capsys.readouterr().out and names(tmp_path) == after
    with pytest.raises(SystemExit):
        main(["clean", str(tmp_path / "none")])
    assert "none is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind",
    [
        "never committed",
        pytest.param("filled, not stepped", marks=pytest.mark.ci),
        pytest.param("of one version", marks=pytest.mark.ci),
    ],
)
def test_what_never_held_a_step_is_removed_by_the_next_store(kind, tmp_path, caplog):
    commits = {"filled, not stepped": 1}.get(kind, 0)
    (path,) = die(tmp_path, num_versions=1 if kind == "of one version" else 2, commits=commits)
    with caplog.at_level(logging.WARNING, "gemini.nvme"):
        BlockStore([tmp_path], ONE).close()
    assert names(tmp_path) == [] and f"removed {path}" in caplog.text


@pytest.mark.parametrize("commits", [pytest.param(0, marks=pytest.mark.ci), 3])
def test_files_of_a_striped_store_are_kept_or_removed_together(commits, tmp_path):
    """The first file alone knows the step."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    paths = die(*folders, commits=commits)
    BlockStore([folders[1]], ONE).close()  # sees the second file only, which cannot say
    assert [path.exists() for path in paths] == [True, True]
    BlockStore(folders[::-1], StoreLayout.plan("d", [5000] * 2, [1.0, 1.0])).close()
    assert [path.exists() for path in paths] == [commits > 0] * 2


@pytest.mark.ci
def test_files_that_are_damaged_or_of_another_version_are_kept(tmp_path, caplog):
    for place in (8, 30, 4096 + 24):  # the version, the header, both slots of the index
        (path,) = die(tmp_path)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\xff" * 4)
    with path.open("r+b") as file:
        file.truncate(5000)
    before = names(tmp_path)
    with caplog.at_level(logging.WARNING, "gemini.nvme"):
        BlockStore([tmp_path], ONE).close()
    assert len(before) == 3 and names(tmp_path) == before
    assert "it holds what this process cannot read" in caplog.text


def test_files_of_others_and_live_files_are_left_alone(tmp_path):
    foreign = tmp_path / "gemini-notes.blocks"
    foreign.write_text("this is somebody's file", encoding="utf-8")
    (tmp_path / "gemini-folder.blocks").mkdir()
    (tmp_path / "gemini-link.blocks").symlink_to(foreign)
    alive = BlockStore([tmp_path], ONE)
    before = names(tmp_path)
    BlockStore([tmp_path], ONE).close()
    assert nvme.remove_orphans(tmp_path) == () == nvme.orphans(tmp_path) == nvme.left_in(tmp_path)
    assert (
        names(tmp_path) == before
        and foreign.read_text(encoding="utf-8") == "this is somebody's file"
    )
    alive.close()


def test_a_file_of_another_user_is_none_of_ours(tmp_path, monkeypatch):
    """In a shared folder anybody may put an empty file of such a name."""
    (tmp_path / "gemini-x.blocks").touch()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    BlockStore([tmp_path], ONE).close()
    assert nvme.remove_orphans(tmp_path) == () and names(tmp_path) == ["gemini-x.blocks"]


def test_a_file_that_cannot_be_removed_stops_nobody(tmp_path, caplog):
    """A sticky folder, an immutable file."""
    path = tmp_path / "gemini-x.blocks"
    path.touch()
    with failing("unlink", errno.EPERM, "gemini-x") as refused:
        with caplog.at_level(logging.WARNING, "gemini.nvme"):
            store = BlockStore([tmp_path], ONE)
        assert refused and f"{path} was not removed: EPERM" in caplog.text
        with pytest.raises(nvme.FolderError, match=rf"cannot remove {path}: EPERM"):
            nvme.remove_orphans(tmp_path)
    store.close()
    assert names(tmp_path) == ["gemini-x.blocks"]


def test_a_file_that_is_taken_for_dead_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Somebody removes orphans between the making of a file and its lock."""
    lock, removed = calls.lock, []

    def late(fd, how):
        if not removed:
            removed.append(None)
            removed.extend(nvme.remove_orphans(tmp_path))
        lock(fd, how)

    monkeypatch.setattr(calls, "lock", late)
    store = BlockStore([tmp_path], ONE)
    assert len(removed) == 2, "it was removed"
    (path,) = store.paths
    assert path.exists() and os.path.samestat(path.stat(), os.fstat(store.files[0].fd))
    store.close()


def test_a_full_disk_says_what_dead_processes_hold(tmp_path):
    die(tmp_path)
    with (
        failing("allocate", errno.ENOSPC),
        pytest.raises(nvme.DiskFullError, match=r"ENOSPC, .*KiB in files of processes that died"),
    ):
        BlockStore([tmp_path], ONE)
    assert len(names(tmp_path)) == 1


def test_recover_follows_no_link_and_says_what_a_file_is_not(tmp_path):
    (path,) = die(tmp_path)
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(path)
    os.mkfifo(pipe)
    for other, said in ((link, "ELOOP"), (pipe, "is no file"), (tmp_path / "none", "ENOENT")):
        with pytest.raises(nvme.StoreFormatError, match=said), nvme.recover([other]):
            pass
    with nvme.recover([path]) as found:
        assert found.index.step == 4


@pytest.mark.ci
def test_a_store_that_was_cut_is_refused_wherever_it_was_cut(tmp_path):
    (path,) = die(tmp_path)
    whole = path.stat().st_size
    for size in (whole - 1, 8192, 4096 + 25, 4096 + 5, 4096, 40, 9, 3, 0):
        os.truncate(path, size)
        with pytest.raises(nvme.StoreFormatError), nvme.recover([path]):
            pass


@pytest.mark.ci
def test_files_of_a_store_must_all_be_there_in_order(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    one, other = die(*folders)
    (stranger,) = die(tmp_path)
    wrong = [[], [one], [other], [other, one], [one, one], [one, stranger], [one, other, other]]
    for paths in wrong:
        with pytest.raises(nvme.StoreFormatError), nvme.recover(paths):
            pass
    with nvme.recover([one, other]) as found:
        assert found.block(3) == b"\4" * 5000
