"""The index of a checkpoint: what a load parses and costs, and what `.metadata` is still for."""

import json
import pickle
import zlib

import pytest
import torch

import gemini
from bench.host.calls import Chain, counted
from gemini.checkpoint.__main__ import main
from gemini.checkpoint.foreign.metadata import read_metadata
from gemini.checkpoint.format.manifest import (
    DataFile,
    Manifest,
    SavedPart,
    SavedValue,
    decode_index,
    encode_index,
    read_manifest,
)
from tests.support import corpus
from tests.support.checkpoints import assert_same, whole
from tests.support.disks.hostile import small, unpacked
from tests.support.disks.sealed import manifest_of, put_manifest

# calls of ours; a layer is a linear one in a chunk of its own, with Adam's state in memory
MOST_CALLS, MOST_CALLS_A_LAYER = 5_100, 400  # 80 of them: plans ask what saved bytes stay
MOST_FILES = 12  # of gemini/checkpoint; a save has 10


# -- what a load parses -------------------------------------------------------------------------


def load_calls(layers, path):
    """Of a load; and files of checkpoints that are in a save and in the load."""
    chain = Chain(layers, "resident")
    chain.forward()
    chain.backward()
    chain.optimizer.step()
    save = counted(lambda: gemini.save_checkpoint(path, chain.model, chain.optimizer))
    load = counted(lambda: gemini.load_checkpoint(path, chain.model, chain.optimizer))
    return load.calls, [sum("/checkpoint/" in file for file in c.files) for c in (save, load)]


def test_a_load_makes_few_calls_a_layer_and_is_in_few_files(tmp_path):
    (few, _), (many, files) = load_calls(4, tmp_path / "4"), load_calls(8, tmp_path / "8")
    assert (many - few) / 4 <= MOST_CALLS_A_LAYER
    assert many <= MOST_CALLS
    assert max(files) <= MOST_FILES


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
