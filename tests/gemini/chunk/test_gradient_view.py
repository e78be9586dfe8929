"""What is done to `.grad` of a wrapped parameter reaches what it stands for."""

import pytest
import torch

from bench.shared.models import Tower, token_batches, token_loss
from gemini import GeminiDDP
from gemini.runtime.gradients.view import GradientView
from optim import HybridSGD


class Source:
    def __init__(self):
        self.tensor = torch.arange(1.0, 7.0).view(2, 3)

    def values(self, param):
        return self.tensor.clone()

    def norm(self, param, order):
        return torch.linalg.vector_norm(self.tensor, order, dtype=torch.float64)

    def scale(self, param, factor):
        self.tensor *= factor

    def clamp(self, param, low, high):
        self.tensor.clamp_(low, high)

    def zero(self, param):
        self.tensor.zero_()

    def assign(self, param, values):
        self.tensor = values.clone()


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def view(source):
    return GradientView(source, 0, source.tensor.shape, torch.device("cpu"))


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.mul_(3), lambda g: g.div_(4), lambda g: g.add_(1), lambda g: g.zero_(),
        lambda g: g.clamp_(2, 4), lambda g: g.clamp_min_(3), lambda g: g.clamp_max_(3),
        lambda g: g.__setitem__((0, 1), 9.0), lambda g: g.copy_(torch.ones(2, 3)),
        lambda g: torch._foreach_mul_([g], [0.5]),
    ],
)  # fmt: skip
def test_an_operator_in_place_has_the_values_that_it_has_on_a_tensor(source, view, change):
    want = source.tensor.clone()
    change(want)
    change(view)
    assert torch.equal(source.tensor, want)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_a_norm_is_that_of_the_values(source, view, order):
    assert float(torch.linalg.vector_norm(view, order)) == pytest.approx(
        float(torch.linalg.vector_norm(source.tensor, order))
    )


def test_a_part_of_it_is_a_copy_that_cannot_be_written_to(source, view):
    assert torch.equal(view[0], source.tensor[0]) and torch.equal(view + 1, source.tensor + 1)
    with pytest.raises(RuntimeError, match="a part of a gradient is a copy"):
        view[0].add_(1)


@pytest.mark.parametrize("factors", [{}, {"layers.0.1.weight": 4.0}, {"embed.weight": 0.0}])
def test_factors_on_gradients_reach_the_step(factors):
    """One for all becomes the step's, others are carried out; powers of two change no bit."""
    model, module = GeminiDDP(Tower(), precision="fp32", min_chunk_size_m=0.001), Tower()
    (batch,) = token_batches(1, 1)[0]
    for trained, optimizer in (
        (model, HybridSGD(model.parameters(), lr=0.1)),
        (module, torch.optim.SGD(module.parameters(), lr=0.1)),
    ):
        token_loss(trained, batch).backward()
        for name, param in getattr(trained, "module", trained).named_parameters():
            param.grad.mul_(0.5 * factors.get(name, 1.0))
        optimizer.step()
    for name, want in module.state_dict().items():
        assert torch.equal(model.state_dict()[name], want), name
