"""Files of strangers: what is opened is a regular file in its folder, and as large as it may be."""

import os
import socket

import pytest

from gemini import strangers


def make(kind, path, outside):
    """Something in the place of a file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(path.parent)  # a path of a socket is short
            made.bind(path.name)
            os.chdir(here)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.symlink_to({
            "device": "/dev/zero", "link to nothing": "nothing", "link outside": outside,
            "link up": f"../{outside.parent.name}/{outside.name}",
            "link over a link": path.parent / "to-outside" / outside.name,
        }[kind])  # fmt: skip


KINDS = (
    "pipe", "socket", "folder", "loop", "device", "link to nothing", "link outside", "link up",
    "link over a link",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name in ("mine", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside/secret").write_text("secret", encoding="utf-8")
    (tmp_path / "mine/to-outside").symlink_to(tmp_path / "outside")
    return tmp_path / "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_its_folder_is_not_opened(kind, folder):
    path = folder / "a.json"
    make(kind, path, folder.parent / "outside/secret")
    for read in (strangers.size_of, strangers.read_text, strangers.read_json):
        with pytest.raises(OSError):
            read(path)
    with pytest.raises(OSError):
        strangers.check_folder(folder)


def test_links_within_a_folder_and_of_the_hubs_cache_are_files(folder):
    (folder / "to-outside").unlink()
    (folder / "a").write_text("a", encoding="utf-8")
    (folder / "b").symlink_to("a")
    os.link(folder / "a", folder / "c")
    blobs, snapshot = folder / "models--x--y/blobs", folder / "models--x--y/snapshots/0"
    for made in (blobs, snapshot):
        made.mkdir(parents=True)
    (blobs / "123").write_text("blob", encoding="utf-8")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    found = [strangers.read_text(folder / name) for name in "abc"]
    assert [*found, strangers.read_text(snapshot / "config.json")] == ["a", "a", "a", "blob"]
    strangers.check_folder(folder)
    (snapshot / "other").symlink_to(folder / "a")
    with pytest.raises(strangers.StrangerError, match="outside of its folder"):
        strangers.read_text(snapshot / "other")


def test_a_folder_that_is_a_link_to_outside_is_none_of_the_folder(folder):
    with pytest.raises(strangers.StrangerError, match="outside of its folder"):
        strangers.check_folder(folder)
    with pytest.raises(strangers.StrangerError, match="its name is none"):
        strangers.size_of(f"{folder}/a\0b")


def test_a_file_is_read_up_to_its_limit_and_as_it_was(folder, monkeypatch):
    path = folder / "sparse"
    path.touch()
    os.truncate(path, 1 << 42)
    with pytest.raises(strangers.StrangerError, match="expected at most 16777216"):
        strangers.read_text(path)
    (folder / "to-outside").unlink()
    path.rename(folder / "tokenizer.json")
    with pytest.raises(strangers.StrangerError, match="to be read whole"):
        strangers.check_folder(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(strangers.StrangerError, match=r"deep\.json' is nested deeper"):
        strangers.check_folder(folder)
    path.write_bytes(b"12345")
    real = os.fstat
    for change in (-1, 1):  # it grew, or was cut, behind the look

        def stat(fd, change=change):
            found = list(real(fd))
            found[6] += change
            return os.stat_result(found)

        monkeypatch.setattr(os, "fstat", stat)
        with pytest.raises(strangers.StrangerError, match="changed while it was read"):
            strangers.read_text(path)


@pytest.mark.parametrize("text", [
    b"[" * 100_000, b'{"a": 1, "a": 2}', b'[{"b": {"a": 1, "a": 2}}]', b"\xff", b"", b"{",
    b"1" * 10_000,
])  # fmt: skip
def test_json_that_says_nothing_certain_is_refused(text):
    with pytest.raises(ValueError):
        strangers.parsed(text)
