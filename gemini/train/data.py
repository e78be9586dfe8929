"""Data of a run: text, prompts and completions, or chats; mixed, streamed, held-out; prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .config import ANSWERS, TrainConfig
from .rows import ALSO, RowForm, RowsWanted, checked, converted, has_template, look_at
from .sources import JSON, RowSource, sources_of, weights_of
from .tokens import MASK, Answers, has_answer, has_completion, has_room

PROMPT_TOKENS = 32  # of a text that is continued
SHUFFLED = 10_000  # rows of a stream, among which the next one is drawn


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
        found = [self._prompt(row, tokenizer) for row in islice(rows, count)]
        begins = (
            tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        )
        found = [ids or [begins] for ids in found]
        return [ids for ids in found if None not in ids]

    def _prompt(self, row: dict[str, Any], tokenizer: Any) -> list[int]:
        prompt, kind = row[self.form.keys[0]], self.form.kind
        if kind in ("chat", "pair") and isinstance(prompt, list):
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

    Rows of a stream are looked at as they come. Raises ValueError for a row that cannot be trained
    on, and where --seq or --held-out leaves none.
    """
    from datasets import concatenate_datasets, disable_progress_bars, interleave_datasets

    if not sys.stderr.isatty():
        disable_progress_bars()
    loader = _Loader(config, tokenizer)
    found = loader.load(config.data, "--data")
    form = loader.form
    assert form is not None
    if not form.is_chat and tokenizer.eos_token is None:
        raise ValueError(
            "the tokenizer of --model has no eos_token, which ends every row; expected one"
        )
    held_out = None
    if config.eval_data is not None:
        held_out = concatenate_datasets(loader.load(config.eval_data, "--eval-data"))
    elif config.held_out:
        parts = [_split(config, rows, len(found)) for rows in found]
        found = [train for train, _ in parts]
        held_out = concatenate_datasets([held for _, held in parts])
    weights = weights_of(config.weights, sources_of(config.data, "--data"))
    try:
        if weights is None:
            train = concatenate_datasets(found)
        else:  # a source that ends before the others begins again
            train = interleave_datasets(
                found, probabilities=weights, seed=config.seed, stopping_strategy="all_exhausted"
            )
    except ValueError as error:
        raise ValueError(
            f"--data {config.data} cannot be mixed: {error}; expected columns of one type"
        ) from None
    if config.stream:
        train = train.shuffle(seed=config.seed, buffer_size=SHUFFLED)
    said: list[str] = []
    train = loader.trained(train, "rows", said)
    if held_out is not None:
        held_out = loader.trained(held_out, "held-out rows", said)
    return Data(form, train, held_out, tuple(said))


class _Loader:
    """Loads rows of one form, which is that of the first row."""

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self.form: RowForm | None = None
        self._first = ""  # source with that row
        marks = config.method == "sft" and config.loss == ANSWERS and has_template(tokenizer)
        self._asked = RowsWanted(config.method, Answers(tokenizer) if marks else None)

    def load(self, given: str, flag: str) -> list[Any]:
        """Rows of each source, with the keys that are trained on."""
        return [self._load(source, flag) for source in sources_of(given, flag)]

    def _load(self, source: RowSource, flag: str) -> Any:
        # all rows of a stream are as its first
        is_stream = self._config.stream and flag == "--data"
        rows: Any = None
        if is_stream or source.reader != JSON:
            rows = source.load(flag, streaming=is_stream)
        seen = [(source.name, islice(rows, 1))] if is_stream else source.parts(rows)
        form = look_at(seen, flag, self._tokenizer, self._asked)
        if self.form is None:
            self.form, self._first = form, f"{flag} {source.name}"
        elif form != self.form:
            raise ValueError(
                f"{flag} {source.name} has {form.in_words}, and {self._first} "
                f"{self.form.in_words}; expected the same keys and kinds of values"
            )
        rows = source.load(flag, streaming=False) if rows is None else rows
        # a column such as input_ids or prompt has a meaning of its own for trl
        named = list(next(iter(rows)))
        # a reward is asked with all columns
        kept = named if form.kind == "question" else (*form.keys, *ALSO)
        others = [key for key in named if key not in kept]
        if is_stream:
            return rows.map(
                self._look_and_convert, with_indices=True, fn_kwargs={"name": source.name},
                remove_columns=others,
            )  # fmt: skip
        if not all(key in named for key in form.keys):
            return rows.map(self._convert, remove_columns=others, desc=f"Converting {source.name}")
        return rows.select_columns([key for key in rows.column_names if key in kept])

    def _convert(self, row: dict[str, Any]) -> dict[str, Any]:
        return converted(row, self._tokenizer, self._config.method)

    def _look_and_convert(self, row: dict[str, Any], index: int, name: str) -> dict[str, Any]:
        flag, number = "--data", index + 1
        try:
            checked(row, self.form, self._tokenizer, self._asked)
        except ValueError as wrong:
            raise ValueError(f"{flag} {name} row {number}: {wrong}") from None
        return self._convert(row)

    def trained(self, rows: Any, what: str, said: list[str]) -> Any:
        """Rows with tokens of answers marked, and those that --seq drops left out: how many is
        added to `said`."""
        form, seq, tokenizer = self.form, self._config.seq, self._tokenizer
        assert form is not None
        answers = self._asked.answers
        if form.kind == "chat" and answers is not None:
            rows = rows.map(answers.mark, **_described(rows, "Marking answers"))
            found = rows.filter(
                has_answer, batched=True, input_columns=MASK, fn_kwargs={"seq": seq},
                **_described(rows, "Measuring answers"),
            )  # fmt: skip
        elif form.kind == "prompt" and self._config.loss == ANSWERS:
            found = rows.filter(
                has_completion, batched=True, **_described(rows, "Measuring prompts"),
                fn_kwargs={"tokenizer": tokenizer, "seq": seq, "is_chat": form.is_chat},
            )  # fmt: skip
        elif self._config.method == "reward":
            found = rows.filter(
                has_room, fn_kwargs={"tokenizer": tokenizer, "seq": seq},
                **_described(rows, "Measuring pairs"),
            )  # fmt: skip
        else:
            return rows
        if self._config.stream and what == "rows":
            return found
        dropped = len(rows) - len(found)
        is_pair = self._config.method == "reward"
        if not len(found):
            why = "prompts fill it, and no token of an answer is left; expected a larger --seq"
            why = f"{why}, or --loss all"
            if is_pair:
                why = "a text of each pair is longer; expected a larger --seq"
            raise ValueError(f"all {len(rows)} {what} are dropped by --seq {seq}: {why}")
        if dropped:
            why = "a text of the pair is longer" if is_pair else "prompts fill it"
            said.append(f"{dropped} of {len(rows)} {what} are dropped by --seq {seq}: {why}")
        return found


def _split(config: TrainConfig, rows: Any, sources: int) -> tuple[Any, Any]:
    """Rows of a source to train on and held-out ones; of a stream its first, as a share of what is
    trained on."""
    if config.stream:
        from datasets import Dataset

        trained = config.steps * config.accumulate * config.batch
        count = max(1, round(config.held_out * trained / sources))
        return rows.skip(count), Dataset.from_list(list(rows.take(count)))
    count = max(1, round(config.held_out * len(rows)))
    if count >= len(rows):
        raise ValueError(
            f"--data {config.data} has {len(rows)} rows, and --held-out {config.held_out} "
            "leaves none to train on; expected --held-out 0, or more rows"
        )
    parts = rows.train_test_split(test_size=count, seed=config.seed)
    return parts["train"], parts["test"]


def _described(rows: Any, text: str) -> dict[str, str]:
    """Options that show progress, which a stream does not take."""
    return {"desc": text} if hasattr(rows, "num_rows") else {}
