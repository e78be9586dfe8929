"""Training loops as people write them for torch, by name; `sides.py` runs them twice."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support.loops.sides import Net, batch, loss_of

STEPS, PARTS = 3, 2


def unwrapped(model):
    """The module inside, or the module itself: what a loop reaches for."""
    return getattr(model, "module", model)


def no_sync(model):
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def stepping(backwards, steps=STEPS):
    """A loop of steps: `backwards(model, step)` makes the gradients of one."""

    def loop(model, optimizer):
        for step in range(steps):
            backwards(model, step)
            optimizer.step()
            optimizer.zero_grad()

    return loop


def accumulating(part, change=lambda model, step: None):
    """`PARTS` backwards a step: `part(model, seed)` gives the loss; then `change(model, step)`."""

    def backwards(model, step):
        for k in range(PARTS):
            part(model, step + 10 * k).backward()
        change(model, step)

    return stepping(backwards)


# -- operators in place on what the wrapper returned -----------------------------------------


class Loss(Net):
    """Returns its loss, 0-d."""

    def forward(self, x):
        return super().forward(x).float().pow(2).mean()


class Output(Net):
    """Returns a dictionary with its loss and more."""

    def forward(self, x):
        y = super().forward(x)
        return {"loss": y.float().pow(2).mean(), "logits": y, "rows": y[1:]}


def changed(in_place, out_of_place, of):
    """Two loops, which must have the same gradients."""

    def make(change):
        def part(model, seed):
            found = of(model(batch(seed)[0]))
            return change(found)

        return accumulating(part)

    return make(in_place), make(out_of_place)


def _divided(t):
    t /= 2
    return t


def _multiplied(t):
    t *= 3
    return t


def _added(t):
    t += t.detach().abs()
    return t


def _scaled_twice(t):
    t.mul_(2).div_(7)
    return t


_PAIRS = {
    "/=": (_divided, lambda t: t / 2),
    "*=": (_multiplied, lambda t: t * 3),
    "+=": (_added, lambda t: t + t.detach().abs()),
    "twice": (_scaled_twice, lambda t: t * 2 / 7),
}
_HOLDERS = {
    "a loss": (Loss, lambda out: out, lambda t: t),
    "logits": (Net, lambda out: out, lambda t: t.float().pow(2).mean()),
    "a loss in a dict": (Output, lambda out: out["loss"], lambda t: t),
    "logits in a dict": (Output, lambda out: out["logits"], lambda t: t.float().pow(2).mean()),
    "a view": (Output, lambda out: out["rows"], lambda t: t.float().pow(2).mean()),
}
LOOPS = {}
BUILDS = {}
for _operator, (_in, _out) in _PAIRS.items():
    for _holder, (_build, _of, _reduce) in _HOLDERS.items():
        _loops = changed(
            lambda t, f=_in, r=_reduce: r(f(t)), lambda t, f=_out, r=_reduce: r(f(t)), _of
        )
        for _kind, _loop in zip(("in place", "out of place"), _loops, strict=True):
            _name = f"{_kind} {_operator} on {_holder}"
            LOOPS[_name], BUILDS[_name] = _loop, _build


# -- backwards that do not begin at an output of the root ------------------------------------


def inner_module(model, seed):
    return loss_of(unwrapped(model), seed)


def from_a_hook(model, optimizer):
    seen = {}
    unwrapped(model).layers[1].register_forward_hook(lambda m, a, out: seen.update(h=out))

    def part(model, seed):
        model(batch(seed)[0])
        return seen["h"].pow(2).mean()

    accumulating(part)(model, optimizer)


class Out:
    def __init__(self, value):
        self.value = value


class OwnOutput(Net):
    """Returns an object of the user's own."""

    def forward(self, x):
        return Out(super().forward(x))


def own_output(model, seed):
    x, y = batch(seed)
    return (model(x).value.float() - y).pow(2).mean()


def of_submodule(model, layer, step):
    return unwrapped(model).layers[layer](batch(step)[0]).pow(2).mean()


def submodule_first(model, step):
    of_submodule(model, 0, step).backward()
    loss_of(model, step).backward()


def submodule_last(model, step):
    loss_of(model, step).backward()
    of_submodule(model, 2, step).backward()


def submodule_alone(model, step):
    """The other parameters have no gradient, and stay."""
    of_submodule(model, 1, step).backward()


def both_in_one(model, seed):
    return loss_of(model, seed) + of_submodule(model, 1, seed)


def penalty(model):
    return 0.05 * sum(p.pow(2).sum() for p in model.parameters())


def penalty_first(model, step):
    penalty(model).backward()
    loss_of(model, step).backward()


def penalty_beside(model, seed):
    return loss_of(model, seed) + penalty(model)


LOOPS |= {
    "inner module": accumulating(inner_module),
    "from a hook": from_a_hook,
    "an output of the user's own": accumulating(own_output),
    "submodule first": stepping(submodule_first),
    "submodule last": stepping(submodule_last),
    "submodule alone": stepping(submodule_alone),
    "submodule and root in one": accumulating(both_in_one),
    "penalty first": stepping(penalty_first),
    "penalty beside": accumulating(penalty_beside),
    "penalty alone": stepping(lambda model, step: penalty(model).backward()),
}
BUILDS["an output of the user's own"] = OwnOutput


# -- .grad -----------------------------------------------------------------------------------


def every(change):
    """`change(model, step)` between the last backward and the step."""
    return accumulating(loss_of, change)


def none_for_all(model, optimizer):
    for step in range(STEPS):
        loss_of(model, step + 40).backward()  # a bad batch
        for p in model.parameters():
            p.grad = None
        for k in range(PARTS):
            loss_of(model, step + 10 * k).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None


def none_for_one(model, step):
    unwrapped(model).layers[step].weight.grad = None


def none_between(model, step):
    loss_of(model, step).backward()
    unwrapped(model).layers[1].weight.grad = None
    loss_of(model, step + 10).backward()


def deleted(model, step):
    del unwrapped(model).layers[1].bias.grad


def assigned(model, step):
    for p in model.parameters():
        p.grad = p.grad.sign() * 0.1


def assigned_to_what_has_none(model, step):
    for i, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + i)
        p.grad = torch.randn(p.shape, generator=generator)
    if step == 1:
        loss_of(model, step).backward()


def scaled(model, step):
    for p in model.parameters():
        p.grad *= 0.25


def scaled_up(model, step):
    for p in model.parameters():
        p.grad.mul_(3.0)


def scaled_apart(model, step):
    for i, p in enumerate(model.parameters()):
        p.grad.div_(i + 1)


def scaled_between(model, step):
    loss_of(model, step).backward()
    for p in model.parameters():
        p.grad *= 0.5
    loss_of(model, step + 10).backward()


def noisy(model, step):
    for i, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + i)
        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)


def clipped_and_scaled(model, step):
    clip_grad_norm_(model.parameters(), 0.3)
    for p in model.parameters():
        p.grad.clamp_(-0.01, 0.02)
        p.grad *= 2


def cleaned(model, step):
    for p in model.parameters():
        torch.nan_to_num_(p.grad, nan=0.0)
        assert bool(p.grad.isfinite().all())


def zeroed(model, step):
    unwrapped(model).layers[0].weight.grad.zero_()


def spoilt_and_cleared(model, step):
    """A gradient that is not finite and then gone, or zero, holds nothing up."""
    layers = unwrapped(model).layers
    for param in (layers[0].weight, layers[1].weight):
        param.grad[0] = float("nan")
    layers[0].weight.grad.zero_()
    layers[1].weight.grad = None


def total_norm(model, step):
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.2, norm)


def by_hand(model, step):
    norm = math.sqrt(sum(float(p.grad.data.norm(2)) ** 2 for p in model.parameters()))
    for p in model.parameters():
        p.grad.data.mul_(min(1.0, 0.2 / (norm + 1e-6)))


def accumulated_quietly(model, step):
    with no_sync(model):
        loss_of(model, step).backward()
    loss_of(model, step + 10).backward()
    clip_grad_norm_(model.parameters(), 0.3)


def only_quietly(model, step):
    with no_sync(model):
        loss_of(model, step).backward()
    clip_grad_norm_(model.parameters(), 0.3)


def own_descent(model, optimizer):
    """No optimizer at all."""
    for step in range(STEPS):
        loss_of(model, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad
                p.grad = None


# -- weights that are frozen at first --------------------------------------------------------


class HalfFrozen(Net):
    """Only its last layer is trained at first."""

    def __init__(self, depth=3):
        super().__init__(depth)
        self.layers[:-1].requires_grad_(False)


def unfrozen_one_by_one(model, step):
    """The optimizer has all parameters from the beginning."""
    if step in (2, 4):
        unwrapped(model).layers[2 - step // 2].requires_grad_(True)
    loss_of(model, step).backward()
    clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.3)


def unfrozen_between_micro_batches(model, step):
    loss_of(model, step).backward()
    unwrapped(model).layers[0].weight.requires_grad_(step >= 2)
    loss_of(model, step + 10).backward()


def unfrozen_for_a_submodule(model, step):
    loss_of(model, step).backward()
    unwrapped(model).layers[0].requires_grad_(True)
    of_submodule(model, 0, step).backward()


def adversaries(model, step):
    """Halves of a model that are frozen in turn."""
    layers = unwrapped(model).layers
    layers[0].requires_grad_(step % 2 == 0)
    layers[2].requires_grad_(step % 2 == 1)
    loss_of(model, step).backward()


_UNFROZEN = {
    "unfrozen one by one": stepping(unfrozen_one_by_one, 2 * STEPS),
    "unfrozen between micro-batches": stepping(unfrozen_between_micro_batches, 2 * STEPS),
    "unfrozen for a submodule": stepping(unfrozen_for_a_submodule),
}
LOOPS |= _UNFROZEN | {"adversaries": stepping(adversaries, 2 * STEPS)}
BUILDS |= dict.fromkeys(_UNFROZEN, HalfFrozen)

LOOPS |= {
    f"clip by norm {order:g}": every(
        lambda m, s, order=order: clip_grad_norm_(m.parameters(), 0.2, order)
    )
    for order in (1.0, 2.0, 3.0, math.inf)
}
LOOPS |= {
    "clip by value": every(lambda m, s: clip_grad_value_(m.parameters(), 0.005)),
    "clip by total norm": every(total_norm),
    "clip by hand": every(by_hand),
    "clip, clamp and scale": every(clipped_and_scaled),
    "None for all": none_for_all,
    "None for one": every(none_for_one),
    "None between backwards": stepping(none_between),
    "grad deleted": every(deleted),
    "grad assigned": every(assigned),
    "grad assigned to what has none": stepping(assigned_to_what_has_none),
    "grad scaled": every(scaled),
    "grad scaled up": every(scaled_up),
    "grads scaled apart": every(scaled_apart),
    "grads scaled between backwards": stepping(scaled_between),
    "grads with noise": every(noisy),
    "grads cleaned": every(cleaned),
    "grad zeroed": every(zeroed),
    "grads not finite, and cleared": every(spoilt_and_cleared),
    "no_sync, then clip": stepping(accumulated_quietly),
    "no_sync alone, then clip": stepping(only_quietly),
    "a descent by hand": own_descent,
}
