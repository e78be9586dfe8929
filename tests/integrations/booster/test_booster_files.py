"""What a Booster saves is what others read: formats, places, and a thread that writes."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gemini
from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import same
from gemini.checkpoint import CheckpointError, FormatError, MismatchError, whole_files
from gemini.integrations import (
    Booster,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
)
from gemini.integrations.plugins.optimizers import scale_of
from optim import HybridAdam

IDS = token_batches(1, 1)[0][0]
ADAM = {"lr": 0.05, "eps": 0.1, "weight_decay": 0.1}


def boosted(plugin, ours=True, steps=2, **options):
    module = Tower()
    optimizer = (HybridAdam if ours else torch.optim.AdamW)(module.parameters(), **ADAM, **options)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(module, optimizer)
    for _ in range(steps):
        booster.backward(token_loss(model, IDS), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return booster, model, optimizer


@pytest.fixture(scope="module")
def trained():
    return boosted(GeminiPlugin(precision="bf16"))


FORMATS = {
    "file": ("weights.bin", {}),
    "safetensors": ("weights.safetensors", {}),
    "safetensors by flag": ("weights", {"use_safetensors": True}),
    "folder": ("folder", {"shard": True, "use_safetensors": True}),
    "folder of torch's": ("torchs", {"shard": True}),
    "folder with prefix": ("named", {"shard": True, "prefix": "lm"}),
}


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_weights_load_into_plain_and_boosted_modules(trained, tmp_path, kind, use_async):
    booster, model, _ = trained
    name, options = FORMATS[kind]
    path = tmp_path / name
    booster.save_model(model, path, use_async=use_async, **options).wait()
    wanted = dict(model.state_dict())
    plain = Tower(seed=1)
    assert booster.load_model(plain, path) is plain
    assert same(dict(plain.state_dict()), wanted)
    other, *_ = Booster(plugin=LowLevelZeroPlugin(precision="fp32")).boost(Tower(seed=1))
    booster.load_model(other, str(path))
    assert same(dict(other.state_dict()), wanted)
    assert [p.name for p in tmp_path.iterdir()] == [name]  # nothing is left beside it
    if kind == "file":
        assert same(torch.load(path, weights_only=True), wanted)
    if kind == "safetensors":
        assert torch.equal(load_file(path)["embed.weight"], wanted["embed.weight"])


def test_a_save_beside_training_has_the_weights_of_its_call(tmp_path, monkeypatch):
    go, write, module = threading.Event(), whole_files.write_file, nn.Linear(3, 2)
    monkeypatch.setattr(whole_files, "write_file", lambda *given: go.wait() and write(*given))
    wanted = {name: value.clone() for name, value in module.state_dict().items()}
    saved = Booster().save_model(module, tmp_path / "weights", use_async=True)
    nn.init.zeros_(module.weight)
    go.set()
    saved.wait()
    assert same(torch.load(tmp_path / "weights", weights_only=True), wanted)


@pytest.mark.parametrize(
    ("safe", "stem", "suffix"), [(True, "model", "safetensors"), (False, "pytorch_model", "bin")]
)
@pytest.mark.parametrize("use_async", [False, True])
def test_shards_have_the_size_and_the_prefix_that_were_asked_for(
    tmp_path, safe, stem, suffix, use_async
):
    booster = Booster()
    big = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))  # 1.4 MB each
    folder = tmp_path / "shards"
    booster.save_model(big, folder, True, True, "lm", 2, safe, use_async).wait()
    files = [f"lm.{stem}-0000{i}-of-00003.{suffix}" for i in (1, 2, 3)]
    assert {p.name for p in folder.iterdir()} == {*files, f"lm.{stem}.{suffix}.index.json"}
    index = json.loads((folder / f"lm.{stem}.{suffix}.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in big.parameters())
    assert [index["weight_map"][f"{i}.weight"] for i in range(3)] == files
    for file in files:  # no more than its own tensors, with room for the names
        assert (folder / file).stat().st_size < 600 * 601 * 4 + 4096


def test_a_torch_file_that_is_no_state_dict_is_refused(tmp_path):
    booster, module = Booster(), nn.Linear(3, 2)
    for content, said in (
        ([1], "expected a state dict"),
        ({"weight": torch.ones(1).expand(2, 3)}, "'weight' is no tensor with all of its"),
        ({"weight": 3}, "'weight' is no tensor"),
    ):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(FormatError, match=said):
            booster.load_model(module, tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"weight": "../x"}}', encoding="utf-8"
    )
    with pytest.raises(FormatError, match="expected files of its folder"):
        booster.load_model(module, tmp_path)


@pytest.mark.parametrize("safe", [False, True])
def test_transformers_reads_a_folder_and_load_checkpoint_reads_transformers(tmp_path, safe):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=12, n_head=2, vocab_size=61, n_positions=8)
    module = transformers.GPT2LMHeadModel(config)
    booster = Booster(plugin=GeminiPlugin(precision="bf16"))
    model, *_ = booster.boost(module)
    folder = tmp_path / "ours"
    booster.save_model(model, folder, shard=True, size_per_shard=1, use_safetensors=safe)
    assert {p.suffix for p in folder.glob("*model-*")} == {".safetensors" if safe else ".bin"}
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    wanted = dict(model.state_dict())
    assert same(dict(read.state_dict()), wanted)
    assert same(dict(gemini.load_pretrained(folder, type(read)).state_dict()), wanted)
    read.save_pretrained(tmp_path / "theirs")  # tied weights under one name
    fresh = transformers.GPT2LMHeadModel(config)
    gemini.load_checkpoint(tmp_path / "theirs", fresh)
    assert same(dict(fresh.state_dict()), wanted)
    again, *_ = Booster(plugin=GeminiPlugin()).boost(transformers.GPT2LMHeadModel(config))
    gemini.load_checkpoint(tmp_path / "theirs", again)
    assert same(dict(again.state_dict()), wanted)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("use_async", [False, True])
def test_an_optimizers_state_goes_from_plugin_to_plugin_bit_for_bit(tmp_path, shard, use_async):
    """ZeRO-1 to Gemini with its state in files, and to torch's AdamW under DDP and back."""
    booster, _, optimizer = boosted(LowLevelZeroPlugin(precision="fp32"))
    booster.save_optimizer(optimizer, tmp_path / "zero", shard, use_async=use_async).wait()
    wanted = optimizer.state_dict()["state"]
    there, _, on_disk = boosted(GeminiPlugin(precision="fp32"), steps=0, nvme_offload_fraction=1.0)
    there.load_optimizer(on_disk, tmp_path / "zero")
    found = on_disk.state_dict()["state"]
    assert all(same(found[name], wanted[name]) for name in wanted)
    on_disk.close()
    ddp, model, plain = boosted(TorchDDPPlugin(), ours=False, steps=0)
    ddp.load_optimizer(plain, tmp_path / "zero")
    for name, param in model.named_parameters():
        for plane in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(plain.state[param][plane], wanted[name][plane])
        assert float(plain.state[param]["step"]) == 2
    assert plain.param_groups[0]["lr"] == ADAM["lr"]
    ddp.save_optimizer(plain, tmp_path / "ddp", shard)
    back, _, again = boosted(GeminiPlugin(precision="fp32"), steps=0)
    back.load_optimizer(again, tmp_path / "ddp")
    found = again.state_dict()["state"]
    assert all(same(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("plugin", [None, TorchDDPPlugin(), GeminiPlugin(precision="bf16")])
def test_groups_are_saved_of_a_rule_that_keeps_nothing(tmp_path, shard, plugin):
    """Plain SGD, as the tutorials have it: its rate is all there is to go on with."""

    def plain_sgd(plugin, lr):
        module = Tower()
        booster = Booster(plugin=plugin)
        return booster, *booster.boost(module, torch.optim.SGD(module.parameters(), lr=lr))[:2]

    booster, model, optimizer = plain_sgd(TorchDDPPlugin(), 0.5)
    booster.backward(token_loss(model, IDS), optimizer)
    optimizer.step()
    booster.save_optimizer(optimizer, tmp_path / "state", shard)
    there, _, other = plain_sgd(plugin, 0.1)
    there.load_optimizer(other, tmp_path / "state")
    assert other.param_groups[0]["lr"] == 0.5


def test_an_optimizers_files_leave_the_weights_alone(tmp_path):
    booster, model, optimizer = boosted(GeminiPlugin(precision="bf16"))
    booster.save_optimizer(optimizer, tmp_path / "state", shard=True)
    other, changed, resumed = boosted(GeminiPlugin(precision="bf16"), steps=1)
    before = {name: value.clone() for name, value in changed.state_dict().items()}
    other.load_optimizer(resumed, tmp_path / "state")
    assert same(dict(changed.state_dict()), before)
    with pytest.raises(MismatchError, match="missing"):
        other.load_model(changed, tmp_path / "state")
    assert not same(dict(model.state_dict()), before)


def test_what_is_no_such_file_is_said(tmp_path, trained):
    booster, model, optimizer = trained
    (tmp_path / "text").write_text("no state", encoding="utf-8")
    with pytest.raises(FormatError, match="holds no schedule"):
        booster.load_lr_scheduler(None, tmp_path / "text")
    with pytest.raises(FormatError, match="no file of torch"):
        booster.load_optimizer(optimizer, tmp_path / "text")
    torch.save({"a": torch.ones(1)}, tmp_path / "weights")
    with pytest.raises(FormatError, match="expected a file of save_optimizer"):
        booster.load_optimizer(optimizer, tmp_path / "weights")
    with pytest.raises(FormatError, match="does not exist"):
        booster.load_model(model, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="give a file, or shard=True"):
        booster.save_model(model, tmp_path)
    booster.save_model(model, tmp_path / "tower")
    with pytest.raises(MismatchError, match="strict=False loads what does"):
        booster.load_model(nn.Linear(3, 3), tmp_path / "tower")
    booster.save_optimizer(optimizer, tmp_path / "state")
    module = nn.Linear(3, 3)
    other = Booster()
    _, small, *_ = other.boost(module, torch.optim.AdamW(module.parameters()))
    with pytest.raises(MismatchError, match="over the same parameters"):
        other.load_optimizer(small, tmp_path / "state")
    torch.save({"state": {}, "param_groups": [{"params": [5]}]}, tmp_path / "plain")
    with pytest.raises(MismatchError, match="state of a parameter 5, and the optimizer has 2"):
        other.load_optimizer(small, tmp_path / "plain")


def test_options_that_would_be_swallowed_are_refused(tmp_path, trained):
    booster, model, optimizer = trained
    for call, options, said in (
        (booster.save_model, {"prefix": "lm"}, "prefix='lm' without shard=True"),
        (booster.save_model, {"size_per_shard": 0}, "must be positive"),
        (booster.save_optimizer, {"prefix": "lm"}, "expected none"),
        (booster.save_optimizer, {"size_per_shard": 5}, "each rank writes one file"),
        (booster.load_model, {"num_threads": 0}, "num_threads=0"),
    ):
        with pytest.raises(ValueError, match=said):
            subject = optimizer if call == booster.save_optimizer else model
            call(subject, tmp_path / "x", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "bf16"])
def test_plain_modules_compute_in_the_precision_of_the_booster(precision, tmp_path):
    """As the fp32 run, to what 16 bits hold; a loss scale that overflows skips, and is saved."""
    losses = {}
    for asked in (None, precision):
        module = Tower()
        optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
        booster = Booster(mixed_precision=asked, plugin=TorchDDPPlugin())
        model, optimizer, *_ = booster.boost(module, optimizer)
        assert model(IDS).dtype == torch.float32
        losses[asked], steps = [], 0
        while steps < 4:
            loss = token_loss(model, IDS)
            booster.backward(loss, optimizer)
            optimizer.clip_grad_by_value(0.5)
            before = next(model.parameters()).detach().clone()
            optimizer.step()
            optimizer.zero_grad()
            if not torch.equal(before, next(model.parameters())):
                steps += 1
                losses[asked].append(loss.item())
    # 8 or 11 bits, over four steps
    assert losses[precision] == pytest.approx(losses[None], rel=0.03)
    for shard in (False, True):
        booster.save_optimizer(optimizer, tmp_path / f"{shard}", shard)
        again = Tower()
        other = torch.optim.AdamW(again.parameters(), **ADAM)
        fresh = Booster(mixed_precision=precision, plugin=TorchDDPPlugin())
        fresh.boost(again, other)
        fresh.load_optimizer(other, tmp_path / f"{shard}")
        if precision != "bf16":
            assert scale_of(other) == scale_of(optimizer)


def test_a_clip_in_fp16_is_behind_the_last_backward():
    module = Tower()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    booster = Booster(mixed_precision="fp16")
    model, optimizer, *_ = booster.boost(module, optimizer)
    booster.backward(token_loss(model, IDS), optimizer)
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(RuntimeError, match="clip after the last backward"):
        booster.backward(token_loss(model, IDS), optimizer)
    with pytest.raises(RuntimeError, match="with a loss scale"):
        optimizer.step(lambda: None)
    optimizer.zero_grad()
    booster.backward(token_loss(model, IDS), optimizer)
    with pytest.raises(ValueError, match="expected a positive number"):
        optimizer.clip_grad_by_value(0)
    optimizer.step()


def test_lora_trains_its_layers_alone_and_is_saved(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=r".*layers\.\d\.(1|3)", r=2)
    plugin = LowLevelZeroPlugin(precision="fp32")
    booster = Booster(plugin=plugin)
    plain = Tower()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)  # over the base's parameters
    module = booster.enable_lora(plain, lora_config=config)
    num_before = len(optimizer.param_groups[0]["params"])
    plugin.add_lora_params_to_optimizer(module, optimizer)
    assert len(optimizer.param_groups[0]["params"]) == num_before + 16
    model, optimizer, *_ = booster.boost(module, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        booster.backward(token_loss(model, IDS), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    moved = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert moved and all(".lora_" in name for name in moved)
    booster.save_lora_as_pretrained(model, tmp_path / "lora", use_safetensors=True)
    saved = load_file(tmp_path / "lora/adapter_model.safetensors")
    assert len(saved) == 16
    again = booster.enable_lora(Tower(), pretrained_dir=tmp_path / "lora")
    assert torch.equal(again.state_dict()[min(moved)], model.state_dict()[min(moved)]), (
        "the layers that were trained"
    )
    for wrong, options in (
        (model, {"lora_config": config}), (Tower(), {}),
        (Tower(), {"lora_config": config, "bnb_quantization_config": "fp3"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            booster.enable_lora(wrong, **options)
    with pytest.raises(ValueError, match=r"between booster.enable_lora and booster.boost"):
        plugin.add_lora_params_to_optimizer(model, optimizer)
    with pytest.raises(ValueError, match="has no LoRA layers"):
        booster.save_lora_as_pretrained(Tower(), tmp_path / "none")


def test_boosting_adds_nothing_to_a_step_of_gemini(caplog):
    """The same classes with the same hooks as without a Booster, so the same step."""
    module = Tower()
    optimizer = HybridAdam(module.parameters())
    model, boosted_, *_ = Booster(plugin=GeminiPlugin()).boost(module, optimizer)
    assert type(boosted_) is HybridAdam and "step" not in vars(boosted_)
    assert caplog.text.count("gemini memory of a rank") == 1
    assert type(model) is type(gemini.GeminiDDP(Tower()))
    assert not boosted_._optimizer_step_pre_hooks and not boosted_._optimizer_step_post_hooks


def test_the_hybrid_plugin_scales_and_clips_in_every_step():
    """Stage 0 in fp16: gradients of the step have the norm that was asked for, at most."""
    module = Tower()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    plugin = HybridParallelPlugin(tp_size=1, pp_size=1, initial_scale=2**5, max_norm=0.01)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(module, optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    booster.backward(token_loss(model, IDS), optimizer)
    optimizer.step()
    pairs = zip(model.parameters(), before, strict=True)
    moved = torch.cat([(a - b).detach().flatten() for a, b in pairs])
    # SGD at rate 1 moves by the clipped gradient; weights are at most 4, in fp32
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_base_is_quantised_where_lora_is_enabled():
    """By the names of Colossal-AI and accelerate, or by default; nothing else of it is trained."""
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    given = accelerate.utils.BnbQuantizationConfig(**options, skip_modules=["layers.3.3"])
    names = {}
    for case in ({"bnb_quantization_config": given}, {"quantize": True}):
        booster = Booster(plugin=GeminiPlugin(precision="bf16"))
        config = peft.LoraConfig(target_modules=r".*layers\.\d\.(1|3)", r=2)
        module = booster.enable_lora(Tower(), lora_config=config, **case)
        trained = [param for param in module.parameters() if param.requires_grad]
        model, *_ = booster.boost(module, HybridAdam(trained, lr=1e-2))
        names[min(case)] = {one.names[0] for one in model.engine.sharding.opaque.values()}
    left = names["quantize"] - names["bnb_quantization_config"]
    assert [name for name in left if "layers.3.3" in name] and len(names["quantize"]) >= 8
