"""The models that ship in torch's wheel for FSDP's tests, wrapped, beside torch's DDP.

Source: torch.testing._internal.common_fsdp (the models are imported, the check is written here from
the meaning of FSDP's `test_fsdp_core.py`: losses and weights after some steps are those of DDP).

Not run, and why: `ModuleWithDelay` and `NestedWrappedModuleWithDelay` wait on a CUDA stream;
`MixtureOfExperts` has other weights on every rank, which a wrapped module broadcasts.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.shared.workers import run_ranks
from gemini import GeminiDDP, StaticPlacement
from optim import HybridAdam

pytestmark = pytest.mark.ci

STEPS = 4
ADAM = {"lr": 0.005, "eps": 1e-2, "weight_decay": 0.01}
BOUND = 2e-5  # fp32: gradients of a transformer summed over ranks in another order


class OneRank:
    """What the models ask of a process group."""

    def rank(self):
        return dist.get_rank()

    def size(self):
        return dist.get_world_size()


def models():
    from torch.testing._internal import common_fsdp as fsdp

    args = (OneRank(), fsdp.FSDPInitMode.NO_FSDP, fsdp.DEVICEInitMode.DEVICE_AFTER)

    def rows(module, shape):
        module.get_input = lambda device: (_random(shape),)
        module.get_loss = lambda inputs, output: _total(output)
        return module

    def seeded(make):
        torch.manual_seed(0)
        return make()

    return {
        "TransformerWithSharedParams": lambda: fsdp.TransformerWithSharedParams.init(
            *args, deterministic=True, add_bn=False
        ),
        "TransformerWithSharedParams, batch norm": lambda: fsdp.TransformerWithSharedParams.init(
            *args, deterministic=True, add_bn=True
        ),
        "NestedWrappedModule": lambda: fsdp.NestedWrappedModule.init(*args, deterministic=True),
        "AlwaysWrapNestedWrappedModule": lambda: fsdp.AlwaysWrapNestedWrappedModule.init(
            *args, deterministic=True
        ),
        "NonUniformReqGradNWM": lambda: fsdp.NonUniformReqGradNWM.init(*args, deterministic=True),
        "MLP": lambda: seeded(lambda: rows(fsdp.MLP(7), (5, 7))),
        "MLP, buffer": lambda: seeded(lambda: rows(fsdp.MLP(7, with_buffer=True), (5, 7))),
        "MLPStack": lambda: seeded(lambda: rows(fsdp.MLPStack(6), (5, 6))),
        "DoubleLinear": lambda: seeded(lambda: rows(fsdp.DoubleLinear(6), (5, 6))),
        "SkipModel": lambda: seeded(lambda: rows(fsdp.SkipModel(double_nest=True), (5, 10))),
    }


def _random(shape):
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return torch.rand(shape, generator=generator)


def _total(output):
    outputs = output if isinstance(output, tuple) else (output,)
    return sum((part - 1).pow(2).sum() for part in outputs)


def train(model, module, optimizer):
    losses = []
    for _ in range(STEPS):
        inputs = module.get_input(torch.device("cpu"))
        loss = module.get_loss(inputs, model(*inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def compared(rank, frac):
    """By model: the largest relative difference of a loss, and that of the update."""
    found = {}
    for name, make in models().items():
        start = make()
        reference = make()
        trained = [p for p in reference.parameters() if p.requires_grad]
        losses = train(
            DistributedDataParallel(
                reference, find_unused_parameters=True, broadcast_buffers=False
            ),
            reference,
            torch.optim.AdamW(trained, foreach=False, **ADAM),
        )
        module = make()
        model = GeminiDDP(
            module,
            precision="fp32",
            placement_policy=StaticPlacement(frac),
            min_chunk_size_m=100 / 2**20,
            search_range_m=0,
        )
        ours = train(model, module, HybridAdam(model.parameters(), **ADAM))
        state = model.state_dict()
        worst = max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True))
        if state:
            theirs = reference.state_dict()
            moved = {n: p.detach() for n, p in start.named_parameters() if p.requires_grad}
            want = torch.cat([(theirs[n] - p).flatten() for n, p in moved.items()])
            got = torch.cat([(state[n] - p).flatten() for n, p in moved.items()])
            worst = max(worst, float((got - want).norm() / want.norm()))
        found[name] = worst
    return found


@pytest.mark.parametrize("frac", [1.0, 0.0], ids=["zero3", "zero2"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_models_of_fsdps_tests_train_as_under_ddp(world_size, frac):
    for found in run_ranks(compared, world_size, frac, processes=True):
        assert len(found) == 10
        assert {name: worst for name, worst in found.items() if not worst < BOUND} == {}
