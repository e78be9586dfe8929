"""The index of a checkpoint: what a load parses and costs, and what `.metadata` is still for."""

import json
import math
import pickle
import shutil
import zlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gemini
from bench.host.calls import Chain, counted
from gemini.checkpoint import CorruptError
from gemini.checkpoint.__main__ import main
from gemini.checkpoint.format.boxes import boxes_of_run
from gemini.checkpoint.format.index import (
    PartsOf,
    SavedPart,
    SavedValue,
    decode_index,
    encode_index,
)
from gemini.checkpoint.format.manifest import DataFile, Manifest
from gemini.checkpoint.format.small_files import read_manifest
from gemini.checkpoint.untrusted.metadata import read_metadata
from tests.support import corpus
from tests.support.checkpoints import assert_same, whole
from tests.support.disks.hostile import refused, small, unpacked
from tests.support.disks.sealed import manifest_of, put_manifest, put_metadata

# calls of ours; a layer is a linear one in a chunk of its own, with Adam's state in memory
MOST_CALLS, MOST_CALLS_A_LAYER = 5_000, 400


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    gemini.save_checkpoint(folder / "a", *small(), extra=[1, "two"])
    return folder / "a"


@pytest.fixture
def saved(original, tmp_path):
    shutil.copytree(original, tmp_path / "a")
    return tmp_path / "a"


# -- what a load parses -------------------------------------------------------------------------


def load_calls(layers, path):
    chain = Chain(layers, "resident")
    chain.forward()
    chain.backward()
    chain.optimizer.step()
    gemini.save_checkpoint(path, chain.model, chain.optimizer)
    return counted(lambda: gemini.load_checkpoint(path, chain.model, chain.optimizer)).calls


def test_a_load_makes_few_calls_a_layer(tmp_path):
    few, many = load_calls(4, tmp_path / "4"), load_calls(8, tmp_path / "8")
    assert (many - few) / 4 <= MOST_CALLS_A_LAYER
    assert many <= MOST_CALLS


def put_pickle(folder, data):
    """`.metadata` of these bytes, with all checksums of a manifest that says what it said."""
    (folder / ".metadata").write_bytes(data)
    body = manifest_of(folder)
    body["metadata"] = [len(data), zlib.crc32(data)]
    body["index"]["metadata"] = zlib.crc32(data)
    put_manifest(folder, body)


def test_a_load_reads_nothing_of_the_pickle_and_verify_all_of_it(saved, capsys):
    put_pickle(saved, b"no pickle")
    assert gemini.load_checkpoint(saved, *small()) == [1, "two"]
    assert main(["verify", str(saved)]) == 1
    assert ".metadata cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("edit", [
    lambda tensors: tensors["model.weight"][1].reverse(),
    lambda tensors: tensors.pop("model.bias"),
    lambda tensors: tensors.update(more=tensors["model.bias"]),
    lambda tensors: tensors.update({"model.bias": ["int32", *tensors["model.bias"][1:]]}),
])  # fmt: skip
def test_verify_compares_the_manifest_with_metadata(edit, saved, capsys):
    body = manifest_of(saved)
    edit(body["index"]["tensors"])
    put_manifest(saved, body)
    assert main(["verify", str(saved)]) == 1
    said = capsys.readouterr().err
    assert "do not say the same of" in said or "lies outside of it" in said


# -- older folders ------------------------------------------------------------------------------


def stepped():
    """What the corpus has a checkpoint of: two steps of a small module."""
    torch.manual_seed(0)
    model, optimizer = small()
    for i in range(2):
        model(torch.arange(14.0).view(2, 7) - i).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("name", corpus.read("checkpoints"))
def test_what_earlier_versions_saved_is_loaded(name, tmp_path):
    found = corpus.read("checkpoints")[name]
    folder = tmp_path / "a"
    folder.mkdir()
    for file, text in found["files"].items():
        (folder / file).write_bytes(unpacked(text))
    assert main(["verify", str(folder)]) == 0
    other = small()
    assert gemini.load_checkpoint(folder, *other) == found["extra"]
    assert_same(whole(*other), whole(*stepped()))


def test_a_data_file_has_the_bytes_that_earlier_versions_wrote(tmp_path):
    """And `.metadata` says the same of it, so that those versions read what this one saves."""
    model, optimizer = stepped()
    gemini.save_checkpoint(tmp_path / "a", model, optimizer, extra="two steps")
    found = corpus.read("checkpoints")["no-index"]["files"]
    now = read_metadata(tmp_path / "a", read_manifest(tmp_path / "a"))
    old = pickle.loads(unpacked(found[".metadata"]))
    keys = [key for key in old.state_dict_metadata if not key.startswith("gemini.")]
    assert old.state_dict_metadata.keys() == now.state_dict_metadata.keys()
    for key in keys:
        assert now.state_dict_metadata[key] == old.state_dict_metadata[key]
    for index in old.storage_data:
        if index.fqn in keys:
            place, before = now.storage_data[index], old.storage_data[index]
            assert place == before
            start, stop = place.offset, place.offset + place.length
            data = (tmp_path / "a" / place.relative_path).read_bytes()[start:stop]
            assert data == unpacked(found[place.relative_path])[start:stop]


def test_an_index_that_readers_would_find_too_large_is_left_out():
    """Older versions refuse a manifest of more than 1 MiB and a byte in 4096 of its files."""
    files = (DataFile("a", 0, ()),)
    for count, is_there in ((1_000, True), (100_000, False)):
        tensors = {f"layers.{i}": ["float32", [1], [0, 0, 4, 0, 1]] for i in range(count)}
        manifest = Manifest(1, 1, 0, 0, files, index={"metadata": 0, "tensors": tensors})
        data = manifest.encode()
        assert ("index" in json.loads(data.partition(b"\n")[0])) is is_there
        assert len(data) <= 1 << 20


# -- an index from strangers --------------------------------------------------------------------


def entry(body):
    return body["index"]["tensors"]["model.weight"]


def set_place(number, value):
    return lambda body: entry(body)[2].__setitem__(number, value)


WRONG = {
    "no tensors": lambda body: body["index"].pop("tensors"),
    "a list of tensors": lambda body: body["index"].update(tensors=[]),
    "an index that is none": lambda body: body.update(index=5),
    "a tensor that is none": lambda body: body["index"]["tensors"].update({"model.weight": 3}),
    "half a tensor": lambda body: entry(body).pop(),
    "another dtype": lambda body: entry(body).__setitem__(0, "Tensor"),
    "a dtype of numbers": lambda body: entry(body).__setitem__(0, [1]),
    "a size of words": lambda body: entry(body).__setitem__(1, ["3", 7]),
    "a size of true": lambda body: entry(body).__setitem__(1, [True, 21]),
    "a larger size": lambda body: entry(body).__setitem__(1, [1 << 40, 1 << 40]),
    "half a place": lambda body: entry(body)[2].pop(),
    "no places": lambda body: entry(body)[2].clear(),
    "a place in no file": set_place(0, 7),
    "a place before the first file": set_place(0, -1),
    "a place behind the end": set_place(1, 1 << 50),
    "a place of a half": set_place(1, 0.5),
    "more bytes than the file": set_place(2, 1 << 50),
    "fewer bytes than elements": set_place(2, 1),
    "a part outside": set_place(3, 1),
    "a part too large": set_place(5, 1 << 61),
    "a part twice": lambda body: entry(body)[2].extend(entry(body)[2]),
    "a value of no parts": lambda body: body["index"]["tensors"].update(a=[None, [], []]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_an_index_says_is_compared_with_the_files(kind, saved):
    body = manifest_of(saved)
    WRONG[kind](body)
    put_manifest(saved, body)
    assert refused(saved, CorruptError, "manifest.json") == [1, 1, 1]


def test_a_long_index_takes_little_memory(saved):
    body = manifest_of(saved)
    tensors = {f"{i:x}": ["int8", [0], []] for i in range(36_000)}
    body["index"]["tensors"] = tensors | {"last": ["int8", [1], []]}
    put_manifest(saved, body)
    assert refused(saved, CorruptError, "last has 1 elements") == [1, 1, 1]


CUT = [b"\x80\x02" + rest for rest in (
    b"", b".", b"J\1\2", b"U\5ab", b"\x8b\xff\xff\xff\xff", b"X\xff\xff\xff\xff", b"cab", b"ca\nb",
    b"U\1\ncab", b"q\5.", b"h\5.", b"\x86.", b"t.", b"N\x8a\x21" + b"\1" * 33 + b".", b"I5\n.",
)]  # fmt: skip


@pytest.mark.parametrize("data", CUT)
def test_a_pickle_that_ends_in_an_instruction_or_has_another_is_refused(data, saved):
    put_metadata(saved, data)
    assert refused(saved, CorruptError, r"\.metadata cannot be read") == [1, 1, 1]


# -- parts and boxes ----------------------------------------------------------------------------


def cuts(data, numel):
    places = data.draw(st.lists(st.integers(0, numel), max_size=5))
    ends = sorted({0, numel, *places})
    return list(pairwise(ends))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_box_is_found_in_the_parts_of_any_other_runs(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    numel = math.prod(shape)
    values = torch.arange(numel).view(shape)
    parts = [
        SavedPart("a", box.start, 0, box.offsets, box.sizes)
        for start, stop in cuts(data, numel)
        for box in boxes_of_run(shape, start, stop)
    ]
    parts = data.draw(st.permutations(parts))
    saved = PartsOf(parts)
    for start, stop in cuts(data, numel):
        for box in boxes_of_run(shape, start, stop):
            there = torch.full(box.sizes, -1)
            for overlap in saved.overlaps(box.offsets, box.sizes):
                item = values[slices(overlap.part.offsets, overlap.part.sizes)]
                target = there[slices(overlap.in_box, overlap.sizes)]
                assert (target == -1).all()
                target.copy_(item[slices(overlap.in_part, overlap.sizes)])
            assert torch.equal(there, values[slices(box.offsets, box.sizes)])


def slices(offsets, sizes):
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def test_an_index_comes_back():
    index = {
        "a": SavedValue(torch.bfloat16, torch.Size((2, 3)), (
            SavedPart("one", 64, 9, (0, 0), (1, 3)), SavedPart("two", 0, 6, (1, 0), (1, 3)))),
        "b": SavedValue(None, torch.Size(()), (SavedPart("two", 10, 5, (), ()),)),
        "c": SavedValue(torch.float32, torch.Size(()), (SavedPart("one", 0, 4, (), ()),)),
        "d": SavedValue(torch.float32, torch.Size((0,)), ()),
    }  # fmt: skip
    files = {"one": 100, "two": 20}
    assert decode_index(json.loads(json.dumps(encode_index(index, list(files)))), files) == index


def test_a_manifest_of_a_save_has_an_index_of_all_of_metadata(saved):
    manifest = read_manifest(saved)
    assert manifest.index["metadata"] == manifest.metadata_crc32
    assert {"model.weight", "gemini.common"} <= manifest.index["tensors"].keys()
