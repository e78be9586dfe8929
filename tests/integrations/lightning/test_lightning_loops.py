"""GeminiStrategy in one process: optimizers, loops, late models, and what a fit leaves."""

import csv
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from gemini import GeminiDDP
from gemini.integrations.lightning import GeminiMetrics
from optim import HybridSGD
from tests.integrations.cases.lightning_runs import (
    ADAM,
    ByHand,
    Later,
    LaterAsInLightning1,
    Net,
    Tuned,
    loader,
    ours,
    trainer,
)

pytestmark = pytest.mark.usefixtures("alone")


def test_the_block_of_the_page_on_trainers_fits_a_module():
    page = (Path(__file__).resolve().parents[3] / "docs/trainers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n((?:(?!^```).)*GeminiStrategy.*?)^```$", page, re.M | re.S)
    quiet = "enable_progress_bar=False, logger=False, enable_checkpointing=False"
    block = block.replace("devices=8", f'devices=1, accelerator="cpu", max_steps=2, {quiet}')
    names = {"module": Net(), "loader": loader()}
    exec(compile(block, "docs/trainers.md", "exec"), names)
    assert names["trainer"].global_step == 2 and names["module"].losses


def test_loggers_have_metrics_and_rates_by_the_name_that_they_had(tmp_path):
    logger = CSVLogger(tmp_path)
    run = trainer(
        ours(adam={"nvme_offload_fraction": 1.0}), tmp_path, logger=logger, log_every_n_steps=2,
        callbacks=[GeminiMetrics(), LearningRateMonitor()],
    )  # fmt: skip
    run.fit(Net(), loader())
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8")))
    assert [row["lr-AdamW"] for row in rows if row["lr-AdamW"]]  # as under DDP
    found = [row for row in rows if row["gemini/nvme_read_bytes"]]
    assert [row["step"] for row in found] == ["1", "3"]
    assert all(float(row["gemini/nvme_read_bytes"]) > 0 for row in found)
    assert all(float(row["gemini/loss_scale"]) == 1 for row in found)


def test_torchs_sgd_is_converted_and_its_schedule_follows(tmp_path):
    class Sgd(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": schedule, "monitor": "flat", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

        def on_train_batch_start(self, batch, i):
            self.log("flat", 1.0)

    runs = []
    for strategy in ("ddp", ours()):
        module = Sgd()
        runs.append(trainer(strategy, tmp_path))
        runs[-1].fit(module, loader())
        runs[-1].found = module.numbers()
    want, got = (run.found for run in runs)
    assert isinstance(runs[1].optimizers[0], HybridSGD)
    assert len(set(want["rates"])) > 2
    assert got["rates"] == want["rates"]
    torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-5, atol=0)


class Unfreezes(Net):
    """Its body is frozen at first."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], **ADAM)

    def on_before_optimizer_step(self, optimizer):
        pass


def finetuning():
    from lightning.pytorch.callbacks import BaseFinetuning

    class Finetuning(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.body)

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.body, optimizer, lr=0.01)

    return Finetuning()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ByHand, {}),
        (Unfreezes, {"callbacks": finetuning, "max_epochs": 2, "limit_train_batches": 2}),
        (Tuned, {"callbacks": lambda: LearningRateFinder(min_lr=1e-3, num_training_steps=8)}),
    ],
)
def test_other_loops_are_those_of_ddp(tmp_path, kind, options):
    found = []
    for strategy in ("ddp", ours()):
        module = kind()
        given = {**options, "limit_val_batches": 0, "max_steps": 4}
        if "callbacks" in given:
            given["callbacks"] = [given["callbacks"]()]
        trainer(strategy, tmp_path, **given).fit(module, loader())
        found.append([*module.losses, getattr(module, "lr", 0.0)])
    assert len(found[0]) > 4
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)
    assert os.listdir(tmp_path) == []


def test_the_batch_size_finder_is_refused_by_name(tmp_path):
    """By Lightning itself, as with its other strategies for several processes."""
    with pytest.raises(MisconfigurationException, match="Batch size finder is not supported"):
        trainer(ours(), tmp_path, callbacks=[BatchSizeFinder()]).fit(Tuned(), loader())


# -- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Later, LaterAsInLightning1])
@pytest.mark.parametrize("empty", [False, True])
def test_a_model_that_is_made_late_may_have_no_memory_until_it_is_wrapped(tmp_path, kind, empty):
    want, got = kind(), kind()
    torch.manual_seed(0)
    trainer("ddp", tmp_path).fit(want, loader())
    torch.manual_seed(0)
    trainer(ours(empty_init=empty), tmp_path).fit(got, loader())
    assert got.was_meta == [empty]
    torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=0)


def test_a_model_is_made_empty_by_init_module(tmp_path):
    run = trainer(ours(), tmp_path, max_steps=1)
    with run.init_module(empty_init=True):
        module = Net()
    assert module.head.weight.is_meta
    run.fit(module, loader())
    assert module.losses[0] > 0 and not module.head.weight.is_meta


# -- the end ---------------------------------------------------------------------------------


def spilled(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_leaves_a_plain_module_and_no_files(tmp_path, fails):
    class Fails(Net):
        def training_step(self, batch, i):
            here.append(spilled(tmp_path))
            if fails and i == 2:
                raise KeyError("in a step")
            return super().training_step(batch, i)

    here, module = [], Fails()
    adam = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": str(tmp_path)}
    run = trainer(ours(precision="bf16", adam=adam), tmp_path / "root")
    if fails:
        with pytest.raises(KeyError):
            run.fit(module, loader())
    else:
        run.fit(module, loader())
    assert here[-1] and spilled(tmp_path) == []
    for param in module.parameters():
        assert type(param) is nn.Parameter and param.device.type == "cpu"
        assert not torch.equal(param, param.bfloat16().float())
    with torch.no_grad():
        assert module(torch.ones(2, 24)).isfinite().all()
    GeminiDDP(module, precision="fp32")


def test_a_trainer_fits_tests_and_fits_again(tmp_path):
    options = {"max_epochs": 1, "max_steps": -1, "limit_train_batches": 2, "limit_val_batches": 0}
    plain, module = Net(), Net()
    for strategy, model in (("ddp", plain), (ours(), module)):
        one = trainer(strategy, tmp_path, **options)
        one.fit(model, loader())
        one.test(model, loader())
        one.fit_loop.max_epochs = 2
        one.fit(model, loader())
    assert len(module.losses) == 4
    torch.testing.assert_close(module.losses, plain.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(module.evals, plain.evals, rtol=1e-5, atol=0)


def test_a_module_that_stays_wrapped_is_fitted_tested_and_fitted_again(tmp_path):
    """Masters go on from the fit, in files where the state was; the next run takes the wrapper."""
    options = {"max_epochs": 1, "max_steps": -1, "limit_train_batches": 2, "limit_val_batches": 0}
    modules, weights = [], []
    for unwraps in (True, False):
        module = Net()
        adam = {"nvme_offload_fraction": 1.0, "nvme_offload_dir": str(tmp_path)}
        one = trainer(ours(precision="bf16", unwrap_at_end=unwraps, adam=adam), tmp_path, **options)
        one.fit(module, loader())
        wrapped = one.strategy.model
        assert isinstance(wrapped, GeminiDDP) is not unwraps
        one.test(module, loader())
        one.fit_loop.max_epochs = 2
        one.fit(module, loader())
        assert one.strategy.model is wrapped
        modules.append(module)
        weights.append(wrapped.state_dict())
    assert modules[0].losses == modules[1].losses and modules[0].evals == modules[1].evals
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_fit_whose_plain_module_has_no_room_ends_with_the_remedy(tmp_path, monkeypatch):
    from gemini.runtime.memory import machine

    class Full(Net):
        def on_train_end(self):
            monkeypatch.setattr(machine, "memory_left", lambda: 5)

    run, module = trainer(ours(precision="bf16"), tmp_path, max_steps=1), Full()
    with pytest.raises(MemoryError, match=r"export_safetensors.*or give .* unwrap_at_end=False"):
        run.fit(module, loader())
    model = run.strategy.model
    assert isinstance(model, GeminiDDP)
    masters = model.state_dict()
    assert not torch.equal(masters["head.weight"], masters["head.weight"].bfloat16().float())
