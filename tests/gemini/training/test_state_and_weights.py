"""Optimizer state that is loaded moves no weight, whatever precision masters have."""

import copy
import logging

import pytest
import torch

from bench.shared.models import token_loss
from tests.support.loops.tails import batches, differences, everything, wrapped


def train(model, optimizer, count=1):
    for batch in batches(count):
        token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["resident", "nvme"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_state_of_other_weights_leaves_these_and_says_so(precision, fraction, caplog):
    model, optimizer = wrapped("serial", fraction=fraction, precision=precision)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2)
    before = weights(model)
    with caplog.at_level(logging.WARNING, "gemini"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())
    assert ("do not round to the weights" in caplog.text) == (precision == "bf16")
    optimizer.close()


@pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["resident", "nvme"])
def test_state_of_these_weights_comes_back_to_the_last_bit_of_its_masters(fraction, caplog):
    model, optimizer = wrapped("serial", fraction=fraction, precision="bf16")
    train(model, optimizer, 2)
    saved, at_save = copy.deepcopy(optimizer.state_dict()), weights(model)
    want = everything(model, optimizer)
    train(model, optimizer, 2)
    model.load_state_dict(at_save)
    optimizer.load_state_dict(saved)
    assert differences(everything(model, optimizer), want) == []
    assert "do not round" not in caplog.text
    optimizer.close()
