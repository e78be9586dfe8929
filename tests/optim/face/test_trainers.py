"""Training loops that others wrote take HybridAdam as they take torch's own, on a plain module."""

import pytest
import torch
from torch import nn

from optim import HybridAdam
from tests.support.plain_training import update_error

pytestmark = pytest.mark.ci
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
STEPS = 4


class Numbers(torch.utils.data.Dataset):
    """Token ids for a language model; the same in every run."""

    def __init__(self):
        self.ids = torch.randint(97, (4 * STEPS, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97, n_positions=16, n_embd=24, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def agrees(train):
    """`train(module, optimizer)` with ours and with torch's; the same updates."""
    runs = []
    for cls in (HybridAdam, torch.optim.AdamW):
        module = tiny_gpt2()
        train(module, cls(module.parameters(), **ADAM))
        runs.append([p.detach() for p in module.parameters()])
    return update_error(*runs, list(tiny_gpt2().parameters())) < 1e-5


def test_hugging_face_trainer(tmp_path):
    """With its own clipping, schedule, and gradient accumulation."""
    from transformers import Trainer, TrainingArguments

    def train(module, optimizer):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, max_grad_norm=0.5, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, seed=0, logging_strategy="no",
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        Trainer(
            module, arguments, train_dataset=Numbers(), optimizers=(optimizer, schedule)
        ).train()
        assert optimizer.param_groups[0]["lr"] < 0.5e-2

    assert agrees(train)


def test_accelerate():
    from accelerate import Accelerator

    def train(module, optimizer):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2)
        module, optimizer, loader, schedule = accelerator.prepare(
            module, optimizer, loader, schedule
        )
        for batch in loader:
            with accelerator.accumulate(module):
                accelerator.backward(module(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    assert agrees(train)


def test_lightning(tmp_path):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, module, optimizer):
            super().__init__()
            self.module, self.optimizer = module, optimizer

        def training_step(self, batch, index):
            return self.module(**batch).loss

        def configure_optimizers(self):
            return [self.optimizer], [torch.optim.lr_scheduler.StepLR(self.optimizer, 2)]

    def train(module, optimizer):
        trainer = lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", devices=1, logger=False, gradient_clip_val=0.5,
            accumulate_grad_batches=2, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2)
        trainer.fit(Module(module, optimizer), loader)
        assert trainer.global_step == STEPS

    assert agrees(train)


def test_a_trainer_checkpoint_goes_on_with_the_same_bits(tmp_path):
    """Accelerate saves and loads the optimizer through its state dict."""
    from accelerate import Accelerator

    def steps(module, optimizer, batches):
        for ids in batches:
            module(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    batches = Numbers().ids.split(4)
    accelerator = Accelerator(cpu=True)
    module = tiny_gpt2()
    module, optimizer = accelerator.prepare(module, HybridAdam(module.parameters(), **ADAM))
    steps(module, optimizer, batches[:2])
    accelerator.save_state(str(tmp_path))
    steps(module, optimizer, batches[2:])
    want = [p.detach().clone() for p in module.parameters()]
    nn.init.zeros_(module.transformer.wte.weight)
    accelerator.load_state(str(tmp_path))
    steps(module, optimizer, batches[2:])
    assert all(torch.equal(a, b) for a, b in zip(want, module.parameters(), strict=True))
