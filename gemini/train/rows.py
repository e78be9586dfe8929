"""Rows of a data set, each looked at once, before a model is loaded: what is wrong, and where."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tokens import Answers, tools_of

KINDS = {
    "text": ("text",),
    "prompt": ("prompt", "completion"),
    "chat": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
    "pair": ("chosen", "rejected"),
    "question": ("prompt",),
}
TAKEN = {  # kinds, by --method; the first whose keys a row has
    "sft": ("text", "prompt", "chat"), "dpo": ("preference", "pair"),
    "reward": ("preference", "pair"), "grpo": ("question",),
}  # fmt: skip
ALSO = ("tools", "chat_template_kwargs")  # keys that chat templates take
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EXPECTED = {
    "sft": "text, prompt and completion, or messages",
    "dpo": "prompt, chosen and rejected, or chosen and rejected",
    "reward": "prompt, chosen and rejected, or chosen and rejected",
    "grpo": "a prompt",
}
# who speaks in rows of ShareGPT -> roles of chat templates
_SPEAKERS = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "observation": "tool",
}  # fmt: skip
_SHOWN = 8  # keys in a message
_BOM = b"\xef\xbb\xbf"
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """What is asked of rows: to be of `--method`.

    answers: of chats, if they alone are trained on.
    """

    method: str = "sft"
    answers: Answers | None = None

    @property
    def expected(self) -> str:
        return EXPECTED[self.method]


@dataclass(frozen=True, slots=True)
class RowForm:
    """What all rows of a run are: one of `KINDS`, as texts or as lists of messages."""

    kind: str
    is_chat: bool

    @property
    def keys(self) -> tuple[str, ...]:
        return KINDS[self.kind]

    @property
    def in_words(self) -> str:
        values = "lists of messages" if self.is_chat else "texts"
        return f"{' and '.join(self.keys)} as {values}"


def look_at(
    parts: Iterable[tuple[str, Iterable[Any]]],
    flag: str,
    tokenizer: Any,
    asked: RowsWanted = RowsWanted(),
) -> RowForm:
    """Look at every row of named parts, such as files; returns what all of them are.

    Raises ValueError for the first row that cannot be trained on, with its part, number and key,
    and for parts without rows.
    """
    form: RowForm | None = None
    names = []
    for name, rows in parts:
        names.append(name)
        each = iter(rows)
        for number in itertools.count(1):
            try:
                form = checked(next(each), form, tokenizer, asked)
            except StopIteration:
                break
            except RecursionError:
                raise ValueError(
                    f"{flag} {name} row {number}: is nested too deep; expected one object with "
                    f"{asked.expected}"
                ) from None
            except ValueError as wrong:
                raise ValueError(f"{flag} {name} row {number}: {wrong}") from None
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise ValueError(f"{flag} {name} cannot be read: {error}; expected JSONL") from None
    if form is None:
        raise ValueError(f"{flag} {', '.join(names)} has no rows; expected JSONL")
    return form


def read(file: Path) -> Iterator[Any]:
    """Rows of a file: one a line, or the elements of one array."""
    with file.open("rb") as raw:
        head = raw.read(8)
    opened = next((found for magic, found in _OPENERS.items() if head.startswith(magic)), open)
    with opened(file, "rb") as lines:
        filled = filter(bytes.strip, lines)
        first = next(filled, b"").removeprefix(_BOM)
        second = next(filled, b"")
        if first.lstrip().startswith(b"[") and not (second and _is_json(first)):
            whole = _parsed(first + second + lines.read())
            yield from whole if isinstance(whole, list) else [whole]
            return
        yield from map(_parsed, filter(bytes.strip, (first, second)))
        yield from map(_parsed, filled)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is no UTF-8 (byte {error.start}: {error.reason}); expected JSON"
        ) from None
    except ValueError as error:
        raise ValueError(f"is no JSON ({error}); expected one object a line") from None


def converted(row: dict[str, Any], tokenizer: Any, method: str = "sft") -> dict[str, Any]:
    """Row as trl takes it, of one with the keys of Alpaca or ShareGPT; any other as it is.

    Alpaca's is a chat if the tokenizer has a template, and otherwise a prompt and its completion.
    """
    if method != "sft":
        if isinstance(row.get("prompt"), str) and isinstance(row.get("chosen"), list):
            return {key: row[key] for key in row if key != "prompt"}  # both chats begin with it
        return row
    if any(all(k in row for k in KINDS[kind]) for kind in ("prompt", "chat")):
        return row
    if "conversations" in row:
        return _with_system(row, [*map(_spoken, _said(row["conversations"]))])
    if "instruction" not in row or "output" not in row:  # beside it, a text repeats both
        return row
    parts = [row["instruction"], row.get("input") or "", row["output"]]
    for key, part in zip(("instruction", "input", "output"), parts, strict=True):
        if not isinstance(part, str):
            raise ValueError(f"{key} is {_named(part)}; expected a text")
    prompt = "\n".join(filter(None, parts[:2]))
    if not has_template(tokenizer):
        return {"prompt": prompt + "\n", "completion": parts[2]}
    turns = [pair for pair in row.get("history") or [] if isinstance(pair, list)]
    said = [
        turn
        for pair in [*turns, (prompt, parts[2])]
        for turn in zip(("user", "assistant"), pair, strict=True)
    ]
    return _with_system(row, [{"role": role, "content": text} for role, text in said])


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _said(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"conversations is {_named(value)}; expected a list of messages")
    return value


def _spoken(message: Any) -> Any:
    """Message of ShareGPT, `from` and `value`, with a role and content."""
    if not isinstance(message, dict) or "from" not in message:
        return message
    role = _SPEAKERS.get(str(message["from"]), message["from"])
    return {"role": role, "content": message.get("value")}


def _with_system(row: dict[str, Any], messages: list[Any]) -> dict[str, Any]:
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return {"messages": system + messages, **{key: row[key] for key in ALSO if key in row}}


def checked(
    row: Any, form: RowForm | None, tokenizer: Any, asked: RowsWanted = RowsWanted()
) -> RowForm:
    """RowForm of a row, which is that of the rows before. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"is {_named(row)}; expected an object with {asked.expected}")
    row = converted(row, tokenizer, asked.method)
    if form is None:
        kinds = TAKEN[asked.method]
        kind = next((one for one in kinds if all(k in row for k in KINDS[one])), None)
        if kind is None:
            raise ValueError(_unknown(row, asked))
        is_chat = kind == "chat" or isinstance(row[KINDS[kind][0]], list)
        form = RowForm(kind, is_chat)
        if form.is_chat and not has_template(tokenizer):
            raise ValueError(
                "is a chat, and the tokenizer of --model has no chat template; expected one, or "
                "rows with a text prompt and completion"
            )
    for key in form.keys:
        if key not in row:
            raise ValueError(
                f"has no {key}, but {_listed(row)}; expected it, as in the rows before"
            )
        _check_value(key, row[key], form, tokenizer)
    _check_characters(row)
    if form.is_chat:
        _check_template(row, form, tokenizer)
    if form.kind == "chat" and asked.answers is not None:
        asked.answers.check(row)
    return form


def _unknown(row: dict[str, Any], asked: RowsWanted) -> str:
    has, taken = _listed(row), [KINDS[kind] for kind in TAKEN[asked.method]]
    half = [k for keys in taken for k in keys if k in row]
    missing = [k for keys in taken if half and half[0] in keys for k in keys if k not in row]
    if missing:
        return f"has {has}, and no {missing[0]}; expected {asked.expected}"
    return f"has rows with {has}; expected {asked.expected}"


def _check_value(key: str, value: Any, form: RowForm, tokenizer: Any) -> None:
    if form.is_chat:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{key} is {_named(value)}; expected a list of messages")
        for at, message in enumerate(value, start=1):
            _check_message(f"{key}, message {at}", message, tokenizer)
        return
    if not isinstance(value, str):
        raise ValueError(f"{key} is {_named(value)}; expected a text")
    # a prompt may be empty if a completion is trained on
    if not value and (key != "prompt" or form.kind == "question"):
        raise ValueError(f"{key} is empty; expected a text to train on")


def _check_message(where: str, message: Any, tokenizer: Any) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_named(message)}; expected an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or (
        role not in ROLES and role not in str(tokenizer.chat_template)
    ):
        came = f"the role {role!a}" if "role" in message else f"no role, but {_listed(message)}"
        raise ValueError(f"{where} has {came}; expected one of {', '.join(ROLES)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        came = f"{_named(content)} as content" if "content" in message else "no content"
        raise ValueError(f"{where} has {came}; expected a text")


def _check_characters(row: dict[str, Any]) -> None:
    """Raise ValueError for half of a surrogate pair, which no file can have as UTF-8."""
    if _is_encoded(row):
        return
    key = next(key for key in row if not _is_encoded({key: row[key]}))
    raise ValueError(f"{_listed([key])} has half of a surrogate pair; expected whole characters")


def _is_encoded(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_template(row: dict[str, Any], form: RowForm, tokenizer: Any) -> None:
    chats = [[message for key in form.keys for message in row[key]]]
    if "chosen" in form.keys:
        prompt = row["prompt"] if form.kind == "preference" else []
        chats = [prompt + row[key] for key in ("chosen", "rejected")]
    try:
        for messages in chats:
            tokenizer.apply_chat_template(messages, tokenize=False, tools=tools_of(row))
    except Exception as error:  # a template raises whatever it likes
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
        keys = " and ".join(form.keys)
        raise ValueError(
            f"{keys}: the chat template of --model refuses them ({said}); expected a chat in its "
            "order of roles"
        ) from None


def _listed(keys: Iterable[str]) -> str:
    found = [key.encode("utf-8", "backslashreplace").decode() for key in keys]
    return ", ".join(found[:_SHOWN]) + (" ..." if found[_SHOWN:] else "") or "nothing"


def _named(value: Any) -> str:
    """A value in words of JSON."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return "a text" if value else "an empty text"
    kind = "a list" if isinstance(value, list) else "an object"
    return kind if value else kind.replace("a list", "an empty list")
