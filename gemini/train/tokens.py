"""Tokens of rows that are trained on: the answers of a chat, or a completion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MASK = "assistant_masks"  # column by which trl knows tokens of answers


class Answers:
    """Answers in chats, by the template of a tokenizer.

    A template with `{% generation %}` marks them, or the one that trl has in place of a template
    without. Of any other template an answer is what its message adds to the messages before.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = _marking_template(tokenizer)

    def check(self, row: dict[str, Any]) -> None:
        """Raise ValueError for a chat without an answer, or whose answers the template hides."""
        ends = list(_ends(row["messages"]))
        if not ends:
            raise ValueError(
                "messages has no message of the assistant, and answers alone are trained on; "
                "expected one, or --loss all"
            )
        if self._template is not None:
            return
        whole = self._render(row, None, tokenize=False)
        if not all(whole.startswith(self._render(row, end, tokenize=False)) for end in ends):
            raise ValueError(
                "messages: the chat template of --model renders a message otherwise when others "
                "follow it, which hides where answers end; expected a template that marks them by "
                "{% generation %}, or --loss all"
            )

    def mark(self, row: dict[str, Any]) -> dict[str, list[int]]:
        """Tokens of a chat, and which of them are answers, as trl takes both."""
        if self._template is not None:
            found = self._render(row, None, return_assistant_tokens_mask=True)
            return {"input_ids": list(found["input_ids"]), MASK: list(found[MASK])}
        from trl.data_utils import common_prefix_length

        whole = list(self._render(row, None)["input_ids"])
        mask = [0] * len(whole)
        for end in _ends(row["messages"]):
            asked = self._render(row, end - 1, add_generation_prompt=True) if end > 1 else None
            first = 0 if asked is None else common_prefix_length(asked["input_ids"], whole)
            last = common_prefix_length(self._render(row, end)["input_ids"], whole)
            mask[first:last] = [1] * (last - first)
        return {"input_ids": whole, MASK: mask}

    def _render(self, row: dict[str, Any], end: int | None, **options: Any) -> Any:
        options = {"return_dict": options.get("tokenize", True), **options}
        return self._tokenizer.apply_chat_template(
            row["messages"][:end], tools=tools_of(row), chat_template=self._template,
            **options, **(row.get("chat_template_kwargs") or {}),
        )  # fmt: skip


def _ends(messages: list[dict[str, Any]]) -> Iterator[int]:
    """Index behind each message of the assistant."""
    return (i for i, said in enumerate(messages, start=1) if said["role"] == "assistant")


def _marking_template(tokenizer: Any) -> str | None:
    """Template that marks answers: the tokenizer's own, or trl's for it; None if neither does."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    own = tokenizer.chat_template
    if has_generation_markers(own):
        return str(own["default"] if isinstance(own, dict) else own)
    try:
        return get_training_chat_template(tokenizer)
    except Exception:  # it renders a chat of its own, and a template raises whatever it likes
        return None


def tools_of(row: dict[str, Any]) -> Any:
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def has_answer(masks: list[list[int]], seq: int) -> list[bool]:
    """Whether each row has an answer's token within the first `seq`."""
    return [any(mask[:seq]) for mask in masks]


def has_completion(
    batch: dict[str, list[Any]], tokenizer: Any, seq: int, is_chat: bool
) -> list[bool]:
    """Whether each row has a token of its completion within the first `seq`, as trl counts.

    trl cuts a row to its first `seq` tokens and drops it if none of the completion is left.
    """
    from trl.data_utils import common_prefix_length

    pairs = zip(batch["prompt"], batch["completion"], strict=True)
    if is_chat:
        tools = [
            tools_of({"tools": one}) for one in batch.get("tools", [None] * len(batch["prompt"]))
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
        texts = [p + c + ("" if c.endswith(end) else end) for p, c in pairs]
        ids = list(
            zip(tokenizer(batch["prompt"])["input_ids"], tokenizer(texts)["input_ids"], strict=True)
        )
    return [common_prefix_length(one, whole) < min(len(whole), seq) for one, whole in ids]


def has_room(row: dict[str, Any], tokenizer: Any, seq: int) -> bool:
    """Whether both texts of a pair have at most `seq` tokens: a score is that of a whole text."""
    before = row.get("prompt")
    for text in (row["chosen"], row["rejected"]):
        whole = text if before is None else before + text
        if isinstance(whole, list):
            found = tokenizer.apply_chat_template(
                whole, tools=tools_of(row), return_dict=True,
                **(row.get("chat_template_kwargs") or {}),
            )  # fmt: skip
        else:
            end = tokenizer.eos_token
            found = tokenizer(whole if whole.endswith(end) else whole + end)
        if len(found["input_ids"]) > seq:
            return False
    return True
