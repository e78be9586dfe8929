"""Checkpoints with anything in them: our errors and nothing else, within bounds of memory.

`make test` reads a few hundred mutated files, always the same; `make fuzz` 10 000 new ones.
"""

import copy
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import gemini
from gemini.checkpoint import CheckpointError
from gemini.checkpoint.__main__ import main
from tests.support.checkpoints import assert_same, bits, make, whole
from tests.support.disks.hostile import assert_takes_little, small
from tests.support.disks.sealed import manifest_of, put_manifest, put_metadata, seal, seal_text

# 20 rounds of `make fuzz` are 2000 examples of each of the seven tests here, and two more of stores
FUZZ = settings(
    max_examples=25 if settings.default.derandomize else 100,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    model, optimizer = small()
    gemini.save_checkpoint(folder / "a", model, optimizer, extra=[1, {"two": torch.ones(3)}])
    gemini.export_safetensors(folder / "out", model)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder / "a.pt")
    return folder


@pytest.fixture(scope="module")
def pair():
    return small()


def survives(work, path):
    """`work` fails in words of ours or not at all, and takes no more memory than it may."""

    def attempt():
        try:
            work()
        except CheckpointError:
            return

    assert_takes_little(attempt, path)


def read(folder, pair, data=None):
    """With `data`, perhaps as a folder of DCP alone."""
    if data is not None and data.draw(st.booleans()):
        (folder / "manifest.json").unlink()
    survives(lambda: gemini.load_checkpoint(folder, *pair, strict=False), folder)
    for arguments in (["verify", str(folder)], ["inspect", str(folder)]):
        survives(lambda arguments=arguments: main(arguments), folder)


# -- what is changed --------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5)
    | st.integers() | st.sampled_from([0, -1, 1 << 31, 1 << 44, 1 << 62, 1 << 70, 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=3),
    max_leaves=5,
)  # fmt: skip


@st.composite
def edits(draw, data):
    """`data` with bytes changed, taken out, put in or repeated."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([1, 1, 1, 2, 4, 8, 100]))
        kind = draw(st.sampled_from(["flip", "put", "cut", "insert", "repeat", "end"]))
        if kind == "flip" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "put":
            data[place : place + length] = draw(st.binary(min_size=length, max_size=length))
        elif kind == "cut":
            del data[place : place + length]
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=20))
        elif kind == "repeat":
            data[place:place] = data[place : place + length] * draw(st.integers(1, 50))
        elif kind == "end":
            del data[place:]
    return bytes(data)


def places_in(value, path=()):
    """Paths to every value of nested lists, dicts and objects."""
    yield path
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        items = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for key, inner in items:
        yield from places_in(inner, (*path, (type(value), key)))


def put(value, path, new):
    """`value` with `new` at `path`; objects and lists are changed in place."""
    if not path:
        return new
    (kind, key), rest = path[0], path[1:]
    inner = (
        vars(value)[key] if hasattr(value, "__dict__") and kind not in (dict, list) else value[key]
    )
    changed = put(inner, rest, new)
    if isinstance(value, (dict, list)):
        value[key] = changed
    elif isinstance(value, tuple):
        return type(value)([*value[:key], changed, *value[key + 1 :]])
    else:
        vars(value)[key] = changed
    return value


@pytest.fixture
def folder(base):
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "a"


def fresh(base, folder):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base / "a", folder)


# -- the tests --------------------------------------------------------------------------------


@FUZZ
@given(data=st.data())
def test_any_change_of_any_file_is_seen(base, pair, folder, data):
    fresh(base, folder)
    path = folder / data.draw(st.sampled_from(["manifest.json", ".metadata", "__0_0.distcp"]))
    path.write_bytes(data.draw(edits(path.read_bytes())))
    read(folder, pair, data)


@FUZZ
@given(data=st.data())
def test_a_manifest_may_say_anything(base, pair, folder, data):
    fresh(base, folder)
    body = manifest_of(folder)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(places_in(body))))
        body = put(body, path, data.draw(JSON))
    try:
        put_manifest(folder, body)
    except ValueError:  # a number that JSON does not write
        text = (folder / "manifest.json").read_bytes().partition(b"\n")[0]
        (folder / "manifest.json").write_bytes(seal_text(data.draw(edits(text))))
    read(folder, pair)


@FUZZ
@given(data=st.data())
def test_a_pickle_may_have_any_bytes(base, pair, folder, data):
    fresh(base, folder)
    put_metadata(folder, data.draw(edits((folder / ".metadata").read_bytes())))
    read(folder, pair, data)


ODD = JSON | st.sampled_from([
    torch.Size((1 << 40,)), torch.Size((-1, 3)), torch.Size(()), torch.float64, torch.quint8,
    (1, 2), ((1,),), "../a", "/etc/passwd", "__0_0.distcp",
])  # fmt: skip


@pytest.mark.ci
@FUZZ
@given(data=st.data())
def test_metadata_may_say_anything(base, pair, folder, data):
    fresh(base, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(places_in(metadata))))
        try:
            metadata = put(metadata, path, data.draw(ODD))
        except (TypeError, ValueError):
            continue  # torch.Size takes numbers alone
    try:
        put_metadata(folder, pickle.dumps(metadata))
    except (TypeError, AttributeError, RuntimeError):
        return  # what torch itself cannot pickle
    read(folder, pair, data)


@pytest.mark.ci
@FUZZ
@given(data=st.data())
def test_values_may_have_any_bytes(base, pair, folder, data):
    """Every checksum is right: what is read is what was written, by whomever."""
    fresh(base, folder)
    path = folder / "__0_0.distcp"
    path.write_bytes(data.draw(edits(path.read_bytes())))
    seal(folder)
    read(folder, pair)


@FUZZ
@given(data=st.data())
def test_files_of_other_programs_may_have_any_bytes(base, pair, folder, data):
    model, optimizer = pair
    if data.draw(st.booleans()):
        path = folder.parent / "a.pt"
        path.write_bytes(data.draw(edits((base / "a.pt").read_bytes())))
        survives(lambda: gemini.load_checkpoint(path, model, optimizer, strict=False), path)
        return
    out = folder.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(base / "out", out)
    path = out / data.draw(st.sampled_from([p.name for p in sorted(out.iterdir())]))
    path.write_bytes(data.draw(edits(path.read_bytes())))

    def load():
        try:
            gemini.checkpoint.import_safetensors(out, model, strict=False)
        except (KeyError, RuntimeError):
            return  # as `load_state_dict` says it

    survives(load, out)


def test_values_are_put_where_their_paths_lead():
    """The fuzzer changes what it says it changes."""
    value = {"a": [1, (2, 3)], "b": json}
    del value["b"]
    paths = list(places_in(value))
    assert len(paths) == 6
    last = put(copy.deepcopy(value), paths[-1], "new")
    assert last == {"a": [1, (2, "new")]}


# -- folders with other things in them ----------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind: a path that loads, and the names that may be changed in its folder."""
    top = tmp_path_factory.mktemp("folders")
    model, optimizer = make("nvme", folder=top, keep_versions=2, module=nn.Linear(7, 3))
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    gemini.save_checkpoint(top / "ours", model, optimizer)
    gemini.save_checkpoint(top / "pinned", model, optimizer, pinned=True)
    shutil.copytree(top / "ours", top / "dcp")
    (top / "dcp/manifest.json").unlink()
    gemini.export_safetensors(top / "safetensors", model, max_shard_size="90B")
    (top / "bin").mkdir()
    values = model.state_dict()
    for name, value in values.items():
        torch.save({name: value}, top / f"bin/pytorch_model-{name}.bin")
    index = {"weight_map": {name: f"pytorch_model-{name}.bin" for name in values}}
    (top / "bin/pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    (top / "pt").mkdir()
    states = {"model": values, "optim": optimizer.state_dict()}
    torch.save(states, top / "pt/a.pt")
    want = whole(model, optimizer)
    optimizer.close()
    return top, want, states


IN_PLACE = (
    "gone", "pipe", "folder", "device", "link outside", "link within", "hard link", "cut", "sparse",
    "swapped", "copied",
)  # fmt: skip


def put_something(draw, kind, folder, away):
    """Change one file of a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if not names:
        return
    path = folder / draw(st.sampled_from(names))
    if kind == "sparse":
        os.truncate(path, draw(st.sampled_from([1 << 20, 1 << 40, 1 << 43])))
    elif kind == "cut":
        os.truncate(path, draw(st.integers(0, path.stat().st_size)))
    elif kind == "copied":
        shutil.copy(path, folder / f"copy-of-{path.name}")
    elif kind == "swapped":
        other = folder / draw(st.sampled_from(names))
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
    elif kind == "link within":
        path.rename(folder / f"real-{path.name}.x")
        path.symlink_to(f"real-{path.name}.x")
    else:
        moved = path.rename(away / f"{len(os.listdir(away))}-{path.name}")
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "hard link":
            os.link(moved, path)
        elif kind != "gone":
            path.symlink_to("/dev/zero" if kind == "device" else moved)


WORDS = [
    -1, -0.5, 1.5, float("nan"), float("inf"), 10**30, 10**400, "1", "", True, None, [], [1.0], {},
    (0.5, 2.0), torch.tensor(-1.0), torch.tensor([1.0, 1.0]), torch.tensor(True), 0, 1, 1e300,
]  # fmt: skip


def say_something(draw, folder, states):
    """Another value in the place of a small one of a file of torch.save."""
    changed = copy.deepcopy(states)
    places = [changed["optim"]["param_groups"][0]]
    places += [*changed["optim"]["state"].values(), changed["optim"]["counters"]]
    there = draw(st.sampled_from(places))
    there[draw(st.sampled_from(sorted(there.keys() - {"params", "exp_avg", "exp_avg_sq"})))] = draw(
        st.sampled_from(WORDS)
    )
    torch.save(changed, folder / "a.pt")


def cut_something(draw, folder):
    """Other boxes for a tensor of an index."""
    body = manifest_of(folder)
    tensors = body["index"]["tensors"]
    _, size, numbers = tensors[draw(st.sampled_from(sorted(k for k in tensors if tensors[k][1])))]
    box = st.tuples(*[st.integers(0, n) for n in size], *[st.integers(0, n) for n in size])
    boxes = draw(st.lists(box, min_size=1, max_size=4))
    numbers[:] = [number for one in boxes for number in (*numbers[:3], *one)]
    put_manifest(folder, body)


@pytest.mark.ci
@FUZZ
@given(data=st.data())
def test_a_folder_may_have_anything_in_the_place_of_a_file(folders, pair, data):
    """It is refused, and the model is as it was; or what is loaded is what was saved."""
    top, want, states = folders
    model, optimizer = pair
    kind = data.draw(st.sampled_from(["ours", "pinned", "dcp", "safetensors", "bin", "pt"]))
    with tempfile.TemporaryDirectory() as name:
        folder, away = Path(name) / "a", Path(name) / "away"
        shutil.copytree(top / kind, folder)
        away.mkdir()
        said = data.draw(st.sampled_from([*IN_PLACE, "values", "boxes", "store"]))
        store = next(top.glob("*.blocks"))
        kept = store.with_suffix(".kept")
        shutil.copy(store, kept)
        if said == "values" and kind == "pt":
            say_something(data.draw, folder, states)
        elif said == "boxes" and kind in ("ours", "pinned"):
            cut_something(data.draw, folder)
        elif said == "store" and kind == "pinned":
            at = data.draw(st.integers(0, store.stat().st_size - 64))
            with store.open("r+b") as file:
                file.seek(at)
                file.write(data.draw(st.sampled_from([b"\1" * 64, b"\0" * 64])))
        elif said in IN_PLACE:
            for _ in range(data.draw(st.integers(1, 2))):
                put_something(data.draw, said, folder, away)
        has_state = kind in ("ours", "pinned", "dcp", "pt")
        before = bits(model, optimizer)
        path = folder / "a.pt" if kind == "pt" else folder
        try:
            gemini.load_checkpoint(path, model, optimizer if has_state else None)
        except CheckpointError:
            assert_same(bits(model, optimizer), before)
        else:
            got = whole(model, optimizer)
            same = [key for key in want if has_state or key.startswith("model.")]
            if said in ("values", "boxes"):  # one value is another, and as good
                assert all(value.isfinite().all() for value in got.values())
            else:
                assert_same({key: got[key] for key in same}, {key: want[key] for key in same})
        finally:
            kept.replace(store)
