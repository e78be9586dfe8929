"""Rows of JSONL files, each looked at once, before a model is loaded: what is wrong, and where."""

from __future__ import annotations

import bz2
import glob
import gzip
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {"text": ("text",), "prompt": ("prompt", "completion"), "chat": ("messages",)}
ALSO = ("tools", "chat_template_kwargs")  # keys that chat templates take
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EXPECTED = "text, prompt and completion, or messages"
# keys of rows that are common elsewhere, and the command that writes such rows as they are taken
_ELSEWHERE = {
    "instruction": 'jq -c \'{prompt: (.instruction + "\\n" + (.input // "")), '
    "completion: .output}'",
    "conversations": 'jq -c \'{messages: [.conversations[] | {role: ({human: "user", '
    'gpt: "assistant"}[.from] // .from), content: .value}]}\'',
}
_SHOWN = 8  # keys in a message
_BOM = b"\xef\xbb\xbf"
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


@dataclass(frozen=True, slots=True)
class RowForm:
    """What all rows of a run are: one of `KINDS`, as texts or as lists of messages."""

    kind: str
    is_chat: bool

    @property
    def keys(self) -> tuple[str, ...]:
        return KINDS[self.kind]


def files_of(pattern: str, flag: str) -> list[str]:
    """Files of a path, or of a glob where no such path exists. Raises ValueError if there are none,
    and for what is no file."""
    here = Path(pattern).exists()
    found = [pattern] if here else sorted(glob.glob(pattern, recursive=True))
    if not found:
        is_id = pattern.count("/") == 1 and not pattern.startswith((".", "/", "~"))
        also = " (of a data set on the hub: load_dataset(...).to_json(FILE))" if is_id else ""
        raise ValueError(f"{flag} {pattern} is no file; expected JSONL{also}")
    for name in found:
        if Path(name).is_dir():
            raise ValueError(f"{flag} {name} is a folder; expected JSONL: '{name}/*.jsonl'")
        if not Path(name).is_file():
            raise ValueError(f"{flag} {name} is no regular file; expected JSONL")
    return found


def look_at(files: Sequence[str], flag: str, tokenizer: Any) -> RowForm:
    """Look at every row of the files; returns what all of them are.

    Raises ValueError for the first row that cannot be trained on, with its file, number and key,
    and for files without rows.
    """
    form: RowForm | None = None
    for file in files:
        rows = _rows(Path(file))
        for number in itertools.count(1):
            try:
                form = _checked(next(rows), form, tokenizer)
            except StopIteration:
                break
            except RecursionError:
                raise ValueError(
                    f"{flag} {file} row {number}: is nested too deep; expected one object with "
                    f"{EXPECTED}"
                ) from None
            except ValueError as wrong:
                raise ValueError(f"{flag} {file} row {number}: {wrong}") from None
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise ValueError(f"{flag} {file} cannot be read: {error}; expected JSONL") from None
    if form is None:
        raise ValueError(f"{flag} {', '.join(files)} has no rows; expected JSONL")
    return form


def _rows(file: Path) -> Iterator[Any]:
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


def _checked(row: Any, form: RowForm | None, tokenizer: Any) -> RowForm:
    """RowForm of a row, which is that of the rows before. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"is {_named(row)}; expected an object with {EXPECTED}")
    if form is None:
        kind = next((one for one, keys in KINDS.items() if all(k in row for k in keys)), None)
        if kind is None:
            raise ValueError(_unknown(row))
        is_chat = kind == "chat" or isinstance(row[KINDS[kind][0]], list)
        form = RowForm(kind, is_chat)
        if form.is_chat and not getattr(tokenizer, "chat_template", None):
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
    return form


def _unknown(row: dict[str, Any]) -> str:
    has = _listed(row)
    half = [k for keys in KINDS.values() for k in keys if k in row]
    missing = [
        k for keys in KINDS.values() if half and half[0] in keys for k in keys if k not in row
    ]
    if missing:
        return f"has {has}, and no {missing[0]}; expected {EXPECTED}"
    how = next((f": {how} writes such rows" for key, how in _ELSEWHERE.items() if key in row), "")
    return f"has rows with {has}; expected {EXPECTED}{how}"


def _check_value(key: str, value: Any, form: RowForm, tokenizer: Any) -> None:
    if form.is_chat:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{key} is {_named(value)}; expected a list of messages")
        for at, message in enumerate(value, start=1):
            _check_message(f"{key}, message {at}", message, tokenizer)
        return
    if not isinstance(value, str):
        raise ValueError(f"{key} is {_named(value)}; expected a text")
    if not value and key != "prompt":  # a prompt may be empty: the completion is trained on
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
    messages = [message for key in form.keys for message in row[key]]
    try:
        tokenizer.apply_chat_template(messages, tokenize=False, tools=_tools(row))
    except Exception as error:  # a template raises whatever it likes
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
        keys = " and ".join(form.keys)
        raise ValueError(
            f"{keys}: the chat template of --model refuses them ({said}); expected a chat in its "
            "order of roles"
        ) from None


def _tools(row: dict[str, Any]) -> Any:
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


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


def fitting(rows: Any, form: RowForm, tokenizer: Any, seq: int) -> Any:
    """Rows of a `datasets.Dataset` of which --seq leaves something to train on.

    trl cuts a row to its first `seq` tokens and drops it if none of the completion is left.
    """
    if form.kind != "prompt":
        return rows
    return rows.filter(
        _has_loss, batched=True, desc="Measuring prompts",
        fn_kwargs={"tokenizer": tokenizer, "seq": seq, "is_chat": form.is_chat},
    )  # fmt: skip


def _has_loss(batch: dict[str, list[Any]], tokenizer: Any, seq: int, is_chat: bool) -> list[bool]:
    """Whether each row has a token of its completion within the first `seq`, as trl counts."""
    from trl.data_utils import common_prefix_length

    pairs = zip(batch["prompt"], batch["completion"], strict=True)
    if is_chat:
        tools = [
            _tools({"tools": one}) for one in batch.get("tools", [None] * len(batch["prompt"]))
        ]
        ids = [
            (
                tokenizer.apply_chat_template(
                    prompt, add_generation_prompt=True, tools=tool, return_dict=True
                )["input_ids"],
                tokenizer.apply_chat_template(prompt + completion, tools=tool, return_dict=True)[
                    "input_ids"
                ],
            )
            for (prompt, completion), tool in zip(pairs, tools, strict=True)
        ]
    else:
        end = tokenizer.eos_token
        wholes = [p + c + ("" if c.endswith(end) else end) for p, c in pairs]
        ids = list(
            zip(
                tokenizer(batch["prompt"])["input_ids"], tokenizer(wholes)["input_ids"], strict=True
            )
        )
    return [common_prefix_length(one, whole) < min(len(whole), seq) for one, whole in ids]
