"""A folder that `from_pretrained` reads, with a tokenizer and rows to train on; random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs/glossary.md").read_text(encoding="utf-8")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer(*, template: str | None = TEMPLATE) -> Any:
    """Bytes, and pieces that the glossary has often."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    pieces.train_from_iterator([TEXT], trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def make_folder(folder: Path, **sizes: int) -> Path:
    """A Llama of two layers, or of other sizes, with its tokenizer, in bf16."""
    import torch
    import transformers

    pieces = make_tokenizer()
    config = transformers.LlamaConfig(
        num_attention_heads=2, num_key_value_heads=2, vocab_size=len(pieces),
        max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **sizes},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    pieces.save_pretrained(folder)
    return folder


def rows(kind: str, count: int = 40) -> list[dict[str, Any]]:
    """Of `gemini.train.rows.KINDS`."""
    found: list[dict[str, Any]] = []
    for i in range(count):
        first, second = TEXT[100 * i : 100 * i + 30], TEXT[100 * i + 30 : 100 * i + 90]
        if kind == "text":
            found.append({"text": first + second})
        elif kind == "prompt":
            found.append({"prompt": first, "completion": second})
        else:
            said = [("user", first), ("assistant", second)]
            found.append({"messages": [{"role": r, "content": text} for r, text in said]})
    return found


def write_rows(path: Path, given: list[dict[str, Any]]) -> Path:
    """As JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    return path


# -- runs of `python -m gemini train` --


def flags(folder: Path, out: Path, *more: str, data: str = "text") -> list[str]:
    """Of a run of four steps that saves twice."""
    return [
        "--model", str(folder / "model"), "--data", str(folder / f"{data}.jsonl"),
        "--out", str(out), "--seq", "32", "--batch", "2", "--accumulate", "2", "--steps", "4",
        "--save-every", "2", "--log-every", "1", "--lr", "1e-3", "--held-out", "0.1",
        "--sample-tokens", "4", *more,
    ]  # fmt: skip


def losses(out: Path) -> list[float]:
    """Of all steps of such a run."""
    (state,) = (out / "checkpoints/checkpoint-4").glob("trainer_state.json")
    log = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def generated(out: Path) -> Any:
    """Tokens that what it wrote goes on with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    return model.generate(**tokenizer("A chunk", return_tensors="pt"), max_new_tokens=3)
