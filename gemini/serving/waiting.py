"""Prompts that wait, and which of them share a pass. Pure: no torch."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_GATHER_SECONDS = 0.02  # a pass begins so long after the first prompt: others may come with it


class PromptError(ValueError):
    """Prompt that no pass has room for, or with a token that the model does not have."""


class QueueFullError(Exception):
    """Prompt that is refused: as many as `max_waiting` wait already."""


class ServiceStoppedError(Exception):
    """Prompt that no pass had begun with when the service stopped."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen: temperature 0 takes the likeliest one, and top_k=0 leaves out none."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Text that is new since the last part; `tokens` are all so far.

    finish: "stop" or "length" with the last part. error: what ended the answer instead.
    """

    text: str = ""
    tokens: int = 0
    finish: str | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked: a key of the answer cache."""

    ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class PromptRequest:
    """A prompt whose client waits. `hear` is called in the worker's thread for each part; `gone`:
    the client left, and nobody reads what follows."""

    prompt: Prompt
    hear: Callable[[AnswerPart], None]
    gone: bool = False


@dataclass(frozen=True, slots=True)
class PassBounds:
    """Bounds of a pass. positions: of one sequence, as the model was made."""

    max_tokens: int
    max_sequences: int
    positions: int

    def check(self, prompt: Prompt) -> None:
        """Raise PromptError for a prompt that has no room even alone."""
        most = min(self.max_tokens, self.positions)
        asked = len(prompt.ids) + prompt.max_new_tokens
        if not prompt.ids or asked > most:
            raise PromptError(
                f"a prompt of {len(prompt.ids)} tokens and max_tokens={prompt.max_new_tokens}; "
                f"expected a prompt, and at most {most} tokens in all"
            )

    def pack(self, waiting: Sequence[PromptRequest]) -> list[PromptRequest]:
        """The first request and all that share its pass: same sampling, and room for the longest
        prompt and answer in each sequence."""
        chosen = list(waiting[:1])
        length = answer = 0
        for one in waiting:
            longest = max(length, len(one.prompt.ids)), max(answer, one.prompt.max_new_tokens)
            if one is not chosen[0]:
                tokens = (len(chosen) + 1) * sum(longest)
                is_full = tokens > self.max_tokens or len(chosen) == self.max_sequences
                unlike = one.prompt.sampling != chosen[0].prompt.sampling
                if is_full or unlike or sum(longest) > self.positions:
                    continue
                chosen.append(one)
            length, answer = longest
        return chosen


class RequestQueue:
    """Requests in the order they came; one worker takes those of a pass at a time."""

    def __init__(self, bounds: PassBounds, max_waiting: int) -> None:
        self.bounds = bounds
        self._max_waiting = max_waiting
        self._waiting: list[PromptRequest] = []
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, requests: Sequence[PromptRequest]) -> None:
        """Append all of them or none. Raises PromptError, QueueFullError, ServiceStoppedError."""
        if len(requests) > self._max_waiting:
            raise PromptError(
                f"{len(requests)} prompts in a request; expected at most {self._max_waiting}"
            )
        with self._changed:
            if self._is_closed:
                raise ServiceStoppedError("the server stops")
            self._drop_gone()
            if len(self._waiting) + len(requests) > self._max_waiting:
                raise QueueFullError(
                    f"{len(self._waiting)} prompts wait, and at most {self._max_waiting} may"
                )
            self._waiting.extend(requests)
            self._changed.notify()

    def take(self) -> list[PromptRequest]:
        """Requests of the next pass, as soon as there are any; none once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                self._changed.wait_for(self._is_enough, _GATHER_SECONDS)
                self._drop_gone()
                if self._waiting:
                    chosen = self.bounds.pack(self._waiting)
                    self._waiting = [one for one in self._waiting if one not in chosen]
                    return chosen
        return []

    def close(self) -> None:
        """End `take`; those that wait hear a ServiceStoppedError."""
        with self._changed:
            self._is_closed = True
            left, self._waiting = self._waiting, []
            self._changed.notify()
        for one in left:
            one.hear(AnswerPart(error=ServiceStoppedError("the server stops")))

    def _is_enough(self) -> bool:
        return self._is_closed or len(self._waiting) >= self.bounds.max_sequences

    def _drop_gone(self) -> None:
        self._waiting = [one for one in self._waiting if not one.gone]


class AnswerCache:
    """Answers to the last `size` prompts, up to `list_size` of each. One thread uses it."""

    def __init__(self, size: int, list_size: int) -> None:
        self._size = size
        self._list_size = list_size
        self._answers: OrderedDict[Prompt, list[AnswerPart]] = OrderedDict()

    def get(self, prompt: Prompt) -> AnswerPart | None:
        """An answer, drawn from those of the prompt once it has as many as it may; else None. A
        greedy prompt has one."""
        answers = self._answers.get(prompt, [])
        if not answers or (prompt.sampling.temperature > 0 and len(answers) < self._list_size):
            return None
        self._answers.move_to_end(prompt)
        return random.choice(answers)

    def add(self, prompt: Prompt, answer: AnswerPart) -> None:
        """Keep a whole answer; the prompt that was asked the longest ago makes room."""
        if self._size:
            answers = self._answers.setdefault(prompt, [])
            if len(answers) < self._list_size:
                answers.append(answer)
            self._answers.move_to_end(prompt)
            if len(self._answers) > self._size:
                self._answers.popitem(last=False)
