"""Layers that plans have computed again in backward: bits of layers that are not."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from gemini import AutoPlacement, GeminiDDP
from gemini.memtracer.module_calls import repeated_blocks
from gemini.placement.plan import Recomputed
from optim import HybridAdam, NvmeConfig

TINY = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 64}  # fmt: skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(48), nn.Dropout(0.1)
        self.a, self.b = nn.Linear(48, 192), nn.Linear(192, 48)

    def forward(self, x):
        return x + self.drop(self.b(nn.functional.gelu(self.a(self.norm(x)))))


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(48)

    def forward(self, x):
        return super().forward(self.batch(x.transpose(1, 2)).transpose(1, 2))


class Counts(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class ChangesInput(Block):
    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


class DrawsOutside(Block):
    def forward(self, x):
        return super().forward(x) * random.random()


class Stack(nn.Module):
    def __init__(self, kind=Block, n=4):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(48, 48), nn.ModuleList(kind() for _ in range(n))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(step):
    return {"x": torch.randn(6, 64, 48, generator=torch.Generator().manual_seed(step))}


def ids(step):
    tokens = torch.randint(97, (2, 17), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def trained(module, policy, feed=batch, choose=lambda step: None, steps=4):
    """Train. choose: layers computed again in a step; None: what plans say."""
    model = GeminiDDP(copy.deepcopy(module), "cpu", policy, precision="fp32", min_chunk_size_m=0.02)
    optimizer = HybridAdam(model.parameters(), lr=1e-2, nvme=NvmeConfig(block_numel=8192))
    seen, planning = [], model.engine.planning
    asked = planning.recomputed_for
    for step in range(steps):
        names = choose(step)
        if names is not None:
            found = Recomputed(tuple(names), 9, 0.0) if names else None
            type(planning).recomputed_for, of_class = (
                (lambda self, signature, found=found: found),
                type(planning).recomputed_for,
            )
        torch.manual_seed(step)
        random.seed(step)
        try:
            outputs = model(**feed(step))
        finally:
            if names is not None:
                type(planning).recomputed_for = of_class
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        saved = model.engine.saved_tensors
        seen.append(0 if saved is None else saved.live_bytes)
        planned = saved and planning.plan_of_forward(model.engine.sampler.signature)
        # the first plan that keeps all may come after one that let some leave
        assert not planned or planned.saved is not None or saved.staging_bytes == 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert saved is None or saved.live_bytes == 0
    assert asked is not None
    return model, seen


def auto(budget="64MiB", **options):
    return AutoPlacement(budget, activations="auto", **options)


def names_of(module):
    return [name for name, _ in repeated_blocks(module)]


@pytest.mark.parametrize("budget", ["64MiB", "3MiB"])
def test_layers_may_change_by_iteration_and_bits_do_not(budget, tmp_path):
    """All is on the device, or state is in files and chunks are released."""
    plain, kept = trained(Stack(), "cuda")
    names = names_of(Stack())
    turns = [names, [], names[:2], names]
    policy = auto(budget, nvme_dir=str(tmp_path), block_numel=8192)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, seen = trained(Stack(), policy, choose=turns.__getitem__)
    assert model.digest() == plain.digest() and not any(kept)
    assert seen[0] == seen[3] < seen[2] < seen[1]
    traces = model.engine.sampler.traces("train")
    assert {trace.signature.partition("; ")[2] for trace in traces} <= {
        "", "recomputed: 2", "recomputed: 4"
    }  # fmt: skip
    module = model.unwrap()
    assert all("forward" not in block.__dict__ for block in module.blocks)


@pytest.mark.parametrize(
    ("module", "feed"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4)), ids),
        (lambda: LlamaForCausalLM(LlamaConfig(**TINY, use_cache=False)), ids),
        (lambda: BertForMaskedLM(BertConfig(**TINY)), ids),
    ],
    ids=["gpt2", "llama", "bert"],
)
def test_models_of_transformers_have_their_bits(module, feed):
    torch.manual_seed(0)
    made = module()
    if hasattr(made.config, "use_cache"):
        made.config.use_cache = False
    plain, _ = trained(made, "cuda", feed, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, _ = trained(made, auto(), feed, lambda step: names_of(made), steps=2)
    assert len(names_of(made)) == 3 and model.digest() == plain.digest()
    assert model.engine.sampler.layers.proved.keys() == set(names_of(made))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Normed, "changes buffers"),
        (Counts, "changes buffers"),
        (ChangesInput, "what it is given, in place"),
        (DrawsOutside, "draws from random"),
    ],
)
def test_a_layer_that_fails_the_proof_is_never_computed_again(kind, reason):
    """The first iteration has its bits too."""
    plain, _ = trained(Stack(kind), "cuda")
    names = names_of(Stack(kind))
    with pytest.warns(UserWarning, match=f"blocks.0 and 3 more never again in backward.*{reason}"):
        model, seen = trained(Stack(kind), auto(), choose=lambda step: names)
    assert model.digest() == plain.digest()
    assert len(set(seen)) == 1


def test_what_the_user_checkpoints_is_left_alone():
    module = LlamaForCausalLM(LlamaConfig(**TINY, use_cache=False))
    assert len(names_of(module)) == 3
    module.gradient_checkpointing_enable()
    assert not names_of(module)


def test_a_cache_is_not_filled_twice():
    module = LlamaForCausalLM(LlamaConfig(**TINY))
    plain, _ = trained(module, "cuda", ids, steps=2)
    with pytest.warns(UserWarning, match=r"DynamicCache, which it may change \(use_cache=False\)"):
        model, _ = trained(module, auto(), ids, lambda step: names_of(module), steps=2)
    assert model.digest() == plain.digest()


def test_a_plan_chooses_layers_where_nothing_else_is_below(tmp_path):
    """From the second iteration on: of the first one nobody had a trace."""
    plain, _ = trained(Stack(), "cuda")
    free, kept = trained(Stack(), auto("64MiB"))
    assert free.engine.plan.recomputed is None and free.digest() == plain.digest()
    most = max(free.engine.sampler.device_peaks.values())
    model, seen = trained(Stack(), auto(f"{most - max(kept) // 2}B"), steps=4)
    assert model.digest() == plain.digest()
    assert seen[-1] < seen[0] == kept[0]
    planned = model.engine.plan.recomputed
    assert 0 < len(planned.names) <= 4 == planned.num_layers
    assert str(planned) in str(model.memory_report())
