"""`fuse` over real models: what is fused, what stays, and that training is the same everywhere."""

import copy
import io

import pytest
import torch
import transformers
from torch import nn

from gemini import GeminiDDP, StaticPlacement
from gemini.fused import Fused, causal_lm_loss, fuse
from optim import HybridAdam

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 37, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
RMS = ["input_layernorm", "post_attention_layernorm"]


def llama(**more):
    config = transformers.LlamaConfig(**SIZES | more)
    return transformers.LlamaForCausalLM(config)


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def gemma2():
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:  # it keeps the weight less 1
                param.copy_(torch.linspace(-0.3, 0.2, len(param)))
    return model


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=37, n_positions=32,
                                attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    )  # fmt: skip


MODELS = {llama: 5, qwen3: 9, gemma2: 9, gpt2: 5}  # norms of each


def ids(seed=0):
    return torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(seed))


def labels():
    return ids().masked_fill(ids() < 5, -100)


@pytest.mark.ci  # kernels are interpreted
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_norms_and_losses_of_real_models_are_fused_and_give_what_they_gave(make):
    torch.manual_seed(1)
    own = make()
    fused = copy.deepcopy(own)
    done = fuse(fused)
    assert len(done.norms) == MODELS[make] and done.has_loss and not done.left
    assert list(fused.state_dict()) == list(own.state_dict())
    for num_items in (None, 9):
        given = {"input_ids": ids(), "labels": labels(), "num_items_in_batch": num_items}
        outs = [model(**given) for model in (own, fused)]
        assert torch.allclose(outs[0].loss, outs[1].loss, rtol=1e-5)
        assert torch.allclose(outs[0].logits, outs[1].logits, atol=1e-5)
    for out in outs:
        out.loss.backward()
    for one, other in zip(own.parameters(), fused.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_a_fused_norm_runs_its_kernel_once_each_way(monkeypatch):
    from kernels_triton import rows

    calls = []
    for name in ("norm_rows_kernel", "norm_rows_backward_kernel"):
        kernel = getattr(rows, name)

        class Counted:
            def __getitem__(self, grid, kernel=kernel, name=name):
                calls.append(name)
                return kernel[grid]

        monkeypatch.setattr(rows, name, Counted())
    norm = nn.LayerNorm(8)
    fuse(norm, loss=False)
    norm(torch.ones(2, 8)).sum().backward()
    assert calls == ["norm_rows_kernel", "norm_rows_backward_kernel"]
    calls.clear()
    norm(torch.ones(2, 8).bfloat16().float().double().float())
    fuse(norm)  # again
    assert type(norm).__mro__.count(nn.LayerNorm) == 1
    norm.double()(torch.ones(2, 8, dtype=torch.float64))  # its own operators
    assert calls == ["norm_rows_kernel"]


class OtherRMSNorm(nn.Module):
    """Of another formula than its name says."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return x * self.weight


class WideRMSNorm(OtherRMSNorm):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.ones(8))


def test_what_gives_something_else_is_left_and_named(caplog):
    module = nn.ModuleDict(
        {"other": OtherRMSNorm(), "wide": WideRMSNorm(), "plain": nn.LayerNorm(8),
         "bare": nn.LayerNorm(8, elementwise_affine=False), "two": nn.LayerNorm((2, 4)),
         "rms": nn.RMSNorm(8), "linear": nn.Linear(8, 8)}
    )  # fmt: skip
    kinds = {name: type(child) for name, child in module.items()}
    done = fuse(module)
    assert done == Fused(("plain", "rms"), False, ("other", "wide", "bare", "two"))
    assert caplog.messages == ["norms that run their own operators: other, wide, bare, two"]
    caplog.clear()
    assert fuse(nn.Linear(2, 2)) == Fused((), False, ())  # asked, and not done: that is said
    assert caplog.messages == ["norms that run their own operators: there are none"]
    for name in (*done.left, "linear"):
        assert type(module[name]) is kinds[name]
    x = torch.linspace(-1, 1, 24).view(3, 8)
    assert torch.allclose(module["rms"](x), nn.RMSNorm(8)(x), atol=1e-6)


def test_norms_on_the_meta_device_are_fused_before_they_have_values():
    with torch.device("meta"):
        model = llama()
    assert len(fuse(model).norms) == 5


def test_a_fused_model_is_copied_and_saved_whole():
    model = llama()
    fuse(model)
    data = io.BytesIO()
    torch.save(model, data)
    data.seek(0)
    loaded = torch.load(data, weights_only=False)
    copied = copy.deepcopy(model)
    for other in (loaded, copied):
        assert type(other.model.norm) is type(model.model.norm)
        assert other.model.norm.weight is not model.model.norm.weight
        assert torch.equal(other(ids()).logits, model(ids()).logits)
    assert isinstance(model.model.norm, transformers.models.llama.modeling_llama.LlamaRMSNorm)


def test_the_loss_shifts_as_transformers_does():
    logits = torch.linspace(-1, 1, 2 * 7 * 37).sin().view(2, 7, 37)
    own = transformers.loss.loss_utils.ForCausalLMLoss
    for more in ({}, {"num_items_in_batch": torch.tensor(11)}, {"ignore_index": 3}):
        given = labels().masked_fill(labels() < 0, more.get("ignore_index", -100))
        got, want = (f(logits, given, 37, **more) for f in (causal_lm_loss, own))
        assert torch.allclose(got, want, rtol=1e-6)
    got, want = (f(logits, None, 37, shift_labels=labels()) for f in (causal_lm_loss, own))
    assert torch.allclose(got, want, rtol=1e-6)


def digests(placement, recomputed):
    torch.manual_seed(1)
    module = llama()
    fuse(module)
    if recomputed:
        module.gradient_checkpointing_enable()
    model = GeminiDDP(
        module, "cpu", placement, precision="bf16", max_norm=0.5, min_chunk_size_m=0.001
    )
    optimizer, found = HybridAdam(model.parameters(), lr=1e-2), []
    for seed in range(2):
        model(ids(seed), labels=ids(seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.digest())
    return found


@pytest.mark.ci  # kernels are interpreted
def test_a_fused_model_trains_to_the_same_bits_wherever_its_weights_are():
    """A weight is gathered again for its backward, as it is for torch's operators."""
    everywhere = [
        digests(StaticPlacement(*shares), recomputed)
        for shares in ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0))
        for recomputed in (False, True)
    ]
    assert all(one == everywhere[0] for one in everywhere)
    assert everywhere[0][0] != everywhere[0][1]
