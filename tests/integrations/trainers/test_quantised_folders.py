"""`load_pretrained` quantises a base as it comes, and puts adapters on it: as transformers and peft
do with all of it in memory."""

import shutil
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from bench.shared.workers import run_ranks
from gemini import AutoPlacement
from gemini.checkpoint import pretrained, quantise
from gemini.checkpoint.converted import converted
from gemini.checkpoint.pretrained import load_pretrained
from gemini.checkpoint.quantise import quantised
from gemini.checkpoint.untrusted.lazy_tensors import LazyTensors
from gemini.placement.tiers import Tier
from gemini.plan.ask import ask
from gemini.plan.machine import machine_of
from gemini.plan.models import adapters_of, build
from gemini.plan.training import Training
from optim import HybridAdam
from tests.support.model_folder import make_folder
from tests.support.quantised import same

SMALL = {"min_chunk_size_m": 0.001, "search_range_m": 0.02, "hidden_dim": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("llama"))


def adapters(**options):
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)


def config_of(kind):
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=kind == "nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip


def whole(folder, kind):
    from transformers import AutoModelForCausalLM

    config = None if kind is None else config_of(kind)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("kind", ["nf4", "int8", "plain nf4", None])
def test_adapters_on_a_folder_are_those_of_peft_on_what_transformers_loads(kind, folder, tmp_path):
    from peft import get_peft_model

    policy = AutoPlacement("400KiB", nvme_dir=str(tmp_path)) if kind == "nf4" else "cuda"
    given = config_of(kind) if kind == "plain nf4" else kind
    torch.manual_seed(3)
    model = load_pretrained(
        folder, quantize=given, lora=adapters(), placement_policy=policy, **SMALL
    )
    torch.manual_seed(3)
    plain = get_peft_model(whole(folder, kind), adapters(), autocast_adapter_dtype=False)
    base = {name: value for name, value in plain.state_dict().items() if "lora_" not in name}
    found = model.state_dict()
    assert same({name: found[name] for name in base}, base)
    assert {name for name in found if "lora_" in name} == plain.state_dict().keys() - base.keys()
    assert {p for p, _ in model.named_parameters() if "lora_" in p} == {
        name for name, param in model.named_parameters() if param.requires_grad
    }
    if kind == "nf4":
        homes = {shard.param_home for shard in model.engine.plan.shards}
        assert Tier.NVME in homes or model.engine.plan.frozen_bytes
    ids = torch.arange(32).reshape(2, 16)
    plain.load_state_dict({name: found[name] for name in found if "lora_" in name}, strict=False)
    plain.train()
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("what", ["llama", "gpt2", "mixtral"])
def test_a_plan_has_the_bytes_of_what_is_loaded(what, kind, folder, of_experts, tmp_path):
    """Layers with biases whose weights are transposed, and experts, among others."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = {"llama": folder, "mixtral": of_experts["mixtral"]}.get(what, tmp_path)
    if what == "gpt2":
        config = GPT2Config(n_embd=52, n_layer=2, n_head=2, vocab_size=100, n_positions=16)
        GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path)
    training = Training(lora=2, quantize=kind, seq=8)
    planned = ask(str(path), machine_of({}, device="cpu"), training)
    planned.trace.check_model(planned.layout.params)
    model = load_pretrained(path, quantize=kind, lora=adapters_of(build(str(path)), 2))
    found = model.engine.layout
    assert model.engine.sharding.opaque
    for one, other in zip(found.params, planned.layout.params, strict=True):
        assert (one.names, one.shape, one.key) == (other.names, other.shape, other.key)


def loaded(rank, folder, lora):
    model = load_pretrained(folder, quantize="nf4", lora=lora, **SMALL)
    return model.state_dict()


@pytest.mark.ci
def test_ranks_have_the_base_that_the_first_one_reads(folder):
    found = run_ranks(loaded, 2, folder, adapters(), processes=True)[0]
    base = {name: v for name, v in loaded(0, folder, adapters()).items() if "lora_" not in name}
    assert same({name: found[name] for name in base}, base)


@pytest.mark.parametrize(
    ("dtype", "budget"), [(torch.bfloat16, "300KiB"), (torch.float32, "900KiB")]
)
def test_a_base_of_16_bits_is_read_from_files_and_never_written(dtype, budget, tmp_path):
    """And has no fp32 originals: only what came in fp32, and is rounded, does, if they are kept."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=128,
        num_attention_heads=2,
    )  # fmt: skip
    with seeded():
        AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(tmp_path / "base")
    policy = AutoPlacement(budget, nvme_dir=str(tmp_path), block_numel=2048)
    model = load_pretrained(
        tmp_path / "base", lora=adapters(), placement_policy=policy, keep_originals=True,
        **{**SMALL, "hidden_dim": 64},
    )  # fmt: skip
    engine = model.engine
    frozen = {spec.id for spec in engine.layout.chunks if not spec.trainable}
    files = engine.storage.frozen
    assert {engine.layout.chunks[chunk].dtype for chunk in frozen} == {"bfloat16"}
    assert bool(engine.originals.chunks & frozen) == (dtype is torch.float32)
    assert files is not None and not set(engine.storage.params or ()) & frozen
    before = files.traffic
    optimizer, ids = HybridAdam(model.parameters()), torch.arange(32).reshape(2, 16)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert files.traffic.nvme_read > before.nvme_read
    assert files.traffic.nvme_write == before.nvme_write > 0


EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 12},  # 10 is behind 9, not behind 1
    "mixtral": {"num_local_experts": 4},
}


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory):
    """Folders of models whose files have an expert a tensor, by their family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for family, sizes in EXPERTS.items():
        config = AutoConfig.for_model(
            family, hidden_size=64, intermediate_size=32, num_hidden_layers=2, head_dim=32,
            num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=2, vocab_size=128,
            **sizes,
        )  # fmt: skip
        found[family] = tmp_path_factory.mktemp(family)
        with seeded():
            model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(found[family])
    return found


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_moe", "nf4"), ("qwen3_moe", None), ("mixtral", "int8")]
)
def test_experts_are_stacked_as_transformers_stacks_them(family, kind, of_experts, monkeypatch):
    """One parameter at a time: none is read before it is asked for."""
    read, of = [], LazyTensors.__getitem__
    monkeypatch.setattr(LazyTensors, "__getitem__", lambda s, n: read.append(n) or of(s, n))
    module = whole(of_experts[family], None)
    with ExitStack() as stack:
        files = converted(module, LazyTensors(of_experts[family], stack))
        (name, *_) = [name for name in module.state_dict() if "experts.gate_up" in name]
        assert files.spec_of(name).shape == module.state_dict()[name].shape and not read
        assert torch.equal(files[name], module.state_dict()[name])
        assert read == [name, *read[1:]] and len(read) == 1 + 2 * len(module.state_dict()[name])
    found = load_pretrained(of_experts[family], quantize=kind, **SMALL).state_dict()
    plain = whole(of_experts[family], kind)
    assert same(found, (of_4_bits(plain) if kind == "nf4" else plain).state_dict())


def of_4_bits(model):
    """With experts as bitsandbytes quantises what is no linear layer."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for module in list(model.modules()):
        if type(module).__name__.endswith("Experts"):
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(module, name, compress_statistics=True)
    return model


@pytest.mark.ci
def test_ranks_have_the_experts_that_the_first_one_stacks(of_experts):
    found = run_ranks(loaded, 2, of_experts["mixtral"], None, processes=True)[0]
    assert same(found, of_4_bits(whole(of_experts["mixtral"], "nf4")).state_dict())


def test_adapters_on_experts_of_4_bits_are_those_of_peft(of_experts):
    """On a device that experts leave with what they are dequantised by; and state dicts load."""
    from peft import get_peft_model

    model = load_pretrained(
        of_experts["mixtral"], quantize="nf4", lora=adapters(), device=SimBackend(), **SMALL
    )
    homes = {
        model.engine.plan.shards[model.engine.sharding.chunk_of[p]]
        for p in model.engine.sharding.opaque
    }
    assert {shard.param_home for shard in homes} == {Tier.HOST}
    found = model.state_dict()
    plain = whole(of_experts["mixtral"], "nf4")
    plain = of_4_bits(get_peft_model(plain, adapters(), autocast_adapter_dtype=False))
    plain.load_state_dict({name: found[name] for name in found if "lora_" in name}, strict=False)
    ids = torch.arange(32).reshape(2, 16)
    ours, theirs = (one.train()(input_ids=ids, labels=ids).loss for one in (model, plain))
    assert torch.equal(ours, theirs)
    ours.backward()
    theirs.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if "lora_B" in name}
    for name, param in plain.named_parameters():
        if "lora_B" in name:
            assert torch.equal(grads[name], param.grad) and grads[name].any()
    other = whole(of_experts["mixtral"], None)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2.5)
    experts = of_4_bits(other).state_dict()
    changed = {name: experts.get(name.removeprefix("base_model.model."), found[name])
               if "experts" in name else found[name] for name in found}  # fmt: skip
    model.load_state_dict(changed)
    assert same(model.state_dict(), changed)


def test_a_config_leaves_experts_as_transformers_does(of_experts):
    model = load_pretrained(of_experts["mixtral"], quantize=config_of("nf4"), **SMALL)
    assert same(model.state_dict(), whole(of_experts["mixtral"], "nf4").state_dict())


def test_weights_are_quantised_one_at_a_time(folder, monkeypatch):
    """None is there beside its chunk when the next one comes."""
    refs, most = [], []

    def counted(layer, values):
        most.append(sum(one() is not None for one in refs))
        made = quantised(layer, values)
        refs.append(weakref.ref(made))
        return made

    monkeypatch.setattr(pretrained, "quantised", counted)
    load_pretrained(folder, quantize="nf4", lora=adapters())
    assert len(most) == 14 and max(most) <= 1


def test_no_file_is_mapped_while_weights_are_read(folder, tmp_path, monkeypatch):
    """What was read of a mapping is resident while it is there, and limits of data count it all."""
    mapped, own = [], shutil.copytree(folder, tmp_path / "own")  # models of other tests map theirs

    def counted(layer, values):
        mapped.append(str(own) in Path("/proc/self/maps").read_text(encoding="utf-8"))
        return quantised(layer, values)

    monkeypatch.setattr(pretrained, "quantised", counted)
    load_pretrained(own, quantize="nf4")
    assert mapped == [False] * 14


def test_a_form_is_made_once_for_all_layers_that_have_it(folder, monkeypatch):
    shapes = []

    def counted(layer, values):
        shapes.append(tuple(values.shape))
        return quantised(layer, values)

    monkeypatch.setattr(quantise, "quantised", counted)  # weights are made by another name of it
    load_pretrained(folder, quantize="nf4")
    assert sorted(shapes) == [(32, 32), (32, 64), (64, 32)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "fp3"}, "quantize='fp3'; expected one of"),
        ({"lora": {"use_dora": True}}, "use_dora=True, which begins with the base's values"),
        ({"lora": {"init_lora_weights": "pissa"}}, "init_lora_weights='pissa', which begins"),
    ],
)
def test_what_cannot_be_is_refused(options, said, folder):
    if "lora" in options:
        options = {"lora": adapters(**options["lora"])}
    with pytest.raises(ValueError, match=said):
        load_pretrained(folder, **options)


def reward(completions, **_):
    return [sum(map(ord, text)) % 7.0 for text in completions]


@pytest.mark.ci
def test_a_script_of_grpo_trains_adapters_on_a_base_of_4_bits_in_files(tmp_path):
    """The trainer's rollouts are those of plain peft, token by token. Adapters are in bf16 with
    fp32 masters, and trl's own in fp32 under autocast: norms differ by as much as bf16 rounds."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from gemini.integrations.transformers import GeminiTrainerMixin

    class Sharded(GeminiTrainerMixin, GRPOTrainer):
        pass

    folder = make_folder(tmp_path / "base", hidden_size=64, intermediate_size=128,
                         num_hidden_layers=4)  # fmt: skip
    policy = AutoPlacement("250KiB", nvme_dir=str(tmp_path), block_numel=2048)
    ours = {"gemini": {"placement_policy": policy, **SMALL}}
    logs = []
    for cls, options in ((GRPOTrainer, {}), (Sharded, ours)):
        arguments = GRPOConfig(
            str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=8, use_cpu=True, bf16=True, report_to="none", logging_steps=1,
            save_strategy="no", learning_rate=1e-2, beta=0.04, seed=3, disable_tqdm=True,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "bfloat16", "quantization_config": config_of("nf4")},
        )  # fmt: skip
        trainer = cls(
            str(folder), reward_funcs=reward, args=arguments, peft_config=adapters(),
            train_dataset=Dataset.from_list([{"prompt": "a chunk is"}, {"prompt": "a shard"}] * 4),
            **options,
        )  # fmt: skip
        trainer.train()
        logs.append([log for log in trainer.state.log_history if "reward" in log])
    plain, found = logs
    assert trainer.model_wrapped.engine.plan.frozen_read_bytes
    assert len(found) == 3 and any(log["reward_std"] for log in found)
    for name in ("reward", "completions/mean_length"):
        assert [log[name] for log in found] == [log[name] for log in plain]
    norms = [log["grad_norm"] for log in plain]
    assert [log["grad_norm"] for log in found] == pytest.approx(norms, rel=0.02)
