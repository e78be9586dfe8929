"""Errors and Ctrl-C in a backward: what it left goes with zero_grad(), and the next is whole."""

import pytest
import torch
from torch import nn

from gemini import GeminiDDP
from optim import HybridAdam


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def drops_all(model, optimizer):
    model.zero_grad()


def makes_all_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def drops_its_groups_and_the_rest(model, optimizer):
    optimizer.zero_grad()
    model.first.bias.grad = None


@pytest.mark.parametrize("clear", [drops_all, makes_all_zeros, drops_its_groups_and_the_rest])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_gradient_that_an_error_left_behind_goes_with_the_others(clear, error):
    torch.manual_seed(0)
    net, plain, raises = Net(), Net(), [True]
    plain.load_state_dict(net.state_dict())

    def mine(param):  # before ours, which would have taken the gradient
        if raises and raises.pop():
            raise error("mine")

    net.last.bias.register_post_accumulate_grad_hook(mine)
    model = GeminiDDP(net, precision="fp32")
    params = list(model.parameters())
    if clear is drops_its_groups_and_the_rest:
        params = [p for p in params if p is not model.first.bias]
    optimizer = HybridAdam(params, lr=0.1)
    one, other = torch.randn(2, 3, 8)
    with pytest.raises(error, match="mine"):
        model(one).square().mean().backward()
    clear(model, optimizer)
    model(other).square().mean().backward()
    plain(other).square().mean().backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.clone(), param.grad)
