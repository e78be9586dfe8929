"""What a save through Hugging Face's Trainer takes on a rank: a chunk, whatever the model."""

import os
from pathlib import Path

from bench.shared.workers import run_ranks
from tests.integrations.cases import trainer_runs

WIDTH, LAYERS = 512, 8
CHUNK_NUMEL = 4 * WIDTH**2  # the largest weight
CHUNK_BYTES = 4 * CHUNK_NUMEL  # fp32
MODEL_BYTES = LAYERS * 3 * CHUNK_BYTES  # of the layers: twelve squares each
# two staging buffers of a save (12 MiB each), what Python and DCP take, and pages of the allocator
SLACK_BYTES = 40 << 20


def saves(rank, folder):
    """Bytes that this rank took at most in a save of the Trainer's, on top of what it had."""
    import transformers

    from gemini.integrations.transformers import GeminiTrainer
    from tests.support.memory import peak_bytes

    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun sets it
    found = []

    class Measured(GeminiTrainer):
        def _save_checkpoint(self, *args, **kwargs):
            save = super()._save_checkpoint
            found.append(peak_bytes(lambda: save(*args, **kwargs)))

    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=8, vocab_size=97, n_positions=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    capacity = CHUNK_NUMEL / 2**20
    trainer_runs.run(
        Path(folder), transformers.GPT2LMHeadModel(config), cls=Measured,
        gemini={"min_chunk_size_m": capacity, "search_range_m": 0}, max_steps=2,
        gradient_accumulation_steps=1, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    return found[-1]  # the first one imports, and makes what is kept


def test_a_save_at_two_ranks_takes_a_chunk_and_no_more(tmp_path):
    assert MODEL_BYTES > 2 * (CHUNK_BYTES + SLACK_BYTES)  # else a whole copy would pass
    for nbytes in run_ranks(saves, 2, str(tmp_path), processes=True):
        assert nbytes <= CHUNK_BYTES + SLACK_BYTES
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "gemini"} <= files
