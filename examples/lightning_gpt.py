"""A Lightning module under `GeminiStrategy`: sharded, placed, checkpointed, resumed.

    python examples/lightning_gpt.py --devices 2 --nvme-fraction 1.0

The module is a plain one. It trains on Python's own standard library, byte by byte.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from gemini.integrations.lightning import GeminiStrategy


class Gpt(LightningModule):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 32, vocab_size=256)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=6e-4)  # becomes HybridAdam


def text(seq: int, rows: int) -> TensorDataset:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found = b"".join(file.read_bytes() for file in files)[: seq * rows]
    return TensorDataset(torch.tensor(list(found)).view(rows, seq))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="in all, also of a resumed run")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--nvme-fraction", type=float, default=0.0, help="of the optimizer state")
    parser.add_argument("--out", default="runs/lightning")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    given = parser.parse_args()
    strategy = GeminiStrategy("auto", adam={"nvme_offload_fraction": given.nvme_fraction})
    trainer = Trainer(
        accelerator="auto",
        devices=given.devices,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=given.steps,
        callbacks=[ModelCheckpoint(given.out, save_last=True, every_n_train_steps=10)],
        logger=False,
    )
    rows = given.steps * given.batch * given.devices
    loader = DataLoader(text(given.seq, rows), batch_size=given.batch, shuffle=True)
    last = f"{given.out}/last.ckpt" if given.resume else None
    trainer.fit(Gpt(given.layers, given.width), loader, ckpt_path=last)
    trainer.print(f"loss {float(trainer.callback_metrics['loss']):.4f}")


if __name__ == "__main__":
    main()
