"""What a sharded save through the Trainer takes on a rank: a chunk, whatever the model."""

import torch

from bench.shared.workers import run_ranks

LAYERS, WIDTH = 24, 1024
CHUNK_BYTES = 4 * WIDTH * (WIDTH + 1)  # fp32: a layer each
MODEL_BYTES = LAYERS * CHUNK_BYTES
# two staging buffers of a save (12 MiB each), what Python and DCP take, and pages of the allocator
SLACK_BYTES = 40 << 20


def saved(rank, folder):
    """Bytes that this rank took at most while the Trainer saved, on top of what it had."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import Callback

    from gemini.integrations.lightning import GeminiStrategy
    from tests.integrations.cases.lightning_runs import as_torchrun, trainer
    from tests.support.memory import peak_bytes

    as_torchrun(rank)

    class Deep(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                *(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
            )

        def training_step(self, batch, i):
            return self.layers(batch[0].repeat(1, 43)[:, :WIDTH]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    found = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, out, batch, i):
            found.append(peak_bytes(lambda: trainer.save_checkpoint(f"{folder}/{i}")))

    strategy = GeminiStrategy(
        min_chunk_size_m=CHUNK_BYTES / 2**22, search_range_m=0, precision="fp32"
    )
    from tests.integrations.cases.lightning_runs import loader

    options = {"max_steps": 2, "limit_val_batches": 0, "callbacks": [Saves()]}
    trainer(strategy, folder, **options).fit(Deep(), loader())
    return found[-1]  # the first one imports, and makes what is kept


def test_a_save_at_two_ranks_takes_a_chunk_and_no_more(tmp_path):
    assert MODEL_BYTES > 2 * (CHUNK_BYTES + SLACK_BYTES)  # else a whole copy would pass
    for nbytes in run_ranks(saved, 2, str(tmp_path), processes=True):
        assert nbytes <= CHUNK_BYTES + SLACK_BYTES
