"""Prints `equal` for each tensor that interpreter and compiled path agree on, bit for bit."""

import torch

from optim.adam import AdamRule
from optim.compiled_path import CompiledUpdate
from optim.cpu_path import NOTHING_CHANGED, CpuWorkers, Piece
from optim.triton_path import TritonUpdater

NUMEL = 300_003
RULE = AdamRule()
HYPER = RULE.hyper(
    {
        "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1,
        "adamw_mode": True, "bias_correction": True,
    }
)  # fmt: skip


def make(has_master):
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(NUMEL, generator=generator)
    planes = (
        torch.randn(NUMEL, generator=generator) * 0.1, torch.rand(NUMEL, generator=generator)
    )  # fmt: skip
    grad = torch.randn(NUMEL, generator=generator)
    if has_master:
        return Piece(master.bfloat16(), grad.bfloat16(), master, planes, HYPER, 1, 0)
    return Piece(master, grad, None, planes, HYPER, 1, 0)


for has_master in (False, True):
    ours, theirs = make(has_master), make(has_master)
    layout = RULE.layout.with_master() if has_master else RULE.layout
    updater = TritonUpdater(RULE, layout, [0], torch.device("cpu"))
    slabs = dict(zip(("exp_avg", "exp_avg_sq"), ours.planes, strict=True))
    if has_master:
        slabs = {"master": ours.master, **slabs}
    updater.begin([HYPER], with_norm=False)
    updater.update_resident([(None, None)], slabs, lambda *_, piece=ours: [piece])
    CompiledUpdate(RULE, []).update(CpuWorkers(), [theirs], NOTHING_CHANGED)
    pairs = [(ours.param, theirs.param), *zip(ours.planes, theirs.planes, strict=True)]
    pairs.append((ours.master, theirs.master) if has_master else (ours.grad, theirs.grad))
    for a, b in pairs:
        print("equal" if torch.equal(a, b) else f"{int((a != b).sum())} differ")
