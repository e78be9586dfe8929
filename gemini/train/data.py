"""Data of a run: JSONL of text, prompts and completions, or chats; held-out rows and prompts."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import TrainConfig

KINDS = {"text": ("text",), "prompt": ("prompt", "completion"), "chat": ("messages",)}
PROMPT_TOKENS = 32  # of a text that is continued


@dataclass(frozen=True)
class Data:
    """Rows of a run, in trl's format.

    kind: one of `KINDS`.
    held_out: rows to evaluate on; None evaluates nothing.
    """

    kind: str
    train: Any
    held_out: Any | None

    def prompts(self, tokenizer: Any, count: int) -> list[list[int]]:
        """Tokens of the first `count` held-out rows, each up to where the model continues."""
        rows = self.train if self.held_out is None else self.held_out
        return [self._prompt(rows[i], tokenizer) for i in range(min(count, len(rows)))]

    def _prompt(self, row: dict[str, Any], tokenizer: Any) -> list[int]:
        prompt = row[KINDS[self.kind][0]]
        if self.kind == "chat":
            said = [i for i, message in enumerate(prompt) if message["role"] == "assistant"]
            prompt = prompt[: said[-1]] if said else prompt
        is_chat = isinstance(prompt, list)
        if is_chat:
            prompt = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
        ids: list[int] = tokenizer(prompt, add_special_tokens=not is_chat)["input_ids"]
        if self.kind == "text":
            ids = ids[: max(1, min(PROMPT_TOKENS, len(ids) // 2))]
        return ids


def load(config: TrainConfig, tokenizer: Any) -> Data:
    """Load training and held-out rows. Raises ValueError for data of no kind in `KINDS`."""
    train = _rows(config.data, "--data")
    kind = _kind(train, config.data)
    if config.eval_data is not None:
        held_out = _rows(config.eval_data, "--eval-data")
        if _kind(held_out, config.eval_data) != kind:
            raise ValueError(
                f"--eval-data {config.eval_data} has {held_out.column_names} and --data "
                f"{train.column_names}; expected the same keys"
            )
    elif config.held_out:
        count = max(1, round(config.held_out * len(train)))
        if count >= len(train):
            raise ValueError(
                f"--data {config.data} has {len(train)} rows, and --held-out {config.held_out} "
                "leaves none to train on; expected --held-out 0, or more rows"
            )
        parts = train.train_test_split(test_size=count, seed=config.seed)
        train, held_out = parts["train"], parts["test"]
    else:
        held_out = None
    data = Data(kind, train, held_out)
    first = train[0][KINDS[kind][0]]
    if isinstance(first, list) and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{config.data} has chats, and the tokenizer of --model has no chat template; expected "
            "one, or rows with a text prompt and completion"
        )
    return data


def _rows(pattern: str, flag: str) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    files = sorted(glob.glob(pattern))
    if not files:
        raise ValueError(f"{flag} {pattern} is no file; expected JSONL")
    for file in files:  # a pipe would be waited for
        if not Path(file).is_file():
            raise ValueError(f"{flag} {file} is no file; expected JSONL")
    try:
        rows = load_dataset("json", data_files=files, split="train", trust_remote_code=False)
    except StopIteration:
        raise ValueError(f"{flag} {pattern} has no rows; expected JSONL") from None
    except (DatasetGenerationError, ValueError) as error:
        said = str(error.__cause__ or error)
        raise ValueError(f"{flag} {pattern} cannot be read as JSONL: {said}") from None
    return rows


def _kind(rows: Any, pattern: str) -> str:
    for kind, keys in KINDS.items():
        if all(key in rows.column_names for key in keys):
            return kind
    raise ValueError(
        f"{pattern} has rows with {', '.join(rows.column_names)}; expected text, prompt and "
        "completion, or messages"
    )
