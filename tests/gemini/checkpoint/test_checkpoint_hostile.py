"""`.metadata` and manifests from strangers: nothing is run, read elsewhere or believed."""

import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import gemini
from gemini.checkpoint import CheckpointError, CorruptError, FormatError
from gemini.checkpoint.foreign.metadata import read_metadata
from tests.support import corpus
from tests.support.disks.hostile import change, refused, small, unpacked
from tests.support.disks.sealed import manifest_of, put_manifest, put_metadata, seal, seal_text

# -- code -------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_does_more_than_a_checkpoint_needs_is_not_run(saved, tmp_path):
    bomb = Bomb(tmp_path / "exploded")
    put_metadata(saved, pickle.dumps({"state_dict_metadata": bomb}))
    refused(saved, FormatError, r"posix\.system")
    (saved / "manifest.json").unlink()
    refused(saved, FormatError, r"posix\.system")
    torch.save({"model": bomb}, tmp_path / "whole.pt")
    refused(tmp_path / "whole.pt", FormatError, "safe")
    with pytest.raises(CheckpointError, match="extra holds"):
        gemini.save_checkpoint(tmp_path / "b", small()[0], extra=bomb)
    assert not (tmp_path / "exploded").exists()


# -- `.metadata` ------------------------------------------------------------------------------


def text(value):
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def called(module, name, arguments=pickle.EMPTY_TUPLE):
    return text(module) + text(name) + pickle.STACK_GLOBAL + arguments + pickle.REDUCE


START = b"\x80\x04"
NUMBERS = b"(" + b"".join(b"J" + struct.pack("<i", i) for i in range(20_000)) + b"t\x94"
FIELDS = b"}\x94(" + b"".join(text(f"k{i}") + b"N" for i in range(5_000)) + b"u"
GREEDY = {find["why"]: unpacked(find["data"]) for find in corpus.read("hostile").values()} | {
    "copies of a size": START + NUMBERS + b"0" + b"".join(
        called("torch", "Size", b"h\0\x85") for _ in range(50_000)) + b".",
    "copies of a dict": START + FIELDS + b"0" + b"".join(
        text("torch.distributed.checkpoint.metadata") + text("StorageMeta") + b"\x93)\x81h\0b"
        for _ in range(50_000)) + b".",
    "copies into ordered dicts": START + FIELDS + b"0" + b"".join(
        called("collections", "OrderedDict", b"h\0\x85") for _ in range(50_000)) + b".",
}  # fmt: skip


@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.ci
def test_a_pickle_takes_no_memory_that_its_files_do_not_have(kind, sealed, saved):
    put_metadata(saved, GREEDY[kind])
    if not sealed:
        (saved / "manifest.json").unlink()
    refused(saved, match=r"\.metadata")


def weight(metadata):
    return metadata.state_dict_metadata["model.weight"]


def place(metadata):
    return next(p for i, p in metadata.storage_data.items() if i.fqn == "model.weight")


def resize(metadata, size):
    """A weight that is larger than what the file has of it."""
    weight(metadata).size = torch.Size(size)
    weight(metadata).chunks[0].sizes = torch.Size(size)


def move(metadata, offsets):
    """A part of a weight that begins elsewhere."""
    weight(metadata).chunks[0].offsets = torch.Size(offsets)
    index = MetadataIndex("model.weight", torch.Size(offsets))
    metadata.storage_data[index] = place(metadata)


def enlarge_blob(metadata):
    entry = metadata.state_dict_metadata["gemini.common"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 40])


LIES = {
    "a file outside": lambda m: setattr(place(m), "relative_path", "../../a/__0_0.distcp"),
    "an absolute file": lambda m: setattr(place(m), "relative_path", "/etc/passwd"),
    "no file": lambda m: setattr(place(m), "relative_path", 5),
    "an unknown file": lambda m: setattr(place(m), "relative_path", "other"),
    "a place behind the end": lambda m: setattr(place(m), "offset", 1 << 50),
    "a place before the beginning": lambda m: setattr(place(m), "offset", -4096),
    "a length beyond the end": lambda m: setattr(place(m), "length", 1 << 50),
    "a negative length": lambda m: setattr(place(m), "length", -1),
    "a length that is none": lambda m: setattr(place(m), "length", "12"),
    "compressed": lambda m: setattr(place(m), "transform_descriptors", ["zstd"]),
    "a weight of a tebibyte": lambda m: resize(m, (1 << 20, 1 << 20)),
    "a weight of more than there is": lambda m: resize(m, (1 << 40, 1 << 40)),
    "a value of a tebibyte": enlarge_blob,
    "a part outside": lambda m: move(m, (1, 0)),
    "a part before": lambda m: move(m, (-1, 0)),
    "parts of fewer dimensions": lambda m: setattr(weight(m).chunks[0], "sizes", torch.Size((21,))),
    "no parts": lambda m: setattr(weight(m), "chunks", []),
    "parts that are none": lambda m: setattr(weight(m), "chunks", [1, 2]),
    "parts twice": lambda m: weight(m).chunks.append(weight(m).chunks[0]),
    "a list of places": lambda m: setattr(m, "storage_data", []),
    "no places": lambda m: m.storage_data.clear(),
    "a place that is none": lambda m: m.storage_data.update({MetadataIndex("model.weight"): 3}),
    "places by name": lambda m: m.storage_data.update({"model.weight": place(m)}),
    "no tensors": lambda m: setattr(m, "state_dict_metadata", None),
    "a tensor that is none": lambda m: m.state_dict_metadata.update({"model.weight": "a"}),
    "tensors by number": lambda m: m.state_dict_metadata.update({5: weight(m)}),
    "no dtype": lambda m: setattr(weight(m), "properties", 4),
    "a size that is none": lambda m: setattr(weight(m), "size", (3, 7)),
    "bytes for a tensor": lambda m: m.state_dict_metadata.update(
        {"model.weight": BytesStorageMetadata()}
    ),
    "a dict": lambda m: vars(m).clear(),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIES)
def test_what_metadata_says_is_compared_with_the_files(kind, saved):
    change(saved, LIES[kind])
    found = refused(saved)
    assert found[:2] == [1, 1] or kind == "bytes for a tensor"


def test_a_pickle_of_something_else_is_refused(saved):
    for value in ({}, None, 5, [Metadata], MetadataIndex("a"), Metadata({}), torch.Size((1,))):
        put_metadata(saved, pickle.dumps(value))
        refused(saved)


def test_a_folder_of_dcp_alone_may_lie_no_more_than_ours(saved, tmp_path):
    """Without a manifest, sizes are those that the files have."""
    for number, edit in enumerate(LIES.values()):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        change(folder, edit)
        (folder / "manifest.json").unlink()
        with pytest.raises(CheckpointError):
            gemini.load_checkpoint(folder, *small())


# -- the manifest -----------------------------------------------------------------------------


NAMES = [
    "../a/__0_0.distcp",
    "/etc/passwd",
    "",
    ".",
    "..",
    "b/c",
    "a\0b",
    "a\nb",
    "..\\a",
    "missing",
]


def rename(name):
    return lambda body: body["files"].update({name: body["files"].pop("__0_0.distcp")})


def test_a_manifest_names_no_file_beside_its_folder_although_nothing_asks_for_it(saved):
    body = manifest_of(saved)
    body["files"]["../other"] = body["files"]["__0_0.distcp"]
    shutil.copy(saved / "__0_0.distcp", saved.parent / "other")
    put_manifest(saved, body)
    assert refused(saved, CorruptError) == [1, 1, 1]


def one_unit(body):
    return body["files"]["__0_0.distcp"]["units"][0]


def set_unit(place, value):
    return lambda body: one_unit(body).__setitem__(place, value)


def set_file(name, value):
    return lambda body: body["files"]["__0_0.distcp"].__setitem__(name, value)


WRONG = {
    "a unit of 16 TiB": set_unit(1, 1 << 44),
    "a unit that is no page": set_unit(1, 100),
    "a unit of nothing": set_unit(1, 0),
    "a negative unit": set_unit(1, -4096),
    "a unit elsewhere": set_unit(0, 4096),
    "a unit that is no number": set_unit(0, "0"),
    "a checksum that is none": set_unit(2, None),
    "a unit of more numbers": lambda body: one_unit(body).append(1),
    "no units": set_file("units", []),
    "units that are none": set_file("units", 5),
    "units in a dict": set_file("units", {"a": 1}),
    "another size": set_file("nbytes", 1 << 40),
    "a size that is none": set_file("nbytes", True),
    "a list of files": lambda body: body.update(files=[1]),
    "a file that is none": lambda body: body.update(files={"a": 1}),
    "no files": lambda body: body.pop("files"),
    "metadata that is none": lambda body: body.update(metadata=3),
    "metadata of one number": lambda body: body.update(metadata=[3]),
    "a world of none": lambda body: body.update(world_size=None),
    "a sequence of words": lambda body: body.update(sequence="last"),
    "a sequence below zero": lambda body: body.update(sequence=-1),
    "about that is none": lambda body: body.update(about=[1]),
    "no format": lambda body: body.pop("format"),
    "a format of words": lambda body: body.update(format={"a": [1] * 100}),
    **{f"a file {name!r}": rename(name) for name in NAMES},
}


def test_a_unit_is_no_larger_than_any_that_was_written(saved):
    """What reads takes memory for four of the largest, whatever the file has."""
    body, nbytes = manifest_of(saved), (16 << 20) + 4096
    os.truncate(saved / "__0_0.distcp", nbytes)
    body["files"]["__0_0.distcp"] = {"nbytes": nbytes, "units": [[0, nbytes, 0]]}
    put_manifest(saved, body)
    assert refused(saved, CorruptError, "has a unit of") == [1, 1, 1]


@pytest.mark.parametrize("kind", WRONG)
def test_a_manifest_of_other_types_is_refused_in_words(kind, saved):
    body = manifest_of(saved)
    WRONG[kind](body)
    put_manifest(saved, body)
    assert refused(saved, (CorruptError, FormatError)) == [1, 1, 1]


@pytest.mark.parametrize("text", [b"[]", b"5", b"null", b'"a"', b"{", b"", b"[" * 100_000,
                                  b"[" + b"[]," * 600_000 + b"[]]"])  # fmt: skip
def test_a_manifest_that_is_none_is_refused_in_words(text, saved):
    (saved / "manifest.json").write_bytes(seal_text(text))
    assert refused(saved, (CorruptError, FormatError), "manifest.json") == [1, 1, 1]
    gemini.save_checkpoint(saved.parent / "b", *small(), keep_last=1)
    assert saved.exists(), "it is none of ours"


PLACES = ("pipe", "folder", "link to nothing", "device", "link outside")


def put_in_place(kind, path):
    """Something that is no file of its folder, in the place of one."""
    outside = path.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "link outside": outside}.get(kind, "nothing"))


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_file_of_the_folder_is_not_waited_for_nor_read(kind, name, saved):
    put_in_place(kind, saved / name)
    refused(saved, (CorruptError, FormatError))
    if name != "manifest.json":  # a folder of DCP alone
        (saved / "manifest.json").unlink()
        refused(saved, (CorruptError, FormatError))


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", ["a.safetensors", "pytorch_model.bin", "index"])
def test_weights_are_files_of_their_folder(kind, name, tmp_path):
    model, folder = small()[0], tmp_path / "a"
    gemini.export_safetensors(folder, model)
    (found,) = folder.glob("*.safetensors")
    if name == "index":
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        name = "model.safetensors.index.json"
        (folder / name).write_text(
            json.dumps({"weight_map": {"weight": found.name}}), encoding="utf-8"
        )
    elif name.endswith(".bin"):
        torch.save(model.state_dict(), folder / name)
        found.unlink()
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    else:
        found.rename(folder / name)
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    put_in_place(kind, folder / name)
    with pytest.raises(CheckpointError):
        gemini.load_checkpoint(folder, model)
    with pytest.raises(CheckpointError):
        gemini.checkpoint.import_safetensors(folder, model)


def test_a_tensor_that_two_files_have_is_refused(tmp_path):
    model = small()[0]
    gemini.export_safetensors(tmp_path / "a", model)
    (found,) = (tmp_path / "a").glob("*.safetensors")
    for path in (tmp_path / "a").glob("*.json"):
        path.unlink()
    shutil.copy(found, found.parent / "other.safetensors")
    with pytest.raises(FormatError, match="expected it once"):
        gemini.load_checkpoint(tmp_path / "a", model)


def test_a_sparse_file_is_not_read_for_its_size(saved, tmp_path):
    for name in ("manifest.json", ".metadata"):
        folder = tmp_path / f"of-{name}"
        shutil.copytree(saved, folder)
        os.truncate(folder / name, 1 << 40)
        os.truncate(folder / "__0_0.distcp", 1 << 42)
        refused(folder, CorruptError)
        (folder / "manifest.json").unlink()
        if name == ".metadata":
            refused(folder, CorruptError, "expected at most")
    with (tmp_path / "a.pt").open("wb") as file:
        file.truncate(1 << 40)
    refused(tmp_path / "a.pt", FormatError, "no zip file")


def test_latest_leads_to_a_checkpoint_beside_it(saved, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "latest").symlink_to(saved)
    with pytest.raises(FormatError, match="latest leads out of its folder"):
        gemini.load_checkpoint(folder, *small())
    (folder / "latest").unlink()
    (folder / "b").symlink_to(saved)  # over another link
    (folder / "latest").symlink_to("b")
    with pytest.raises(FormatError, match="latest leads out of its folder"):
        gemini.load_checkpoint(folder, *small())
    assert gemini.load_checkpoint(folder / "b", *small()) == [1, "two"], "which its caller names"


# -- an index from strangers --------------------------------------------------------------------


def entry(body):
    return body["index"]["tensors"]["model.weight"]


def set_place(number, value):
    return lambda body: entry(body)[2].__setitem__(number, value)


WRONG_INDEX = {
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


@pytest.mark.parametrize("kind", WRONG_INDEX)
def test_what_an_index_says_is_compared_with_the_files(kind, saved):
    body = manifest_of(saved)
    WRONG_INDEX[kind](body)
    put_manifest(saved, body)
    assert refused(saved, CorruptError, "manifest.json") == [1, 1, 1]


def parts(body, *boxes):
    """Cut the weight [3, 7] into boxes (first row, first column, rows, columns) of one place."""
    _, _, numbers = entry(body)
    numbers[:] = [number for box in boxes for number in (*numbers[:3], *box)]


OVERLAPS = {
    "rows": [(0, 0, 2, 7), (0, 0, 1, 7)],
    "columns": [(0, 0, 3, 4), (0, 3, 3, 3)],
    "a corner": [(0, 0, 2, 4), (1, 3, 2, 4), (0, 5, 1, 2), (2, 0, 1, 3)],
    "one twice and one never": [(0, 0, 3, 3), (0, 4, 3, 3), (0, 0, 3, 1)],
    "none": [(0, 0, 1, 7), (1, 0, 2, 3), (1, 3, 2, 4), (3, 7, 0, 0), (3, 0, 0, 7)],
}


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize("with_index", [True, False])
def test_parts_of_a_tensor_hold_every_element_once(kind, with_index, saved):
    """With the index of a manifest, and with that of DCP's own folders."""
    if with_index:
        body = manifest_of(saved)
        parts(body, *OVERLAPS[kind])
        put_manifest(saved, body)
    else:
        change(saved, lambda metadata: cut(metadata, OVERLAPS[kind]))
    if kind != "none":
        refused(saved, CorruptError, "overlap|elements, of which")
    else:  # as an index: its places are of the one item
        assert gemini.load_checkpoint(saved, *small()) == [1, "two"]


def cut(metadata, boxes):
    there = place(metadata)
    offsets = [torch.Size(box[:2]) for box in boxes]
    weight(metadata).chunks = [
        ChunkStorageMetadata(at, torch.Size(box[2:]))
        for at, box in zip(offsets, boxes, strict=True)
    ]
    metadata.storage_data |= {MetadataIndex("model.weight", at): there for at in offsets}


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


# -- what is right stays right ----------------------------------------------------------------


def test_sealing_what_was_not_changed_changes_nothing(saved, original):
    before = {path.name: path.read_bytes() for path in original.iterdir()}
    body = manifest_of(saved)
    seal(saved)
    assert manifest_of(saved) == body
    assert {p.name: p.read_bytes() for p in saved.iterdir()}.keys() == before.keys()
    change(saved, lambda metadata: None)
    assert gemini.load_checkpoint(saved, *small()) == [1, "two"]


@pytest.mark.ci
def test_a_long_list_of_small_tensors_is_read(tmp_path):
    """Objects take more memory than their pickle has bytes; that is no attack."""
    count = 20_000
    names = [f"layers.{i}.some.module.weight" for i in range(count)]
    size = torch.Size((3, 2))
    entry = {
        name: TensorStorageMetadata(
            TensorProperties(), size, [ChunkStorageMetadata(torch.Size((0, 0)), size)]
        )
        for name in names
    }
    places = {
        MetadataIndex(name, torch.Size((0, 0))): _StorageInfo("__0_0.distcp", 24 * i, 24)
        for i, name in enumerate(names)
    }
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(bytes(24 * count))
    whole = Metadata(entry, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    assert read_metadata(folder, None) == whole
