"""Disks that fail under parameters, gradients and state: the last completed step stays."""

import errno
import os

import pytest
import torch

import nvme
from bench.shared.models import token_batches, token_loss
from gemini import AutoPlacement
from tests.support.checkpoints import train
from tests.support.disks.faults import failing, file_size_limit, flip
from tests.support.spilled import LEAST, assert_same, wrapped

BATCHES = token_batches(3, 1)


def trained(steps):
    run = wrapped(LEAST, max_norm=0.5)
    train(*run, BATCHES[:steps])
    return run


def files_of(model):
    """The stores of parameters and of state, and what their files are called."""
    target = model.engine.target
    stores = {
        "parameters": model.engine.storage.params.store,
        "state": target.tiered_state.nvme.store,
    }
    return {name: (store, store.paths[0].name) for name, store in stores.items()}


@pytest.mark.parametrize("file", ["parameters", "state"])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_what_a_failed_step_has_written_does_not_count_with_what_is_written_next(file, call):
    """A weight that the user changes is committed by itself."""
    model, optimizer = trained(1)
    before = model.state_dict()
    store, name = files_of(model)[file]
    token_loss(model, BATCHES[1][0]).backward()
    well = store.layout.num_blocks - 1 if call == "pwritev" else 0
    with failing(call, errno.EIO, name, after=well), pytest.raises(nvme.TransferError):
        optimizer.step()
    changed = "layers.2.1.weight"
    with torch.no_grad():
        model.module.get_parameter(changed).zero_()
    optimizer.zero_grad()
    after = model.state_dict()
    for name, value in after.items():
        want = torch.zeros(()) if name == changed else before[name]
        assert torch.equal(value, want.expand_as(value)), name
    for name, value in full_weights(model):
        assert torch.equal(value, after[name].bfloat16()), name


def full_weights(model):
    """As a forward reads them from their file, where a state dict shows masters."""
    with model.summon_full_params(writeback=False):
        return [(name, p.detach().clone()) for name, p in model.module.named_parameters()]


def test_a_gradient_that_cannot_be_written_ends_the_backward_and_no_more():
    model, optimizer = trained(1)
    loss = token_loss(model, BATCHES[1][0])
    with file_size_limit(4 << 10), pytest.raises(nvme.NvmeError):
        loss.backward()
    optimizer.zero_grad()
    train(model, optimizer, BATCHES[1:2])
    assert_same((model, optimizer), trained(2))


def test_a_gradient_that_does_not_verify_fails_the_step():
    model, optimizer = trained(1)
    before = model.state_dict()
    token_loss(model, BATCHES[1][0]).backward()
    files = model.engine.storage.gradient_files.files[0]
    files.flush()
    store = files.store
    extent = store.layout.extents()[0][0]
    flip(store.paths[0], extent.offset)
    with pytest.raises(nvme.ChecksumError):
        optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    optimizer.zero_grad()
    train(model, optimizer, BATCHES[1:2])
    assert_same((model, optimizer), trained(2))


def test_a_parameter_that_cannot_be_read_is_an_error_that_says_what_is_left():
    model, _ = wrapped(AutoPlacement("176KiB"))
    spilled = [chunk for chunk in model.engine.chunks if chunk.files is not None]
    assert 0 < len(spilled) < len(model.engine.chunks)
    path = model.engine.storage.params.store.paths[0]
    size = path.stat().st_size
    data = path.read_bytes()
    os.truncate(path, 8192)
    with pytest.raises(nvme.TransferError) as info:
        model(BATCHES[0][0])
    (note,) = info.value.__notes__
    left = model.salvage()
    assert left and all(name in note for name in left if name != "head.weight")
    assert all(value.dtype == torch.bfloat16 for value in left.values())
    lost = {model.engine.layout.params[s.param].name for c in spilled for s in c.spec.slots}
    assert not lost & left.keys()
    path.write_bytes(data)  # the disk came back
    assert path.stat().st_size == size
    assert torch.isfinite(model(BATCHES[0][0])).all()
