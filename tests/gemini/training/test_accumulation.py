"""Several backwards before one step, in one process; several ranks in tests/dist."""

import contextlib

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from bench.shared.reference import flat, relative_error
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP
from optim import HybridAdam, HybridSGD, LossScale
from tests.support.towers import weights

SMALL = {"min_chunk_size_m": 0.004}
SLOW = pytest.mark.ci


@SLOW
def test_gradients_that_outlive_their_step_are_carried_to_the_new_scale():
    """As in torch: without zero_grad the next backward adds to what there is."""
    options = LossScale(initial_scale=2.0**12, growth_interval=1)
    (first,), (second,) = token_batches(2, 1)
    for device in ("cpu", SimBackend(updates_by_triton=True)):
        model = GeminiDDP(Tower(), device, precision="fp16", loss_scale=options)
        optimizer = HybridSGD(model.parameters(), lr=0.0)
        token_loss(model, first).backward()
        alone = dict(model.named_gradients())
        optimizer.step()
        token_loss(model, second).backward()
        both = dict(model.named_gradients())
        optimizer.step()
        assert optimizer.last_report.loss_scale == 2.0**13
        optimizer.zero_grad()
        token_loss(model, second).backward()
        for name, grad in model.named_gradients():
            got = (both[name] - alone[name]).double()
            assert relative_error(got, grad.double()) < 2e-3  # rounded to fp16 at two scales


def test_a_step_inside_no_sync_is_refused_and_changes_nothing():
    (batch,) = token_batches(1, 1)
    model = GeminiDDP(Tower(), precision="fp32", **SMALL)
    optimizer = HybridAdam(model.parameters())
    before = weights(model)
    with model.no_sync():
        token_loss(model, batch[0]).backward()
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match="inside no_sync"):
                call()
        with pytest.raises(RuntimeError, match="inside no_sync"):
            list(model.named_gradients())
    assert torch.equal(weights(model), before)
    optimizer.step()
    other = GeminiDDP(Tower(), precision="fp32", **SMALL)
    other_optimizer = HybridAdam(other.parameters())
    token_loss(other, batch[0]).backward()
    other_optimizer.step()
    assert torch.equal(weights(model), weights(other))


@pytest.mark.ci  # the interpreter
def test_the_device_path_steps_over_gradients_of_no_sync_alone():
    (batch,) = token_batches(1, 1)
    results = []
    for no_sync in (False, True):
        device = SimBackend(updates_by_triton=True)
        model = GeminiDDP(Tower(), device, precision="fp32")
        optimizer = HybridSGD(model.parameters(), lr=0.1)
        with model.no_sync() if no_sync else contextlib.nullcontext():
            token_loss(model, batch[0]).backward()
        optimizer.step()
        results.append(weights(model))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], flat(list(Tower().parameters())))
