"""Routes of HTTP: OpenAI's completions, and the documents' OPT service. Imported lazily: FastAPI is
an extra."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from starlette.exceptions import HTTPException

from gemini.strangers import said

from .waiting import (
    AnswerCache,
    AnswerPart,
    Prompt,
    PromptError,
    PromptRequest,
    QueueFullError,
    Sampling,
    ServiceStoppedError,
)
from .worker import DecodeWorker

_COLD = 1e-3  # of temperature: below it, logits overflow, and the answer is the greedy one
_STATUS: dict[type[Exception], int] = {
    PromptError: 400, QueueFullError: 429, ConnectionResetError: 499, ServiceStoppedError: 503,
}  # fmt: skip
_PLAIN: dict[str, tuple[Any, ...]] = {  # options that would change an answer, and what they may be
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (), "seed": (),
    "logit_bias": ({},), "frequency_penalty": (0,), "presence_penalty": (0,),
}  # fmt: skip
Ids = list[StrictInt]
_Parts = AsyncIterator[tuple[int, AnswerPart]]


class StreamOptions(BaseModel):
    """How a stream ends."""

    include_usage: bool = False


class CompletionBody(BaseModel):
    """What OpenAI's completions take. Other fields are in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    prompt: str | Ids | list[str] | list[Ids]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class GenerationBody(BaseModel):
    """What the documents' OPT service takes; without the last three the answer is greedy."""

    prompt: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None


class CompletionService:
    """Worker, cache and name of a model. `app()` has the routes."""

    def __init__(self, worker: DecodeWorker, name: str, cache: AnswerCache) -> None:
        self._worker, self._name, self._cache = worker, name, cache
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """Application to give to a server."""
        app = FastAPI(title="Gemini", docs_url="/docs")
        app.get("/health")(self.health)
        app.get("/v1/models")(self.models)
        app.post("/v1/completions", response_model=None)(self.complete)
        app.post("/generation", response_model=None)(self.generation)
        app.exception_handler(RequestValidationError)(_invalid)
        app.exception_handler(HTTPException)(_refused)
        return app

    async def health(self) -> Response:
        """Whether prompts are decoded, and how many wait."""
        alive = self._worker.is_alive
        state = {"status": "ok" if alive else "stopped", "waiting": len(self._worker.queue)}
        return JSONResponse(state, 200 if alive else 503)

    async def models(self) -> dict[str, Any]:
        """The one model."""
        one = {"id": self._name, "object": "model", "created": self._created, "owned_by": "gemini"}
        return {"object": "list", "data": [one]}

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Answers to one prompt or several, whole or as they are decoded."""
        if body.model not in (None, self._name):
            return _error(404, f"no model {body.model}; expected {self._name}")
        for name, value in (body.model_extra or {}).items():
            if name in _PLAIN and value is not None and value not in _PLAIN[name]:
                return _error(400, f"{name}={value!r} is not supported")
        stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        sampling = _sampling(body.temperature, body.top_p)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion",
                "created": int(time.time()), "model": self._name}  # fmt: skip
        try:
            prompts = [
                self._prompt(one, body.max_tokens, sampling, tuple(filter(None, stops)))
                for one in _each(body.prompt)
            ]
            parts = await _begun(self._parts(prompts, request))
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                events = _events(head, prompts, parts, usage=usage)
                return StreamingResponse(events, media_type="text/event-stream")
            answers = await _whole(len(prompts), parts)
        except Exception as error:
            return _failed(error)
        choices = [_choice(i, answer) for i, answer in enumerate(answers)]
        return JSONResponse({**head, "choices": choices, "usage": _usage(prompts, answers)})

    async def generation(self, body: GenerationBody, request: Request) -> Response:
        """A prompt with its answer."""
        is_sampled = (body.temperature, body.top_k, body.top_p) != (None, None, None)
        temperature = float(is_sampled) if body.temperature is None else body.temperature
        sampling = _sampling(temperature, body.top_p or 1.0, body.top_k or 0)
        try:
            prompt = self._prompt(body.prompt, body.max_tokens, sampling, ())
            (answer,) = await _whole(1, self._parts([prompt], request))
        except Exception as error:
            return _failed(error)
        return JSONResponse({"text": body.prompt + answer.text})

    def _prompt(
        self, given: str | list[int], tokens: int, sampling: Sampling, stops: tuple[str, ...]
    ) -> Prompt:
        """Raises PromptError for one that no pass has room for."""
        ids = self._worker.tokenizer(given)["input_ids"] if isinstance(given, str) else given
        prompt = Prompt(tuple(ids), tokens, sampling, stops)
        self._worker.check(prompt)
        return prompt

    async def _parts(self, prompts: Sequence[Prompt], request: Request) -> _Parts:
        """Parts of all answers with the index of each prompt, as they are decoded. Raises what ends
        them; nothing is decoded for a client that leaves."""
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[tuple[int, AnswerPart]]()
        texts = [""] * len(prompts)
        asked: list[PromptRequest] = []
        for i, prompt in enumerate(prompts):
            cached = self._cache.get(prompt)
            if cached is not None:
                heard.put_nowait((i, cached))
                continue

            def hear(part: AnswerPart, i: int = i) -> None:
                loop.call_soon_threadsafe(heard.put_nowait, (i, part))

            asked.append(PromptRequest(prompt, hear))
        self._worker.queue.add(asked)
        async with _watched(request, asked, heard):
            left = len(prompts)
            while left:
                i, part = await heard.get()
                if part.error is not None:
                    raise part.error
                texts[i] += part.text
                if part.finish is not None:
                    left -= 1
                    self._cache.add(prompts[i], replace(part, text=texts[i]))
                yield i, part


@asynccontextmanager
async def _watched(
    request: Request,
    asked: Sequence[PromptRequest],
    heard: asyncio.Queue[tuple[int, AnswerPart]],
) -> AsyncIterator[None]:
    """Context in which requests end as soon as their client leaves; after it all are gone."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for one in asked:
            one.gone = True
        heard.put_nowait((0, AnswerPart(error=ConnectionResetError("the client left"))))

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        for one in asked:
            one.gone = True


async def _begun(parts: _Parts) -> _Parts:
    """All parts, once there is the first: what is raised before it has a status of its own."""
    first = await anext(parts)

    async def rest() -> _Parts:
        yield first
        async for one in parts:
            yield one

    return rest()


async def _whole(count: int, parts: _Parts) -> list[AnswerPart]:
    """Answers of `count` prompts."""
    texts, last = [""] * count, [AnswerPart()] * count
    async for i, part in parts:
        texts[i] += part.text
        last[i] = part
    return [replace(part, text=text) for text, part in zip(texts, last, strict=True)]


async def _events(
    head: dict[str, Any], prompts: Sequence[Prompt], parts: _Parts, *, usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; an error is the last."""
    last = [AnswerPart()] * len(prompts)
    try:
        async for i, part in parts:
            last[i] = part
            yield _event({**head, "choices": [_choice(i, part)]})
    except Exception as error:
        yield _event(json.loads(bytes(_failed(error).body)))
        return
    if usage:
        yield _event({**head, "choices": [], "usage": _usage(prompts, last)})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _each(prompt: Any) -> list[Any]:
    """Prompts of a request: each is a text or a list of token ids."""
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return prompt if many else [prompt]


def _sampling(temperature: float, top_p: float, top_k: int = 0) -> Sampling:
    return Sampling() if temperature < _COLD else Sampling(temperature, top_p, top_k)


def _choice(index: int, part: AnswerPart) -> dict[str, Any]:
    return {"index": index, "text": part.text, "logprobs": None, "finish_reason": part.finish}


def _usage(prompts: Sequence[Prompt], answers: Sequence[AnswerPart]) -> dict[str, int]:
    asked, made = sum(len(one.ids) for one in prompts), sum(one.tokens for one in answers)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def _error(status: int, message: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status)


def _failed(error: Exception) -> JSONResponse:
    status = _STATUS.get(type(error))
    if status is None:
        return _error(500, f"the model failed: {type(error).__name__}: {said(error)}")
    return _error(status, str(error))


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = {f"{'.'.join(map(str, one['loc'][1:2]))}: {one['msg']}" for one in error.errors()}
    return _error(400, "; ".join(sorted(found)))


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)
