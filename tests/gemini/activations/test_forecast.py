"""Bytes of an iteration whose layers are computed again, told from one in which none is."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini import trace
from gemini.memtracer.layers import recomputing

D = 256


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(D), nn.Dropout(0.1)
        self.a, self.b = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        return x + self.drop(self.b(nn.functional.gelu(self.a(self.norm(x)))))


class Attention(Mlp):
    def __init__(self):
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, s, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        weights = self.drop((q @ k.transpose(-1, -2) / 8).softmax(-1))
        return super().forward(x + self.out((weights @ v).transpose(1, 2).reshape(b, s, D)))


class SavesWhatItGives(Mlp):
    """The next block's input stays all the same."""

    def forward(self, x):
        return torch.relu(self.b(nn.functional.gelu(self.a(x))))


class SavesNotWhatItIsGiven(Mlp):
    """Its input stays only if it is computed again."""

    def forward(self, x):
        return self.b(nn.functional.gelu(self.a(x * 2.0)))


class Linears(Mlp):
    """Backward needs more at its end than at its begin."""

    def forward(self, x):
        return self.b(self.a(x))


class Masked(Mlp):
    """All blocks are given one tensor more."""

    def forward(self, x, mask):
        return super().forward(x * mask)


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.more = kind is Masked

    def forward(self, x):
        x = self.first(x)
        more = (x.detach() * 2,) if self.more else ()
        for block in self.blocks:
            x = block(x, *more)
        return self.last(x).square().mean()


def computed_again(module, number):
    """The module, of whose blocks so many are checkpointed: what is measured."""
    module = copy.deepcopy(module)
    for block in module.blocks[:number]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return module


@pytest.mark.parametrize(
    "kind", [Mlp, Attention, SavesWhatItGives, SavesNotWhatItIsGiven, Linears, Masked]
)
def test_predicted_bytes_are_those_that_are_measured(kind):
    """Peaks, and with them what is saved: no less, and at most 5 % more."""
    module, inputs = Stack(kind), (torch.zeros(2, 256, D),)
    traced = trace(module, inputs, precision="fp32")
    assert len(traced.layers) == 4
    peaks = [traced.peak_non_model_bytes]
    for number in (1, 2, 3, 4):
        told = recomputing(traced, number)
        measured = trace(computed_again(module, number), inputs, precision="fp32")
        assert told.peak_saved_bytes == measured.peak_saved_bytes
        peaks.append(told.peak_non_model_bytes)
        assert 1 <= told.peak_non_model_bytes / measured.peak_non_model_bytes <= 1.05
    assert peaks[4] < 0.6 * peaks[0]
