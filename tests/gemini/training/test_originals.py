"""fp32 values of frozen 16-bit weights: what is planned of them is what is held, on every tier."""

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bench.shared.models import seeded
from bench.shared.threads import run_threads
from gemini import AutoPlacement, GeminiDDP, StaticPlacement, init_empty, save_checkpoint
from gemini.chunk.layout import ChunkLayout, ParamSpec, specs_of
from gemini.memtracer.trace import sequential_trace
from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.runtime.memory.backend import FileConfig
from gemini.runtime.memory.originals import Originals
from gemini.units import ORIGINAL_BLOCK_NUMEL, PAGE_BYTES, align_up
from optim import HybridAdam, NvmeConfig
from tests.support.device.placed import batch, device
from tests.support.loops.tails import state_of

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
BLOCKS = NvmeConfig(block_numel=1024)
CHUNKS = {"min_chunk_size_m": 2700 / 2**20, "search_range_m": 0.0}


class Adapted(nn.Module):
    """A base of odd sizes, frozen, and an adapter of low rank beside each half of it."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.up, self.down = nn.Linear(33, 77), nn.Linear(77, 33)
            self.a = nn.Linear(33, 5, bias=False)
            self.b = nn.Linear(5, 33, bias=False)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) + self.b(self.a(x))


def wrapped(placement, backend=None, module=None, **chunks):
    module = Adapted() if module is None else module
    trace = sequential_trace(specs_of(module, "bfloat16"))
    options = {"keep_originals": True, **CHUNKS, **chunks}
    model = GeminiDDP(module, backend, placement, trace=trace, **options)
    return model, HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)


def step(model, optimizer, seed=0):
    model(batch(seed)).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def rows(model, kind):
    """Of a kind, the bytes on every tier as planned, at rest, and as the ledger counts them."""
    engine = model.engine
    engine.manager.release_all()
    profile, in_use = engine.planning.result.profile, engine.manager.bytes_in_use()
    return [
        {t: profile.rows[t, kind][-1] for t in Tier},
        {t: in_use.get((t, kind), 0) for t in Tier},
    ]


def frozen_bytes(model, unit=1):
    """fp32 bytes of what is frozen of this rank's shards, each in whole units."""
    sizes = [4 * c.spec.shard_numel for c in model.engine.chunks if not c.spec.trainable]
    return sum(align_up(nbytes, unit) for nbytes in sizes)


def in_memory(model):
    """Bytes of the storages that hold originals, whole ones."""
    originals = model.engine.originals
    kept = [originals.get(chunk) for chunk in originals.chunks]
    return sum(values.untyped_storage().nbytes() for values in kept)


def check_counted(model):
    """The ledger says what files take, and as much in all as by kind."""
    engine = model.engine
    engine.manager.release_all()
    totals, in_use = engine.manager.ledger.totals(), engine.manager.bytes_in_use()
    assert totals == {t: sum(n for (on, _), n in in_use.items() if on is t) for t in Tier}
    folder = engine.planning.nvme_folder
    if folder is not None:
        paths = Path(folder).glob(f"*rank{engine.comm.rank}-*originals*")
        assert sum(p.stat().st_blocks * 512 for p in paths) == in_use.get((N, "originals"), 0)


def check_held(model, tier):
    """Nothing but what is frozen has originals, where the plan has them, in memory of that tier."""
    check_counted(model)
    assert model.engine.manager.ledger.totals()[D] == model.engine.backend.device_bytes
    planned, counted = rows(model, "originals")
    nbytes = frozen_bytes(model, PAGE_BYTES if tier is N else 1)
    overhead = counted[N] - planned[N] if tier is N and nbytes else 0  # header and index
    assert 0 <= overhead < 66_000
    assert planned == {D: 0, H: 0, N: 0, tier: nbytes}
    assert counted == {D: 0, H: 0, N: 0, tier: nbytes + overhead}
    originals = [c.original_bytes for c in model.engine.planning.plan.chunks]
    assert sum(originals) == frozen_bytes(model)
    if tier is not N:
        assert in_memory(model) == nbytes
    planned, counted = rows(model, "state")
    assert planned[D] == counted[D] and planned[H] == counted[H]


@pytest.mark.parametrize("tier", [H, N], ids=str)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_what_is_planned_is_held_before_and_behind_unfreezing(world_size, tier, tmp_path):
    """Of a simulated device, whose memory is not the host's. To files under a host budget that
    has no room for them."""
    mine = StaticPlacement(0.5)
    if tier is N:
        mine = AutoPlacement("1MiB", world_size * 10_000, nvme_dir=str(tmp_path))

    def work(rank):
        model = GeminiDDP(Adapted(), device(by_triton=True), mine, keep_originals=True, **CHUNKS)
        assert frozen_bytes(model) > 10_000
        check_counted(model)
        assert model.engine.originals.memory_bytes[D] > 0  # of what is trained, until masters are
        optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=BLOCKS)
        check_held(model, tier)
        step(model, optimizer)
        check_held(model, tier)
        for unfrozen in (model.module.up, model.module.down):
            before = frozen_bytes(model)
            unfrozen.requires_grad_(True)
            step(model, optimizer, 1)
            assert frozen_bytes(model) < before
            check_held(model, tier)
        model.module.up.requires_grad_(False)  # it keeps its state, as in torch
        step(model, optimizer, 2)
        check_held(model, tier)
        optimizer.close(keep_masters=False)

    run_threads(work, world_size)


def test_weights_that_no_rounding_changed_are_not_planned():
    module = Adapted()
    with torch.no_grad():
        for param in module.down.parameters():
            param.copy_(param.bfloat16())
    model, _ = wrapped("cuda", device(by_triton=True), module)
    kept = {chunk.id for chunk in model.engine.planning.plan.chunks if chunk.original_bytes}
    assert kept == model.engine.originals.chunks and len(kept) == 1
    assert rows(model, "originals") == [{D: 0, H: in_memory(model), N: 0}] * 2


def test_on_a_cpu_they_are_memory_of_the_device():
    model, optimizer = wrapped("cuda")
    planned, counted = rows(model, "originals")
    assert planned == counted == {D: frozen_bytes(model), H: 0, N: 0}
    step(model, optimizer)
    said = {(row.tier, row.kind): row for row in model.memory_report().rows}
    row = said["device", "originals"]
    assert row.predicted_bytes == row.measured_bytes == frozen_bytes(model)
    assert "originals: 11.00 KiB on device" in model.explain("up.weight")
    assert "originals" not in model.explain("a.weight")


def peaks(model, optimizer):
    """The most model data on every tier over two steps."""
    ledger = model.engine.manager.ledger
    for seed in range(2):
        ledger.watched = True
        loss = model(batch(seed)).float().pow(2).mean()
        ledger.watched = True  # sampling switches it off
        loss.backward()
        ledger.watched = True
        optimizer.step()
        optimizer.zero_grad()
    return {tier: sum(kinds.values()) for tier, kinds in ledger.peaks.items()}


def test_a_host_budget_has_room_for_them_or_they_go_to_files_or_the_remedy_is_named():
    def limited(nbytes):
        return AutoPlacement("1MiB", nbytes, "1MiB"), device(by_triton=True)

    model, optimizer = wrapped(*limited(frozen_bytes(wrapped("cuda")[0])))
    assert model.engine.planning.plan.original_home is H
    assert peaks(model, optimizer)[H] <= frozen_bytes(model)
    model, optimizer = wrapped(*limited(frozen_bytes(model) - 1))
    assert model.engine.planning.plan.original_home is N
    assert peaks(model, optimizer).get(H, 0) < frozen_bytes(model)
    with pytest.raises(BudgetError, match="or leave keep_originals=True out") as info:
        wrapped(AutoPlacement("1MiB", "1000B", "100B"), device(by_triton=True))
    assert info.value.tier is N
    enough = 100 + info.value.missing_bytes
    wrapped(AutoPlacement("1MiB", "1000B", enough), device(by_triton=True))
    with pytest.raises(BudgetError) as info:
        wrapped(AutoPlacement("1MiB", "1000B", enough - 1), device(by_triton=True))
    assert info.value.missing_bytes == 1


@pytest.mark.parametrize("kib", [20, 30, 42])
def test_a_budget_of_a_cpu_holds_with_them(kib):
    """Where they do not fit beside what a step needs, they are the first to go to files."""
    model, optimizer = wrapped(AutoPlacement(kib << 10))
    assert peaks(model, optimizer)[D] <= kib << 10
    assert model.engine.planning.plan.original_home is (D if kib == 42 else N)
    assert model.engine.planning.plan.blocks_on(N) == frozenset()


@pytest.mark.parametrize("placement", ["cuda", AutoPlacement("30KiB")], ids=["memory", "file"])
def test_frozen_values_that_are_loaded_are_kept_exactly(placement):
    """Also when they were looked at before: what was read of a file is not what it has now."""
    model, _ = wrapped(placement, min_chunk_size_m=1)  # all of it in one chunk
    model.state_dict()
    other = {name: value + torch.rand(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other[name]), name


def test_what_was_read_of_a_file_is_not_kept_in_memory():
    model, _ = wrapped(AutoPlacement("30KiB"))
    engine = model.engine
    chunk = next(chunk for chunk in engine.chunks if not chunk.spec.trainable)
    assert chunk.spec.id in engine.originals and engine.storage.file_bytes > 0
    values = engine.weights.without_master(chunk)
    assert values.dtype == torch.float32
    gone = weakref.ref(values)
    del values
    gc.collect()
    assert gone() is None


def test_files_have_room_for_what_is_kept_alone(tmp_path):
    """Of what is trained nothing is left when masters are there, nor of what was not rounded."""
    module = Adapted()
    with torch.no_grad():
        for param in module.down.parameters():
            param.copy_(param.bfloat16())
    placement = AutoPlacement("30KiB", nvme_dir=str(tmp_path))
    model, _ = wrapped(placement, module=module)
    (path,) = tmp_path.iterdir()
    kept = sum(c.original_bytes for c in model.engine.planning.plan.chunks)
    assert 0 < kept < frozen_bytes(model)
    assert kept <= path.stat().st_blocks * 512 <= kept + 16384  # header, index, a last page


def test_blocks_of_a_base_are_no_smaller_where_those_of_adapters_are(tmp_path):
    """Each has objects in RAM: of 4 KiB of values these would be a sixth."""
    numel = 2 * ORIGINAL_BLOCK_NUMEL + 500
    specs = ChunkLayout.build([ParamSpec("a", (numel,), "bfloat16")], 1 << 20).chunks
    chunk, values = specs[0].id, torch.randn(specs[0].shard_numel)
    for block_numel, count in ((1024, 3), (2 * ORIGINAL_BLOCK_NUMEL, 2)):
        config = FileConfig(str(tmp_path), block_numel=block_numel)
        originals = Originals(specs, {chunk: N}, torch.device("cpu"), config)
        originals.put(chunk, values)
        (store,) = originals.stores
        assert store.layout.num_blocks == count and torch.equal(originals.get(chunk), values)
        originals.clear()


def test_masters_that_are_given_back_take_no_memory_of_a_device_that_is_full():
    """The optimizer gives them back before its state goes."""
    specs = ChunkLayout.build([ParamSpec("a", (301,), "bfloat16")], 1 << 10).chunks
    chunk = specs[0].id
    originals = Originals(specs, {chunk: D}, torch.device("meta"), FileConfig())
    originals.put(chunk, torch.empty(512, device="meta"))
    assert originals.memory_bytes == {D: 2048}
    given = torch.randn(512)
    originals.put(chunk, given)
    assert +originals.memory_bytes == {H: 2048} and torch.equal(originals.get(chunk), given)
    originals.drop(chunk)
    assert not +originals.memory_bytes


def test_a_machine_with_too_little_memory_left_is_a_budget_for_them_too(monkeypatch):
    """Nobody gave one: files have what there is no room for."""
    from gemini.runtime.memory import machine

    found = []
    for left in (1 << 30, 34_200):
        monkeypatch.setattr(machine, "memory_left", lambda left=left: left)
        found.append(wrapped("auto")[0].engine.planning)
    assert [planning.inputs.budgets.device for planning in found] == [966367641, 30780]
    assert [planning.plan.original_home for planning in found] == [Tier.DEVICE, Tier.NVME]


class FromArrays(nn.Linear):
    """Its values are memory of numpy's, which is let go when torch has no tensor over it."""

    made = ()

    def reset_parameters(self):
        if self.weight.is_meta:
            return
        array = np.random.default_rng(len(self.made)).standard_normal(self.weight.shape, np.float32)
        self.weight.data = torch.from_numpy(array)
        self.made.append(weakref.ref(array))


class Tower(nn.Module):
    """Seven frozen layers, in one chunk, and one that is trained."""

    def __init__(self):
        super().__init__()
        FromArrays.made = []
        self.layers = nn.Sequential(*(FromArrays(47, 31, bias=False) for _ in range(7)))
        self.layers.requires_grad_(False)
        self.last = nn.Linear(31, 33)


@pytest.mark.parametrize("empty", [True, False], ids=["made on the way", "there"])
def test_values_go_one_by_one_as_they_are_written(empty, monkeypatch):
    """Nobody has the fp32 values of a chunk twice: of what a module makes, or had, only what comes
    next, and beside the payload no buffer of the chunk's size."""
    alive = []

    def put_block(self, chunk, index, values):
        alive.append(sum(ref() is not None for ref in FromArrays.made))
        written(self, chunk, index, values)

    written = Originals.put_block
    monkeypatch.setattr(Originals, "put_block", put_block)
    monkeypatch.setattr("gemini.runtime.memory.originals.ORIGINAL_BLOCK_NUMEL", 1024)
    backend = device(by_triton=True)
    allocate, wide = backend.allocate, []
    monkeypatch.setattr(
        backend,
        "allocate",
        lambda numel, dtype: wide.append((dtype, numel)) or allocate(numel, dtype),
    )
    with init_empty() if empty else nullcontext():
        module = Tower()
    before = None if empty else [ref().copy() for ref in FromArrays.made]
    placement = AutoPlacement("1MiB", 20_000, "1MiB", block_numel=1024)
    options = {**CHUNKS, "min_chunk_size_m": 1, "keep_originals": True}
    model = GeminiDDP(module, backend, placement, **options)
    assert model.engine.planning.plan.original_home is N
    frozen = [c for c in model.engine.chunks if not c.spec.trainable]
    (chunk,) = frozen
    assert chunk.spec.shard_numel > 6 * 1024 and chunk.spec.id in model.engine.originals
    assert len(alive) == -(-chunk.spec.shard_numel // 1024)
    last = [min(6, (1024 * (i + 1) - 1) // 1472) for i in range(len(alive))]  # layer of each block
    assert alive == [1 if empty else 7 - layer for layer in last]
    assert all(numel < 2048 for dtype, numel in wide if dtype is torch.float32)
    if before is not None:
        for array, value in zip(before, model.state_dict().values(), strict=False):
            assert torch.equal(torch.from_numpy(array), value)


# -- where nobody asked for them --


@pytest.fixture
def said(caplog):
    """Warnings that name the option."""
    caplog.set_level("WARNING", "gemini")
    return lambda: [one for one in caplog.messages if "keep_originals=True" in one]


def rounded(module, name):
    return module.state_dict()[name].bfloat16().float()


def test_none_are_kept_where_nobody_asked(said):
    """And what leaves the engine, rounded, is told once."""
    before = Adapted()
    model, optimizer = wrapped("cuda", module=Adapted(), keep_originals=False)
    assert not model.engine.originals.chunks
    assert rows(model, "originals") == [{D: 0, H: 0, N: 0}] * 2
    step(model, optimizer)
    assert said() == []
    for _ in range(2):
        assert torch.equal(model.state_dict()["up.weight"], rounded(before, "up.weight"))
    (text,) = said()
    assert text.startswith("state dicts, checkpoints and unwrap() have the values of up.weight")
    assert "and 3 more frozen parameters as they were rounded to bfloat16" in text


def test_unfreezing_tells_that_masters_begin_with_rounded_weights(said):
    before = Adapted()
    model, optimizer = wrapped("cuda", module=Adapted(), keep_originals=False)
    optimizer.param_groups[0]["lr"] = 0.0
    model.module.up.requires_grad_(True)
    step(model, optimizer)
    (text,) = said()
    assert text.startswith("fp32 masters begin with the values of up.weight and 1 more frozen")
    master = state_of(optimizer.visit_state)["up.weight/master/0"].view(77, 33)
    assert torch.equal(master, rounded(before, "up.weight"))
    assert not torch.equal(master, before.up.weight)


@pytest.mark.parametrize("kept", [True, False])
def test_nothing_is_told_of_weights_that_no_rounding_changed(kept, said, tmp_path):
    module = Adapted()
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(param.bfloat16())
    model, optimizer = wrapped("cuda", module=module, keep_originals=kept)
    model.module.up.requires_grad_(True)
    step(model, optimizer)
    save_checkpoint(tmp_path / "a", model, optimizer)
    model.unwrap()
    assert said() == []


def test_fp32_values_that_are_loaded_into_frozen_weights_are_told_too(said, tmp_path):
    module = Adapted()
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(param.bfloat16())
    model, optimizer = wrapped("cuda", module=module, keep_originals=False)
    exact = {name: value.bfloat16().float() for name, value in model.state_dict().items()}
    model.load_state_dict(exact)
    model.state_dict()
    assert said() == []
    model.load_state_dict({**exact, "down.weight": torch.randn(33, 77)})
    save_checkpoint(tmp_path / "a", model, optimizer)
    (text,) = said()
    assert "the values of down.weight and 1 more frozen" in text
    model.load_state_dict(exact)
    assert not model.engine.originals.lost
