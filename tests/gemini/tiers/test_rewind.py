"""Going back some steps: weights, state, counts, loss scale and buffers of then, bit for bit."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nvme
from bench.shared.models import Tower, token_loss
from bench.shared.workers import run_ranks
from gemini import EMA, AutoPlacement, GeminiDDP
from optim import HybridAdam, NvmeConfig
from tests.support import checkpoints
from tests.support.checkpoints import assert_same, batches, make, train
from tests.support.spilled import N, homes

KEPT = 8


def kept(folder, **options):
    return make("nvme", folder=folder, **{"keep_versions": KEPT, **options})


def bits(model, optimizer):
    return {"digest": model.digest(), **checkpoints.bits(model, optimizer)}


def history(model, optimizer, steps, first=0, world_size=1):
    """Bits before each of these steps, and behind the last."""
    found = [bits(model, optimizer)]
    for batch in batches(first, first + steps, world_size):
        train(model, optimizer, [batch])
        found.append(bits(model, optimizer))
    return found


CASES = [
    ("bf16", "serial", "fp32"),
    ("bf16", "tail", "8bit"),
    ("bf16", "tail", "fp32"),
    ("fp16", "serial", "bf16"),
    ("fp32", "serial", "fp32"),  # without masters: weights come from what each step would undo
    ("fp32", "tail", "8bit"),
]


@pytest.mark.parametrize(("precision", "update", "state"), CASES)
def test_every_step_that_is_kept_comes_back_with_its_bits(precision, update, state, tmp_path):
    model, optimizer = kept(
        tmp_path, precision=precision, update=update, state=state, max_norm=0.05
    )
    found = history(model, optimizer, KEPT + 2)
    last = KEPT + 2
    for back in (1, 2, 1, 4):  # one after the other, down to the oldest that is kept
        last -= back
        written = optimizer.stores[0].traffic.written_bytes
        model.rewind(back)
        assert_same(bits(model, optimizer), found[last])
        assert optimizer.stores[0].traffic.written_bytes == written  # no block
    with pytest.raises(ValueError, match=r"rewind\(1\), and 0 steps are kept"):
        model.rewind(1)
    assert_same(history(model, optimizer, 4, last)[-1], found[last + 4])  # it goes on as it did
    model.rewind(3)
    assert_same(bits(model, optimizer), found[last + 1])
    optimizer.close()


@pytest.mark.parametrize("back", range(1, KEPT + 1))
def test_any_of_eight_steps_is_gone_back_to_at_once(back, tmp_path):
    model, optimizer = kept(tmp_path)
    found = history(model, optimizer, KEPT + 1)
    model.rewind(back)
    assert_same(bits(model, optimizer), found[KEPT + 1 - back])
    optimizer.close()


def test_the_disk_holds_what_is_kept_and_two_versions_more(tmp_path):
    sizes = {}
    for count in (0, 1, KEPT):
        (tmp_path / str(count)).mkdir()
        model, optimizer = kept(tmp_path / str(count), keep_versions=count)
        train(model, optimizer, batches(0, KEPT + 3))
        sizes[count] = optimizer.nvme_bytes
        (files,) = [path.stat() for path in optimizer.stores[0].paths]
        assert files.st_blocks * 512 <= sizes[count] + (1 << 16)
        rows = {(row.tier, row.kind): row for row in model.memory_report().rows}
        assert sizes[count] <= rows["nvme", "total"].predicted_bytes <= 1.5 * sizes[count]
        optimizer.close()
    one = sizes[1] - sizes[0]
    assert sizes[KEPT] == sizes[0] + KEPT * one and sizes[0] < 3 * one


def test_a_skipped_step_belongs_to_the_step_before(tmp_path):
    model, optimizer = kept(tmp_path, precision="fp16")
    found = history(model, optimizer, 2)
    weight = model.module.get_parameter("layers.2.1.weight")
    handle = weight.register_hook(lambda grad: grad * math.inf)
    train(model, optimizer, batches(2, 3))
    handle.remove()
    assert optimizer.skipped_steps == 1
    skipped = bits(model, optimizer)
    train(model, optimizer, batches(3, 5))
    model.rewind(2)
    assert_same(bits(model, optimizer), skipped)
    assert optimizer.skipped_steps == 1
    model.rewind(1)
    assert_same(bits(model, optimizer), found[1])
    assert optimizer.skipped_steps == 0
    optimizer.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_user_wrote_between_two_steps_belongs_to_the_first(precision, tmp_path):
    model, optimizer = kept(tmp_path, precision=precision)
    before = history(model, optimizer, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.01, 0.01)
    clamped = bits(model, optimizer)
    after = history(model, optimizer, 2, 2)
    model.rewind(2)
    assert_same(bits(model, optimizer), clamped)
    assert_same(history(model, optimizer, 2, 2)[-1], after[-1])
    model.rewind(3)
    assert_same(bits(model, optimizer), before[1])
    optimizer.close()


class Normed(nn.Module):
    """A Tower behind a BatchNorm, which counts and averages in buffers."""

    def __init__(self):
        super().__init__()
        self.tower, self.norm = Tower(0), nn.BatchNorm1d(1)

    def forward(self, ids):
        return self.tower(ids) + self.norm(ids.float().reshape(-1, 1)).mean()


def test_buffers_come_back_as_the_step_left_them(tmp_path):
    model, optimizer = kept(tmp_path, module=Normed())
    seen = []
    for batch in batches(0, 4):
        seen.append({n: b.clone() for n, b in model.module.named_buffers()})
        train(model, optimizer, [batch])
    assert seen[3]["norm.num_batches_tracked"] == 3
    for step in (3, 2, 0):
        model.rewind(int(model.module.norm.num_batches_tracked) - step)
        assert_same(dict(model.module.named_buffers()), seen[step])
    optimizer.close()


def test_nobody_goes_back_behind_what_was_loaded(tmp_path):
    model, optimizer = kept(tmp_path)
    train(model, optimizer, batches(0, 3))
    optimizer.load_state_dict(optimizer.state_dict())
    found = history(model, optimizer, 2, 3)
    with pytest.raises(ValueError, match=r"rewind\(3\), and 2 steps are kept since"):
        model.rewind(3)
    assert_same(bits(model, optimizer), found[-1])
    model.rewind(2)
    assert_same(bits(model, optimizer), found[0])
    optimizer.close()


def test_a_step_that_failed_is_not_one_of_them(tmp_path, monkeypatch):
    model, optimizer = kept(tmp_path)
    found = history(model, optimizer, 3)
    store = optimizer.stores[0]

    def full(*args):
        raise nvme.DiskFullError("full")

    token_loss(model, batches(3, 4)[0][0]).backward()
    with monkeypatch.context() as patch:
        patch.setattr(store, "flush", full)
        with pytest.raises(nvme.DiskFullError):
            optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    model.rewind(1)
    assert_same(bits(model, optimizer), found[3])
    model.rewind(3)
    assert_same(bits(model, optimizer), found[0])
    optimizer.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_version_that_is_damaged_is_refused_before_anything_is_changed(precision, tmp_path):
    model, optimizer = kept(tmp_path, precision=precision)
    found = history(model, optimizer, 3)
    store = optimizer.stores[0]
    entry = store.versions.history[1].entries[4]  # of step 1
    extent = store.layout.extents()[4][entry.version]
    with store.paths[0].open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"damaged!")
    with pytest.raises(nvme.ChecksumError, match="block 4 at offset"):
        model.rewind(2)
    assert_same(bits(model, optimizer), found[3])
    model.rewind(1)  # the others are whole
    assert_same(bits(model, optimizer), found[2])
    assert_same(history(model, optimizer, 1, 2)[-1], found[3])
    optimizer.close()


def test_what_keeps_no_steps_says_how_it_would(tmp_path):
    model, optimizer = make("nvme", folder=tmp_path)
    with pytest.raises(RuntimeError, match=r"keeps no steps; make it with.*keep_versions"):
        model.rewind(1)
    optimizer.close()
    with pytest.raises(RuntimeError, match="a module without an optimizer"):
        GeminiDDP(Tower(0)).rewind(1)
    with pytest.raises(ValueError, match=r"nvme_offload_fraction=0\.4 some is in memory"):
        make("mixed", keep_versions=2)
    with pytest.raises(ValueError, match="keep_versions=65; expected 0 to 64"):
        NvmeConfig(keep_versions=65)
    plain = HybridAdam(
        Tower(0).parameters(), nvme_offload_fraction=1.0, nvme=NvmeConfig(keep_versions=1)
    )
    with pytest.raises(ValueError, match="for the optimizer of a GeminiDDP"):
        plain.bind()
    policy = AutoPlacement("180KiB", nvme_dir=str(tmp_path))
    model = GeminiDDP(Tower(0), None, policy, precision="fp32", min_chunk_size_m=0.004)
    assert N in homes(model)[0]
    with pytest.raises(ValueError, match="parameters on NVMe without fp32 masters"):
        HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme=NvmeConfig(keep_versions=1))


def test_gradients_of_weights_that_are_gone_are_dropped(tmp_path):
    model, optimizer = kept(tmp_path)
    found = history(model, optimizer, 3)
    token_loss(model, batches(3, 4)[0][0]).backward()
    with model.summon_full_params(), pytest.raises(RuntimeError, match="parameters are summoned"):
        model.rewind(1)
    model.rewind(2)
    with pytest.raises(RuntimeError, match="without a gradient"):
        optimizer.step()
    assert_same(history(model, optimizer, 2, 1)[-1], found[3])
    optimizer.close()


def test_an_average_has_one_version(tmp_path):
    model, optimizer = kept(tmp_path)
    ema = EMA(model, decay=0.9)
    train(model, optimizer, batches(0, 2))
    want = bits(model, optimizer)
    with pytest.raises(RuntimeError, match="a model with an EMA"):
        model.rewind(1)
    assert_same(bits(model, optimizer), want)
    ema.close()
    model.rewind(1)
    optimizer.close()


# -- two ranks ------------------------------------------------------------------------------------


def there_and_back(rank, folder, damaged):
    model, optimizer = kept(folder, max_norm=0.05)
    found = history(model, optimizer, 5, 0, dist.get_world_size())
    if rank == damaged:
        store = optimizer.stores[0]
        entry = store.versions.history[2].entries[0]
        with store.paths[0].open("r+b") as file:
            file.seek(store.layout.extents()[0][entry.version].offset)
            file.write(b"damaged!")
    said = ""
    try:
        model.rewind(3)
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    assert_same(bits(model, optimizer), found[5 if said else 2])
    optimizer.close()
    return said


@pytest.mark.ci
def test_all_ranks_go_back_or_none(tmp_path):
    assert run_ranks(there_and_back, 2, tmp_path, None) == ["", ""]
    said = run_ranks(there_and_back, 2, tmp_path, 1)
    assert said[1].startswith("ChecksumError: block 0 at offset")
    assert said[0].startswith("RuntimeError: rank 1: block 0 at offset")
