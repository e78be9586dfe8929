"""One LightningModule and what its runs leave behind, for tests at any world size."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.shared.models import seeded
from gemini.integrations.lightning import GeminiStrategy

WIDTH = 24
ROWS = 96
BATCH = 3
# eps so large that an update shows the gradient and not its sign alone
ADAM = {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.1}
SMALL = {"min_chunk_size_m": 600 / 2**20, "search_range_m": 600 / 2**20}


class Net(LightningModule):
    """Odd sizes, a schedule by steps, and lists of what happened."""

    def __init__(self, width: int = WIDTH, **adam: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        with seeded():
            self.body = nn.Sequential(nn.Linear(width, 37), nn.Tanh(), nn.Linear(37, 31), nn.Tanh())
            self.head = nn.Linear(31, 5)
            self.adam = {**ADAM, **adam}
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.rates: list[float] = []
            self.evals: list[float] = []
            self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.rows += batch[2].tolist()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [param.grad for param in self.parameters()]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evals.append(self.loss(batch).item())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.evals.append(out.double().sum().item())
        return out

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), **self.adam)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def numbers(self) -> dict[str, list[float]]:
        return {name: getattr(self, name) for name in ("losses", "norms", "rates", "evals")}


class ByHand(Net):
    """Calls backward and steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """At several ranks gradients cannot be read inside a training step."""


class Tuned(Net):
    """Has a rate that a finder may set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.05, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=0.01)


class Later(Net):
    """Makes its layers when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        del self.body, self.head
        self.body = None
        self.was_meta: list[bool] = []

    def configure_model(self) -> None:
        if self.body is None:
            torch.manual_seed(0)
            self.body = nn.Linear(24, 31)
            self.head = nn.Linear(31, 5)
            self.was_meta.append(self.head.weight.is_meta)


class LaterAsInLightning1(Later):
    configure_model = LightningModule.configure_model

    def configure_sharded_model(self) -> None:
        Later.configure_model(self)


def loader(rows: int = ROWS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(rows, WIDTH, generator=generator),
        torch.randn(rows, 5, generator=generator),
        torch.arange(rows),
    )
    return DataLoader(data, batch_size=BATCH)


def ours(**options: Any) -> GeminiStrategy:
    """With chunks so small that there are several."""
    return GeminiStrategy(**{**SMALL, **options})


def trainer(strategy: Any, folder: Path | str, **options: Any) -> Trainer:
    """On all ranks that there are, quiet and quick."""
    warnings.filterwarnings("ignore", module="lightning")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {
        "max_steps": 4,
        "limit_val_batches": 2,
        "val_check_interval": 3,
        "limit_predict_batches": 2,
        "limit_test_batches": 2,
        "enable_checkpointing": False,
        "devices": world_size,
    }
    return Trainer(
        strategy=strategy, accelerator="cpu", default_root_dir=str(folder),
        **{**quiet, **given, **options},
    )  # fmt: skip


def as_torchrun(rank: int) -> None:
    """What torchrun tells a rank; the process group is there already."""
    os.environ.update(
        TORCHELASTIC_RUN_ID="tests",
        GROUP_RANK="0",
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29400",
    )


def close(got: Sequence[float], want: Sequence[float], rtol: float = 1e-5) -> None:
    """fp32 sums are in another order."""
    assert len(got) == len(want) > 0
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=rtol, atol=1e-7)


class SaveAt(Callback):
    """A checkpoint behind one micro-batch, wherever in an accumulation that is."""

    def __init__(self, path: Path | str, micro_batch: int) -> None:
        self.path, self.micro_batch = path, micro_batch

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        if i + 1 == self.micro_batch:
            trainer.save_checkpoint(self.path)
