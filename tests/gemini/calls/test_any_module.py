"""Parameters wherever they are used: every module trains as in plain torch, on poisoned memory.

The simulated device fills what is released with NaN, so a read of a released parameter shows.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.shared.reference import flat, relative_error
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP
from optim import HybridSGD

STEPS = 3


def vector(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Base(nn.Module):
    """Layers that push each other out, and odd ones whose weights others use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.other = nn.Linear(24, 24)

    def body(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def uses(function):
    """A module whose forward is `function(self, x)`, with the layers above."""
    return type(function.__name__, (Base,), {"forward": function})


def x_at_p_t(self, x):
    return self.body(x @ self.other.weight.T)


def m_t(self, x):
    return self.body(torch.matmul(x, self.other.weight.mT))


def view_kept_over_an_eviction(self, x):
    w = self.other.weight.T
    return self.body(self.body(x) @ w) @ w


def view_of_a_view(self, x):
    w = self.other.weight.view(2, 12, 24)[1].t().contiguous()
    rows = self.other.weight.view(2, 12, 24)[0]
    return self.body(x)[:, :12] @ rows + (x @ w).mean()


def split_and_unbind(self, x):
    a, b = self.other.weight.chunk(2)
    y = self.body(x)
    return torch.cat([y @ a.T, y @ b.T], 1) + sum(row.sum() for row in self.other.weight.unbind())


def scalars_with_a_parameter(self, x):
    p = self.other.weight
    return self.body(x) * ((1 - p).mean() + (1 / (p.abs() + 1)).mean() + (2**p).mean())


def einsum(self, x):
    return self.body(torch.einsum("bi,oi->bo", x, self.other.weight))


def stack_of_parameters(self, x):
    both = torch.stack([self.other.weight, self.layers[0].weight])
    return self.body(x) @ both.sum(0)


def functional_linear(self, x):
    return F.linear(self.body(x), self.other.weight, self.layers[2].bias)


def weight_only_chain(self, x):
    return self.body(x) * torch.relu(self.other.weight @ self.layers[1].weight).mean()


def dict_and_view_outputs(self, x):
    return self.body(x) + self.body(x).sum() * self.other.weight.detach().mean()


OPERATORS = [
    x_at_p_t, m_t, view_kept_over_an_eviction, view_of_a_view, split_and_unbind,
    scalars_with_a_parameter, einsum, stack_of_parameters, functional_linear, weight_only_chain,
    dict_and_view_outputs,
]  # fmt: skip


class ReturnsItsView(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self):
        return self.inner.weight.T


class ViewFromAModule(Base):
    def __init__(self):
        super().__init__()
        self.source = ReturnsItsView()

    def forward(self, x):
        w = self.source()
        return self.body(self.body(x) @ w)


class PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class CustomFunction(Base):
    """The function's weight is of the module that is running, as its author expects."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24) / 5)

    def forward(self, x):
        return self.body(PassThrough.apply(self.body(x), self.weight))


class Reused(Base):
    def forward(self, x):
        return self.other(self.body(self.other(self.body(self.other(x)))))


class TiedThrice(Base):
    def __init__(self):
        super().__init__()
        self.layers[3].weight = self.other.weight
        self.layers[1].weight = self.other.weight

    def forward(self, x):
        return self.other(self.body(x))


class Checkpointed(Base):
    reentrant = False

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x,
                               use_reentrant=self.reentrant)  # fmt: skip
        return self.other(x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class UsedInTwoReentrantRegionsAndOutside(Base):
    def forward(self, x):
        x = x * 1.0
        y = checkpoint(lambda t: self.body(self.other(t)), x, use_reentrant=True)
        z = checkpoint(lambda t: torch.tanh(self.other(self.body(t))), y, use_reentrant=True)
        return self.other(z) + x @ self.other.weight


class EarlyStop(Base):
    """What is recomputed stops before the last layer's output is made again."""

    def forward(self, x):
        def block(t):
            return self.layers[1](torch.tanh(self.layers[0](t)))

        return self.other(self.body(checkpoint(block, x, use_reentrant=False)))


class Attention(Base):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x):
        x = self.body(x)[None]
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(Base):
    def __init__(self):
        super().__init__()
        self.cell, self.lstm = nn.GRUCell(24, 24), nn.LSTM(24, 12, num_layers=2)

    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(3):
            state = self.cell(self.body(x), state)
        return self.lstm(state)[0]


class Parametrized(Base):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.layers[1])
        nn.utils.parametrizations.orthogonal(self.other)

    def forward(self, x):
        return self.other(self.body(x))


class BatchNormed(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x):
        return self.norm(self.body(x))


class NestedOwner(nn.Module):
    """Parameters of its own around children."""

    def __init__(self, depth=3):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24) * 1.1)
        self.child = NestedOwner(depth - 1) if depth else nn.Linear(24, 24)
        self.after = nn.Linear(24, 24)

    def forward(self, x):
        return self.after(torch.tanh(self.child(x * self.scale))) * self.scale


class FrozenParts(Base):
    def __init__(self):
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[3].weight.requires_grad_(False)

    def forward(self, x):
        return self.other(self.body(x))


class LossInside(Base):
    def forward(self, x):
        loss = self.other(self.body(x)).pow(2).mean()
        loss /= 2
        return loss


MODULES = [
    ViewFromAModule, CustomFunction, Reused, TiedThrice, Checkpointed, CheckpointedReentrant,
    UsedInTwoReentrantRegionsAndOutside, EarlyStop, Attention, Recurrent, Parametrized, BatchNormed,
    NestedOwner, FrozenParts, LossInside,
]  # fmt: skip


def loss_of(output):
    loss = output.pow(2).mean() if output.ndim else output
    loss /= 3  # in place, on what the wrapper returned
    return loss


def batch(step):
    return vector(4, 24, seed=step).requires_grad_()


def train_plain(module):
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.3)
    for step in range(STEPS):
        loss_of(module(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(list(module.parameters()))


def train_wrapped(module, backend, **options):
    model = GeminiDDP(module, backend, precision="fp32", min_chunk_size_m=0.0006, **options)
    optimizer = HybridSGD(model.parameters(), lr=0.3)
    for step in range(STEPS):
        loss = loss_of(model(batch(step)))
        assert torch.isfinite(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.summon_full_params():
        return flat(list(module.parameters())), model


def compare(make):
    torch.manual_seed(0)
    module = make()
    start = flat(list(module.parameters()))
    want = train_plain(copy.deepcopy(module))
    for seed in range(2):
        got, model = train_wrapped(copy.deepcopy(module), SimBackend(seed), max_prefetch=seed)
        assert relative_error(got - start, want - start) < 1e-6
        assert model.engine.manager.gathers_of.total() > STEPS * len(model.engine.chunks)
    got, _ = train_wrapped(module, "cpu")
    assert relative_error(got - start, want - start) < 1e-6


@pytest.mark.parametrize("function", OPERATORS, ids=lambda f: f.__name__)
def test_operators_on_parameters_outside_their_module(function):
    compare(uses(function))


@pytest.mark.parametrize("make", MODULES, ids=lambda m: m.__name__)
def test_modules_train_as_in_torch(make):
    compare(make)


@pytest.mark.parametrize(
    "make", [Reused, Checkpointed, x_at_p_t, Attention], ids=lambda m: m.__name__
)
def test_evaluation_in_inference_mode(make):
    torch.manual_seed(0)
    module = make() if isinstance(make, type) else uses(make)()
    x = vector(4, 24)
    want = module(x)
    model = GeminiDDP(module, SimBackend(3), precision="fp32", min_chunk_size_m=0.0006)
    for mode in (torch.inference_mode, torch.no_grad):
        for _ in range(3):
            with mode():
                assert torch.allclose(model(x), want, atol=1e-6)


def test_numpy_gets_values_of_its_own():
    module = uses(x_at_p_t)()
    want = module.other.weight.detach().clone()
    model = GeminiDDP(module, SimBackend(), precision="fp32", min_chunk_size_m=0.0006)
    array = module.other.weight.detach().numpy()
    model.engine.manager.release_all()
    assert np.array_equal(array, want.numpy())


def test_double_backward_is_refused():
    model = GeminiDDP(Reused(), precision="fp32")
    x = batch(0)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss_of(model(x)), x, create_graph=True)


class Recorder(nn.Module):
    """Keeps how often it ran, to see that hooks do not run modules twice."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(24, 24), 0

    def forward(self, x, twice):
        self.calls += 1
        y = self.linear(x)
        return self.linear(y) if twice else y


def test_control_flow_that_changes_between_iterations():
    torch.manual_seed(0)
    plain = Recorder()
    model = GeminiDDP(copy.deepcopy(plain), SimBackend(), precision="fp32",
                      min_chunk_size_m=0.0006)  # fmt: skip
    optimizer = HybridSGD(model.parameters(), lr=0.3)
    reference = torch.optim.SGD(plain.parameters(), lr=0.3)
    for step, twice in enumerate([True, True, False, True, False, False]):
        rows = 4 if step != 3 else 1  # a shorter batch
        loss_of(model(batch(step)[:rows], twice)).backward()
        loss_of(plain(batch(step)[:rows], twice)).backward()
        for opt in (optimizer, reference):
            opt.step()
            opt.zero_grad()
    with model.summon_full_params():
        assert torch.allclose(flat(list(model.parameters())), flat(list(plain.parameters())),
                              rtol=1e-6)  # fmt: skip
    assert model.module.calls == 6
