"""Hugging Face's own Trainer over a wrapped model, beside the same Trainer over the plain one.

Source: transformers.Trainer, unchanged, with its default clipping. Losses, gradient norms and
evaluation are equal. Several ranks go through `gemini.integrations.transformers`.
"""

import copy

import pytest
import torch

from gemini import GeminiDDP
from optim import HybridAdam
from tests.integrations.cases.trainer_runs import model_and_data

STEPS = 6
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}


def run(folder, model, data, optimizer, **options):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
        gradient_accumulation_steps=2, max_grad_norm=0.5, report_to=[], save_strategy="no",
        lr_scheduler_type="linear", use_cpu=True, disable_tqdm=True, seed=3,
        dataloader_pin_memory=False, **options,
    )  # fmt: skip
    data = [{**row, "ignored": 1} for row in data]
    trainer = Trainer(
        model, args, train_dataset=data, eval_dataset=data[:6], optimizers=(optimizer, None)
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return (
        [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in logs],
        trainer.evaluate()["eval_loss"],
    )


@pytest.mark.ci
@pytest.mark.parametrize("fraction", [0.0, pytest.param(1.0, marks=pytest.mark.ci)])
def test_trainer_trains_a_wrapped_model_as_the_plain_one(tmp_path, fraction):
    plain, data = model_and_data()
    model = GeminiDDP(copy.deepcopy(plain), precision="fp32", min_chunk_size_m=0.004)
    want = run(tmp_path, plain, data, torch.optim.AdamW(plain.parameters(), foreach=False, **ADAM))
    optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=fraction, **ADAM)
    got = run(tmp_path, model, data, optimizer)
    assert len(want[0]) == STEPS and want[0][0][1] > 0.5  # it clips
    # Trainer prints 4 decimals of a loss; norms and rates whole
    assert torch.allclose(torch.tensor(got[0]), torch.tensor(want[0]), rtol=1e-5, atol=1e-4)
    assert abs(got[1] - want[1]) < 1e-4


def test_the_optimizer_that_trainer_makes_is_refused_by_name(tmp_path):
    plain, data = model_and_data()
    with pytest.raises(RuntimeError, match=r"AdamW would keep its state whole.*HybridAdam"):
        run(tmp_path, GeminiDDP(plain, min_chunk_size_m=0.004), data, None)
