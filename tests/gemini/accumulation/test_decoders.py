"""Decoders of Hugging Face layer by layer: their own list of layers, masks, dropout and loss."""

import pytest
import torch

import gemini
from bench.shared.models import seeded
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP, StaticPlacement
from gemini.integrations import chunk_loss
from optim import HybridAdam

transformers = pytest.importorskip("transformers")
ON_HOST = StaticPlacement(offload_param_frac=1.0, offload_optim_frac=1.0)
SIZES = {"vocab_size": 31, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
SMALL = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 32}
KINDS = {
    "GPT2": {},
    "Llama": {"num_key_value_heads": 1},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 8},
    "GPTNeoX": {},
    "Mistral": {"num_key_value_heads": 1, "sliding_window": 3},
}


def decoder(kind, **config):
    if kind == "GPT2":
        given = {"vocab_size": 31, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
        names = "GPT2Config", "GPT2LMHeadModel"
    else:
        given = SMALL
        names = f"{kind}Config", f"{kind}ForCausalLM"
    made, model = (getattr(transformers, name) for name in names)
    with seeded(4):
        return model(made(**{**given, **KINDS[kind], **config})).train()


def batches(step):
    """Of several lengths; the last has padding."""
    generator = torch.Generator().manual_seed(step)
    given = []
    for j in range(3):
        ids = torch.randint(31, (2, 5 + j), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, :j] = 0
        labels = ids.masked_fill(mask == 0, -100)
        given.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return given


def trained(module, order, placement="cuda"):
    device = SimBackend() if placement is ON_HOST else "cpu"
    model = GeminiDDP(module, device, placement, precision="fp32", min_chunk_size_m=0.0005)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    losses = []
    for step in range(3):
        losses += gemini.accumulate(model, batches(step), order=order)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses], model.digest()


@pytest.mark.parametrize("placement", ["cuda", ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_other_order(kind, placement):
    layers, batches = (trained(decoder(kind), order, placement) for order in ("layers", "batches"))
    assert layers == batches


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_with_checkpoints_of_transformers(reentrant):
    found = []
    for order in ("layers", "batches"):
        model = decoder("GPT2")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found.append(trained(model, order))
    assert found[0] == found[1]


@pytest.mark.parametrize("placement", ["cuda", ON_HOST], ids=["device", "host"])
def test_with_a_chunked_loss(placement):
    """Its hooks see each prologue begin that ends before the head."""
    found = []
    for order in ("layers", "batches"):
        model = decoder("GPT2")
        chunk_loss(model, 4)
        found.append(trained(model, order, placement))
    assert found[0] == found[1]
