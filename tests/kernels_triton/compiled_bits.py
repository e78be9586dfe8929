"""Prints what differs between the interpreter and the compiled path, for every row of the table."""

import torch

from optim.rules.quantised import encode
from optim.state.pieces import Piece
from optim.update.compiled_update import CompiledUpdate
from optim.update.cpu_update import NOTHING_CHANGED, CpuWorkers
from optim.update.triton_update import TritonUpdater
from tests.support.rules import CASES

NUMEL = 300_003
HALVES = (None, torch.bfloat16, torch.float16)  # None: fp32, without a master


def make(rule, group, half):
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(NUMEL, generator=generator)
    planes = tuple(
        torch.rand(NUMEL, generator=generator) * (0.1 if i == 0 else 1.0)
        for i in range(len(rule.layout.planes))
    )
    if rule.layout.is_quantised:
        values, kept = planes, rule.layout.stored().planes
        planes = tuple(torch.zeros(p.numel(NUMEL), dtype=getattr(torch, p.dtype)) for p in kept)
        encode(values, planes, rule.layout, None)
    grad = torch.randn(NUMEL, generator=generator)
    hyper = rule.hyper(group)
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


for name, case in CASES.items():
    rule, group = case.rule(), case.group()
    compiled = CompiledUpdate(rule, [])
    for half in HALVES:
        ours, theirs, before = (make(rule, group, half) for _ in range(3))
        updater = TritonUpdater(rule, [0], torch.device("cpu"))
        slabs = {p.name: t for p, t in zip(rule.layout.stored().planes, ours.planes, strict=True)}
        if half is not None:
            slabs = {"master": ours.master, **slabs}
        updater.begin([ours.hyper], with_norm=False)
        updater.update([ours], slabs)
        compiled.update(CpuWorkers(), [theirs], NOTHING_CHANGED)
        if torch.equal(theirs.param, before.param):
            print(name, "updates nothing")
        for i, (a, b) in enumerate(zip(tensors(ours), tensors(theirs), strict=True)):
            if not torch.equal(a, b):
                print(name, half, i, int((a != b).sum()), "differ")
print("compared")
