"""Doors of samplers: TRL's own loop, verl's and vLLM's interfaces, files, other modules."""

import asyncio
import copy
import errno
import hashlib
import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn

from bench.shared.models import Tower, seeded, token_batches, token_loss
from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from gemini.integrations.samplers import load_bucket, send_through
from gemini.samplers.files import WeightFiles, read_weights
from gemini.samplers.merged import merged_weights, named_weights, tensor_specs
from gemini.transfer.outgoing import digest_of
from optim import HybridAdam
from tests.support.disks.faults import failing
from tests.support.spilled import SMALL
from tests.support.towers import weights_of

BUCKET = 3000


def wrapped(module=None, **options):
    model = GeminiDDP(module or Tower(), precision="bf16", **SMALL, **options)
    return model, HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def stepped(model, optimizer, ids):
    token_loss(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def sorted_digest(weights):
    return digest_of(dict(sorted(weights.items())))


def with_lora(**options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["layers.0.1", "layers.1.3"], **options
    )
    with seeded(0):
        model = peft.get_peft_model(Tower(), config, autocast_adapter_dtype=False)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param)
    return model


def merging(rank):
    inner = with_lora(modules_to_save=["layers.2.0"])
    plain = {name for name, _ in Tower().named_parameters()}
    model, optimizer = wrapped(inner)
    (ids,) = token_batches(1, 1)[0]
    version = None
    have = {}
    for _ in range(2):
        before = weights_of(model)
        for bucket in merged_weights(model, bytes=BUCKET, since=version):
            bucket.apply(have)
            version = bucket.version
        assert have.keys() == plain
        for layer in ("layers.0.1", "layers.1.3"):
            part = f"base_model.model.{layer}"
            added = before[f"{part}.lora_B.default.weight"].float() @ (
                before[f"{part}.lora_A.default.weight"].float()
            ) * 3.0  # fmt: skip
            added = added.to(torch.bfloat16).float()  # as peft rounds it on a CPU
            wanted = (before[f"{part}.base_layer.weight"].float() + added).to(torch.bfloat16)
            assert torch.equal(have[f"{layer}.weight"], wanted)
        saved = before["base_model.model.layers.2.0.modules_to_save.default.weight"]
        assert torch.equal(have["layers.2.0.weight"], saved)
        assert torch.equal(have["embed.weight"], before["base_model.model.embed.weight"])
        after = weights_of(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        stepped(model, optimizer, ids)
    sent = {name for b in merged_weights(model, since=version) for name in b.tensors}
    assert sent == {
        "layers.0.1.weight", "layers.1.3.weight", "layers.2.0.weight", "layers.2.0.bias"
    }  # fmt: skip
    assert {name for name, *_ in tensor_specs(model)} == plain
    optimizer.close()
    return sorted_digest(have)


def test_adapters_are_merged_bucket_by_bucket_under_plain_names():
    assert run_ranks(merging, 1) and len({*run_ranks(merging, 2)}) == 1


def test_adapters_that_no_sum_merges_are_refused():
    model, optimizer = wrapped(with_lora(use_dora=True))
    with pytest.raises(ValueError, match="expected plain LoRA"):
        next(merged_weights(model))
    optimizer.close()


class Vllm:
    """Engine of vLLM as far as TRL 1.16 knows it: `load_weights` of a colocated model, and the
    three requests that a client of a server makes."""

    def __init__(self):
        self.have, self.told, self.num_resets = {}, None, 0
        runner = SimpleNamespace(model=self)
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.have[name] = tensor.clone()

    def update_named_params(self, metadata, named_params):
        self.told = metadata
        for (name, dtype, shape), (sent, tensor) in zip(metadata, named_params, strict=True):
            assert sent == name and str(tensor.dtype) == f"torch.{dtype}"
            assert list(tensor.shape) == shape
            self.have[name] = tensor.clone()

    def reset_prefix_cache(self):
        self.num_resets += 1


def generation_of(mode, engine, model, rank):
    generation = pytest.importorskip("trl.generation.vllm_generation")
    made = object.__new__(generation.VLLMGeneration)  # its constructor starts vLLM
    given = {"mode": mode, "enable_sleep_mode": False, "llm": engine, "vllm_client": engine,
             "accelerator": SimpleNamespace(is_main_process=rank == 0), "_weight_metadata": None,
             "model": model}  # fmt: skip
    vars(made).update(given)
    return made


def through_trl(rank, mode):
    model, optimizer = wrapped()
    engine = Vllm()
    generation = generation_of(mode, engine, model, rank)
    send_through(generation, model, bytes=BUCKET)
    for parts in token_batches(2, 2):
        stepped(model, optimizer, parts[rank])
        generation.sync_weights()
        if mode == "colocate" or rank == 0:
            assert sorted_digest(engine.have) == sorted_digest(weights_of(model))
        else:
            weights_of(model)
    optimizer.close()
    return engine.num_resets


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_trls_own_loop_takes_buckets_in_both_modes(mode):
    assert run_ranks(through_trl, 2, mode) == ([2, 0] if mode == "server" else [2, 2])


def test_another_object_than_trls_is_refused():
    model, optimizer = wrapped()
    with pytest.raises(ValueError, match="expected the VLLMGeneration"):
        send_through(Vllm(), model)
    optimizer.close()


class CheckpointEngine:
    """verl 0.9.1, `verl/checkpoint_engine/base.py`: what an actor's side calls; a bucket is copied
    while the generator goes on."""

    def __init__(self):
        self.have, self.is_ready = {}, False

    def prepare(self):
        self.is_ready = True
        return {}

    async def send_weights(self, weights, global_steps=None):
        assert self.is_ready
        for name, tensor in weights:
            self.have[name] = tensor.clone()
        self.steps = global_steps

    async def receive_weights(self, global_steps=None):
        for name, tensor in self.have.items():
            yield name, tensor

    def finalize(self):
        self.is_ready = False


def through_verl(rank):
    model, optimizer = wrapped()
    engine = CheckpointEngine()
    engine.prepare()
    asyncio.run(engine.send_weights(named_weights(model, bytes=BUCKET), global_steps=3))
    engine.finalize()

    async def received():
        return {name: tensor async for name, tensor in engine.receive_weights(3)}

    assert sorted_digest(asyncio.run(received())) == sorted_digest(weights_of(model))
    assert [name for name, *_ in tensor_specs(model)] == [*engine.have]
    optimizer.close()


def test_verls_checkpoint_engine_takes_the_stream():
    run_ranks(through_verl, 2)


def through_files(rank, folder, deltas):
    model, optimizer = wrapped()
    files = WeightFiles(folder, model, deltas=deltas, whole_every=3, bytes=BUCKET)
    have, since, slow = {}, None, {}
    for i, parts in enumerate(token_batches(5, 2)):
        if i == 3:
            optimizer.param_groups[0]["lr"] = 1e-5
        stepped(model, optimizer, parts[rank])
        assert files.send() == i
        if rank == 0:
            since = read_weights(folder, have, since)
            assert since == i
        if rank == 0 and i == 4:
            assert read_weights(folder, slow) == 4
            assert sorted_digest(slow) == sorted_digest(have)
        want = sorted_digest(weights_of(model))
        assert rank or sorted_digest(have) == want
    optimizer.close()


@pytest.mark.parametrize("deltas", [False, True])
def test_an_evaluation_process_follows_versions_in_a_folder(deltas, tmp_path):
    run_ranks(through_files, 2, str(tmp_path / "sent"), deltas)
    assert sorted(p.name for p in (tmp_path / "sent").iterdir()) == [f"{i:06}" for i in range(5)]


def failing_files(rank, folder):
    model, optimizer = wrapped()
    files = WeightFiles(folder, model, bytes=BUCKET)
    files.send()
    (ids,) = token_batches(1, 1)[0]
    stepped(model, optimizer, ids)
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(failing("fsync", errno.ENOSPC, "00002.safetensors"))
        with pytest.raises(OSError if rank == 0 else RuntimeError, match="No space left"):
            files.send()
    have = {}
    if rank == 0:
        assert read_weights(folder, have) == 0  # whole, as it was
    assert files.send() == 1
    if rank == 0:
        assert read_weights(folder, have, 0) == 1
    want = sorted_digest(weights_of(model))
    assert rank or sorted_digest(have) == want
    optimizer.close()


def test_a_full_disk_leaves_the_versions_of_before_and_is_told_to_all_ranks(tmp_path):
    run_ranks(failing_files, 2, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000", "000001"]


def test_what_is_damaged_or_missing_is_refused_before_it_is_applied(tmp_path):
    model, optimizer = wrapped()
    with pytest.raises(ValueError, match="no version"):
        read_weights(tmp_path, {})
    WeightFiles(tmp_path, model, bytes=BUCKET).send()
    path = sorted((tmp_path / "000000").glob("*.safetensors"))[-1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    have = {}
    with pytest.raises(ValueError, match="is damaged"):
        read_weights(tmp_path, have)
    assert have == {}
    optimizer.close()


@pytest.mark.parametrize(
    "about",
    ["[]", '{"a": 1}', '{"a": {"starts": [0], "shape": [2]}}', '{"a": {"starts": []}}', "no"],
)
def test_a_file_of_a_stranger_that_is_no_bucket_is_refused(about, tmp_path):
    content = safetensors.torch.save({"b": torch.ones(2)}, {"deltas": about})
    place = tmp_path / "000000"
    place.mkdir()
    (place / "00000.safetensors").write_bytes(content)
    manifest = {"version": 0, "files": {"00000.safetensors": hashlib.sha256(content).hexdigest()}}
    (place / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    have = {}
    with pytest.raises(ValueError):
        read_weights(tmp_path, have)
    assert have == {}


def sent_buckets():
    model, optimizer = wrapped()
    buckets = [copy.deepcopy(bucket) for bucket in model.weights(bytes=BUCKET)]
    want = sorted_digest(weights_of(model))
    optimizer.close()
    return buckets, want


def received(rank, buckets, want):
    model, optimizer = wrapped(Tower(1), placement_policy=StaticPlacement())
    assert sorted_digest(weights_of(model)) != want
    for bucket in buckets:
        load_bucket(model, bucket)
    assert sorted_digest(weights_of(model)) == want
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_wrapped_module_of_any_world_size_is_a_receiver(world_size):
    buckets, want = sent_buckets()
    run_ranks(received, world_size, buckets, want)
