"""Prints what differs between the interpreter and the compiled path, for every rule."""

import torch

from optim.adam import AdamRule
from optim.compiled_path import CompiledUpdate
from optim.cpu_path import NOTHING_CHANGED, CpuWorkers, Piece
from optim.lion import LionRule
from optim.sgd import SGDRule
from optim.triton_path import TritonUpdater

NUMEL = 300_003
GROUP = {
    "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9,
    "adamw_mode": True, "bias_correction": True,
}  # fmt: skip


def make(rule, has_master):
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(NUMEL, generator=generator)
    planes = (
        torch.randn(NUMEL, generator=generator) * 0.1, torch.rand(NUMEL, generator=generator)
    )[: len(rule.layout.planes)]  # fmt: skip
    grad = torch.randn(NUMEL, generator=generator)
    hyper = rule.hyper(GROUP)
    if has_master:
        return Piece(master.bfloat16(), grad.bfloat16(), master, planes, hyper, 1, 0)
    return Piece(master, grad, None, planes, hyper, 1, 0)


def tensors(piece):
    return [
        piece.param,
        piece.grad,
        *piece.planes,
        *([piece.master] if piece.master is not None else []),
    ]


for rule in (AdamRule(), SGDRule(), LionRule()):
    mixes = [(torch.float32, torch.float32, False), (torch.bfloat16, torch.bfloat16, True)]
    compiled = CompiledUpdate(rule, mixes)
    for has_master in (False, True):
        ours, theirs, before = (make(rule, has_master) for _ in range(3))
        layout = rule.layout.with_master() if has_master else rule.layout
        updater = TritonUpdater(rule, layout, [0], torch.device("cpu"))
        slabs = {p.name: t for p, t in zip(rule.layout.planes, ours.planes, strict=True)}
        if has_master:
            slabs = {"master": ours.master, **slabs}
        updater.begin([ours.hyper], with_norm=False)
        updater.update_resident([(None, None)], slabs, lambda *_, piece=ours: [piece])
        compiled.update(CpuWorkers(), [theirs], NOTHING_CHANGED)
        if torch.equal(theirs.param, before.param):
            print(rule.name, "updates nothing")
        for i, (a, b) in enumerate(zip(tensors(ours), tensors(theirs), strict=True)):
            if not torch.equal(a, b):
                print(rule.name, has_master, i, int((a != b).sum()), "differ")
print("compared")
