"""ESM-2 on protein sequences, masked as for BERT, by Trainer over a sharded model.

    python examples/protein.py --fasta uniref.fasta --size 650M --out runs/esm

One residue is one token. Without --fasta sequences are drawn at random, of which nothing is learnt.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    EsmConfig,
    EsmForMaskedLM,
    EsmTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

from gemini import AutoPlacement
from gemini.integrations.transformers import GeminiTrainer

TOKENS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
SIZES = {"toy": (2, 32, 2), "8M": (6, 320, 20), "650M": (33, 1280, 20), "3B": (36, 2560, 40)}


def sequences(fasta: Path | None, count: int = 256) -> list[str]:
    """Sequences of a FASTA file, or drawn ones."""
    if fasta is None:
        drawn = random.Random(0)
        return ["".join(drawn.choices(TOKENS[4:24], k=drawn.randint(20, 60))) for _ in range(count)]
    records = fasta.read_text(encoding="utf-8").split(">")[1:]
    return ["".join(record.splitlines()[1:]) for record in records]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fasta", type=Path)
    parser.add_argument("--size", choices=SIZES, default="8M")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, not in bf16")
    parser.add_argument("--device-budget", help="as in 22GiB; what does not fit goes elsewhere")
    parser.add_argument("--nvme-dir", help="a folder on a fast disk")
    parser.add_argument("--plain", action="store_true", help="transformers alone, to compare with")
    return parser.parse_args(given)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, save the model, and return the losses."""
    given = arguments(argv)
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "vocab.txt").write_text("\n".join(TOKENS), encoding="utf-8")
    tokenizer = EsmTokenizer(out / "vocab.txt")
    layers, width, heads = SIZES[given.size]
    set_seed(0)
    model = EsmForMaskedLM(EsmConfig(
        vocab_size=len(TOKENS), num_hidden_layers=layers, hidden_size=width,
        intermediate_size=4 * width, num_attention_heads=heads, position_embedding_type="rotary",
        mask_token_id=TOKENS.index("<mask>"), pad_token_id=1, token_dropout=True,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, emb_layer_norm_before=False,
    ))  # fmt: skip
    rows = [tokenizer(one, truncation=True, max_length=given.seq) for one in sequences(given.fasta)]
    args = TrainingArguments(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        learning_rate=4e-4,
        weight_decay=0.01,
        bf16=not given.fp32,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    placement = AutoPlacement(device_budget=given.device_budget, nvme_dir=given.nvme_dir)
    sharded: dict[str, Any] = {} if given.plain else {"gemini": {"placement_policy": placement}}
    kind: Any = Trainer if given.plain else GeminiTrainer
    trainer = kind(
        model, args, train_dataset=rows, processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer), **sharded,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()  # all ranks call
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
