"""Hugging Face folders straight into chunks and masters, and back; peft's adapters; trl."""

import copy
import json
import os

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gemini
from bench.shared.reference import same
from gemini import GeminiDDP
from gemini.checkpoint import FormatError
from gemini.checkpoint.pretrained import load_pretrained, write_weights
from gemini.plan import models
from optim import HybridAdam
from tests.integrations.cases.trainer_runs import SMALL, checkpoints, model_and_data, run


@pytest.fixture
def saved(tmp_path):
    """A folder that `save_pretrained` wrote in several files, and its model."""
    model, _ = model_and_data()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    return tmp_path / "hf", model


def same_weights(state, model):
    return same(state, model.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("index", [False, True])
def test_a_folder_becomes_chunks_and_masters_and_comes_back(saved, tmp_path, precision, index):
    folder, model = saved
    path = folder / "model.safetensors.index.json" if index else folder
    loaded = load_pretrained(path, precision=precision, **SMALL)
    assert isinstance(loaded, GeminiDDP) and type(loaded.module) is type(model)
    assert same_weights(loaded.state_dict(), model)  # fp32, though it computes in bf16
    HybridAdam(loaded.parameters())  # masters begin from the files' values
    assert same_weights(loaded.state_dict(), model)
    write_weights(tmp_path / "back", loaded, max_shard_size="20KB")
    again = type(model).from_pretrained(tmp_path / "back")
    assert same_weights(again.state_dict(), model) and again.lm_head.weight is (
        again.transformer.wte.weight
    )


def test_what_is_loaded_trains_as_what_is_wrapped(saved):
    folder, model = saved
    ids = torch.arange(32).reshape(2, 16)
    losses = []
    for one in (load_pretrained(folder, precision="fp32"), GeminiDDP(model, precision="fp32")):
        optimizer = HybridAdam(one.parameters(), lr=0.01)
        for _ in range(3):
            loss = one(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_the_dtype_is_the_files_unless_it_is_said(saved, tmp_path):
    folder, model = saved
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path / "16")
    loaded = load_pretrained(tmp_path / "16")
    assert {value.dtype for value in loaded.state_dict().values()} == {torch.bfloat16}
    raised = load_pretrained(tmp_path / "16", dtype=torch.float32)
    assert {value.dtype for value in raised.state_dict().values()} == {torch.float32}
    assert gemini.load_pretrained is load_pretrained and folder.exists()


def test_a_base_model_and_one_with_a_head_read_each_other(saved, tmp_path):
    from transformers import GPT2LMHeadModel, GPT2Model

    folder, model = saved
    base = load_pretrained(folder, GPT2Model, precision="fp32")
    assert same_weights(base.state_dict(), model.transformer)
    model.transformer.save_pretrained(tmp_path / "base")
    head = load_pretrained(tmp_path / "base", GPT2LMHeadModel, precision="fp32")
    assert same_weights(head.state_dict(), model)


def test_buffers_come_with_the_weights(tmp_path):
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    model = ResNetModel(config)
    model(torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(tmp_path / "hf")
    loaded = load_pretrained(tmp_path / "hf", precision="fp32")
    assert same_weights(loaded.state_dict(), model)


def test_a_head_that_no_file_has_begins_as_the_model_initialises_it(saved, tmp_path, caplog):
    from transformers import GPT2ForSequenceClassification

    folder, model = saved
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path / "16")
    for place, dtype in ((folder, torch.float32), (tmp_path / "16", torch.bfloat16)):
        torch.manual_seed(3)
        loaded = load_pretrained(place, GPT2ForSequenceClassification, init_missing=True)
        state = loaded.state_dict()
        assert {value.dtype for value in state.values()} == {dtype}  # the head as the others
        head = state["score.weight"].float()
        # GPT-2 draws it with 0.02; a fifth is far from what 48 numbers can miss that by, at 6 sigma
        assert head.abs().min() > 0 and 0.004 < head.std() < 0.1
        torch.testing.assert_close(
            state["transformer.h.0.attn.c_attn.weight"],
            model.transformer.h[0].attn.c_attn.weight.detach().to(dtype), rtol=0, atol=0,
        )  # fmt: skip
    assert [r.message for r in caplog.records if "no weights for score.weight" in r.message]


def test_what_is_no_path_is_an_id_on_the_hub(saved, monkeypatch):
    """In the cache of `huggingface_hub`; offline, the error says what the cache lacks."""
    asked = []

    def download(model, *, revision, **options):
        asked.append((model, revision))
        if model == "ours/other":
            raise LocalEntryNotFoundError("outgoing traffic has been disabled.\nMore of it.")
        return str(saved[0])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = load_pretrained("ours/model", revision="main", precision="fp32")
    assert asked == [("ours/model", "main")]
    assert model.state_dict().keys() == load_pretrained(saved[0]).state_dict().keys()
    assert len(asked) == 1
    for offline, why in (("0", "no network reaches the hub"), ("1", "HF_HUB_OFFLINE is set")):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        with pytest.raises(ValueError, match=f"ours/other is no folder here, and {why}; expected"):
            load_pretrained("ours/other")
    before = len(asked)
    for path in ("./none", "../none", "/none", "~/none", "a/b/c", "none/"):
        with pytest.raises(ValueError, match=f"there is no folder {path}; expected one, or an id"):
            load_pretrained(path)
    assert len(asked) == before


def test_what_does_not_fit_is_refused(saved, tmp_path):
    from transformers import BertConfig, BertModel, GPT2ForSequenceClassification

    folder, _ = saved
    with pytest.raises(ValueError, match=r"no weights for score.weight of GPT2.*init_missing=True"):
        load_pretrained(folder, GPT2ForSequenceClassification)
    with pytest.raises(FormatError, match="has weights of BertModel"):
        load_pretrained(folder, BertModel, config=BertConfig(num_hidden_layers=1, hidden_size=24,
                        num_attention_heads=2))  # fmt: skip
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": None}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"no architecture; expected one of"):
        load_pretrained(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(FormatError, match="empty has no safetensors"):
        load_pretrained(tmp_path / "empty")


NO_ARCHITECTURES = [
    ["Trainer"], ["pipeline"], ["logging"], ["LlamaTokenizer"], ["TrainingArguments"], ["__name__"],
    [5], [None], [["GPT2Model"]], "GPT2LMHeadModel", {}, ["PreTrainedModel"], ["AutoModel"], [],
    ["a" * 10_000], ["BertModel"],
]  # fmt: skip


@pytest.mark.parametrize("names", NO_ARCHITECTURES, ids=lambda names: str(names)[:30])
def test_a_config_names_a_model_and_nothing_else_of_transformers(saved, names):
    folder, _ = saved
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": names}), encoding="utf-8"
    )
    with pytest.raises(ValueError) as found:
        load_pretrained(folder)
    said = str(found.value)
    if names != ["BertModel"]:  # which is one, and not of this config
        assert "expected one of transformers' classes of models" in said
    assert len(said) < 500 and "\n" not in said
    assert str(folder) in said


CODE = """
import pathlib
pathlib.Path("{mark}").touch()
from transformers import GPT2Config, GPT2LMHeadModel
class C(GPT2Config):
    model_type = "stranger"
class M(GPT2LMHeadModel):
    config_class = C
"""


@pytest.mark.parametrize("kind", ["gpt2", "stranger"])
def test_code_of_a_folder_runs_only_if_the_caller_says_so(saved, tmp_path, monkeypatch, kind):
    """No terminal is asked either: transformers' own default would."""
    folder, model = saved
    mark = tmp_path / "ran"
    (folder / "code.py").write_text(CODE.format(mark=mark), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": kind, "architectures": ["M"] if kind == "stranger" else ["GPT2Model"]}
    config["auto_map"] = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    monkeypatch.syspath_prepend(tmp_path / "c")
    loads = [
        lambda: load_pretrained(folder), lambda: models.build(folder),
        lambda: models.build(str(folder)),
    ]  # fmt: skip
    for load in loads:
        if kind == "stranger":
            with pytest.raises(ValueError):
                load()
        else:
            load()
    assert not mark.exists()
    if kind == "stranger":
        loaded = load_pretrained(folder, trust_remote_code=True, precision="fp32")
        assert mark.exists() and type(loaded.module).__name__ == "M"
        assert torch.equal(loaded.state_dict()["lm_head.weight"], model.lm_head.weight)
        assert isinstance(models.build(folder, trust_remote_code=True), type(loaded.module))


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "link outside", "deep"])
def test_a_folder_has_files_and_no_other_things(saved, tmp_path, name, kind):
    folder, _ = saved
    path = folder / name
    if path.exists():
        path.rename(tmp_path / "away")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "deep":
        path.write_text("[" * 100_000, encoding="utf-8")
    else:
        path.symlink_to(tmp_path / "away" if (tmp_path / "away").exists() else "/etc/passwd")
    if (kind, name) != ("deep", "a.safetensors"):  # which its index does not name
        with pytest.raises(FormatError, match=name):
            load_pretrained(folder)


def test_the_hubs_cache_is_read_through_its_links(saved, tmp_path):
    folder, model = saved
    cache = tmp_path / "models--ours--model"
    snapshot, blobs = cache / "snapshots/abc", cache / "blobs"
    for made in (snapshot, blobs):
        made.mkdir(parents=True)
    for number, path in enumerate(folder.iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    found = load_pretrained(snapshot, precision="fp32").state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.ci
def test_a_trainer_takes_what_is_loaded(saved, tmp_path):
    from gemini.integrations.transformers import GeminiTrainer

    folder, model = saved
    want = run(tmp_path, model)
    loaded = load_pretrained(folder, precision="fp32", **SMALL)
    got = run(tmp_path, loaded, cls=GeminiTrainer)
    assert got.differs(want) < 1e-5 and got.trainer.model_wrapped is loaded
    with pytest.raises(ValueError, match=r"precision 'fp32', and was wrapped without .*expected"):
        run(tmp_path, load_pretrained(folder, precision="fp32"), cls=GeminiTrainer, bf16=True)


@pytest.mark.ci
def test_what_a_trainer_does_to_its_model_it_does_to_the_inner_one(saved, tmp_path):
    """trl replaces `forward`: on the wrapper no iteration would ever begin."""
    from transformers import Trainer

    from gemini.integrations.transformers import GeminiTrainerMixin

    class Patching(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            model = self.model

            def forward(input_ids, labels, **_):
                hidden = model.transformer(input_ids=input_ids).last_hidden_state
                return {"loss": model.loss_function(model.lm_head(hidden), labels, vocab_size=97)}

            model.forward = forward

    class Replaces(GeminiTrainerMixin, Patching):
        pass

    folder, _ = saved
    budget = gemini.AutoPlacement(device_budget="1GiB")  # with one, iterations are sampled
    loaded = load_pretrained(folder, placement_policy=budget, precision="fp32", **SMALL)
    got = run(tmp_path, loaded, cls=Replaces)
    assert got.trainer.model_wrapped.memory_stats.traces


LORA = {"r": 3, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["c_attn"]}


def adapted():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model, _ = model_and_data()
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True, **LORA))


@pytest.mark.ci
def test_lora_trains_saves_and_resumes_as_in_plain_trainer(tmp_path):
    """1e-5: rounding in another order; the adapter alone has state, and is what is saved."""
    from peft import PeftModel

    from gemini.integrations.transformers import GeminiTrainer

    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
             "load_best_model_at_end": True}  # fmt: skip
    want = run(tmp_path / "a", adapted(), **saves)
    got = run(tmp_path / "b", adapted(), cls=GeminiTrainer, **saves)
    assert got.differs(want) < 1e-5
    assert checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b")
    best = tmp_path / "b" / "checkpoint-6"
    files = {path.name for path in best.iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    plain = PeftModel.from_pretrained(model_and_data()[0], best)
    state = got.trainer.model_wrapped.state_dict()
    lora = {k: v for k, v in plain.state_dict().items() if "lora_" in k}
    assert lora and all(torch.equal(state[name], value) for name, value in lora.items())
    resumed = run(tmp_path / "c", adapted(), cls=GeminiTrainer, resume=tmp_path / "b/checkpoint-4")
    assert torch.equal(resumed.steps, got.steps)


def test_another_adapter_is_refused(tmp_path):
    from peft import LoraConfig, get_peft_model

    from gemini.checkpoint import CheckpointError
    from gemini.checkpoint.adapters import load_adapter, write_adapter

    write_adapter(tmp_path, GeminiDDP(adapted(), precision="fp32"))
    other = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["c_proj"], fan_in_fan_out=True)
    with pytest.raises(CheckpointError, match="is of another adapter"):
        load_adapter(tmp_path, GeminiDDP(get_peft_model(model_and_data()[0], other)))


@pytest.mark.parametrize("door", ["save_pretrained", "write_adapter"])
def test_adapters_inside_wrappers_are_saved_under_the_names_of_peft(door, tmp_path):
    """peft reads the names of layers from the tree, and leaves out what it finds under others."""
    from safetensors.torch import load_file

    from gemini.checkpoint.adapters import load_adapter, write_adapter

    plain, module = adapted(), adapted()
    plain.save_pretrained(tmp_path / "plain")
    layers = module.base_model.model.transformer.h
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer)
    wrapped = [*layers]
    model = GeminiDDP(module, precision="fp32")
    if door == "save_pretrained":
        model.save_pretrained(tmp_path / "saved")
    else:
        write_adapter(tmp_path / "saved", model)
    want, got = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("plain", "saved"))
    assert want and same(got, want)
    load_adapter(tmp_path / "plain", model)
    assert [*layers] == wrapped


@pytest.mark.ci
def test_a_trainer_of_trl_takes_the_mixin(tmp_path):
    """SFTTrainer over rows of token ids, and over text by a tokenizer of its own."""
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from gemini.integrations.transformers import GeminiTrainerMixin

    class Sharded(GeminiTrainerMixin, SFTTrainer):
        pass

    words = {"<eos>": 0, "<pad>": 1, **{f"w{i}": i + 2 for i in range(90)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )
    model, _ = model_and_data()
    rows = [{"text": " ".join(f"w{(7 * i + j) % 90}" for j in range(12))} for i in range(40)]
    losses = []
    for cls, options in ((SFTTrainer, {}), (Sharded, {"gemini": SMALL})):
        arguments = SFTConfig(
            str(tmp_path), max_steps=4, per_device_train_batch_size=2, logging_steps=1,
            learning_rate=1e-2, adam_epsilon=1e-3, report_to=[], use_cpu=True, bf16=False,
            disable_tqdm=True, max_length=16, gradient_accumulation_steps=2, seed=3,
            dataloader_pin_memory=False, gradient_checkpointing=False, save_strategy="no",
        )  # fmt: skip
        trainer = cls(
            copy.deepcopy(model), arguments, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=fast, **options,
        )  # fmt: skip
        trainer.train()
        trainer.save_model()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert type(model).from_pretrained(tmp_path).config.vocab_size == 97


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("door", ["save_pretrained", "its state dict", "export", "export in fp16"])
def test_a_config_names_the_dtype_of_the_weights_beside_it(tmp_path, own, door):
    """Whatever the model computes in; and its own config says what it said."""
    plain, _ = model_and_data()
    plain.to(own)
    plain.config.dtype = torch.float16  # of the folder that it came from, say
    model = GeminiDDP(copy.deepcopy(plain), precision="bf16" if own is torch.float32 else "fp32")
    config, said = model.config, model.config.to_dict()
    written = torch.float16 if door == "export in fp16" else own
    if door == "save_pretrained":
        model.save_pretrained(tmp_path / "a")
    elif door == "its state dict":
        model.save_pretrained(tmp_path / "a", state_dict=model.state_dict())
    else:
        asked = None if written is own else written
        gemini.export_safetensors(tmp_path / "a", model, dtype=asked)
    assert model.config is config and config.to_dict() == said
    assert (
        json.loads((tmp_path / "a/config.json").read_text(encoding="utf-8"))["dtype"]
        == str(written)[6:]
    )
    again = type(plain).from_pretrained(tmp_path / "a")
    assert same_weights(again.state_dict(), plain.to(written))


def test_a_config_inside_a_config_names_the_dtype_too(tmp_path):
    from transformers import CLIPConfig, CLIPTextConfig

    class Model(torch.nn.Linear):
        config = CLIPConfig(text_config=CLIPTextConfig(hidden_size=8), dtype="bfloat16")

    Model.config.text_config.dtype = "float16"
    model = GeminiDDP(Model(2, 2), precision="bf16")
    gemini.export_safetensors(tmp_path / "a", model)
    said = json.loads((tmp_path / "a/config.json").read_text(encoding="utf-8"))
    assert (said["dtype"], said["text_config"]["dtype"]) == ("float32", "float32")
    assert str(Model.config.text_config.dtype).endswith("float16")
