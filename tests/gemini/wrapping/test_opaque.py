"""Quantised bases are bytes to the engine, and adapters on them train as in plain peft."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gemini
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement, GeminiDDP
from gemini.checkpoint.format.manifest import CheckpointError, MismatchError
from gemini.chunk.layout import specs_of
from gemini.chunk.parameter import ChunkView
from gemini.dtypes import DTYPES
from gemini.memtracer.trace import sequential_trace
from gemini.nvme import ChecksumError
from gemini.placement.sizes import file_bytes
from gemini.placement.tiers import Tier
from gemini.units import PAGE_BYTES, format_bytes
from optim import HybridAdam, LossScale
from tests.support.pairs import pairs
from tests.support.quantised import (
    HIDDEN,
    KINDS,
    STEPS,
    Loop,
    adapters,
    batches,
    lora,
    plain_losses,
    same,
    wrapped_losses,
)

HOMES = {"device": Tier.DEVICE, "zero2": Tier.DEVICE, "host": Tier.HOST, "files": Tier.NVME}
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def wrapped(module, place, folder=None, world_size=1, **options):
    """In chunks of a layer at most where they are released."""
    small = options | {"min_chunk_size_m": 0.001, "search_range_m": 0.02, "hidden_dim": HIDDEN}
    if place == "host":
        return GeminiDDP(module, SimBackend(), **small)
    if place == "files":
        budget = "300KiB" if world_size == 1 else "500KiB"
        policy = AutoPlacement(device_budget=budget, nvme_dir=str(folder), block_numel=2048)
        return GeminiDDP(module, placement_policy=policy, **small)
    return GeminiDDP(module, placement_policy="zero2" if place == "zero2" else "cuda", **options)


def trained(rank, world_size, kind, place, reentrant, layers, folder):
    model = wrapped(lora(kind, reentrant=reentrant, layers=layers), place, folder, world_size)
    engine = model.engine
    homes = {
        engine.plan.shards[engine.sharding.chunk_of[param]].param_home
        for param in engine.sharding.opaque
    }
    assert homes == {HOMES[place]} and len(engine.sharding.opaque) == 7 * layers
    losses = wrapped_losses(model, rank)
    return losses, {name: v for name, v in model.state_dict().items() if "lora_" in name}


@pytest.mark.parametrize(
    ("kind", "place", "world_size", "reentrant"),
    pairs(KINDS, HOMES, (1, 2), (None, True, False)),
)
def test_adapters_train_as_in_plain_peft(kind, place, world_size, reentrant, tmp_path):
    """Losses and adapters have the same bits."""
    layers = 4 if place == "files" else 2
    arguments = world_size, kind, place, reentrant, layers, tmp_path
    results = run_ranks(trained, world_size, *arguments)
    plain = lora(kind, reentrant=reentrant, layers=layers)
    assert [losses for losses, _ in results] == plain_losses(plain, world_size)
    values = results[0][1]
    assert values.keys() == adapters(plain).keys()
    assert all(torch.equal(values[name], param) for name, param in adapters(plain).items())


SCALED = {"precision": "fp16", "loss_scale": LossScale(2.0**12, hysteresis=1)}
LOOPS = {
    "bfloat16": (Loop(parts=2, max_norm=0.3, overflows=1), {}),
    "float16": (Loop(parts=2, max_norm=0.3, overflows=1, scale=2.0**12), SCALED),
}


def looped(rank, world_size, kind, place, dtype, folder):
    loop, options = LOOPS[dtype]
    module = lora(kind, layers=4, dtype=DTYPES[dtype])
    model = wrapped(module, place, folder, world_size, **options)
    norms = []
    losses = wrapped_losses(model, rank, loop, norms)
    return losses, model.state_dict(), norms


@pytest.mark.parametrize(
    ("kind", "place", "dtype", "world_size"), pairs(KINDS, ("device", "files"), LOOPS, (1, 2))
)
def test_steps_of_parts_that_clip_or_are_skipped_are_plain_pefts(
    kind, place, dtype, world_size, tmp_path
):
    """Losses and adapters have the same bits, also where losses are scaled."""
    results = run_ranks(looped, world_size, world_size, kind, place, dtype, tmp_path)
    plain = lora(kind, layers=4, dtype=DTYPES[dtype])
    _, values, norms = results[0]
    losses = plain_losses(plain, world_size, LOOPS[dtype][0], norms)
    assert str([losses for losses, *_ in results]) == str(losses)  # nan among them
    assert all(torch.equal(values[name], param) for name, param in adapters(plain).items())


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["nf4-double", "int8", "torchao"])
def test_a_compiled_block_trains_as_in_plain_peft(kind, tmp_path):
    module = lora(kind, layers=4)
    for block in module.base_model.model.model.layers:
        block.compile(backend="aot_eager")
    model = wrapped(module, "files", tmp_path)
    assert wrapped_losses(model) == plain_losses(lora(kind, layers=4))[0]


@pytest.mark.parametrize(
    ("kind", "family", "place"),
    [("nf4", "qwen3_moe", "files"), ("packed", "qwen3_moe", "files"), ("packed", "llama", "host"),
     ("nf4", "gpt2", "files"), ("int8", "gpt2", "files"), ("torchao", "gpt2", "host")],
)  # fmt: skip
def test_stacked_experts_biases_and_packed_integers_train_as_in_plain_peft(
    kind, family, place, tmp_path
):
    """And state dicts have the names of the library, whose hooks make them of what is packed."""
    plain, module = (lora(kind, layers=4, family=family, reentrant=False) for _ in range(2))
    model = wrapped(module, place, tmp_path)
    assert same(model.state_dict(), plain.state_dict())
    assert wrapped_losses(model) == plain_losses(plain)[0]


def noting(chunks, inner):
    def noted(chunk, *rest):
        chunks.append(chunk)
        return inner(chunk, *rest)

    return noted


def test_a_base_in_files_is_written_once(tmp_path):
    """What of it is 16-bit too, and has no fp32 originals; layers are read twice an iteration."""
    model = wrapped(lora("int8", layers=4), "files", tmp_path)
    engine = model.engine
    frozen = {spec.id for spec in engine.layout.chunks if not spec.trainable}
    assert {engine.layout.chunks[chunk].dtype for chunk in frozen} == {"uint8", "bfloat16"}
    assert not engine.originals.chunks & frozen
    files = engine.storage.frozen
    sizes = [engine.plan.chunks[chunk] for chunk in files]
    assert set(files) == frozen and not set(engine.storage.params) & frozen
    assert files.file_bytes == sum(file_bytes("frozen", size.shard_bytes) for size in sizes)
    pages = {path.name: path.stat().st_blocks * 512 for path in tmp_path.iterdir()}
    of_base = [nbytes for name, nbytes in pages.items() if "-base-" in name]
    assert len(of_base) == len(frozen) and sum(of_base) == files.file_bytes
    one_version = sum(engine.layout.chunks[chunk].payload_bytes for chunk in frozen)
    assert files.file_bytes - one_version <= len(frozen) * 4 * PAGE_BYTES  # and header and index
    read, written = [], []
    files.read, files.replace = noting(read, files.read), noting(written, files.replace)
    wrapped_losses(model)
    assert not written
    plan = engine.planning.plan
    report, told = model.memory_report(), model.explain(QUERY)
    assert report.as_dict()["frozen_read_bytes"] == plan.frozen_read_bytes > one_version
    assert f"of it frozen: {format_bytes(plan.frozen_bytes[Tier.NVME])} on nvme" in str(report)
    assert "frozen parameters: " in told and " on nvme" in told
    base = {
        engine.sharding.chunk_of[param] for param in engine.sharding.opaque
    }  # without the embedding
    assert base <= set(read) and all(read.count(chunk) <= 2 * STEPS for chunk in base)


@pytest.mark.parametrize(("kind", "place"), [("nf4-double", "files"), ("nf4", "host")])
def test_adapters_of_dora_train_as_in_plain_peft(kind, place, tmp_path):
    """Whose layers look at the base's weights outside of its modules."""
    plain, module = (lora(kind, layers=4, use_dora=True) for _ in range(2))
    assert wrapped_losses(wrapped(module, place, tmp_path)) == plain_losses(plain)[0]


class Scaled(nn.Module):
    """A frozen layer with a factor that is trained."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(128, 128).requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(128))

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) * self.factor


@pytest.mark.parametrize("budget", ["200KiB", "220KiB"])
def test_an_iteration_reads_of_a_base_in_files_what_the_plan_says(budget, tmp_path):
    policy = AutoPlacement(budget, host_budget="400KiB", nvme_dir=str(tmp_path), block_numel=1024)
    small = {"min_chunk_size_m": 0.001, "search_range_m": 0.02, "hidden_dim": 128}
    module = nn.Sequential(*(Scaled() for _ in range(8)))
    trace = sequential_trace(specs_of(module, "float32"))
    model = GeminiDDP(module, SimBackend(), policy, precision="fp32", trace=trace, **small)
    optimizer, read, gathered = HybridAdam(model.parameters()), [0], []
    files = model.engine.storage.frozen
    files.read = noting(gathered, files.read)
    for _ in range(5):
        gathered.clear()
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        read.append(files.traffic.nvme_read)
    plan = model.engine.planning.plan
    assert not model.engine.manager.deviated
    assert read[-1] - read[-2] == plan.frozen_read_bytes > 0
    turn = gathered.index(max(gathered)) + 1  # from forward to backward
    assert gathered[:turn] == sorted(gathered[:turn])
    assert gathered[turn:] == sorted(gathered[turn:], reverse=True)


class WithHead(nn.Module):
    """Frozen layers and a frozen head, whose weight the forward takes without its module."""

    def __init__(self, heads):
        super().__init__()
        self.layers = nn.Sequential(*(Scaled() for _ in range(8)))
        self.head = nn.Linear(128, 128, bias=False).requires_grad_(False)
        self.heads = heads

    def forward(self, x):
        out = self.layers(x)
        return nn.functional.linear(out, self.head.weight) if self.heads else out


@pytest.mark.parametrize("inside", [True, False])
def test_a_weight_that_a_loss_uses_does_not_undo_the_plan(inside, tmp_path):
    """In the wrapped forward its reads are planned too; outside there is one chunk more, as it
    takes the place of another."""
    policy = AutoPlacement("300KiB", host_budget="400KiB", nvme_dir=str(tmp_path), block_numel=1024)
    small = {"min_chunk_size_m": 0.001, "search_range_m": 0.02, "hidden_dim": 128}
    model = GeminiDDP(WithHead(inside), SimBackend(), policy, precision="fp32", **small)
    optimizer, read = HybridAdam(model.parameters()), [0]
    files = model.engine.storage.frozen
    for _ in range(5):
        out = model(torch.ones(1, 128))
        if not inside:
            out = nn.functional.linear(out, model.module.head.weight)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        read.append(files.traffic.nvme_read)
    last, before = read[-1] - read[-2], read[-2] - read[-3]
    planned = model.engine.planning.plan.frozen_read_bytes
    chunk = max(model.engine.plan.chunks[chunk].payload_bytes for chunk in files)
    assert not model.engine.manager.deviated
    assert last == before == planned + (0 if inside else chunk) > 0


def base_files(folder):
    return sorted(path for path in folder.iterdir() if "-base-" in path.name)


def test_runs_of_one_base_have_one_file_of_it(tmp_path):
    """Whoever comes second writes nothing, and who goes last removes it."""
    first = wrapped(lora("nf4", layers=4), "files", tmp_path)
    files = base_files(tmp_path)
    written = first.engine.storage.frozen.traffic.nvme_write
    second = wrapped(lora("nf4", layers=4), "files", tmp_path)
    assert written and not second.engine.storage.frozen.traffic.nvme_write
    assert base_files(tmp_path) == files
    other = wrapped(lora("nf4", layers=4, seed=1), "files", tmp_path)
    assert len(base_files(tmp_path)) > len(files)
    other.load_state_dict(lora("nf4", layers=4).state_dict())  # and is the same base then
    assert base_files(tmp_path) == files
    first.unwrap()
    assert base_files(tmp_path) == files
    assert wrapped_losses(second) == wrapped_losses(other)
    second.unwrap()
    other.unwrap()
    assert not base_files(tmp_path)


def test_a_base_that_is_changed_under_a_run_is_refused_by_name(tmp_path):
    model = wrapped(lora("int8", layers=4), "files", tmp_path)
    for path in base_files(tmp_path):
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(-PAGE_BYTES, 2)
            byte = file.read(1)
            file.seek(-PAGE_BYTES, 2)
            file.write(bytes([byte[0] ^ 1]))
    ids = next(batches(0))
    said = r"gemini-base-.*changed while it was in use.* of parameter base_model.*start again"
    with pytest.raises(ChecksumError, match=said):
        model(input_ids=ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_outside_of_modules_is_fetched(kind):
    """Views that were taken before a chunk was released too: no memory is read that was freed."""
    plain, module = lora(kind), lora(kind)
    model = wrapped(module, "host")
    ours, theirs = dict(module.named_parameters())[QUERY], dict(plain.named_parameters())[QUERY]
    assert isinstance(ours, nn.Parameter) and type(ours).__name__ == type(theirs).__name__
    (one,) = (one for one in model.engine.sharding.opaque.values() if one.param is ours)
    assert all(type(tensor) is not torch.Tensor for tensor, _, _ in one.tensors)
    if kind == "torchao":
        taken = [ours.detach().qdata, ours.qdata, ours.scale[:4]]
        expected = [theirs.qdata, theirs.qdata, theirs.scale[:4]]
        assert torch.equal(ours.dequantize(), theirs.dequantize())
    elif kind == "int8":
        taken, expected = (
            [ours.data, ours.CB[:4], ours.SCB],
            [theirs.data, theirs.CB[:4], theirs.SCB],
        )
    else:
        state, other = ours.quant_state, theirs.quant_state
        taken = [ours.data, state.absmax, state.code[:3], ours.absmax]
        expected = [theirs.data, other.absmax, other.code[:3], theirs.absmax]
    assert all(type(tensor) is ChunkView for tensor in taken[1:])
    model.engine.manager.release_all()
    assert all(torch.equal(a + 0, b + 0) for a, b in zip(taken, expected, strict=True))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(ours)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_have_the_librarys_own_form_and_names(kind, tmp_path):
    """Of the base as it came, of another that was loaded, and of the module that is unwrapped."""
    model = wrapped(lora(kind, layers=4), "files", tmp_path)
    assert same(model.state_dict(), lora(kind, layers=4).state_dict())
    ids = next(batches(0))
    model(input_ids=ids).logits.sum().backward()
    other = lora(kind, layers=4, seed=1)
    model.load_state_dict(other.state_dict())
    assert same(model.state_dict(), other.state_dict())
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
    salvaged = wrapped(lora(kind), "device").salvage()
    assert salvaged.keys() == lora(kind).state_dict().keys()
    model.zero_grad()
    plain = model.unwrap()
    assert same(plain.state_dict(), other.state_dict())
    assert all(
        type(p) is type(q) for p, q in zip(plain.parameters(), other.parameters(), strict=True)
    )
    assert torch.equal(plain(input_ids=ids).logits, other(input_ids=ids).logits)


def merged(rank, world_size, kind, place, folder):
    model = wrapped(lora(kind, layers=4), place, folder, world_size)
    ids = next(batches(0))
    model(input_ids=ids)
    states, logits = [], []
    for change in (model.module.merge_adapter, model.module.unmerge_adapter):
        change()
        states.append(model.state_dict())
        logits.append(model(input_ids=ids).logits.detach())
    return states, logits


@pytest.mark.parametrize(
    ("kind", "place", "world_size"), pairs(KINDS[:3], ("device", "host", "files"), (1, 2))
)
def test_adapters_merge_as_in_plain_peft(kind, place, world_size, tmp_path):
    """Which makes the quantised parameter anew; its own object stays, and has the new bytes."""
    plain, ids = lora(kind, layers=4), next(batches(0))
    states, logits = run_ranks(merged, world_size, world_size, kind, place, tmp_path)[0]
    for change in (plain.merge_adapter, plain.unmerge_adapter):
        change()
        assert same(states.pop(0), plain.state_dict())
        assert torch.equal(logits.pop(0), plain(input_ids=ids).logits)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_an_export_has_the_librarys_own_names(kind, tmp_path):
    module = lora(kind)
    gemini.export_safetensors(tmp_path / "export", GeminiDDP(module))
    (file,) = (tmp_path / "export").glob("*.safetensors")
    found = load_file(file)
    expected = lora(kind).state_dict()
    assert expected.keys() - found.keys() == {"base_model.model.lm_head.weight"}  # which is tied
    assert same(found, {name: expected[name] for name in found})


def saved_and_loaded(rank, kind, folder):
    model = GeminiDDP(lora(kind), placement_policy="zero2")
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    for ids in batches(rank):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gemini.save_checkpoint(folder / "saved", model, optimizer)
    return {name: v for name, v in model.state_dict().items() if "lora_" in name}


@pytest.mark.parametrize("kind", ["nf4-double", "torchao"])
def test_a_checkpoint_has_adapters_and_the_digest_of_the_base(kind, tmp_path):
    values = run_ranks(saved_and_loaded, 2, kind, tmp_path)[0]
    model = wrapped(lora(kind), "host")
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert wrapped_state(optimizer) == len(values)
    model.load_state_dict(lora(kind, seed=1).state_dict())
    with pytest.raises(MismatchError, match="trained on another base"):
        gemini.load_checkpoint(tmp_path / "saved", model, optimizer)
    nbytes = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    assert nbytes < 18 * sum(v.numel() for v in values.values()) + 300_000
    other = GeminiDDP(lora(kind, seed=1))
    with pytest.raises(MismatchError, match=r"trained on another base: .*q_proj.*have other bytes"):
        gemini.load_checkpoint(tmp_path / "saved", other)
    gemini.load_checkpoint(tmp_path / "saved", other, strict=False)


def wrapped_state(optimizer):
    return sum(bool(state["step"]) for state in optimizer.state_dict()["state"].values())


def test_packed_integers_are_bytes():
    """As of MXFP4: a module of its own unpacks them."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
            self.blocks = nn.Parameter(blocks, requires_grad=False)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            low, high = self.blocks & 15, self.blocks >> 4
            return x @ (torch.cat([low, high]).to(x.dtype) * self.scale)

    model, plain = GeminiDDP(Packed(), SimBackend(), precision="fp32"), Packed()
    x = torch.arange(32.0).reshape(2, 16)
    out = model(x)
    assert torch.equal(out, plain(x))
    out.sum().backward()
    assert torch.equal(model.state_dict()["blocks"], plain.blocks)
    model.load_state_dict({"blocks": plain.blocks * 0 + 1, "scale": torch.ones(8)})
    assert model(x)[0, 0] == x[0, :8].sum()  # the low halves


def test_what_is_written_to_bytes_outside_of_modules_stays():
    module = lora("torchao")
    model = wrapped(module, "host")
    other = dict(lora("torchao", seed=1).named_parameters())[QUERY]
    dict(module.named_parameters())[QUERY].copy_(other)
    model.engine.manager.release_all()
    assert same({QUERY: model.state_dict()[QUERY]}, {QUERY: other.detach()})


class Unknown(nn.Parameter):
    """Of a library that nobody knows."""


def trainable(module):
    dict(module.named_parameters())[QUERY].requires_grad_(True)
    return module


def unknown(module):
    module.get_submodule(QUERY.removesuffix(".weight")).weight = Unknown(torch.ones(2))
    return module


def on_two_devices(module):
    """As where a part of it was left behind."""
    weight = dict(module.named_parameters())[QUERY]
    weight.quant_state.absmax = weight.quant_state.absmax.to("meta")
    return module


def unquantised():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return bitsandbytes.nn.Linear4bit(64, 64, bias=False)


REFUSED = {
    "q_proj.base_layer.weight is a Int8Tensor, whose bytes no step": lambda: trainable(
        lora("torchao")
    ),
    "q_proj.base_layer.weight is a Unknown; expected a plain": lambda: unknown(lora("int8")),
    "q_proj.base_layer.weight is a Params4bit with tensors on (cpu and meta|meta and cpu); "
    "expected all of them on one device": lambda: on_two_devices(lora("nf4")),
    "weight is a Params4bit that is not quantised": unquantised,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_no_frozen_base_is_refused_by_name(said):
    with pytest.raises(ValueError, match=said):
        GeminiDDP(REFUSED[said]())


def test_what_changes_a_base_is_refused_by_name(tmp_path):
    model = GeminiDDP(lora("torchao"))
    ids = next(batches(0))
    trainable(model.module)
    with pytest.raises(ValueError, match=r"q_proj.*whose bytes no step updates, and requi"):
        model(input_ids=ids)
    with pytest.raises(CheckpointError, match="which a file of weights does not hold"):
        gemini.export_safetensors(tmp_path / "export", model)
    values = lora("torchao").state_dict()
    with pytest.raises(ValueError, match=r"another form of .*q_proj"):
        model.load_state_dict({**values, QUERY: torch.zeros(64, 64)})
    with pytest.raises(ValueError, match=r"init_state_dict has .* which is quantised"):
        GeminiDDP(lora("torchao"), init_state_dict=values)
