"""The files of checkpoints: boxes, manifests, damage that is found, exports, memory of a save."""

import json
import math
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gemini
from gemini.checkpoint import CorruptError, FormatError
from gemini.checkpoint.__main__ import main
from gemini.checkpoint.format.boxes import PartsOf, Region, boxes_of_region, boxes_of_run, in_run
from gemini.checkpoint.format.manifest import DataFile, Manifest, SavedPart, Unit
from gemini.checkpoint.untrusted.lazy_tensors import INDEX
from gemini.chunk.local import part_of
from gemini.ddp import GeminiDDP
from tests.support.checkpoints import assert_same, batches, make, train, whole

# -- runs as boxes, manifests -----------------------------------------------------------------


def slices(offsets, sizes):
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_boxes_of_a_run_are_few_and_hold_its_elements_in_order(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = boxes_of_run(shape, start, stop)
    whole_tensor = torch.arange(numel).view(shape)
    found = [whole_tensor[slices(box.offsets, box.sizes)] for box in boxes]
    for box, elements in zip(boxes, found, strict=True):
        assert int(elements.reshape(-1)[0]) == box.start and elements.numel() == box.numel
    together = torch.cat([e.reshape(-1) for e in found]) if found else torch.empty(0)
    assert together.tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_boxes_of_segments_hold_the_elements_that_runs_of_them_do(data):
    shape = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    segments = []
    for size in shape:
        ends = data.draw(st.lists(st.integers(0, size), min_size=2, max_size=4, unique=True))
        ends = sorted(ends)[: len(ends) // 2 * 2]
        segments.append(tuple((a, b - a) for a, b in zip(ends[::2], ends[1::2], strict=True)))
    region, whole = Region(tuple(shape), tuple(segments)), torch.arange(math.prod(shape))
    mine = part_of(whole.view(shape), segments).reshape(-1)
    start = data.draw(st.integers(0, len(mine)))
    stop = data.draw(st.integers(start, len(mine)))
    found = torch.full_like(mine[start:stop], -1)
    for box in boxes_of_region(region, start, stop):
        there = in_run(found, start, box, region)
        assert (there == -1).all()  # no two boxes have one element
        there.copy_(whole.view(shape)[slices(box.offsets, box.sizes)])
    assert torch.equal(found, mine[start:stop])


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


def test_a_manifest_comes_back_and_every_flipped_bit_of_it_is_seen():
    files = (DataFile("a", 8192, (Unit(0, 4096, 7), Unit(4096, 4096, 2**32 - 1))),)
    manifest = Manifest(3, 5, 100, 42, files, {"saved": "now"})
    data = manifest.encode()
    assert Manifest.decode(data, "m") == manifest
    for i in range(len(data)):
        flipped = bytearray(data)
        flipped[i] ^= 4
        with pytest.raises(CorruptError, match="m is damaged"):
            Manifest.decode(bytes(flipped), "m")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_units_of_a_range_are_those_that_hold_its_bytes(pages, data):
    units, end = [], 0
    for count in pages:
        units.append(Unit(end, count * 4096, 0))
        end += count * 4096
    offset = data.draw(st.integers(0, end - 1))
    nbytes = data.draw(st.integers(1, end - offset))
    want = [
        i for i, u in enumerate(units)
        if u.offset < offset + nbytes and offset < u.offset + u.nbytes
    ]  # fmt: skip
    assert list(DataFile("a", end, tuple(units)).units_of(offset, nbytes)) == want


# -- files that are not as they were written ---------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    model, optimizer = make("mixed")
    train(model, optimizer, batches(0, 1))
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    return tmp_path / "a"


def test_a_flipped_byte_anywhere_in_any_file_is_refused_with_the_files_name(saved):
    model, optimizer = make()
    generator = torch.Generator().manual_seed(0)
    for path in sorted(saved.iterdir()):
        data = path.read_bytes()
        places = torch.randint(len(data), (4,), generator=generator).tolist()
        for place in (0, len(data) - 1, *places):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert main(["verify", str(saved)]) == 1
            if place in places:
                with pytest.raises(CorruptError, match=re.escape(str(path))):
                    gemini.load_checkpoint(saved, model, optimizer)
        path.write_bytes(data)
    gemini.load_checkpoint(saved, model, optimizer)
    assert main(["verify", str(saved)]) == 0


def test_a_missing_or_cut_file_is_refused_with_its_name(saved, tmp_path):
    model, optimizer = make()
    before = whole(model, optimizer)
    for path in sorted(saved.iterdir()):
        away = tmp_path / "away"
        path.rename(away)
        name = re.escape(path.name) if path.name != "manifest.json" else "."
        if path.name != "manifest.json":  # without it, it is a checkpoint of DCP like any other
            with pytest.raises(CorruptError, match=name):
                gemini.load_checkpoint(saved, model, optimizer)
            path.write_bytes(away.read_bytes()[:-1])
            with pytest.raises(CorruptError, match=name):
                gemini.load_checkpoint(saved, model, optimizer)
            assert_same(whole(model, optimizer), before)
        away.replace(path)


def test_a_future_format_is_refused(saved):
    import zlib

    text = (saved / "manifest.json").read_bytes().partition(b"\n")[0]
    text = text.replace(b'"format":1', b'"format":3')
    crc = f"crc32 {zlib.crc32(text):08x}\n".encode()
    (saved / "manifest.json").write_bytes(text + b"\n" + crc)
    with pytest.raises(FormatError, match="format 3, this code reads up to 2"):
        gemini.load_checkpoint(saved, *make())


# -- export -----------------------------------------------------------------------------------


def test_from_pretrained_loads_what_was_exported_and_import_takes_it_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=16)
    torch.manual_seed(3)
    model = GeminiDDP(transformers.GPT2LMHeadModel(config), min_chunk_size_m=0.004)
    gemini.export_safetensors(tmp_path / "hf", model, max_shard_size=40_000)
    index = json.loads((tmp_path / "hf" / INDEX).read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) > 2
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    torch.manual_seed(4)
    other = GeminiDDP(transformers.GPT2LMHeadModel(config), min_chunk_size_m=0.01)
    gemini.checkpoint.import_safetensors(tmp_path / "hf", other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    gemini.save_checkpoint(tmp_path / "c", model)
    arguments = ["export", str(tmp_path / "c"), str(tmp_path / "out"), "--max-shard-size", "40kB"]
    assert main(arguments) == 0
    (tmp_path / "out" / "config.json").write_text(
        (tmp_path / "hf" / "config.json").read_text(encoding="utf-8"), encoding="utf-8"
    )
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_inspect_says_what_is_there(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "model.layers.2.1.weight  float32[77, 33]" in said
    assert "optim.state.embed.weight.exp_avg  float32[97, 33]" in said
    assert "world size 1" in said and "digest" in said and "as written" in said
