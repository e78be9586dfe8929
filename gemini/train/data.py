"""Data of a run: JSONL of text, prompts and completions, or chats; held-out rows and prompts."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from typing import Any

from .config import TrainConfig
from .rows import ALSO, RowForm, files_of, fitting, look_at

PROMPT_TOKENS = 32  # of a text that is continued


@dataclass(frozen=True)
class Data:
    """Rows of a run, in trl's format.

    held_out: rows to evaluate on; None evaluates nothing.
    said: what --seq drops, in words.
    """

    form: RowForm
    train: Any
    held_out: Any | None
    said: tuple[str, ...] = ()

    def prompts(self, tokenizer: Any, count: int) -> list[list[int]]:
        """Tokens of the first `count` held-out rows, each up to where the model continues. An empty
        prompt is the token that begins a text, or ends one."""
        rows = self.train if self.held_out is None else self.held_out
        found = [self._prompt(rows[i], tokenizer) for i in range(min(count, len(rows)))]
        begins = (
            tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        )
        found = [ids or [begins] for ids in found]
        return [ids for ids in found if None not in ids]

    def _prompt(self, row: dict[str, Any], tokenizer: Any) -> list[int]:
        prompt, kind = row[self.form.keys[0]], self.form.kind
        if kind == "chat":
            said = [i for i, message in enumerate(prompt) if message["role"] == "assistant"]
            prompt = prompt[: said[-1]] if any(said) else prompt
        is_chat = isinstance(prompt, list)
        if is_chat:
            prompt = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
        ids: list[int] = tokenizer(prompt, add_special_tokens=not is_chat)["input_ids"]
        if kind == "text":
            ids = ids[: max(1, min(PROMPT_TOKENS, len(ids) // 2))]
        return ids


def load(config: TrainConfig, tokenizer: Any) -> Data:
    """Look at all rows, and load those of training and held-out ones that --seq leaves.

    Raises ValueError for a row that cannot be trained on, and where --seq or --held-out leaves
    none.
    """
    train, form = _rows(config.data, "--data", tokenizer)
    if not form.is_chat and tokenizer.eos_token is None:
        raise ValueError(
            "the tokenizer of --model has no eos_token, which ends every row; expected one"
        )
    held_out = None
    if config.eval_data is not None:
        held_out, other = _rows(config.eval_data, "--eval-data", tokenizer)
        if other != form:
            raise ValueError(
                f"--eval-data {config.eval_data} has {' and '.join(other.keys)} as "
                f"{_values(other)}, and --data {' and '.join(form.keys)} as {_values(form)}; "
                "expected the same keys and kinds of values"
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
    said: list[str] = []
    if not config.packing:
        train = _within(train, form, tokenizer, config.seq, "rows", said)
        if held_out is not None:
            held_out = _within(held_out, form, tokenizer, config.seq, "held-out rows", said)
    return Data(form, train, held_out, tuple(said))


def _rows(pattern: str, flag: str, tokenizer: Any) -> tuple[Any, RowForm]:
    """Rows of a path or a glob, with the keys that are trained on, and their form."""
    from datasets import load_dataset

    files = files_of(pattern, flag)
    form = look_at(files, flag, tokenizer)
    try:
        escaped = [*map(glob.escape, files)]
        rows = load_dataset("json", data_files=escaped, split="train", trust_remote_code=False)
    except Exception as error:  # by its ending a file may be taken for a compressed one
        said = str(error.__cause__ or error)
        raise ValueError(f"{flag} {pattern} cannot be read as JSONL: {said}") from None
    # a column such as input_ids or prompt has a meaning of its own for trl
    return rows.select_columns([k for k in rows.column_names if k in (*form.keys, *ALSO)]), form


def _values(form: RowForm) -> str:
    return "lists of messages" if form.is_chat else "texts"


def _within(rows: Any, form: RowForm, tokenizer: Any, seq: int, what: str, said: list[str]) -> Any:
    """Rows that --seq does not drop; how many it drops is added to `said`."""
    found = fitting(rows, form, tokenizer, seq)
    dropped = len(rows) - len(found)
    if not len(found):
        raise ValueError(
            f"all {len(rows)} {what} are dropped by --seq {seq}: their prompts fill it, and no "
            "token of a completion is left; expected a larger --seq, or --packing"
        )
    if dropped:
        said.append(f"{dropped} of {len(rows)} {what} are dropped by --seq {seq}: prompts fill it")
    return found
