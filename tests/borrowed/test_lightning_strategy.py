"""What Lightning once tested of its ColossalAIStrategy, of the one that is here, at two ranks.

Source: Lightning 1.9, tests/tests_pytorch/strategies/test_colossalai.py; written here from what its
eleven tests mean. It refused schedules of accumulation and ignored `LightningModule.backward`: here
they work as with DDP. What else it asked is in tests/integrations/lightning: clipping by value and
torch's optimizers in test_lightning_ranks, one that is refused in test_lightning, names in
test_lightning_names, no schedule in test_lightning_loops, weights in test_lightning_checkpoints.
"""

import functools
import tempfile

import pytest
import torch
from torch import nn

from bench.shared.workers import run_ranks

pytestmark = pytest.mark.ci

CLASSES, WIDTH, ROWS = 3, 32, 96


def data():
    """Three clouds, told apart by a linear layer."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(ROWS) % CLASSES
    centres = torch.randn(CLASSES, WIDTH, generator=generator)
    rows = centres[labels] + 0.3 * torch.randn(ROWS, WIDTH, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=8)


def classifier(make_optimizer=None, **hooks):
    """A LightningModule whose layers are made in `configure_sharded_model`, as they were."""
    from lightning.pytorch import LightningModule
    from torchmetrics.classification import MulticlassAccuracy

    from optim import HybridAdam

    class Classifier(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = None
            self.losses = []
            for stage in ("train", "val", "test"):
                setattr(self, f"{stage}_acc", MulticlassAccuracy(CLASSES, average="micro"))

        def configure_sharded_model(self):
            if self.layers is None:
                torch.manual_seed(0)
                layers = [m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
                self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

        def forward(self, x):
            return self.layers(x)

        def _step(self, stage, batch):
            logits = self(batch[0])
            loss = nn.functional.cross_entropy(logits.float(), batch[1])
            accuracy = getattr(self, f"{stage}_acc")
            accuracy(logits, batch[1])
            self.log(f"{stage}_loss", loss, sync_dist=True)
            self.log(f"{stage}_acc", accuracy, on_epoch=True, on_step=False)
            return loss

        def training_step(self, batch, i):
            loss = self._step("train", batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, i):
            self._step("val", batch)

        def test_step(self, batch, i):
            self._step("test", batch)

        def configure_optimizers(self):
            if make_optimizer is not None:
                return make_optimizer(self.parameters())
            optimizer = HybridAdam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return type("Classifier", (Classifier,), hooks)()


def trainer(strategy, folder, **options):
    import lightning.pytorch as pl

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"enable_checkpointing": False, "max_epochs": 1}
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, default_root_dir=folder,
        **{**quiet, **given, **options},
    )  # fmt: skip


def in_fp32(**options):
    from gemini.integrations.lightning import ColossalAIStrategy, GeminiPrecision

    return ColossalAIStrategy(
        precision_plugin=GeminiPrecision(), chunk_size=2000, placement_policy="cuda", **options
    )


def beside_ddp(folder):
    """Losses of both, where the number of batches that add up changes."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    found = []
    for strategy in ("ddp", in_fp32()):
        one = classifier(adam)
        given = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2}
        trainer(strategy, folder, limit_val_batches=0, **given).fit(one, data())
        found.append(one.losses)
    return found


def adam(params):
    return torch.optim.Adam(params, lr=0.01, eps=1e-3)


def own_backward(folder):
    """How often a module's own `backward` ran, and the norms that it logged."""
    from lightning.pytorch.utilities import grad_norm

    calls, norms = [], []

    def backward(self, loss, *args, **kwargs):
        calls.append(loss.item())
        loss.backward()

    def on_before_optimizer_step(self, optimizer):
        norms.append(float(grad_norm(self.layers, 2)["grad_2.0_norm_total"]))

    found = []
    for strategy in ("ddp", in_fp32()):
        calls.clear()
        norms.clear()
        hooks = {"backward": backward, "on_before_optimizer_step": on_before_optimizer_step}
        module = classifier(adam, **hooks)
        trainer(strategy, folder, max_steps=2, limit_val_batches=0).fit(module, data())
        found.append((len(calls), list(norms)))
    return found


def best_of(folder):
    """Test results: of the fit, of its best file, and of that file in a new trainer."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    best = ModelCheckpoint(folder, monitor="val_acc", mode="max", save_last=True, save_top_k=-1)
    module = classifier()
    run = trainer("colossalai", folder, callbacks=[best], enable_checkpointing=True)
    run.fit(module, data(), data())
    found = [run.test(module, data()), run.test(dataloaders=data(), ckpt_path=best.best_model_path)]
    fresh = trainer("colossalai", folder)
    found.append(fresh.test(classifier(), data(), ckpt_path=best.best_model_path))
    return found


def accuracies(folder):
    from gemini.integrations.lightning import ColossalAIStrategy

    module = classifier()
    run = trainer(ColossalAIStrategy(initial_scale=32), folder, max_epochs=3)
    run.fit(module, data(), data())
    found = {name: float(run.callback_metrics[name]) for name in ("train_acc", "val_acc")}
    (tested,) = run.test(module, data())
    return {**found, "test_acc": tested["test_acc"]}


def work(rank, folder):
    from tests.integrations.cases.lightning_runs import as_torchrun

    as_torchrun(rank)
    import gemini.integrations.lightning  # noqa: F401  the names

    return {
        "schedule": beside_ddp(folder),
        "backward": own_backward(folder),
        "best": best_of(folder),
        "accuracies": accuracies(folder),
    }


@functools.cache
def results():
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(work, 2, folder, processes=True)


def of_all(name):
    return [found[name] for found in results()]


def close(got, want):
    assert len(got) == len(want) > 0
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-7)


def test_batches_that_accumulate_may_differ_between_epochs():
    for want, got in of_all("schedule"):
        close(got, want)


def test_a_modules_own_backward_runs_and_gradient_norms_are_logged():
    for (want_calls, want), (calls, got) in of_all("backward"):
        assert calls == want_calls == 2
        close(got, want)


def test_the_best_checkpoint_tests_as_the_fit_did_also_in_a_new_trainer():
    for fitted, best, fresh in of_all("best"):
        assert fitted == best == fresh and fitted[0]["test_acc"] > 0.3


def test_a_fit_in_fp16_learns_and_ranks_end_with_the_same_metrics():
    first, second = of_all("accuracies")
    assert first == second and min(first.values()) > 0.7
