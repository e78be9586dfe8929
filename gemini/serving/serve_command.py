"""`python -m gemini serve`: completions over HTTP, by a model that need not fit in memory."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.arguments import Parser
from gemini.placement.sizes import BudgetError

from .command import add_model, load, positive

if TYPE_CHECKING:
    from .server import CompletionService


def parser_of_serve() -> Parser:
    """Parser of the command."""
    parser = Parser(
        prog="python -m gemini serve",
        description="Answer POST /v1/completions, as OpenAI does, and the OPT service's POST\n"
        "/generation. Prompts that wait are decoded in one pass; SIGTERM ends it after that.",
        epilog="exit status: 0 it was ended, 1 the model does not fit, 2 wrong flags, a refused "
        "model or a port in use",
    )  # fmt: skip
    add_model(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="who listens elsewhere is not asked "
        "for a key: put a proxy before it",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=7070, metavar="N", help="0 takes a free one")
    parser.add_argument(
        "--max-waiting", type=positive, default=256, metavar="N",
        help="prompts that wait; more get status 429",
    )  # fmt: skip
    parser.add_argument(
        "--cache-size", type=int, default=0, metavar="N", help="prompts whose answers are kept"
    )
    parser.add_argument(
        "--cache-list-size", type=positive, default=1, metavar="N",
        help="answers of each: once a prompt has so many, one of them is drawn",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str]) -> int:
    """Command `python -m gemini serve`. Raises ImportError without FastAPI or uvicorn."""
    parser = parser_of_serve()
    options = parser.parse_args(arguments)
    try:
        from .server import CompletionService
    except ImportError as error:
        raise ImportError(
            f"python -m gemini serve needs {error.name}: pip install 'gemini-memory[serve]'"
        ) from error
    from .waiting import AnswerCache
    from .worker import DecodeWorker

    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("serve on several ranks; expected one process")
        listener = _bound(options.host, options.port)
        model, tokenizer = load(options)
    except BudgetError as error:
        sys.stderr.write(f"python -m gemini serve: {error}\n")
        return 1
    except (OSError, ValueError, OverflowError) as error:
        parser.error(str(error))
    worker = DecodeWorker(
        model, tokenizer, max_tokens=options.max_tokens, max_sequences=options.max_sequences,
        max_waiting=options.max_waiting,
    )  # fmt: skip
    folder = Path(options.model)
    name = folder.resolve().name if folder.exists() else options.model
    cache = AnswerCache(options.cache_size, options.cache_list_size)
    _serve(CompletionService(worker, name, cache), worker, listener)
    return 0


def _bound(host: str, port: int) -> socket.socket:
    """Socket of the address, before the model is read: it does not listen yet. Raises OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"{host}:{port}: {error}") from error
    return bound


def _serve(service: CompletionService, worker: Any, listener: socket.socket) -> None:
    """Answer until a signal comes."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listener.getsockname()[:2]
            sys.stderr.write(f"serving at http://{f'[{host}]' if ':' in host else host}:{port}\n")

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            worker.stop()  # before uvicorn waits for what is under way
            await super().shutdown(sockets)

    # uvicorn raises a signal again that ended it: with this handler the exit status is 0
    signal.signal(signal.SIGTERM, lambda *_: None)
    worker.start()
    Server(uvicorn.Config(service.app(), log_level="warning", lifespan="off")).run([listener])
    worker.join()
