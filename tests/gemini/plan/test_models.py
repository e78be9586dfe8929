"""Models that a plan is made for: names, folders, configs, and traces of few layers."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from gemini.chunk.layout import specs_of
from gemini.memtracer.collector import trace
from gemini.plan import models
from gemini.plan.activations import activations_of, example_inputs


def check_grown(model, seq, *batches):
    """Byte for byte; returns the last one."""
    activations = activations_of(model, specs_of(model, "bfloat16"), seq)
    for batch in batches:
        grown, whole = activations.at(batch), trace(model, example_inputs(model, batch, seq))
        assert whole.deviation_of(grown) is None
        for kind in ("non_model_bytes", "saved_bytes"):
            both = [[getattr(m, kind) for m in t.moments] for t in (grown, whole)]
            assert both[0] == both[1]
    return grown


def test_a_name_that_nobody_knows_and_an_absent_package_are_said(monkeypatch):
    with pytest.raises(
        ValueError, match=r"no model 'gpt5'; did you mean gpt2\? expected a name that --help lists"
    ):
        models.build("gpt5")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        models.build("gpt2")


def test_a_folder_is_a_folder_whatever_its_name(tmp_path, monkeypatch):
    """`pay:run` beside a `pay.py`: a folder of a stranger imports nothing of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pay.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")
    (tmp_path / "pay:run").mkdir()
    (tmp_path / "pay:file").touch()
    (tmp_path / "gpt2").mkdir()
    for what in ("pay:run", Path("pay:run"), Path("pay:file"), Path("pay:none"), "gpt2"):
        with pytest.raises(ValueError, match="cannot be read"):
            models.build(what)
    (tmp_path / "pay:run/config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 1}', encoding="utf-8"
    )
    assert type(models.build("pay:run")).__name__ == "GPT2LMHeadModel"
    with pytest.raises(ValueError, match=r"expected package\.module:factory"):
        models.build("no_such_module:run")
    with pytest.raises(SystemExit, match="ran"):
        models.build("pay:none")  # which who types a command may ask for


@pytest.mark.parametrize("config", [
    "5", "[]", "{", "[" * 100_000, "{}", '{"model_type": 5}', '{"model_type": "no_such"}',
    '{"model_type": "gpt2", "n_embd": "a"}',
    '{"model_type": "gpt2", "dtype": "load"}', '{"model_type": "gpt2", "n_layer": 1, "n_layer": 2}',
], ids=lambda text: text[:30])  # fmt: skip
def test_a_config_that_describes_no_model_is_refused_in_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot be read|describes no model|holds a") as found:
        models.build(str(tmp_path))
    assert len(str(found.value).splitlines()) == 1


def test_a_hub_id_of_known_sizes_needs_no_network(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    raised = OSError("404")

    def refuse(*_, **__):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert models.build("Qwen/Qwen2.5-0.5B-Instruct").config.hidden_size == 896
    for what, known in (
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"), ("openai-community/gpt2", "gpt2"),
        ("mistralai/Mistral-7B-v0.1", None), ("somebody/gpt2", None),  # of other sizes, perhaps
    ):  # fmt: skip
        assert models.known_name(what) == known
    with pytest.raises(ValueError, match=r"its config\.json \(404\); expected a folder, its con"):
        models.build("somebody/gpt2")
    raised = huggingface_hub.errors.LocalEntryNotFoundError("retries")
    with pytest.raises(ValueError, match=r"and no network reaches the hub; expected a folder, its"):
        models.build("somebody/gpt2")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "numel", "used"),
    [("llama-3.2-1b", 1_235_814_400, 1), ("llama-3.1-8b", 8_030_261_248, 0.935),
     ("qwen2.5-0.5b", 494_032_768, 1), ("qwen2.5-7b", 7_615_616_512, 0.928),
     ("qwen3-8b", 8_190_735_360, 0.924), ("gemma-2-2b", 2_614_341_888, 1),
     ("mistral-7b", 7_248_023_552, 0.981), ("mixtral-8x7b", 46_702_792_704, 0.273),
     ("deepseek-v2-lite", 15_706_484_224, 0.156), ("qwen3-30b-a3b", 30_532_122_624, 0.0996)],
)  # fmt: skip
def test_named_models_have_as_many_parameters_as_published(name, numel, used):
    """used: share that a token is multiplied by; embeddings that are no head are not."""
    model = models.build(name)
    assert sum(param.numel() for param in model.parameters()) == numel
    assert models.used_numel(model) / numel == pytest.approx(used, rel=2e-3)


def test_trace_of_few_layers_grows_into_the_trace_of_all(config, question):
    """Also of what was done to a model, as checkpointing and adapters are no configuration's."""
    plain = check_grown(models.build(str(config)), 64, 3)
    assert plain.moments == question.traced.at(3).moments
    model = models.build(str(config))
    model.gradient_checkpointing_enable()
    assert check_grown(model, 64, 3).peak_non_model_bytes < plain.peak_non_model_bytes
    assert len(model.model.layers) == model.config.num_hidden_layers == 7
    check_grown(models.add_lora(models.checkpointed(models.build(str(config))), 4), 64, 3)


@pytest.mark.parametrize(
    "name",
    [pytest.param("gpt2", marks=pytest.mark.ci),
     *(pytest.param(name, marks=pytest.mark.deep) for name in ("bert-base", "vit-base"))],
)  # fmt: skip
def test_known_models_traces_grow_into_the_traces_of_all_layers(name):
    """At a batch that was traced and at one that was not."""
    check_grown(models.build(name), 128, 1, 4)


def test_adapters_are_on_no_experts_nor_on_those_that_all_tokens_go_to():
    """peft takes their names for those of the others, which then have other names in a forward."""
    config = transformers.DeepseekV2Config(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, first_k_dense_replace=1, vocab_size=40, kv_lora_rank=8,
        q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.DeepseekV2ForCausalLM(config)
    adapted = models.add_lora(model, 2)
    of = {n.partition(".lora_A")[0].rpartition(".")[2]
          for n, _ in adapted.named_parameters() if "lora_A" in n}  # fmt: skip
    assert of == {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    check_grown(adapted, 8, 2)
