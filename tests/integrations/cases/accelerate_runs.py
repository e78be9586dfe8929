"""One loop of accelerate's, over a plain and a sharded model, and what it saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared.models import seeded

RATE, CLIP = 0.1, 0.2
SMALL = {"min_chunk_size_m": 100 / 2**20, "search_range_m": 100 / 2**20}


class Net(nn.Module):
    """Odd sizes; several chunks where they are small."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
            self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(50, 9, generator=generator)  # no multiple of a batch
        self.y = torch.randn(50, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Counted:
    """What a user registers for checkpointing."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@dataclass
class Seen:
    """fp64 tensors, one figure a step or batch."""

    losses: Tensor
    norms: Tensor
    rates: Tensor
    evaluated: Tensor


def difference(got: Seen, want: Seen) -> float:
    """The largest relative difference of any figure."""
    pairs = [(getattr(got, name), getattr(want, name)) for name in vars(want)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float(((a - b).abs() / b.abs().clamp(min=1e-9)).max()) for a, b in pairs if len(b))


def reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def reset_but_ranks() -> None:
    """For another accelerator on the same ranks."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(False)
    GradientState._reset_state()


def plain(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, gradient_accumulation_steps=2, **options)


def ours(gemini: dict[str, Any] | None = None, **options: Any) -> Any:
    from gemini.integrations.accelerate import GeminiAccelerator

    return GeminiAccelerator(
        cpu=True, gradient_accumulation_steps=2, gemini={**SMALL, **(gemini or {})}, **options
    )


def net_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, eps=1.0)


def prepared(accelerator: Any, order: tuple[int, ...] = (0, 1, 2, 3), batch: int = 4) -> list[Any]:
    """Model, optimizer, loader and schedule, given to `prepare` in this order."""
    model, optimizer = net_and_optimizer()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=batch, shuffle=False)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    parts = [model, optimizer, loader, schedule]
    found = accelerator.prepare(*(parts[i] for i in order))
    return [found[order.index(i)] for i in range(4)]


def loop(accelerator: Any, order: tuple[int, ...] = (0, 1, 2, 3), **options: Any) -> Seen:
    return train(accelerator, *prepared(accelerator, order), **options)


def train(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    schedule: Any,
    *,
    clip: str = "norm",
    by_hand: bool = False,
) -> Seen:
    """One epoch with accumulation over 2, and an evaluation.

    by_hand: with `no_sync`, and not `accumulate`.
    """
    losses, norms, rates = [], [], []
    model.train()
    for i, (x, y) in enumerate(loader):
        last = i % 2 == 1 or i == len(loader) - 1
        if by_hand:
            accelerator.gradient_state._set_sync_gradients(last)
            context = accelerator.no_sync(model) if not last else torch.enable_grad()
        else:
            context = accelerator.accumulate(model)
        with context:
            loss = (model(x).float() - y).pow(2).mean()
            accelerator.backward(loss)
            losses.append(accelerator.gather(loss.detach()).double().mean())
            if accelerator.sync_gradients and clip == "norm":
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
            elif accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append(schedule.get_last_lr()[0])
    model.eval()
    evaluated = []
    for x, y in loader:
        with torch.no_grad():
            error = (model(x).float() - y).pow(2).mean(dim=1)
        evaluated.append(accelerator.gather_for_metrics(error).double())
    assert sum(map(len, evaluated)) == len(Rows())
    return Seen(
        torch.stack(losses),
        torch.tensor([float(norm) for norm in norms], dtype=torch.float64),
        torch.tensor(rates, dtype=torch.float64),
        torch.cat(evaluated),
    )
