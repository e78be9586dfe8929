"""Embeddings that are whole in memory, updated over every row: what cached ones are compared to."""

import json
from dataclasses import replace
from math import sqrt

import torch

from gemini.embedding import LazyAdam, RowAdagrad, RowSGD

RULES = (RowSGD(lr=0.1), RowAdagrad(lr=0.1), LazyAdam(lr=0.1))


def tree_sum(columns):
    """Sum of columns, the first half added to the second, what is over to the first of them."""
    if len(columns) == 1:
        return columns[0]
    half = len(columns) // 2
    sums = [a + b for a, b in zip(columns[:half], columns[half : 2 * half], strict=True)]
    if len(columns) % 2:
        sums[0] = sums[0] + columns[-1]
    return tree_sum(sums)


class WholeTable:
    """Torch's module, and the dense form of a rule: every row is computed, untouched ones are
    masked out. `records` are as a checkpoint has them."""

    def __init__(self, module, rule):
        self.module, self.rule, self.step_count = module, rule, 0
        self.state = torch.zeros(module.num_embeddings, rule.state_numel(module.embedding_dim))
        self.touched = torch.zeros(module.num_embeddings, 1, dtype=torch.bool)
        self.before = None

    def __call__(self, ids, *args):
        self.touched[ids] = True
        if self.module.padding_idx is not None:
            self.touched[self.module.padding_idx] = False
        return self.module(ids, *args)

    @property
    def records(self):
        return torch.cat([self.module.weight.detach(), self.state], 1)

    @torch.no_grad()
    def step(self, scale=1.0):
        weight, rule, state, touched = self.module.weight, self.rule, self.state, self.touched
        self.before = weight.clone(), state.clone(), self.step_count
        self.step_count += 1
        grad = weight.grad * scale
        if isinstance(rule, RowSGD):
            new, new_state = weight - grad * rule.lr, state
        elif isinstance(rule, RowAdagrad):
            square = tree_sum(list((grad * grad).unbind(1)))[:, None]
            new_state = state + square * (1 / grad.shape[1])
            new = weight - grad * rule.lr / (new_state.sqrt() + rule.eps)
        else:
            mean, square = state.chunk(2, 1)
            mean = mean * rule.betas[0] + grad * (1 - rule.betas[0])
            square = square * rule.betas[1] + grad * grad * (1 - rule.betas[1])
            corrections = [1 - beta**self.step_count for beta in rule.betas]
            rate = rule.lr * sqrt(corrections[1]) / corrections[0]
            new, new_state = (
                weight - mean * rate / (square.sqrt() + rule.eps),
                torch.cat([mean, square], 1),
            )
        weight.copy_(torch.where(touched, new, weight))
        self.state = torch.where(touched, new_state, state)
        self.zero_grad()

    def zero_grad(self):
        self.module.zero_grad()
        self.touched.zero_()

    @torch.no_grad()
    def undo(self):
        weight, self.state, self.step_count = self.before
        self.module.weight.copy_(weight)


def pair(rule, num, dim, kind, cache_rows, *, home="host", nvme_dir=None, **options):
    """The same rows twice: cached, and whole. kind: a class of torch.nn."""
    import gemini

    own = {k: options.pop(k) for k in ("lookahead", "name", "process_group") if k in options}
    torch.manual_seed(0)
    cached = getattr(gemini, f"Cached{kind.__name__}")(
        num, dim, cache_rows=cache_rows, rule=rule, home=home, nvme_dir=nvme_dir, **own, **options
    )
    torch.manual_seed(0)
    return cached, WholeTable(kind(num, dim, **options), rule)


def saved_records(folder):
    """Records [num_rows, width] in a folder of `save`, and its step."""
    manifest = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    count, num = len(manifest["files"]), manifest["num_rows"]
    records = torch.empty(num, manifest["width"])
    for rank in range(count):
        data = bytearray((folder / f"rows-{rank:05}.bin").read_bytes())
        records[rank::count] = torch.frombuffer(data, dtype=torch.float32).view(
            -1, manifest["width"]
        )
    return records, manifest["step"]


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def quicker(rule):
    return replace(rule, lr=rule.lr * 2)
