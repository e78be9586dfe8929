"""Plain optimizers walked on a device that is not the CPU and holds no data.

Every operator refuses tensors of two devices, so a table, a gradient or a scalar that was made on
the host and given to the device's shows without a GPU.
"""

import pytest
import torch
from torch import nn

from optim import HybridAdam, HybridLion, HybridSGD
from optim.plain.views import Order

META = torch.device("meta")


def layers():
    return nn.Sequential(nn.Linear(33, 77), nn.Tanh(), nn.Linear(77, 33))


def walk(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(5, 33, device=META)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [HybridAdam, HybridLion, HybridSGD])
def test_a_plain_optimizer_stays_on_its_device(make, monkeypatch):
    monkeypatch.setattr(make, "check_param", lambda self, param: None)  # that it has no values
    monkeypatch.setattr("optim.binding._check_made", lambda params: None)
    module = layers().to(META)
    walk(module, make(module.parameters(), lr=1e-3))


def test_a_gradient_in_another_order_is_copied_on_its_own_device():
    """To the CPU, and its address given to a kernel, once."""
    param = torch.empty(8, 4, device=META)
    assert Order.of(param).flat(torch.empty(4, 8, device=META).t()).device == META


def test_strides_of_dimensions_of_one_element_are_no_other_order():
    """A 1x1 convolution in channels_last: nothing is copied."""
    param = torch.empty_strided((8, 4, 1, 1), (4, 1, 4, 4))
    grad = torch.randn(8, 4, 1, 1)
    assert grad.stride() != param.stride()
    assert Order.of(param).flat(grad).data_ptr() == grad.data_ptr()
