"""`load_pretrained` quantises a base as it comes, and puts adapters on it: as transformers and peft
do with all of it in memory."""

import weakref

import pytest
import safetensors.torch
import torch

from bench.shared.workers import run_ranks
from gemini import AutoPlacement
from gemini.checkpoint import pretrained, quantise
from gemini.checkpoint.pretrained import load_pretrained
from gemini.checkpoint.quantise import quantised
from gemini.checkpoint.untrusted import lazy_tensors
from gemini.placement.tiers import Tier
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


def loaded(rank, folder):
    model = load_pretrained(folder, quantize="nf4", lora=adapters(), **SMALL)
    return model.state_dict()


@pytest.mark.ci
def test_ranks_have_the_base_that_the_first_one_reads(folder):
    found = run_ranks(loaded, 2, folder, processes=True)[0]
    base = {name: v for name, v in loaded(0, folder).items() if "lora_" not in name}
    assert same({name: found[name] for name in base}, base)


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


class Mapping:
    """A file of safetensors that can be asked for by weak references."""

    def __init__(self, *arguments, **options):
        self.file = safetensors.torch.safe_open(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_files_are_mapped_anew_as_they_are_read(folder, monkeypatch):
    """What was read of a mapping is resident while the mapping is there."""
    expected = load_pretrained(folder, quantize="nf4").state_dict()
    refs, others = [], []

    def mapped(*arguments, **options):
        others.append(sum(one() is not None for one in refs))
        made = Mapping(*arguments, **options)
        refs.append(weakref.ref(made))
        return made

    monkeypatch.setattr(lazy_tensors, "MAPPED_BYTES", 1)
    monkeypatch.setattr(safetensors, "safe_open", mapped)
    assert same(load_pretrained(folder, quantize="nf4").state_dict(), expected)
    assert len(others) > 14 and max(others) == 0


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
