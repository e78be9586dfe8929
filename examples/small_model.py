"""A folder to begin with: a small Llama with random weights, its tokenizer, and text to train on.

    python examples/small_model.py runs/given

Nothing is downloaded: the text is Python's own standard library. `from_pretrained` reads the
folder; text.jsonl in it is what `python -m gemini train --data` takes.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, CHARACTERS, ROWS = 1024, 400, 1000


def texts() -> Iterator[str]:
    """Parts of `CHARACTERS` each."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found = "".join(file.read_text(errors="ignore", encoding="utf-8") for file in files)
    for begin in range(0, CHARACTERS * ROWS, CHARACTERS):
        yield found[begin : begin + CHARACTERS]


def tokenizer() -> PreTrainedTokenizerFast:
    """Pieces of bytes, found in the text."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    pieces.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=given.layers, hidden_size=given.width, intermediate_size=3 * given.width,
        num_attention_heads=given.width // 32, num_key_value_heads=given.width // 32,
        vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(given.folder)
    tokenizer().save_pretrained(given.folder)
    rows = (json.dumps({"text": text}) + "\n" for text in texts())
    (given.folder / "text.jsonl").write_text("".join(rows), encoding="utf-8")
    print(f"written: {given.folder}")


if __name__ == "__main__":
    main()
