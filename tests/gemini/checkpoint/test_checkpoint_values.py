"""Values, files of torch.save and safetensors from strangers: read in words, and little memory."""

import copy
import io
import math
import shutil
import signal
import zipfile

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import gemini
from gemini.checkpoint import CheckpointError, CorruptError, FormatError
from gemini.checkpoint import save as save_module
from gemini.checkpoint.model.keys import encode
from optim import HybridAdam
from tests.support.checkpoints import assert_same, bits
from tests.support.disks.hostile import assert_takes_little, change, refused, small

# -- values -----------------------------------------------------------------------------------


VALUES = {
    "common": [5, {}, {"scheduler": None, "counters": 5}, {"scheduler": None, "counters": [[]]},
               {"scheduler": None, "counters": [{"skipped_steps": "a"}]},
               {"scheduler": None, "memory": 5}, {"scheduler": None, "memory": {"device": "cpu"}},
               {"scheduler": None, "counters": [{"skipped_steps": -1}]},
               {"scheduler": None, "counters": [{"skipped_steps": math.nan}]},
               {"scheduler": None, "counters": [{"scale": 0.0, "good_steps": 0}]},
               {"scheduler": None, "counters": [{"scale": math.inf, "good_steps": 0}]},
               {"scheduler": None, "counters": [{"scale": True, "good_steps": 0}]},
               {"scheduler": None, "counters": [{"scale": 2.0, "good_steps": 1.5}]},
               {"scheduler": None, "counters": [{"scale": 2.0, "good_steps": 10**30}]},
               {"scheduler": None, "counters": [{"scale": 2.0, "good_steps": 0}]},
               {"scheduler": None, "files": {"step": "x", "began": {}}},
               {"scheduler": None, "files": {"step": 1}}, {"scheduler": None, "files": 5}],
    "own": [5, {}, {"extra": 1, "random": {}, "buffers": {}},
            {"extra": 1, "random": {"torch": 1}, "buffers": {}},
            {"extra": 1, "random": None, "buffers": None}],
}  # fmt: skip


@pytest.mark.parametrize("which, index", [(w, i) for w in VALUES for i in range(len(VALUES[w]))])
def test_values_of_another_form_are_refused_in_words(which, index, tmp_path, monkeypatch):
    def lie(what, value):
        is_common = what != "extra"
        return encode(what, VALUES[which][index] if is_common == (which == "common") else value)

    monkeypatch.setattr(save_module, "encode", lie)
    gemini.save_checkpoint(tmp_path / "a", *small())
    pair = small()
    before = bits(*pair)
    with pytest.raises(CorruptError):
        gemini.load_checkpoint(tmp_path / "a", *pair)
    assert_same(bits(*pair), before)


NO_COUNTS = [
    -1, -1.0, math.nan, math.inf, 1.5, "3", True, 10**30, None, [1], {}, torch.tensor(-1.0),
    torch.tensor(math.nan), torch.tensor([1.0, 2.0]), torch.tensor(True), torch.tensor(1e12),
]  # fmt: skip


@pytest.mark.parametrize("count", NO_COUNTS, ids=repr)
def test_step_counts_are_counts(count, tmp_path):
    """Under a wrapped module, under our optimizer of a plain one, and under torch's."""
    wrapped = small()
    plain = nn.Linear(7, 3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(torch.ones(2, 7)).sum().backward()
    theirs.step()
    pairs = [wrapped, (plain, theirs), (plain, HybridAdam(plain.parameters(), lr=1e-2))]
    for number, (model, optimizer) in enumerate(pairs):
        steps_of(model, optimizer)
        path, before = tmp_path / f"{number}.pt", copy.deepcopy(optimizer.state_dict())
        states = copy.deepcopy(before)
        for state in states["state"].values():
            state["step"] = count
        torch.save({"model": model.state_dict(), "optim": states}, path)
        with pytest.raises(CheckpointError, match=r"cannot be read|of shape|no tensor"):
            gemini.load_checkpoint(path, model, optimizer)
        assert_same(optimizer.state_dict(), before)
        if number != 1:  # which is torch's own
            with pytest.raises(ValueError, match="has step="):
                optimizer.load_state_dict(states)
            assert_same(optimizer.state_dict(), before)


def steps_of(model, optimizer):
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


NO_OPTIONS = [
    ("lr", "1"), ("lr", True), ("lr", None), ("lr", math.nan), ("lr", 10**400), ("lr", [1.0]),
    ("lr", torch.tensor(True)), ("betas", "ab"), ("betas", (0.9,)), ("betas", 0.9),
    ("betas", (True, 0.9)), ("eps", "1e-8"), ("weight_decay", {}), ("amsgrad", "no"),
    ("amsgrad", 1), ("initial_lr", "1"),
]  # fmt: skip


@pytest.mark.parametrize("name, value", NO_OPTIONS)
def test_options_have_the_kind_of_the_optimizers_own(name, value, tmp_path):
    """A string that is read as a number would be one where a schedule multiplies it."""
    model, optimizer = small()
    steps_of(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    states = copy.deepcopy(before)
    states["param_groups"][0][name] = value
    with pytest.raises((TypeError, ValueError), match=name):
        optimizer.load_state_dict(states)
    torch.save({"model": model.state_dict(), "optim": states}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError):
        gemini.load_checkpoint(tmp_path / "a.pt", model, optimizer)
    assert_same(optimizer.state_dict(), before)


NO_PARAMS = [None, 5, "ab", [0, 0], [-1, 0], [1.5, 0], [True, 0], [[0], 1], ["weight", "weight"],
             ["weight", 1], ["weight", "other"]]  # fmt: skip
NO_GROUPS = [[], None, 5, [5], [[]], {}, [{}]]


@pytest.mark.parametrize("kind", ["wrapped", "torch's"])
@pytest.mark.parametrize("change", [
    *({"params": value} for value in NO_PARAMS), *NO_GROUPS,
], ids=repr)  # fmt: skip
def test_param_groups_have_each_parameter_once(kind, change, tmp_path):
    """torch's optimizer would take a group over others, and lose its own options."""
    if kind == "wrapped":
        model, optimizer = small()
    else:
        model = nn.Linear(7, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps_of(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    states = copy.deepcopy(before)
    if isinstance(change, dict) and change:
        states["param_groups"][0] |= change
    else:
        states["param_groups"] = change
    torch.save({"model": model.state_dict(), "optim": states}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError):
        gemini.load_checkpoint(tmp_path / "a.pt", model, optimizer)
    assert_same(optimizer.state_dict(), before)


def test_a_plain_module_goes_on_from_a_file_of_torch(tmp_path):
    """Whose optimizer's state says positions, and its groups too."""
    pairs = []
    for rate in (0.1, 0.2):
        model = nn.Linear(7, 3)
        groups = [{"params": [model.bias], "lr": rate}, {"params": [model.weight]}]
        pairs.append((model, torch.optim.AdamW(groups, lr=rate)))
        steps_of(*pairs[-1])
    (model, optimizer), (other, others) = pairs
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch.save(states, tmp_path / "a.pt")
    gemini.load_checkpoint(tmp_path / "a.pt", other, others)
    assert_same(others.state_dict(), optimizer.state_dict())
    steps_of(model, optimizer)
    steps_of(other, others)
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("change", [
    lambda item: item.to(torch.complex64), lambda item: item.to(torch.int32),
    lambda item: item[:1], lambda item: item.to_sparse(), lambda item: 5,
], ids=["complex", "whole", "shape", "sparse", "number"])  # fmt: skip
def test_an_item_of_dcp_that_is_another_is_found_before_anything_is_changed(change, tmp_path):
    """The index is right; the last file has another tensor than it says."""
    module = nn.Linear(7, 3)
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
    dcp.save({"model": module.state_dict()}, storage_writer=writer)
    for path in tmp_path.glob("*.distcp"):
        item = torch.load(path)
        if item.dim() == 1:
            size, there = path.stat().st_size, io.BytesIO()
            torch.save(change(item), there)
            # a zip file is found from its end: what is shorter is put there
            path.write_bytes(there.getvalue().rjust(size, b"\0")[:size])
    model, _ = small()
    before = model.digest()
    with pytest.raises(CorruptError, match="cannot be read"):
        gemini.load_checkpoint(tmp_path, model)
    assert model.digest() == before


@pytest.mark.parametrize("change", [
    {"last_epoch": "3"}, {"last_epoch": math.nan}, {"base_lrs": ["x"]}, {"step": 5},
    {"get_lr": "a"}, {"_last_lr": 5}, {"T_max": None}, [], "a",
])  # fmt: skip
def test_a_schedule_takes_over_the_like_of_its_own_values(change, tmp_path):
    model, optimizer = small()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer, schedule)
    for _ in range(3):
        steps_of(model, optimizer)
        schedule.step()
    gemini.load_checkpoint(tmp_path / "a", model, optimizer, schedule)
    assert schedule.last_epoch == 0
    before = copy.deepcopy(schedule.state_dict())

    class Lying:
        def state_dict(self):
            return {**before, **change} if isinstance(change, dict) else change

    gemini.save_checkpoint(tmp_path / "b", model, optimizer, Lying())
    steps_of(model, optimizer)
    kept = bits(model, optimizer)
    with pytest.raises(CorruptError, match="holds a schedule"):
        gemini.load_checkpoint(tmp_path / "b", model, optimizer, schedule)
    assert_same(schedule.state_dict(), before)
    assert_same(bits(model, optimizer), kept)


def test_an_average_loads_what_an_average_saved(tmp_path):
    model, optimizer = small()
    average = gemini.EMA(model, decay=0.5)
    gemini.save_checkpoint(tmp_path / "a", model, extra={"num_averaged": -1})
    average.save(tmp_path / "b")
    steps_of(model, optimizer)
    average.update()
    with average.swapped():
        before = model.digest()
    with pytest.raises(CorruptError, match=r"expected a checkpoint of EMA\.save"):
        average.load(tmp_path / "a")
    with average.swapped():
        assert model.digest() == before
    average.load(tmp_path / "b")
    assert average.num_averaged == 0


def test_steps_that_are_no_number_are_refused_in_words(saved):
    change(saved, lambda m: [
        m.state_dict_metadata.update({key: BytesStorageMetadata()})
        or m.storage_data.update({MetadataIndex(key): _StorageInfo("__0_0.distcp", 0, 1000)})
        for key in list(m.state_dict_metadata) if key.endswith(".step")
    ])  # fmt: skip
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        gemini.load_checkpoint(saved, *small())


# -- files of torch.save ----------------------------------------------------------------------


def torch_file(path, pickled, *, compressed=False, pad=0):
    """A file of torch.save with another pickle in it."""
    whole = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, whole)
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(path, "w", kind) as after:
        for entry in before.infolist():
            data = before.read(entry)
            if entry.filename.endswith("data.pkl"):
                data = (pickled or data) + bytes(pad)
            after.writestr(entry.filename, data)


def protocol_2(module, name, arguments):
    return f"c{module}\n{name}\n".encode() + arguments + b"R"


def long(value):
    return b"\x8a\x05" + value.to_bytes(5, "little")


BIG_LIST = b"\x80\x02](" + b"K\x01" * 100_000 + b"eq\0"
GREEDY_FILES = {
    "zeros": b"\x80\x02" + protocol_2("__builtin__", "bytearray", long(10**10) + b"\x85") + b".",
    "a tensor": b"\x80\x02" + protocol_2("torch", "Tensor", long(1 << 31) + b"\x85") + b".",
    "copies of a list": BIG_LIST + protocol_2("__builtin__", "set", b"h\0\x85") * 20_000 + b".",
    "copies into ordered dicts": BIG_LIST
    + protocol_2("collections", "OrderedDict", b"h\0\x85") * 20_000 + b".",
    "a storage": b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
                 + long(1 << 36) + b"tQ.",
}  # fmt: skip


@pytest.mark.parametrize("kind", GREEDY_FILES)
def test_a_file_of_torch_save_takes_no_memory_that_it_does_not_have(kind, tmp_path):
    torch_file(tmp_path / "a.pt", GREEDY_FILES[kind])
    refused(tmp_path / "a.pt", FormatError, "would take more memory")


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path):
    torch_file(tmp_path / "a.pt", None, compressed=True, pad=200 << 20)
    assert (tmp_path / "a.pt").stat().st_size < 1 << 20
    refused(tmp_path / "a.pt", FormatError, "it is compressed")


def test_tensors_have_bytes_for_all_of_their_elements(tmp_path):
    for number, value in enumerate((
        torch.empty(1).expand(1 << 40), torch.empty(1 << 40, device="meta"),
        torch.eye(3).to_sparse(),
    )):  # fmt: skip
        torch.save({"gemini.common": value}, tmp_path / f"{number}.pt")
        refused(tmp_path / f"{number}.pt", FormatError)


@pytest.mark.ci
def test_nesting_ends(tmp_path):
    """A dict in a dict, and one that is its children's two children."""
    deep = wide = {"a": torch.zeros(1)}
    for _ in range(200):
        deep = {"a": deep}
    for _ in range(30):
        wide = {"a": wide, "b": wide}
    for number, value in enumerate((deep, wide)):
        torch.save(value, tmp_path / f"{number}.pt")
        refused(tmp_path / f"{number}.pt", FormatError)


# -- safetensors ------------------------------------------------------------------------------


INDICES = [
    b'{"weight_map": {"weight": "../a.safetensors"}}', b'{"weight_map": {"weight": "/etc/passwd"}}',
    b'{"weight_map": {"weight": 5}}', b'{"weight_map": {"weight": ["a"]}}',
    b'{"weight_map": [1]}', b'{"weight_map": null}', b"{}", b"[]", b'"a"', b"5",
    b"{", b"\xff", b"[" * 100_000, b"[" + b"[]," * 2_000_000 + b"[]]",
]  # fmt: skip


def test_an_index_of_safetensors_names_files_of_its_folder_alone(tmp_path):
    """And one that is no JSON, or too long, is refused in words."""
    model, _ = small()
    gemini.export_safetensors(tmp_path / "out", model)
    shutil.copy(tmp_path / "out/model-00001-of-00001.safetensors", tmp_path / "a.safetensors")
    path = tmp_path / "out/model.safetensors.index.json"

    def load():
        with pytest.raises((FormatError, CorruptError), match=r"index\.json"):
            gemini.checkpoint.import_safetensors(tmp_path / "out", model)

    for text in INDICES:
        path.write_bytes(text)
        assert_takes_little(load, path)


def test_what_a_signals_handler_raises_while_state_is_encoded_is_raised_as_it_is():
    class AtItsEnd:
        """Noted while it is pickled."""

        def __reduce__(self):
            signal.raise_signal(signal.SIGALRM)
            return dict, ()

    def ends(number, frame):
        raise TimeoutError("the time is up")

    before = signal.signal(signal.SIGALRM, ends)
    try:
        with pytest.raises(TimeoutError, match="the time is up"):
            encode("user_state", {"a": AtItsEnd()})
    finally:
        signal.signal(signal.SIGALRM, before)
