"""Checkpoints that write no state: the files of the optimizer keep the version that was saved."""

import errno
import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gemini
import nvme
from bench.shared.workers import run_processes, run_ranks
from gemini.checkpoint import CheckpointError, CorruptError
from gemini.checkpoint.__main__ import main
from gemini.checkpoint.format.manifest import read_manifest
from nvme.files import calls
from optim import HybridAdam, NvmeConfig
from optim.rules.state_layout import Plane, StateLayout
from optim.state.disk.state_version import StateVersion
from tests.support import corpus
from tests.support.checkpoints import assert_same, batches, bits, make, train, whole
from tests.support.disks.hostile import assert_takes_little, unpacked

KEPT = 3


def kept(folder, **options):
    folder.mkdir(exist_ok=True)
    return make("nvme", folder=folder, **{"keep_versions": KEPT, **options})


def written(optimizer):
    return sum(store.traffic.written_bytes for store in optimizer.stores)


def pinned(tmp_path, steps=2, **options):
    """A run with a pinned checkpoint, `tmp_path / "a"`, and the bits that it has."""
    model, optimizer = kept(tmp_path / "disk", **options)
    train(model, optimizer, batches(0, steps))
    model.digest()  # waits for the last step
    before = written(optimizer)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer, extra={"steps": steps}, pinned=True)
    assert written(optimizer) == before  # no block
    return model, optimizer, bits(model, optimizer)


def loaded(path, placement="resident", **options):
    model, optimizer = make(placement, seed=3, **options)
    extra = gemini.load_checkpoint(path, model, optimizer)
    return whole(model, optimizer), extra


FORMS = [
    {"precision": "bf16"},
    {"precision": "bf16", "state": "8bit"},
    {"precision": "fp16", "state": "bf16", "update": "tail"},
    {"precision": "fp32", "max_norm": 0.05},
    {"precision": "bf16", "update": "tail", "max_norm": 0.05},
]


@pytest.mark.parametrize("form", FORMS)
def test_what_was_pinned_is_what_was_there_however_far_training_goes(form, tmp_path):
    model, optimizer, want = pinned(tmp_path, **form)
    values = whole(model, optimizer)
    train(model, optimizer, batches(2, 2 + 2 * KEPT))
    assert main(["verify", str(tmp_path / "a")]) == 0
    got, extra = loaded(tmp_path / "a", precision=form["precision"], chunk_size_m=0.01)
    assert_same(got, values)
    assert extra == {"steps": 2}
    after = bits(model, optimizer)
    gemini.load_checkpoint(tmp_path / "a", model, optimizer)
    assert_same(bits(model, optimizer), want)
    train(model, optimizer, batches(2, 2 + 2 * KEPT))
    assert_same(bits(model, optimizer), after)
    optimizer.close()


@pytest.mark.parametrize("name", corpus.read("pinned"))
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_what_earlier_versions_pinned_is_loaded_and_trains_on(name, state, tmp_path, monkeypatch):
    """`8bit-linear`: moments in codes that count from the largest of 64."""
    found = corpus.read("pinned")[name]
    monkeypatch.chdir(tmp_path)  # where the pinned file says that the blocks are
    (tmp_path / "a").mkdir()
    for folder, files in (("a", found["files"]), (".", found["blocks"])):
        for file, text in files.items():
            (tmp_path / folder / file).write_bytes(unpacked(text))
    model = gemini.GeminiDDP(
        nn.Sequential(nn.Linear(33, 40), nn.Linear(40, 9)), precision="bf16", min_chunk_size_m=0.002
    )
    optimizer = HybridAdam(model.parameters(), lr=1e-2, state=state)
    assert gemini.load_checkpoint(tmp_path / "a", model, optimizer) == found["extra"]
    values = whole(model, optimizer)
    for key, digest in found["values"].items():
        data = values[key].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if state == "fp32" or not key.endswith((".exp_avg", ".exp_avg_sq")):
            assert hashlib.sha256(data).hexdigest()[:16] == digest, key
    before = model.state_dict()
    model(torch.ones(4, 33)).float().square().sum().backward()
    optimizer.step()
    after = model.state_dict()
    moved = max(float((after[key] - before[key]).abs().max()) for key in before)
    assert 0.001 < moved < 0.05
    optimizer.close()


def test_it_takes_a_tenth_of_a_byte_a_parameter(tmp_path):
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    model = gemini.GeminiDDP(module, "cpu", precision="bf16", min_chunk_size_m=0.5)
    nvme_config = NvmeConfig(block_numel=1 << 16, keep_versions=1)
    optimizer = HybridAdam(
        model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path, nvme=nvme_config
    )
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    before = written(optimizer)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer, pinned=True)
    numel = sum(param.numel() for param in module.parameters())
    nbytes = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert written(optimizer) == before
    assert nbytes <= 0.1 * numel, nbytes / numel
    assert main(["inspect", str(tmp_path / "a")]) == 0
    optimizer.close()


def test_each_pin_takes_the_place_of_a_step_that_could_be_gone_back(tmp_path):
    model, optimizer, want = pinned(tmp_path)
    train(model, optimizer, batches(2, 3))
    gemini.save_checkpoint(tmp_path / "b", model, optimizer, pinned=True)
    train(model, optimizer, batches(3, 8))
    kept_steps = optimizer.stores[0].versions
    assert len(kept_steps.pinned) == 2 and len(kept_steps.history) == KEPT - 2
    model.rewind(1)
    gemini.save_checkpoint(tmp_path / "c", model, optimizer, pinned=True)
    with pytest.raises(
        CheckpointError, match=r"3 checkpoints are pinned already, .*keep_versions=3"
    ):
        gemini.save_checkpoint(tmp_path / "d", model, optimizer, pinned=True)
    train(model, optimizer, batches(7, 9))
    with pytest.raises(ValueError, match="0 steps are kept"):
        model.rewind(1)
    shutil.rmtree(tmp_path / "b")
    gemini.save_checkpoint(tmp_path / "d", model, optimizer, pinned=True)
    gemini.load_checkpoint(tmp_path / "a", model, optimizer)
    assert_same(bits(model, optimizer), want)
    optimizer.close()


def test_a_pinned_checkpoint_takes_the_place_of_another_of_its_name(tmp_path):
    model, optimizer, _ = pinned(tmp_path, keep_versions=1)
    for step in (2, 3, 4):
        train(model, optimizer, batches(step, step + 1))
        want = bits(model, optimizer)
        gemini.save_checkpoint(tmp_path / "a", model, optimizer, pinned=True)
    train(model, optimizer, batches(5, 8))
    assert len(optimizer.stores[0].versions.pinned) == 1
    gemini.load_checkpoint(tmp_path / "a", model, optimizer)
    assert_same(bits(model, optimizer), want)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)  # one like all others
    train(model, optimizer, batches(5, 7))
    assert not optimizer.stores[0].versions.pinned
    model.rewind(1)
    optimizer.close()
    assert not list((tmp_path / "disk").glob("*.blocks"))
    assert_same(loaded(tmp_path / "a")[1], None)


def test_keep_last_lets_old_pins_go(tmp_path):
    model, optimizer = kept(tmp_path / "disk")
    for step in range(6):
        train(model, optimizer, batches(step, step + 1))
        path = tmp_path / "runs" / str(step)
        gemini.save_checkpoint(path, model, optimizer, keep_last=KEPT - 1, pinned=True)
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["4", "5", "latest"]
    assert [main(["verify", str(tmp_path / "runs" / name)]) for name in names] == [0, 0, 0]
    optimizer.close()


def test_it_is_complete_at_once_and_copied_out_in_the_background(tmp_path, held):
    model, optimizer = kept(tmp_path / "disk")
    train(model, optimizer, batches(0, 2))
    want = whole(model, optimizer)
    path = tmp_path / "a"
    ticket = gemini.save_checkpoint(path, model, optimizer, async_save=True, pinned=True)
    assert read_manifest(path).pinned
    train(model, optimizer, batches(2, 8))
    assert main(["verify", str(path)]) == 0
    held.set()
    ticket.wait()
    assert not read_manifest(path).pinned
    optimizer.close()
    assert not list((tmp_path / "disk").iterdir())
    assert_same(loaded(path)[0], want)


def ended(index, folder):
    torch.set_num_threads(1)
    model, optimizer, want = pinned(Path(folder))
    del model, optimizer  # as at the end of any process
    return want


def test_files_stay_when_their_process_has_ended_until_the_checkpoint_is_deleted(tmp_path, caplog):
    (want,) = run_processes(ended, 1, str(tmp_path))
    (files,) = (tmp_path / "disk").glob("*.blocks")
    assert nvme.remove_orphans(tmp_path / "disk") == ()
    assert f"kept {files}: the checkpoint in {tmp_path / 'a'} is pinned to it" in caplog.text
    model, optimizer = kept(tmp_path / "disk")
    gemini.load_checkpoint(tmp_path / "a", model, optimizer)
    assert_same(bits(model, optimizer), want)
    assert files.exists()
    shutil.rmtree(tmp_path / "a")
    optimizer.close()
    _, optimizer = kept(tmp_path / "disk")
    optimizer.close()
    assert not list((tmp_path / "disk").iterdir())


# -- what goes wrong ------------------------------------------------------------------------------


def test_files_that_were_deleted_are_named(tmp_path):
    _, optimizer, _ = pinned(tmp_path)
    (files,) = (tmp_path / "disk").glob("*.blocks")
    files.unlink()
    refused_whole(tmp_path / "a", f"{files} is gone, and .*a is pinned to the state")
    assert main(["verify", str(tmp_path / "a")]) == 1
    optimizer.close()


def test_a_block_that_was_written_over_is_refused(tmp_path):
    _, optimizer, _ = pinned(tmp_path)
    store = optimizer.stores[0]
    extent = store.layout.extents()[5][store.last.entries[5].version]
    with store.paths[0].open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"written over")
    match = r"is pinned to, was written over or is damaged: block 5"
    refused_whole(tmp_path / "a", match)
    assert main(["verify", str(tmp_path / "a")]) == 1
    optimizer.close(keep_masters=False)


@pytest.mark.parametrize("kind", ["pipe", "link", "cut", "another run"])
def test_files_of_another_kind_are_refused_before_anything_is_changed(kind, tmp_path):
    _, optimizer, _ = pinned(tmp_path)
    (files,) = (tmp_path / "disk").glob("*.blocks")
    away = files.rename(files.with_suffix(".away"))
    if kind == "pipe":
        os.mkfifo(files)
    elif kind == "link":
        files.symlink_to(away)
    elif kind == "cut":
        files.write_bytes(away.read_bytes()[:-8192])
    else:
        (tmp_path / "other").mkdir()
        other = pinned(tmp_path / "other", steps=1)[1]
        shutil.copy(other.stores[0].paths[0], files)
        other.close()
    refused_whole(tmp_path / "a", None)
    files.unlink()
    away.rename(files)
    loaded(tmp_path / "a")
    optimizer.close()


def refused_whole(path, match):
    """Refused, and the model is as it was: state in other files is looked at first."""
    model, optimizer = make(seed=3)
    before = bits(model, optimizer)
    with pytest.raises(CorruptError, match=match):
        gemini.load_checkpoint(path, model, optimizer)
    assert_same(bits(model, optimizer), before)


@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_damaged_index_is_refused(at, tmp_path):
    _, optimizer, _ = pinned(tmp_path)
    (file,) = (tmp_path / "a").glob("*.pinned")
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"\.pinned is damaged: its checksum does not match"):
        loaded(tmp_path / "a")
    assert main(["verify", str(tmp_path / "a")]) == 1
    optimizer.close()


def test_another_format_says_so_to_older_versions(tmp_path):
    _, optimizer, _ = pinned(tmp_path)
    said = (tmp_path / "a" / "manifest.json").read_bytes()
    assert b'"format":2' in said
    gemini.save_checkpoint(tmp_path / "b", *make("resident"))
    assert b'"format":1' in (tmp_path / "b" / "manifest.json").read_bytes()
    optimizer.close()


LAYOUT = StateLayout((Plane("exp_avg", "float32"), Plane("exp_avg_sq", "float32")))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]\n",
        b'{"paths": [], "kind": "fp32", "planes": [], "blocks": [[64, false, 99999999999]], '
        b'"has_undo": false}\n' + bytes(64),
        b'{"paths": [], "kind": "fp32", "planes": [], "blocks": [[64, false, 1]], '
        b'"has_undo": false}\n' + bytes(64),
        b'{"paths": 7, "kind": "fp32", "planes": [{"name": 1}], "blocks": [], "has_undo": 0}\n',
        b'{"a":' * 100_000,
        b"[" + b"[]," * 4_000_000 + b"[]]\n" + bytes(64),
    ],
)
def test_what_no_state_is_takes_no_memory(data, tmp_path):
    (tmp_path / "file").write_bytes(data)

    def decode():
        with pytest.raises(ValueError):
            StateVersion.decode(data)

    assert_takes_little(decode, tmp_path / "file")


def test_a_version_says_the_same_again():
    entries = tuple(nvme.IndexEntry(i, 7 * i) for i in range(5))
    blocks = ((128, True), (128, True), (64, False))
    version = StateVersion(("/a",), nvme.Index(3, 2, entries), LAYOUT.with_master(), blocks, False)
    again = StateVersion.decode(version.encode())
    assert again == version and again.starts == (0, 1536, 3072, 3840)
    for wrong in (((63, False),), ((0, False),), ()):
        with pytest.raises(ValueError):
            StateVersion(("/a",), version.index, LAYOUT, wrong, False)


@pytest.mark.parametrize("name", ["write_whole", "rename", "sync_folder"])
def test_a_disk_that_fails_pins_nothing(name, tmp_path, monkeypatch):
    """Beside the store's files, and in the folder of the checkpoint."""
    for part in ("disk", "runs"):
        model, optimizer = kept(tmp_path / "disk")
        train(model, optimizer, batches(0, 1))
        real = getattr(calls, name)

        def full(path, *args, part=part, real=real):
            if f"/{part}" in str(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(path, *args)

        with monkeypatch.context() as patch:
            patch.setattr(calls, name, full)
            with pytest.raises(CheckpointError):
                gemini.save_checkpoint(tmp_path / "runs" / "a", model, optimizer, pinned=True)
        train(model, optimizer, batches(1, 6))
        assert not optimizer.stores[0].versions.pinned
        model.rewind(KEPT)
        gemini.save_checkpoint(tmp_path / "runs" / "a", model, optimizer, pinned=True)
        assert main(["verify", str(tmp_path / "runs" / "a")]) == 0
        optimizer.close()
        shutil.rmtree(tmp_path / "runs")


def test_what_keeps_no_versions_says_how_it_would(tmp_path):
    with pytest.raises(CheckpointError, match=r"pinned=True is for a GeminiDDP.*keep_versions"):
        gemini.save_checkpoint(tmp_path / "a", *make("nvme"), pinned=True)
    model, optimizer = kept(tmp_path / "disk")
    with pytest.raises(CheckpointError, match="pinned=True is for a GeminiDDP"):
        gemini.save_checkpoint(tmp_path / "a", model, pinned=True)
    optimizer.close()
    model = gemini.GeminiDDP(nn.Linear(64, 64), "cpu")
    unchecked = NvmeConfig(keep_versions=1, checksums=False)
    optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme=unchecked)
    with pytest.raises(CheckpointError, match="without checksums could not be verified"):
        gemini.save_checkpoint(tmp_path / "a", model, optimizer, pinned=True)
    optimizer.close()
    assert not (tmp_path / "a").exists()


# -- ranks ----------------------------------------------------------------------------------------


def pin_over_ranks(rank, folder, form):
    world_size = dist.get_world_size()
    model, optimizer = kept(Path(folder) / "disk", **form)
    train(model, optimizer, batches(0, 2, world_size))
    gemini.save_checkpoint(f"{folder}/a", model, optimizer, extra=rank, pinned=True)
    want, mine = whole(model, optimizer), bits(model, optimizer)
    train(model, optimizer, batches(2, 7, world_size))
    assert gemini.load_checkpoint(f"{folder}/a", model, optimizer) == rank
    assert_same(bits(model, optimizer), mine)
    optimizer.close()
    return want


def load_over_ranks(rank, folder, form):
    return loaded(f"{folder}/a", **form)


def test_one_on_disks_of_several_hosts_says_so(tmp_path, monkeypatch, caplog):
    names = iter(["one", "two"])
    host = SimpleNamespace(gethostname=lambda: next(names))
    monkeypatch.setattr("gemini.checkpoint.save.socket", host)
    run_ranks(pin_over_ranks, 2, str(tmp_path), FORMS[0])
    said = [record.getMessage() for record in caplog.records if "is pinned to" in record.msg]
    assert said == [said[0]] and "on the disks of 2 hosts" in said[0]


@pytest.mark.ci
@pytest.mark.parametrize("form", [{"precision": "bf16"}, {"precision": "fp32", "state": "8bit"}])
def test_another_number_of_ranks_loads_it(form, tmp_path):
    want = run_ranks(pin_over_ranks, 2, str(tmp_path), form)[0]
    assert len(list((tmp_path / "a").glob("*.pinned"))) == 2
    for world_size in (1, 2, 3):
        other = {"placement": "nvme", "chunk_size_m": 0.002 * world_size, **form}
        assert_same(run_ranks(load_over_ranks, world_size, str(tmp_path), other)[0][0], want)
