"""A step that is driven from outside, block by block."""

import pytest
import torch
from torch import nn

from optim import HybridAdam, NvmeConfig
from optim.state.held_signals import HeldSignals
from optim.step.driver import Stage, take

NUMELS = (3000, 1500)  # six blocks of at most 1024 elements


def made(folder, fraction=1.0):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(numel)) for numel in NUMELS]
    optimizer = HybridAdam(
        params,
        lr=1e-2,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=folder,
        nvme=NvmeConfig(block_numel=1024),
    )
    gradients(params, 0)
    optimizer.step()
    return params, optimizer


def gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def begun(optimizer):
    (target,) = optimizer.targets
    views, hypers = target.views(optimizer.param_groups)
    return target, views, target.begin(views, hypers, None)


def copies(params):
    return [param.detach().clone() for param in params]


def counts(step):
    found = list(step.stages.values())
    return {stage: found.count(stage) for stage in Stage if stage in found}


def test_blocks_go_through_their_stages_one_by_one(tmp_path):
    params, optimizer = made(tmp_path)
    want, other = made(tmp_path)
    gradients(params, 1), gradients(want, 1)
    other.step()
    target, views, step = begun(optimizer)
    assert step.stages == {}
    step.submit()
    for prepared in range(1, 6):
        assert step.prepare_next()
        assert counts(step) == (
            {Stage.SUBMITTED: 5 - prepared, Stage.PREPARED: prepared}
            if prepared < 5
            else {Stage.PREPARED: 5}
        )
        torch.randn(10).sort()  # who drives does something else
    assert not step.has_more and not step.prepare_next()
    step.settle()
    step.confirm()
    target.end(views)
    assert counts(step) == {Stage.CONFIRMED: 5}
    for param, expected in zip(params, want, strict=True):
        assert torch.equal(param, expected)
    optimizer.close(), other.close()


@pytest.mark.parametrize("prepared", [0, 1, 3, 5])
def test_what_is_undone_leaves_weights_and_state_as_they_were(prepared, tmp_path):
    params, optimizer = made(tmp_path, fraction=0.8)
    want, other = made(tmp_path, fraction=0.8)
    before = copies(params)
    gradients(params, 1)
    _, _, step = begun(optimizer)
    step.submit()
    for _ in range(prepared):
        step.prepare_next()
    step.undo()
    assert set(step.stages.values()) == {Stage.UNDONE}
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old)
    gradients(params, 2), gradients(want, 2)
    optimizer.step(), other.step()  # as if there had been no such step
    for param, expected in zip(params, want, strict=True):
        assert torch.equal(param, expected)
    optimizer.close(), other.close()


def test_who_disagrees_undoes_the_step_of_all(tmp_path):
    both = [made(tmp_path) for _ in range(2)]
    before = [copies(params) for params, _ in both]
    for params, _ in both:
        gradients(params, 1)
    steps = [begun(optimizer)[2] for _, optimizer in both]

    def disagree(error):
        assert error is None
        raise RuntimeError("another rank failed")

    with HeldSignals() as held, pytest.raises(RuntimeError, match="another rank"):
        take(steps, held, disagree)
    for (params, optimizer), olds, step in zip(both, before, steps, strict=True):
        assert set(step.stages.values()) == {Stage.UNDONE}
        for param, old in zip(params, olds, strict=True):
            assert torch.equal(param, old)
        optimizer.close()
