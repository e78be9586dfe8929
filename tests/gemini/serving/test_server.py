"""Completions over HTTP: packed, streamed, refused, cancelled, and after an error in the model."""

import asyncio
import json
import signal
import subprocess
import sys

import httpx
import pytest
import torch

import gemini
from gemini.serving.server import CompletionService
from gemini.serving.waiting import (
    AnswerCache,
    AnswerPart,
    PassBounds,
    Prompt,
    PromptRequest,
    Sampling,
)
from gemini.serving.worker import DecodeWorker
from tests.support.model_folder import make_folder
from tests.support.model_folder import tokenizer as tokenizer
from tests.support.until import until

TEXTS = ["A chunk", "The planner keeps every shard of it", "x", "gradients and state"]
ROOM = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return gemini.load_pretrained(
        folder, serve=True, dtype=torch.float32, precision="fp32", max_tokens=ROOM, max_sequences=4
    )


class Served:
    """A service over ASGI. `begin` starts its worker, by default before the first request."""

    def __init__(self, model, tokenizer, *, max_waiting=8, cache=(0, 1)):
        self.worker = DecodeWorker(
            model, tokenizer, max_tokens=ROOM, max_sequences=4, max_waiting=max_waiting
        )
        self.app = CompletionService(self.worker, "tiny", AnswerCache(*cache)).app()

    def ask(self, *bodies, path="/v1/completions", first=0):
        """Replies to bodies that wait together; the worker begins once `first` of them wait."""

        async def all_of_them():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                calls = [asyncio.create_task(client.post(path, json=body)) for body in bodies]
                await asyncio.to_thread(until, lambda: len(self.worker.queue) >= first)
                if not self.worker.is_alive:
                    self.worker.start()
                return await asyncio.gather(*calls)

        return asyncio.run(all_of_them())

    def get(self, path):
        async def one():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await client.get(path)

        return asyncio.run(one())


@pytest.fixture
def serve(model, tokenizer):
    made = []

    def make(**options):
        made.append(Served(model, tokenizer, **options))
        return made[-1]

    yield make
    for one in made:
        one.worker.stop()
        if one.worker.is_alive:
            one.worker.join()


@pytest.fixture
def passes(model, monkeypatch):
    """Number of prompts in each pass."""
    found, generate = [], model.generate

    def counted(**given):
        found.append(len(given["input_ids"]))
        return generate(**given)

    monkeypatch.setattr(model, "generate", counted, raising=False)
    return found


def greedy(prompt, **options):
    return {"prompt": prompt, "temperature": 0, "max_tokens": 12, **options}


def alone(model, tokenizer, text, count=12):
    given = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(input_ids=given, max_new_tokens=count, do_sample=False)
    return out[0, given.shape[1] :].tolist()


def events(reply):
    lines = reply.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], reply.text
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_prompts_that_wait_share_a_pass_and_each_has_the_answer_it_has_alone(
    serve, passes, model, tokenizer
):
    lengths = [12, 5, 9, 1]
    bodies = [greedy(text, max_tokens=n) for text, n in zip(TEXTS, lengths, strict=True)]
    replies = serve().ask(*bodies, first=4)
    assert passes == [4]
    for text, count, reply in zip(TEXTS, lengths, replies, strict=True):
        tokens = alone(model, tokenizer, text, count)
        (choice,) = reply.json()["choices"]
        is_whole = tokens[-1] != tokenizer.eos_token_id
        assert choice["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
        assert choice["finish_reason"] == ("length" if is_whole else "stop")
        assert reply.json()["usage"]["completion_tokens"] == len(tokens)
        assert reply.json()["usage"]["prompt_tokens"] == len(tokenizer(text)["input_ids"])


def test_a_list_of_prompts_texts_or_ids_is_answered_in_its_order(serve, passes, tokenizer):
    served = serve()
    (texts,) = served.ask(greedy(TEXTS))
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    (same,) = served.ask(greedy(ids))
    (one,) = served.ask(greedy(ids[1], model="tiny"))
    choices = texts.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert same.json()["choices"] == choices and len({one["text"] for one in choices}) > 1
    assert one.json()["choices"][0]["text"] == choices[1]["text"]
    assert passes == [4, 4, 1]


def test_prompts_that_are_sampled_otherwise_do_not_share_a_pass(serve, passes):
    bodies = [greedy("x"), {"prompt": "x", "temperature": 0.5}, greedy("y"), {"prompt": "z"}]
    replies = serve().ask(*bodies, first=4)
    assert [reply.status_code for reply in replies] == [200] * 4
    assert passes == [2, 1, 1]


def test_a_stream_has_the_same_text_in_parts(serve):
    served = serve()
    (whole,) = served.ask(greedy(TEXTS[:2]))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    (reply,) = served.ask(greedy(TEXTS[:2], **options))
    assert reply.headers["content-type"].startswith("text/event-stream")
    *parts, last = events(reply)
    assert len(parts) > 4 and last["choices"] == [] and last["usage"] == whole.json()["usage"]
    for choice in whole.json()["choices"]:
        mine = [part["choices"][0] for part in parts]
        mine = [part for part in mine if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        reasons = [part["finish_reason"] for part in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_a_stop_ends_the_answer_before_it_and_no_part_of_it_is_sent(serve):
    served = serve()
    (whole,) = served.ask(greedy(TEXTS[0]))
    text = whole.json()["choices"][0]["text"]
    stop = text[4:7]
    (cut,) = served.ask(greedy(TEXTS[0], stop=["never that", stop]))
    (streamed,) = served.ask(greedy(TEXTS[0], stop=stop, stream=True))
    (choice,) = cut.json()["choices"]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    assert "".join(one["choices"][0]["text"] for one in events(streamed)) == choice["text"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "prompt: Field required"),
        ({"prompt": 3}, 400, "prompt:"),
        (greedy("x", temperature=-1), 400, "temperature:"),
        (greedy("x", top_p=0), 400, "top_p:"),
        (greedy("x", max_tokens=0), 400, "max_tokens:"),
        (greedy("x", n=2), 400, "n=2 is not supported"),
        (greedy([]), 400, "a prompt of 0 tokens"),
        (greedy([[5], [300]]), 400, "no token 300; expected 0..299"),
        (greedy("x", model="another"), 404, "no model another; expected tiny"),
        (greedy("x " * 100), 400, "expected a prompt, and at most 64 tokens in all"),
        (greedy(["x"] * 9), 400, "9 prompts in a request; expected at most 8"),
    ],
)
def test_bad_input_is_refused_with_a_reason_and_disturbs_nobody(serve, passes, body, status, says):
    bad, good = serve().ask(body, greedy("A chunk"), first=1)
    error = bad.json()["error"]
    assert bad.status_code == status and says in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"] == status
    assert good.status_code == 200 and passes == [1]


def test_what_is_no_json_and_no_route_is_refused_in_the_same_form(serve):
    served = serve()

    async def send():
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            headers = {"content-type": "application/json"}
            return await client.post("/v1/completions", content="{", headers=headers)

    reply, missing = asyncio.run(send()), served.get("/nowhere")
    assert reply.status_code == 400 and "JSON" in reply.json()["error"]["message"]
    assert missing.status_code == 404 and missing.json()["error"]["message"] == "Not Found"


def test_a_full_queue_refuses_one_more(serve, passes):
    replies = serve(max_waiting=2).ask(*map(greedy, TEXTS[:3]), first=2)
    assert sorted(reply.status_code for reply in replies) == [200, 200, 429]
    (full,) = (reply for reply in replies if reply.status_code == 429)
    assert "2 prompts wait" in full.json()["error"]["message"] and passes == [2]


def test_an_error_in_the_model_is_said_to_its_pass_and_the_next_is_decoded(serve, model):
    served = serve()
    (before,) = served.ask(greedy(TEXTS[0]))
    layer = model.model.layers[1]

    def fails(*_):
        raise RuntimeError("no such luck")

    handle = layer.register_forward_hook(fails)
    try:
        replies = served.ask(greedy("x"), greedy("y", stream=True))
    finally:
        handle.remove()
    for reply in replies:
        assert reply.status_code == 500 and "no such luck" in reply.json()["error"]["message"]
    (after,) = served.ask(greedy(TEXTS[0]))
    assert after.json()["choices"] == before.json()["choices"]


def test_an_error_within_a_stream_is_its_last_event(serve, model):
    calls = []

    def fails(*_):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("no such luck")

    handle = model.model.layers[1].register_forward_hook(fails)
    try:
        (reply,) = serve().ask(greedy(TEXTS[1], stream=True))
    finally:
        handle.remove()
    *parts, last, end = reply.text.split("\n\n")
    assert reply.status_code == 200 and parts and end == ""
    assert "no such luck" in json.loads(last.removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", ["while it waits", "while it is decoded"])
def test_a_client_that_leaves_is_dropped(serve, passes, model, stream, leaves):
    served, lengths = serve(), []
    waits = leaves == "while it waits"

    async def leave():
        gone, heard = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        body = json.dumps(greedy("A chunk", max_tokens=50, stream=stream)).encode()
        said = [{"type": "http.request", "body": body, "more_body": False}]

        def decoded(*_):
            lengths.append(1)
            if len(lengths) == 3:
                asyncio.run_coroutine_threadsafe(until_dropped(), loop).result()

        async def until_dropped():
            gone.set()
            await answered

        async def receive():
            if said:
                return said.pop()
            heard.set()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_):
            pass

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"},
        }  # fmt: skip
        answered = asyncio.ensure_future(served.app(scope, receive, send))
        await heard.wait()
        handle = model.model.layers[0].register_forward_hook(decoded)
        try:
            if waits:
                gone.set()
                await answered
            served.worker.start()
            await answered
        finally:
            if not waits:
                await asyncio.to_thread(served.worker.stop)
                await asyncio.to_thread(served.worker.join)
            handle.remove()

    asyncio.run(leave())
    if waits:
        assert served.ask(greedy("x"))[0].status_code == 200
        assert passes == [1]
    else:
        assert passes == [1] and len(lengths) == 3


def test_greedy_answers_are_cached_and_sampled_ones_once_there_are_enough(serve, passes):
    served = serve(cache=(2, 2))
    sampled = {"prompt": "x", "temperature": 1.5, "max_tokens": 6}
    (first,), (again,) = served.ask(greedy("A chunk")), served.ask(greedy("A chunk"))
    assert first.json()["choices"] == again.json()["choices"] and len(passes) == 1
    answers = [served.ask(sampled)[0].json()["choices"][0]["text"] for _ in range(12)]
    assert len(passes) == 3 and set(answers[2:]) <= set(answers[:2])
    served.ask(greedy("A chunk"))
    assert len(passes) == 3


def test_the_prompt_that_was_asked_the_longest_ago_makes_room():
    cache = AnswerCache(2, 1)
    first, second, third = (Prompt((i,), 4, Sampling()) for i in range(3))
    for one in (first, second):
        cache.add(one, AnswerPart(str(one.ids), 1, "stop"))
    assert cache.get(first).text == "(0,)"
    cache.add(third, AnswerPart("third", 1, "stop"))
    assert [cache.get(one) is None for one in (first, second, third)] == [False, True, False]
    nothing = AnswerCache(0, 1)
    nothing.add(first, AnswerPart("x", 1, "stop"))
    assert nothing.get(first) is None


def test_a_pass_has_room_for_its_longest_prompt_and_answer_in_each_row():
    def request(length, new, temperature=0.0):
        prompt = Prompt((5,) * length, new, Sampling(temperature))
        return PromptRequest(prompt, lambda part: None)

    bounds = PassBounds(max_tokens=60, max_sequences=3, positions=25)
    head, short, long_, other = request(4, 6), request(2, 2), request(20, 5), request(4, 6, 1.0)
    assert bounds.pack([head, long_, other, short]) == [head, short]
    assert bounds.pack([long_, head, short]) == [long_, short]  # 20 + 6 are more than 25 positions
    assert bounds.pack([long_, short, request(2, 2)]) == [long_, short]  # 3 x 25 are more than 60
    four = [request(2, 2) for _ in range(4)]
    assert bounds.pack(four) == four[:3]


def test_the_opt_service_answers_a_prompt_with_its_text(serve, model, tokenizer):
    served = serve()
    body = {"prompt": "A chunk", "max_tokens": 7}
    (reply,) = served.ask(body, path="/generation")
    tokens = alone(model, tokenizer, "A chunk", 7)
    assert reply.json() == {"text": "A chunk" + tokenizer.decode(tokens, skip_special_tokens=True)}
    (one,) = served.ask({**body, "top_k": 1, "top_p": 0.9, "temperature": 0.5}, path="/generation")
    assert one.json() == reply.json()  # of one candidate it draws the likeliest
    (bad,) = served.ask({**body, "top_k": 0}, path="/generation")
    assert bad.status_code == 400 and "top_k" in bad.json()["error"]["message"]


def test_health_and_models(serve):
    served = serve()
    assert served.get("/health").status_code == 503
    served.worker.start()
    assert served.get("/health").json() == {"status": "ok", "waiting": 0}
    assert [one["id"] for one in served.get("/v1/models").json()["data"]] == ["tiny"]
    served.worker.stop()
    served.worker.join()
    assert served.get("/health").status_code == 503


def test_prompts_that_wait_when_the_server_stops_are_told(serve):
    served = serve()

    async def stopped():
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            waiting = asyncio.create_task(client.post("/v1/completions", json=greedy("x")))
            await asyncio.to_thread(until, lambda: len(served.worker.queue))
            served.worker.stop()
            return await waiting, await client.post("/v1/completions", json=greedy("x"))

    for reply in asyncio.run(stopped()):
        assert reply.status_code == 503 and "stops" in reply.json()["error"]["message"]


def test_the_command_serves_until_it_is_told_to_end(folder):
    command = [sys.executable, "-m", "gemini", "serve", str(folder), "--port", "0"]
    command += ["--device-mem", "64MiB", "--max-tokens", str(ROOM), "--max-sequences", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("serving at "):
                    break
            assert said[-1].startswith("serving at http://127.0.0.1:"), "".join(said)
            with httpx.Client(base_url=said[-1].split()[-1], timeout=None) as client:
                assert client.get("/health").json()["status"] == "ok"
                reply = client.post("/v1/completions", json=greedy(TEXTS[:2], model="tiny"))
                assert [one["index"] for one in reply.json()["choices"]] == [0, 1]
                body = greedy(TEXTS[0], stream=True, max_tokens=50)
                with client.stream("POST", "/v1/completions", json=body) as stream:
                    lines = []
                    for line in stream.iter_lines():
                        if not lines:  # the pass under way is ended
                            process.send_signal(signal.SIGTERM)
                        lines += [line] if line else []
                assert lines[-1] == "data: [DONE]" and len(lines) > 2
            assert process.wait() == 0, process.stderr.read()
        finally:
            process.kill()


def test_without_fastapi_the_command_names_the_extra(monkeypatch):
    from gemini.serving import serve_command

    monkeypatch.setitem(sys.modules, "gemini.serving.server", None)
    with pytest.raises(ImportError, match=r"pip install 'gemini-memory\[serve\]'"):
        serve_command.main(["somewhere"])


def test_a_port_in_use_is_refused_before_the_model_is_read(capsys):
    import socket

    from gemini.serving import serve_command

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as ended:
            serve_command.main(["nowhere/at-all", "--port", port])
    assert ended.value.code == 2 and f"127.0.0.1:{port}: " in capsys.readouterr().err
