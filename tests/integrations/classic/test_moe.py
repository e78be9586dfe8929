"""Layers of experts of Colossal-AI's documents: formulas, and ranks against one process."""

import copy

import pytest
import torch
from torch import nn

from bench.shared.models import seeded
from bench.shared.workers import run_ranks
from gemini.integrations.classic import initialize, moe
from gemini.integrations.config import global_context, read_config
from tests.support.plain_training import update_error

WIDTH, EXPERTS, TOKENS, STEPS, CLIP = 6, 4, 20, 3, 0.05
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}
TOLERANCE = 1.5e-6  # fp32: sums in other orders


class Ffn(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Wide(nn.Module):
    """Two layers that share a router and experts, as WideNet's, and one of its own."""

    def __init__(self, router, factor):
        super().__init__()
        self.inputs, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        shared, own = (moe.Experts(Ffn, EXPERTS, d_model=WIDTH, d_ff=5) for _ in range(2))
        self.layers = nn.ModuleList(
            moe.MoeLayer(
                dim_model=WIDTH, num_experts=EXPERTS, router=router(factor), experts=experts
            )
            for experts in (shared, shared, own)
        )

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def made(router, factor):
    with seeded():
        return Wide(router, factor)


def batch(step, place):
    draw = torch.Generator().manual_seed(100 * step + place)
    x = torch.randn(2, TOKENS // 2, WIDTH, generator=draw)
    return x, torch.randint(0, 3, (TOKENS,), generator=draw)


class Criterion(moe.MoeLoss):
    def __init__(self):
        super().__init__(aux_weight=0.01, loss_fn=nn.CrossEntropyLoss, label_smoothing=0.1)

    def forward(self, outputs, targets):
        return super().forward(outputs.flatten(0, 1), targets)


def on_ranks(rank, models, size):
    global_context.config = read_config(
        {"parallel": {"moe": {"size": size}}, "clip_grad_norm": CLIP}
    )
    model = models[rank]
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    assert len(model.layers[0].experts.up__weight) == EXPERTS
    engine = initialize(model, optimizer, Criterion())[0]
    split = getattr(model.layers[0].experts.up__weight, "_local_tensor", None)
    assert size == 1 or len(split) == EXPERTS // size
    for step in range(STEPS):
        x, targets = batch(step, rank)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), targets))
        engine.step()
    return engine.model.state_dict()


@pytest.mark.parametrize(
    ("ranks", "size", "router", "factor"),
    [(1, 1, moe.Top2Router, 1.0), (2, 2, moe.Top2Router, 0.6),
     pytest.param(2, 2, moe.Top1Router, 1.2, marks=pytest.mark.unlike),
     pytest.param(4, 2, moe.Top2Router, 0.6, marks=pytest.mark.ci)],
)  # fmt: skip
def test_experts_on_ranks_train_as_in_one_process(ranks, size, router, factor):
    """Each rank's tokens have capacities of their own, and some are dropped."""
    plain, criterion = made(router, factor), Criterion()
    start = copy.deepcopy(plain.state_dict())
    models = [made(router, factor) for _ in range(ranks)]  # threads draw from one generator
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            x, targets = batch(step, rank)
            (criterion(plain(x), targets) / ranks).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
    found, want = run_ranks(on_ranks, ranks, models, size)[0], plain.state_dict()
    assert found.keys() == want.keys()
    assert update_error(*([one[key] for key in want] for one in (found, want, start))) <= TOLERANCE


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("router", [moe.Top1Router, moe.Top2Router])
def test_an_expert_takes_its_first_tokens(router, drops):
    """First choices of all tokens come before second ones."""
    torch.manual_seed(0)
    logits = torch.randn(31, EXPERTS) + torch.tensor([2.0, 0, 0, -3])
    one = router(0.7, drop_tks=drops)
    index, weights, loss = one(logits)
    room, probs = [one.capacity(31, EXPERTS)] * EXPERTS, logits.softmax(1)
    assert room[0] % 2 == 0 and room[0] >= one.k * 0.7 * 31 // EXPERTS
    assert one.eval().capacity(31, EXPERTS) > room[0] and one.capacity(3, EXPERTS) == 4
    dropped = 0
    for k in range(one.k):
        for token in range(31):
            expert = int(logits[token].argsort(descending=True)[k])
            assert index[token, k] == expert
            room[expert] -= 1
            is_dropped = drops and room[expert] < 0
            dropped += is_dropped
            assert weights[token, k] == (0 if is_dropped else probs[token, expert])
    assert bool(dropped) == drops
    counts = torch.bincount(index.flatten(), minlength=EXPERTS) / 31
    assert torch.allclose(loss, EXPERTS * (counts * probs.mean(0)).sum() / one.k)


def test_experts_are_each_of_the_class_and_weighed():
    torch.manual_seed(0)
    experts, x = moe.Experts(Ffn, 3, d_model=WIDTH, d_ff=5), torch.randn(7, WIDTH)
    alone = []
    for i in range(3):
        one = Ffn(WIDTH, 5)
        names = {name: name.replace(".", "__") for name in one.state_dict()}
        one.load_state_dict({n: experts.state_dict()[key][i] for n, key in names.items()})
        alone.append(one(x))
    index = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2], [2, 0], [0, 2]])
    weights = torch.rand(7, 2)
    want = sum(weights[:, k, None] * torch.stack(alone, 1)[range(7), index[:, k]] for k in range(2))
    assert torch.allclose(experts(x, index, weights), want, atol=1e-6)
    assert len({value[0].flatten()[0].item() for value in experts.state_dict().values()}) == 4
    with pytest.raises(ValueError, match="BatchNorm1d has buffers"):
        moe.Experts(nn.BatchNorm1d, 2, num_features=3)


def test_a_forward_has_the_balancing_losses_of_its_layers_once():
    """Also where a layer runs again in backward."""
    model, x = made(moe.Top2Router, 2.0), batch(0, 0)[0]
    for layer in model.layers:
        layer.forward = recomputed(layer.forward)
    model(x).sum().backward()
    left = moe.MOE_CONTEXT.take()
    model(x)
    assert torch.equal(moe.MOE_CONTEXT.take(), left) and moe.MOE_CONTEXT.take() == 0
    assert 2 < left < 6


def recomputed(forward):
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(forward, x, use_reentrant=False)


def test_noise_is_of_training_alone():
    torch.manual_seed(0)
    logits = torch.zeros(50, EXPERTS)
    for noise in (moe.NormalNoiseGenerator(EXPERTS), moe.UniformNoiseGenerator()):
        router = moe.Top1Router(noisy_func=noise)
        twice = [router.eval()(logits) for _ in range(2)]
        assert all(map(torch.equal, *twice))
    router = moe.Top1Router(noisy_func=moe.NormalNoiseGenerator(EXPERTS))
    assert (
        len(router(logits)[0].unique()) == EXPERTS and len(router.eval()(logits)[0].unique()) == 1
    )
