"""Checkpoints in one process: resume, what fits what, files that are not as written, export."""

import json
import math
import os
import re
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import checkpoint as dcp

import gemini
from gemini.checkpoint import CorruptError, FormatError, MismatchError, background
from gemini.checkpoint.__main__ import main
from gemini.checkpoint.format.boxes import boxes_of_run
from gemini.checkpoint.format.manifest import DataFile, Manifest, Unit
from gemini.checkpoint.untrusted.lazy_tensors import INDEX
from gemini.ddp import GeminiDDP
from optim import HybridAdam, NvmeConfig
from tests.support.checkpoints import ADAM, assert_same, batches, everything, make, train, whole
from tests.support.models import Tower

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# -- runs as boxes, manifests -----------------------------------------------------------------


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_boxes_of_a_run_are_few_and_hold_its_elements_in_order(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = boxes_of_run(shape, start, stop)
    whole_tensor = torch.arange(numel).view(shape)
    found = [
        whole_tensor[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))]
        for b in boxes
    ]
    for box, elements in zip(boxes, found, strict=True):
        assert int(elements.reshape(-1)[0]) == box.start and elements.numel() == box.numel
    together = torch.cat([e.reshape(-1) for e in found]) if found else torch.empty(0)
    assert together.tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


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


# -- resume -----------------------------------------------------------------------------------


def scheduled(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def go(model, optimizer, scheduler, steps):
    for step in steps:
        train(model, optimizer, [step])
        scheduler.step()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_training_goes_on_with_the_same_bits(precision, async_save, tmp_path):
    """At other placements and chunk sizes, with scheduler, scale, counters and random numbers."""
    model, optimizer = make("mixed", precision)
    scheduler = scheduled(optimizer)
    go(model, optimizer, scheduler, batches(0, 2))
    extra = {"position": 2, "names": ["a"], "ema": torch.ones(3, dtype=torch.bfloat16)}
    ticket = gemini.save_checkpoint(
        tmp_path / "k2", model, optimizer, scheduler, extra, async_save, async_ram_budget=50_000
    )
    go(model, optimizer, scheduler, batches(2, 5))
    ticket.wait()
    want = everything(model, optimizer)
    for placement, chunk_size_m in (("resident", 0.01), ("nvme", 0.004), ("host", 0.002)):
        other, its_optimizer = make(placement, precision, chunk_size_m, seed=7)
        its_scheduler = scheduled(its_optimizer)
        assert_same(gemini.load_checkpoint(tmp_path, other, its_optimizer, its_scheduler), extra)
        go(other, its_optimizer, its_scheduler, batches(2, 5))
        got = everything(other, its_optimizer)
        # chunks that differ cut runs differently: compare whole tensors
        assert_same(whole(other, its_optimizer), whole(model, optimizer))
        for name in ("steps", "counters", "groups", "random"):
            assert_same(got[name], want[name], name)
        assert its_scheduler.state_dict() == scheduler.state_dict()


def train_and_save(index, folder, placement):
    model, optimizer = make(placement)
    for k in range(1, 11):
        train(model, optimizer, batches(k - 1, k))
        gemini.save_checkpoint(folder / f"k{k}", model, optimizer)
    train(model, optimizer, batches(10, 12))
    return everything(model, optimizer)


def resume_at(index, folder, placement):
    model, optimizer = make(placement, seed=index)
    gemini.load_checkpoint(folder / f"k{index + 1}", model, optimizer)
    train(model, optimizer, batches(index + 1, 12))
    return everything(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["resident", "host", "nvme", "mixed"])
def test_a_fresh_process_resumes_at_any_step_with_the_same_bits(placement, tmp_path):
    from tests.support.workers import run_processes

    (want,) = run_processes(train_and_save, 1, tmp_path, placement)
    for got in run_processes(resume_at, 10, tmp_path, placement):
        assert_same(got, want)


def test_weights_alone_are_loaded_without_an_optimizer_on_either_side(tmp_path):
    model, optimizer = make()
    train(model, optimizer, batches(0, 2))
    gemini.save_checkpoint(tmp_path / "a", model)
    bare = GeminiDDP(Tower(4), precision="bf16", min_chunk_size_m=0.004)
    gemini.load_checkpoint(tmp_path, bare)
    assert_same(bare.state_dict(), model.state_dict())
    with pytest.raises(MismatchError, match="has no optimizer state"):
        gemini.load_checkpoint(tmp_path, *make())


# -- any optimizer, any module ----------------------------------------------------------------


def plain(steps, seed=0):
    module = Tower(seed)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    train(module, optimizer, steps)
    return module, optimizer


def plain_whole(module, optimizer):
    found = {f"model.{name}": value for name, value in module.state_dict().items()}
    names = [name for name, _ in module.named_parameters()]
    for i, planes in optimizer.state_dict()["state"].items():
        found |= {f"{names[i]}.{plane}": value for plane, value in planes.items()}
    return found


@pytest.mark.parametrize("how", ["dcp", "torch.save", "save_checkpoint"])
@pytest.mark.parametrize("placement", ["resident", "nvme"])
def test_a_plain_module_and_adamw_are_loaded(how, placement, tmp_path):
    module, optimizer = plain(batches(0, 2))
    if how == "dcp":
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, state = get_state_dict(module, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "a")
    elif how == "torch.save":
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "a")
    else:
        gemini.save_checkpoint(tmp_path / "a", module, optimizer, extra=[1])
    model, its_optimizer = make(placement, seed=2)
    train(model, its_optimizer, batches(5, 6))
    extra = gemini.load_checkpoint(tmp_path / "a", model, its_optimizer)
    assert extra == ([1] if how == "save_checkpoint" else None)
    assert_same(whole(model, its_optimizer), plain_whole(module, optimizer))


@pytest.mark.parametrize("how", ["dcp", "load_checkpoint"])
def test_a_plain_module_and_adamw_load_what_was_saved_wrapped(how, tmp_path):
    model, optimizer = make("mixed")
    train(model, optimizer, batches(0, 2))
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    module, its_optimizer = plain([], seed=5)
    if how == "dcp":
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        weights, state = get_state_dict(module, its_optimizer)
        loaded = {"model": weights, "optim": state}
        dcp.load(loaded, checkpoint_id=tmp_path / "a")
        set_state_dict(
            module,
            its_optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optim"],
        )
    else:
        gemini.load_checkpoint(tmp_path, module, its_optimizer)
    assert_same(plain_whole(module, its_optimizer), whole(model, optimizer))
    assert its_optimizer.param_groups[0]["lr"] == ADAM["lr"]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_hybrid_adam_on_a_plain_module_goes_on_with_the_same_bits(fraction, tmp_path):
    def pair(seed, fraction):
        module = Tower(seed)
        config = NvmeConfig(block_numel=1024)
        options = {"nvme_offload_fraction": fraction, "nvme": config}
        return module, HybridAdam(module.parameters(), **options, **ADAM)

    module, optimizer = pair(0, fraction)
    train(module, optimizer, batches(0, 2))
    gemini.save_checkpoint(tmp_path / "a", module, optimizer)
    train(module, optimizer, batches(2, 4))
    other, its_optimizer = pair(1, 1 - fraction)
    gemini.load_checkpoint(tmp_path, other, its_optimizer)
    train(other, its_optimizer, batches(2, 4))
    assert_same(plain_whole(other, its_optimizer), plain_whole(module, optimizer))


class Odd(nn.Module):
    """Shapes that cut badly, a scalar, an empty one, a frozen one, a buffer."""

    def __init__(self, seed=0, extra=0):
        super().__init__()
        torch.manual_seed(seed)
        self.deep = nn.Parameter(torch.randn(3, 5, 7, 31))
        self.scalar = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(301, 3 + extra), requires_grad=False)
        self.vector = nn.Parameter(torch.randn(1023))
        self.register_buffer("seen", torch.tensor([seed, 5]))

    def forward(self):
        return (self.deep.sum() * self.scalar + self.vector.square().sum()) * self.frozen.mean()


def odd(seed=0, extra=0, **options):
    return make(module=Odd(seed, extra), chunk_size_m=0.001, **options)


def step_odd(model, optimizer):
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_plan_is_that_of_the_saved_run_from_the_first_iteration_on(tmp_path):
    budget = gemini.ConstPlacement("150KiB")
    model, optimizer = make(policy=budget)
    train(model, optimizer, batches(0, 2))
    sampled = model.engine.planning.inputs.trace
    assert sampled.signature != "assumed"
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    train(model, optimizer, batches(2, 4))
    again, its_optimizer = make(policy=budget)
    assert again.engine.planning.inputs.trace.signature == "assumed"
    gemini.load_checkpoint(tmp_path, again, its_optimizer)
    assert again.engine.planning.inputs.trace.moments == sampled.moments
    train(again, its_optimizer, batches(2, 4))
    assert_same(whole(again, its_optimizer), whole(model, optimizer))
    other, _ = make(module=Odd())
    sampler = model.engine.sampler.state_dict()
    other.engine.sampler.load_state_dict(sampler, told_apart=True)  # of another model: left
    assert other.engine.planning.inputs.trace.signature == "assumed"


def test_scalars_frozen_ones_buffers_and_unused_state_come_back(tmp_path):
    model, optimizer = odd(placement="nvme")
    step_odd(model, optimizer)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    other, its_optimizer = odd(seed=1, placement="resident", precision="fp32")
    gemini.load_checkpoint(tmp_path, other, its_optimizer)
    got, want = whole(other, its_optimizer), whole(model, optimizer)
    assert_same(got, want)
    assert other.module.seen.tolist() == [0, 5]


def test_all_differences_are_listed_at_once_and_strict_can_be_given_up(tmp_path):
    model, optimizer = odd()
    step_odd(model, optimizer)
    gemini.save_checkpoint(tmp_path / "a", model, optimizer)
    module = Odd(1, extra=2)
    module.renamed = module.vector
    del module.vector
    module.forward = lambda: module.deep.sum()
    other, its_optimizer = make(module=module, chunk_size_m=0.001)
    before = whole(other, its_optimizer)
    with pytest.raises(MismatchError) as raised:
        gemini.load_checkpoint(tmp_path, other, its_optimizer)
    text = str(raised.value)
    assert "missing model.renamed" in text and "unexpected model.vector" in text
    assert "model.frozen is of shape (301, 3), expected (301, 5)" in text
    assert "unexpected optim.state.vector.exp_avg" in text
    assert_same(whole(other, its_optimizer), before)
    with pytest.raises(MismatchError, match="parameter vector, which is not in"):
        gemini.load_checkpoint(tmp_path, other, its_optimizer, strict=False)
    gemini.load_checkpoint(tmp_path, other, strict=False)
    got, want = other.state_dict(), model.state_dict()
    assert torch.equal(got["deep"], want["deep"])
    assert torch.equal(got["renamed"], before["model.renamed"])


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
    text = text.replace(b'"format":1', b'"format":2')
    crc = f"crc32 {zlib.crc32(text):08x}\n".encode()
    (saved / "manifest.json").write_bytes(text + b"\n" + crc)
    with pytest.raises(FormatError, match="format 2, this code reads 1"):
        gemini.load_checkpoint(saved, *make())


MEASURE = """
import gc, sys, tempfile, torch, gemini
from bench.checkpoint import extra_ram, network, step, wrapped
from optim import HybridAdam
from pathlib import Path
how, fraction, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
if how == "wrapped":
    model, optimizer = wrapped(8, fraction, folder)
else:
    model = network(8)
    offload = {"nvme_offload_fraction": fraction, "nvme_offload_dir": folder}
    optimizer = HybridAdam(model.parameters(), **offload)
    step(model, optimizer)
save = lambda name: gemini.save_checkpoint(folder / name, model, optimizer)
load = lambda name: gemini.load_checkpoint(folder / name, model, optimizer)
save("first")  # imports
load("first")
block = 12 << 20
saving, loading = extra_ram(lambda: save("second")), extra_ram(lambda: load("second"))
print(saving / block, loading / block, optimizer.nvme_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("how", ["wrapped", "plain"])
def test_a_save_and_a_load_take_a_few_blocks_of_memory(how, fraction, tmp_path):
    """State is 32 blocks; measured as resident memory, in a process of its own."""
    import subprocess
    import sys

    from bench.support.machine import MALLOC_ENVIRONMENT

    environment = {**os.environ, **MALLOC_ENVIRONMENT, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, how, str(fraction), str(tmp_path)],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    saving, loading, on_disk = done.stdout.split()
    assert (int(on_disk) > 0) == (fraction > 0)
    assert float(saving) <= 3
    assert float(loading) <= 5  # it reads ahead


# -- asynchronous saves -----------------------------------------------------------------------


def test_a_step_waits_for_the_block_that_it_would_overwrite(tmp_path):
    """The saved version of every block stays until it was read, however far training goes."""
    import threading

    model, optimizer = make("nvme")
    train(model, optimizer, batches(0, 2))
    want = whole(model, optimizer)
    target = model.engine.target
    snapshot = target.snapshot_state()
    done = []
    thread = threading.Thread(
        target=lambda: (train(model, optimizer, batches(2, 5)), done.append(True))
    )
    thread.start()
    thread.join(1.0)
    assert not done and target._num_steps == 3  # one step went by, the next one waits
    got = {}

    def keep(run):
        got.setdefault(f"{run.name}/{run.plane}", {})[run.start] = run.values.clone()

    snapshot.visit_disk(keep)
    snapshot.close()
    thread.join(30)
    assert done and target.pinned_seconds > 0.5
    for key, runs in got.items():
        name, plane = key.split("/")
        values = torch.cat([runs[start] for start in sorted(runs)])
        key = f"model.{name}" if plane == "master" else f"{name}.{plane}"
        assert torch.equal(values, want[key].reshape(-1)), key


@pytest.mark.parametrize("placement", ["resident", "nvme"])
def test_a_save_in_the_background_holds_what_was_there_when_it_began(
    placement, tmp_path, monkeypatch
):
    model, optimizer = make(placement)
    train(model, optimizer, batches(0, 1))
    want = dict(model.state_dict())
    stepped, start = threading.Event(), background.start
    monkeypatch.setattr(
        background, "start", lambda path, work: start(path, lambda: (stepped.wait(), work()))
    )
    ticket = gemini.save_checkpoint(tmp_path / "a", model, optimizer, async_save=True)
    train(model, optimizer, batches(1, 2))  # both versions of a block on disk have their place
    stepped.set()
    ticket.wait()
    assert any(not torch.equal(want[name], value) for name, value in model.state_dict().items())
    gemini.load_checkpoint(tmp_path / "a", model, optimizer)
    assert_same(dict(model.state_dict()), want)


def test_a_second_save_while_one_is_under_way_is_refused(tmp_path):
    model, optimizer = make("nvme")
    ticket = gemini.save_checkpoint(tmp_path / "a", model, optimizer, async_save=True)
    try:
        if not ticket.ready():
            with pytest.raises(gemini.checkpoint.CheckpointError, match="is under way; wait"):
                gemini.save_checkpoint(tmp_path / "b", model, optimizer)
    finally:
        ticket.wait()
    gemini.save_checkpoint(tmp_path / "b", model, optimizer)


# -- export -----------------------------------------------------------------------------------


def test_from_pretrained_loads_what_was_exported_and_import_takes_it_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=16)
    torch.manual_seed(3)
    model = GeminiDDP(transformers.GPT2LMHeadModel(config), min_chunk_size_m=0.004)
    gemini.export_safetensors(tmp_path / "hf", model, max_shard_size=40_000)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
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
    (tmp_path / "out" / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_inspect_says_what_is_there(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "model.layers.2.1.weight  float32[77, 33]" in said
    assert "optim.state.embed.weight.exp_avg  float32[97, 33]" in said
    assert "world size 1" in said and "digest" in said and "as written" in said


# -- digest -----------------------------------------------------------------------------------


def test_the_digest_follows_weights_and_not_where_they_are():
    forms = [("resident", 0.002), ("nvme", 0.01), ("host", 0.004)]
    found = {make(placement, chunk_size_m=size)[0].digest() for placement, size in forms}
    assert len(found) == 1
    model, optimizer = make()
    before = model.digest()
    assert before in found
    with torch.no_grad():
        model.layers[1][1].weight.view(-1)[-1] += 0.01
    changed = model.digest()
    train(model, optimizer, batches(0, 1))
    assert len({before, changed, model.digest()}) == 3


def test_the_digest_kernel_gives_the_bits_of_its_reference():
    from kernels_triton.digest import digest_on_device, digest_reference

    for numel in (0, 1, 1023, 4096, 70_001):
        words = torch.randint(-(2**62), 2**62, (numel,))
        want = digest_reference(words, 17, 3)
        assert torch.equal(digest_on_device(words, 17, 3), want)
        if numel > 1:
            parts = digest_reference(words[:500], 17, 3) + digest_reference(words[500:], 517, 3)
            assert torch.equal(parts, want)
