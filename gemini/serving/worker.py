"""One thread that owns the model: it decodes passes of requests until the queue is closed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .command import device_of
from .waiting import (
    AnswerPart,
    PassBounds,
    Prompt,
    PromptError,
    PromptRequest,
    RequestQueue,
    Sampling,
)

log = logging.getLogger("gemini")
_UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character


class DecodeWorker:
    """Model, tokenizer and queue; `start` begins its thread and `stop` ends it after its pass."""

    def __init__(
        self, model: Any, tokenizer: Any, *, max_tokens: int, max_sequences: int, max_waiting: int
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        config = model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or max_tokens
        self._vocabulary: int = config.vocab_size
        self._bounds = PassBounds(max_tokens, max_sequences, positions)
        self.queue = RequestQueue(self._bounds, max_waiting)
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self._ends: list[int] = [] if ends is None else ends if isinstance(ends, list) else [ends]
        # a tokenizer's first call sets it up, and fails while another thread has it
        tokenizer("")
        self._thread = threading.Thread(target=self._work, name="gemini-decode", daemon=True)

    def check(self, prompt: Prompt) -> None:
        """Raise PromptError for strange tokens, and for more than a pass has room for."""
        strange = [one for one in prompt.ids if not 0 <= one < self._vocabulary]
        if strange:
            raise PromptError(f"no token {strange[0]}; expected 0..{self._vocabulary - 1}")
        self._bounds.check(prompt)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are decoded."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Refuse requests from now on, those that wait too; the pass under way goes on."""
        self.queue.close()

    def join(self) -> None:
        """Wait for the end of the last pass."""
        self._thread.join()

    def _work(self) -> None:
        while requests := self.queue.take():
            try:
                self._decode(requests)
            except Exception as error:  # of any model; the next pass may be another
                log.exception("a pass over %d prompts failed", len(requests))
                for one in requests:
                    one.hear(AnswerPart(error=error))

    def _decode(self, requests: Sequence[PromptRequest]) -> None:
        """Decode one pass: prompts are padded on the left, and each row ends by its own bounds."""
        length = max(len(one.prompt.ids) for one in requests)
        pad = self.tokenizer.pad_token_id or 0
        device = device_of(self.model)
        rows = [[pad] * (length - len(one.prompt.ids)) + [*one.prompt.ids] for one in requests]
        masks = [[0] * (length - len(one.prompt.ids)) + [1] * len(one.prompt.ids)
                 for one in requests]  # fmt: skip
        answers = _PassAnswers(self.tokenizer, requests, self._ends)
        with torch.no_grad():
            self.model.generate(
                input_ids=torch.tensor(rows, device=device),
                attention_mask=torch.tensor(masks, device=device),
                max_new_tokens=max(one.prompt.max_new_tokens for one in requests),
                stopping_criteria=[answers], pad_token_id=pad, num_beams=1,
                eos_token_id=self._ends or None, **_chosen(requests[0].prompt.sampling),
            )  # fmt: skip


def _chosen(sampling: Sampling) -> dict[str, Any]:
    """Arguments of `generate`: all of them, as a folder may bring its own defaults."""
    if sampling.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k}  # fmt: skip


class _PassAnswers:
    """Stopping criterion of `generate`: tells requests their new text, and which rows are done."""

    def __init__(
        self, tokenizer: Any, requests: Sequence[PromptRequest], ends: Collection[int]
    ) -> None:
        self._rows = [_RowAnswer(tokenizer, one, ends) for one in requests]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            if not row.is_done:
                row.add(token)
        return torch.tensor([row.is_done for row in self._rows], device=input_ids.device)


class _RowAnswer:
    """Tokens of one answer, and how much of its text the client has."""

    def __init__(self, tokenizer: Any, request: PromptRequest, ends: Collection[int]) -> None:
        self._tokenizer, self._request, self._ends = tokenizer, request, ends
        self._tokens: list[int] = []
        self._sent = 0  # characters
        self.is_done = False

    def add(self, token: int) -> None:
        """Append a token, and send the text that no later one changes."""
        if self._request.gone:
            self.is_done = True
            return
        prompt = self._request.prompt
        self._tokens.append(token)
        text: str = self._tokenizer.decode(
            self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        found = [at for stop in prompt.stops if (at := text.find(stop)) >= 0]
        finish = None
        if found or token in self._ends:
            finish, text = "stop", text[: min(found, default=len(text))]
        elif len(self._tokens) == prompt.max_new_tokens:
            finish = "length"
        else:
            text = text[: len(text) - _unsure(text, prompt.stops)]
        self.is_done = finish is not None
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        if new or finish:
            self._request.hear(AnswerPart(new, len(self._tokens), finish))


def _unsure(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may become a stop, or another character."""
    bare = text.rstrip(_UNFINISHED)
    lengths = [size for stop in stops for size in range(1, len(stop)) if bare.endswith(stop[:size])]
    return len(text) - len(bare) + max(lengths, default=0)
