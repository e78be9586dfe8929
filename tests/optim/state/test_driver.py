"""A step that is driven from outside: submitted, prepared, and confirmed or undone."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from optim import HybridAdam, NvmeConfig
from optim.state.deferred_signals import DeferredSignals
from optim.state.machine import Phase
from optim.step.driver import take

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


def test_all_of_a_step_is_prepared_before_any_of_it_counts(tmp_path):
    params, optimizer = made(tmp_path)
    want, other = made(tmp_path)
    gradients(params, 1), gradients(want, 1)
    other.step()
    target, views, step = begun(optimizer)
    store, told = target.tiered_state.nvme.store, []
    assert step.phase is Phase.PASS
    step.submit()
    assert step.phase is Phase.PREPARING
    assert step.prepare(watch=told.append) is None
    assert sorted(told) == list(range(5)) and step.phase is Phase.VOTING
    assert store.committed_step == 1
    step.confirm()
    target.end(views)
    assert step.phase is Phase.PASS and store.committed_step == 2
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
    told = []

    def watch(block):
        told.append(block)
        if len(told) == prepared:
            raise KeyboardInterrupt

    if prepared:
        with suppress(KeyboardInterrupt):
            step.prepare(watch=watch)
    assert len(told) == min(prepared, step.num_blocks)
    step.undo()
    assert step.phase is Phase.PASS
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

    with DeferredSignals() as held, pytest.raises(RuntimeError, match="another rank"):
        take(steps, held, disagree)
    for (params, optimizer), olds, step in zip(both, before, steps, strict=True):
        assert step.phase is Phase.PASS
        for param, old in zip(params, olds, strict=True):
            assert torch.equal(param, old)
        optimizer.close()
