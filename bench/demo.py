"""`make demo`: a small language model learns Python's language reference, its state on disk.

Nothing is downloaded. The optimizer state lives in files, the result is the same to the last bit as
with state in memory, and Ctrl-C loses at most `SAVE_EVERY` steps: the same command continues.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import gemini
from gemini import GeminiDDP, HybridAdam
from gemini.nvme import default_folder

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, WIDTH, LAYERS, SEQ, BATCH = 1024, 128, 4, 64, 16
HELD_OUT, SAVE_EVERY = 32, 100
LEARNING_RATE, WARMUP = 4e-3, 20
PROMPT, SAMPLE_TOKENS, TEMPERATURE = "The", 100, 0.5


def tokens() -> tuple[Tokenizer, Tensor, Tensor]:
    """(tokenizer, training tokens, held-out sequences [HELD_OUT, SEQ]); the two do not overlap."""
    text = re.sub(" +", " ", "\n".join(topics.values()))  # what `help()` shows
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    pieces.train_from_iterator([text], trainer)
    ids = torch.tensor(pieces.encode(text).ids)
    count = HELD_OUT * SEQ
    return pieces, ids[:-count], ids[-count:].view(HELD_OUT, SEQ)


def batch_of(step: int, text: Tensor) -> Tensor:
    """The batch of a step, drawn by its number: a resumed run draws what it would have drawn."""
    drawn = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - SEQ, (BATCH,), generator=drawn)
    return torch.stack([text[start : start + SEQ] for start in starts.tolist()])


def learning_rate(step: int, steps: int) -> float:
    rising = min(1.0, (step + 1) / WARMUP)
    return LEARNING_RATE * rising * (1 + math.cos(math.pi * step / steps)) / 2


@torch.no_grad()
def held_out_loss(model: Any, sequences: Tensor) -> float:
    losses = [model(input_ids=part, labels=part).loss.item() for part in sequences.split(BATCH)]
    return float(sum(losses) / len(losses))


@torch.no_grad()
def sample(model: Any, pieces: Tokenizer) -> str:
    """What the model writes behind `PROMPT`."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.tensor([pieces.encode(PROMPT).ids])
    for _ in range(SAMPLE_TOKENS):
        logits = model(input_ids=ids[:, -SEQ:]).logits[0, -1].float()
        chosen = torch.multinomial((logits / TEMPERATURE).softmax(0), 1, generator=drawn)
        ids = torch.cat([ids, chosen[None]], dim=1)
    return pieces.decode(ids[0].tolist())


def train(steps: int, out: Path, folder: Path) -> tuple[float, float]:
    """Train, or continue from the checkpoint in `out`; returns held-out losses, first and last."""
    torch.set_num_threads(1)  # operators are small: threads would wait for each other
    pieces, text, held_out = tokens()
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
        num_attention_heads=WIDTH // 32, vocab_size=VOCABULARY, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GeminiDDP(LlamaForCausalLM(config), "cpu", precision="fp32", max_norm=1.0)
    optimizer = HybridAdam(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.01,
        nvme_offload_fraction=1.0, nvme_offload_dir=str(folder),
    )  # fmt: skip
    checkpoint = out / "checkpoint"
    if checkpoint.exists():
        done, before = gemini.load_checkpoint(checkpoint, model, optimizer)
        print(f"continues from step {done} of {steps}")
    else:
        done, before = 0, held_out_loss(model, held_out)
        print(f"step 0: held-out loss {before:.3f}")
    loss, saved = before, done
    try:
        for step in range(done, steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            batch = batch_of(step, text)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
                loss = held_out_loss(model, held_out)
                gemini.save_checkpoint(checkpoint, model, optimizer, extra=(step + 1, before))
                saved = step + 1
                print(f"step {saved}: held-out loss {loss:.3f}", flush=True)
    except KeyboardInterrupt:
        raise SystemExit(
            f"\nstopped; the same command continues from step {saved} of {steps}"
        ) from None
    if done >= steps:
        loss = held_out_loss(model, held_out)
    print(f"\nA sample:\n\n{sample(model, pieces)}\n")
    optimizer.close()
    return before, loss


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/demo", help="for the checkpoint")
    parser.add_argument("--nvme-dir", type=Path, help="default: a temporary folder on a disk")
    args = parser.parse_args(arguments)
    folder = args.nvme_dir or default_folder()
    print("Ctrl-C stops it; the same command continues.")
    before, after = train(args.steps, args.out, folder)
    print(
        f"held-out loss {before:.3f} to {after:.3f} ({after / before - 1:+.0%}), "
        f"optimizer state in {folder}\n"
        "next: python -m gemini train --model FOLDER_OR_HUB_ID --data chat.jsonl --out runs/1"
    )


if __name__ == "__main__":
    main()
