"""Checkpoints of GeminiStrategy in one process: folders, files, and what hooks see."""

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint

from gemini import GeminiDDP
from tests.integrations.cases.lightning_runs import Net, SaveAt, loader, ours, trainer

pytestmark = pytest.mark.usefixtures("alone")


def test_model_checkpoint_keeps_the_best_folders(tmp_path):
    callback = ModelCheckpoint(tmp_path / "best", save_top_k=1, monitor="step", mode="max",
                               every_n_train_steps=1, save_last=True)  # fmt: skip
    run = trainer(ours(), tmp_path, callbacks=[callback], enable_checkpointing=True, max_steps=3)
    module = Net()
    run.fit(module, loader())
    found = {path.name for path in (tmp_path / "best").iterdir() if path.is_dir()}
    assert found == {"epoch=0-step=3.ckpt", "last.ckpt", "latest"}
    weights = module.head.weight.detach().clone()
    nn.init.zeros_(module.head.weight)
    run.test(module, loader(), ckpt_path="best")
    assert torch.equal(module.head.weight, weights)


def test_the_full_file_is_one_that_plain_lightning_loads(tmp_path):
    path = tmp_path / "whole.ckpt"
    module = Net()
    run = trainer(ours(checkpoint="full", precision="bf16"), tmp_path, callbacks=[SaveAt(path, 4)])
    run.fit(module, loader())
    loaded = Net.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    saved = torch.load(path, weights_only=True)
    assert set(saved["state_dict"]) == set(module.state_dict())
    assert saved["optimizer_states"][0]["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_weights_alone_are_saved_and_cannot_be_gone_on_from(tmp_path):
    run, module = trainer(ours(), tmp_path), Net()
    run.fit(module, loader())
    with pytest.raises(ValueError, match="state went when the fit ended"):
        run.save_checkpoint(tmp_path / "all")
    run.save_checkpoint(tmp_path / "weights", weights_only=True)
    other = Net()
    trainer(ours(), tmp_path).validate(other, loader(), ckpt_path=tmp_path / "weights")
    trainer(ours(), tmp_path).validate(module, loader())
    assert other.evals == module.evals[-len(other.evals) :]
    with pytest.raises(ValueError, match="no optimizer state"):
        trainer(ours(), tmp_path).fit(other, loader(), ckpt_path=tmp_path / "weights")


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_fit_without_an_optimizer_is_saved_too(tmp_path, kind):
    class Measures(Net):
        def configure_optimizers(self):
            return None

        def on_before_optimizer_step(self, optimizer):
            pass

    path = tmp_path / "x"
    module = Measures()
    trainer(ours(checkpoint=kind), tmp_path, callbacks=[SaveAt(path, 2)]).fit(module, loader())
    again = Measures()
    trainer(ours(checkpoint=kind), tmp_path).fit(again, loader(), ckpt_path=path)
    assert again.losses and torch.equal(again.head.weight, module.head.weight)


@pytest.mark.parametrize(
    ("hook", "error", "says"),
    [
        (
            lambda saved: saved.update(state_dict={"head.bias": torch.zeros(5)}),
            ValueError, r"checkpoint\['state_dict'\].*checkpoint=\"full\"",
        ),
        (
            lambda saved: saved.update(optimizer_states=[{"state": {}}]),
            ValueError, r"checkpoint\['optimizer_states'\]",
        ),
        (lambda saved: saved.update(moved=saved["state_dict"]), ValueError, "under another key"),
        (lambda saved: saved["state_dict"]["head.bias"], KeyError, "holds no whole weights"),
    ],
)  # fmt: skip
def test_values_that_a_hook_saves_for_weights_are_not_dropped(tmp_path, hook, error, says):
    module = Net()
    module.on_save_checkpoint = hook
    with pytest.raises(error, match=says):
        trainer(ours(), tmp_path, callbacks=[SaveAt(tmp_path / "x", 1)]).fit(module, loader())


def test_what_else_a_module_and_callbacks_save_comes_back(tmp_path):
    class Counts(Net):
        count = 0

        def on_save_checkpoint(self, checkpoint):
            checkpoint["count"] = 7

        def on_load_checkpoint(self, checkpoint):
            self.count = checkpoint["count"]

    path = tmp_path / "x"
    trainer(ours(), tmp_path, callbacks=[SaveAt(path, 2)]).fit(Counts(), loader())
    module = Counts()
    run = trainer(ours(), tmp_path)
    run.fit(module, loader(), ckpt_path=path)
    assert module.count == 7 and run.global_step == 4 and len(module.losses) == 2


def test_a_folder_of_another_program_is_said_to_be_one(tmp_path):
    import gemini

    module = Net()
    gemini.save_checkpoint(tmp_path / "x", GeminiDDP(Net(), precision="fp32"))
    with pytest.raises(ValueError, match=r"nothing of Lightning's.*gemini.load_checkpoint"):
        trainer(ours(), tmp_path).validate(module, loader(), ckpt_path=tmp_path / "x")
