"""Several backwards before one step, in one process; several ranks in tests/dist."""

import contextlib

import pytest
import torch

from bench.shared.models import Choosy, Tower, token_batches, token_loss
from bench.shared.reference import flat, relative_error, train_reference
from bench.shared.simulated import SimBackend
from gemini import GeminiDDP
from optim import HybridAdam, HybridSGD, LossScale
from tests.support.towers import weights, wrapped

SMALL = {"min_chunk_size_m": 0.004}
SLOW = pytest.mark.ci
BOUNDS = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 1e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("precision", "num_parts", "no_sync"),
    [
        ("fp32", 4, True), ("bf16", 4, False), ("fp16", 1, False),
        pytest.param("fp32", 1, False, marks=SLOW), pytest.param("bf16", 3, True, marks=SLOW),
        pytest.param("fp16", 2, True, marks=SLOW),
    ],
)  # fmt: skip
def test_k_backwards_are_one_step_of_their_sum(precision, num_parts, no_sync, tmp_path):
    """On a simulated device with half of the state on disk, clipping on."""
    batches = token_batches(3, num_parts)
    rule = {"lr": 0.1, "momentum": 0.9}
    model, optimizer = wrapped(
        precision, SimBackend(), tmp_path, 0.5, HybridSGD, rule=rule, max_norm=0.4
    )
    for parts in batches:
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with model.no_sync() if no_sync and not last else contextlib.nullcontext():
                token_loss(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()
    start = flat(list(Tower().parameters()))
    want = train_reference(
        Tower(),
        lambda ps: torch.optim.SGD(ps, **rule),
        batches,
        token_loss,
        DTYPES[precision],
        max_norm=0.4,
        divisor=1,
    )
    assert relative_error(weights(model) - start, want - start) < BOUNDS[precision]


def test_a_parameter_that_some_parts_do_not_use_gets_the_others_gradients():
    torch.manual_seed(1)
    parts = [(torch.randn(2, 5), head) for head in (0, 1, 1, 0)]
    for precision in ("fp32", "fp16"):
        scale = LossScale(initial_scale=2.0**8) if precision == "fp16" else None
        model = GeminiDDP(Choosy(), precision=precision, loss_scale=scale, min_chunk_size_m=1e-5)
        optimizer = HybridSGD(model.parameters(), lr=0.1, weight_decay=0.1)
        plain = Choosy()
        for x, head in parts:
            for some in (model, plain):
                some(x, head).float().pow(2).sum().backward()
        names = {name for name, _ in model.named_gradients()}
        assert names == {n for n, p in plain.named_parameters() if p.grad is not None}
        torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1).step()
        optimizer.step()
        bound = 1e-6 if precision == "fp32" else 1e-2
        for name, want in plain.named_parameters():
            start = Choosy().get_parameter(name).detach().double()
            got = model.state_dict()[name].double()
            if name.startswith("heads.2"):
                assert torch.equal(got, start)
            else:
                assert relative_error(got - start, want.detach().double() - start) < bound


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


def test_zero_grad_to_zeros_lets_momentum_go_on():
    (batch,) = token_batches(1, 1)
    results = []
    for some in (Tower(), GeminiDDP(Tower(), precision="fp32", **SMALL)):
        cls = HybridSGD if isinstance(some, GeminiDDP) else torch.optim.SGD
        optimizer = cls(some.parameters(), lr=0.1, momentum=0.9)
        token_loss(some, batch[0]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        state = some.state_dict()
        results.append(flat([state[name] for name, _ in Tower().named_parameters()]))
    assert torch.equal(results[0], results[1])


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
