"""Plain parameters of odd sizes, gradients for them, and a loop, for tests of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim import HybridAdam, HybridSGD, NvmeConfig

PAIRS: list[Any] = [
    (HybridAdam, torch.optim.AdamW, {}),
    (HybridSGD, torch.optim.SGD, {"momentum": 0.9}),
]
BY_CLASS = pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS, ids=["adam", "sgd"])
ON_DISK = pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])  # of the state
ODD = [(1,), (3,), (17,), (1023,), (1025,), (67, 977), (7, 11, 13)]


def on_disk(folder: Any, fraction: float) -> dict[str, Any]:
    """Options of an optimizer with this share of its state in small blocks of a folder."""
    small = NvmeConfig(block_numel=1024)
    return {"nvme_offload_fraction": fraction, "nvme_offload_dir": folder, "nvme": small}


def make_params(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = ODD
) -> list[nn.Parameter]:
    """The same values every time."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(
    params: Sequence[Tensor], step: int, skip: Collection[int] = (), scale: float = 1.0
) -> None:
    """Those of a step; of seven magnitudes. `skip`: parameters that get none."""
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator)
        p.grad = None if i in skip else (grad * 10 ** (i - 3) * scale).to(p.dtype)


def train(
    params: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int = 10,
    skip: Callable[[int], Collection[int]] = lambda step: (),
    first: int = 0,
    shrink: float = 1.0,
) -> list[Tensor]:
    """Copies of the parameters after steps [first, first + steps).

    Gradients are `shrink` times smaller from step to step.
    """
    for step in range(first, first + steps):
        give_gradients(params, step, skip(step), shrink**step)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in params]


def update_error(got: Sequence[Tensor], want: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """||got - want|| / ||want - start||."""

    def moved(params: Sequence[Tensor]) -> Tensor:
        pairs = zip(params, start, strict=True)
        return torch.cat([(a - b).detach().flatten().double() for a, b in pairs])

    return float((moved(got) - moved(want)).norm() / moved(want).norm())


def check_undone_step(
    make: Callable[[], list[nn.Parameter]], options: dict[str, Any], monkeypatch: Any
) -> None:
    """A step whose third write fails changes no bit, and goes through when it is taken again."""
    params = make()
    optimizer = HybridAdam(params, **options)
    train(params, optimizer, 2)
    before = [p.detach().clone() for p in params]
    give_gradients(params, 2)
    store = optimizer.targets[0].tiered_state.nvme.store
    inner, calls = store.write, []

    def fails_at_the_third(block: int, buffer: memoryview) -> Any:
        calls.append(block)
        if len(calls) == 3:
            raise OSError("on purpose")
        return inner(block, buffer)

    with monkeypatch.context() as patched:
        patched.setattr(store, "write", fails_at_the_third)
        with pytest.raises(OSError, match="on purpose"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    others = make()
    want = train(others, HybridAdam(others), 3)
    got = train(params, optimizer, 1, first=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
