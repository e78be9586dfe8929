"""A small LLaMA, and a question about it."""

import json

import pytest

from gemini.plan.ask import ask
from gemini.plan.machine import machine_of
from gemini.plan.training import Training

FIELDS = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 7, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4000, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A LLaMA of 7 layers, 26 M parameters, 416 MB of model data."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(FIELDS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def question(config):
    return ask(str(config), machine_of({"nvme": 10**12}), Training(seq=64))
