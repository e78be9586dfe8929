"""Prints what differs between the interpreter and the compiled path, for every rule and option."""

import torch

from optim.adam import AdamRule, AmsgradRule
from optim.lion import LionRule
from optim.sgd import SGDRule
from optim.state.pieces import Piece
from optim.update.compiled_update import CompiledUpdate
from optim.update.cpu_update import NOTHING_CHANGED, CpuWorkers
from optim.update.triton_update import TritonUpdater

NUMEL = 300_003
GROUP = {
    "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9,
    "adamw_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False,
    "dampening": 0.0, "nesterov": False,
}  # fmt: skip
CASES = [
    (AdamRule(), {}), (AdamRule(), {"maximize": True, "adamw_mode": False}),
    (AmsgradRule(), {"amsgrad": True}), (AmsgradRule(), {"maximize": True}),
    (SGDRule(), {}), (SGDRule(), {"nesterov": True}), (SGDRule(), {"momentum": 0.0}),
    (SGDRule(), {"dampening": 0.5, "maximize": True}), (LionRule(), {}),
]  # fmt: skip


HALVES = (None, torch.bfloat16, torch.float16)  # None: fp32, without a master


def make(rule, options, half):
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(NUMEL, generator=generator)
    planes = (
        torch.randn(NUMEL, generator=generator) * 0.1, torch.rand(NUMEL, generator=generator),
        torch.rand(NUMEL, generator=generator),
    )[: len(rule.layout.planes)]  # fmt: skip
    grad = torch.randn(NUMEL, generator=generator)
    hyper = rule.hyper({**GROUP, **options})
    if half is not None:
        return Piece(master.to(half), grad.to(half), master, planes, hyper, 1, 0)
    return Piece(master, grad, None, planes, hyper, 1, 0)


def tensors(piece):
    return [
        piece.param,
        piece.grad,
        *piece.planes,
        *([piece.master] if piece.master is not None else []),
    ]


for rule, options in CASES:
    compiled = CompiledUpdate(rule, [])
    for half in HALVES:
        ours, theirs, before = (make(rule, options, half) for _ in range(3))
        updater = TritonUpdater(rule, [0], torch.device("cpu"))
        slabs = {p.name: t for p, t in zip(rule.layout.planes, ours.planes, strict=True)}
        if half is not None:
            slabs = {"master": ours.master, **slabs}
        updater.begin([ours.hyper], with_norm=False)
        updater.update([ours], slabs)
        compiled.update(CpuWorkers(), [theirs], NOTHING_CHANGED)
        if torch.equal(theirs.param, before.param):
            print(rule.name, options, "updates nothing")
        for i, (a, b) in enumerate(zip(tensors(ours), tensors(theirs), strict=True)):
            if not torch.equal(a, b):
                print(rule.name, options, half, i, int((a != b).sum()), "differ")
print("compared")
