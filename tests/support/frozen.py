"""What users see of doors and options, written down: signatures, and what is said of a value.

python -m tests.support.frozen writes `tests/frozen/*.txt` anew, refusals of the expressions that
are there. A difference is a change of what users see, and needs its reason. Names of Colossal-AI's
documents have there the signatures that these print.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, is_typeddict

from gemini.migrate import colossal

ROOT = Path(__file__).resolve().parents[2]
SIGNATURES, REFUSALS = ROOT / "tests/frozen/signatures.txt", ROOT / "tests/frozen/refusals.txt"
# whose methods users call
CALLED = ("ddp", "ema", "metrics", "integrations.booster", "integrations.accelerate",
          "integrations.classic", "integrations.launch", "integrations.plugins.plugin")  # fmt: skip
DOORS = (
    "accelerate",
    "classic",
    "launch",
    "lightning",
    "torch_optimizers",
    "transformers",
)


def names() -> Iterator[str]:
    """Of what users call: what packages list, doors have, and the two pages of names say."""
    for package in ("gemini", "gemini.optim", "gemini.integrations"):
        yield from (f"{package}.{name}" for name in importlib.import_module(package).__all__)
    for door in DOORS:
        module = importlib.import_module(f"gemini.integrations.{door}")
        for name, found in vars(module).items():
            if name[0] != "_" and getattr(found, "__module__", "").startswith(module.__name__):
                yield f"{module.__name__}.{name}"
    yield from re.findall(
        r"^::: (\S+)", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    yield from colossal.names().moved.values()


def signatures() -> list[str]:
    """`name(argument=default, ...)`, methods by the class that has them; no annotations."""
    lines = set()
    for name in names():
        place, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(place), last)
        if (not inspect.isclass(found) and not inspect.isfunction(found)) or is_typeddict(found):
            continue
        if inspect.isclass(found) and issubclass(found, Exception):
            continue
        lines.add(name + _signature(found))
        for base in found.__mro__ if inspect.isclass(found) else ():
            if base.__module__.startswith(tuple(f"gemini.{place}" for place in CALLED)):
                lines |= {
                    f"  {base.__module__}.{function.__qualname__}{_signature(function)}"
                    for member, held in vars(base).items()
                    if not member.startswith("_")
                    and inspect.isfunction(function := getattr(held, "__func__", held))
                }
    return sorted(lines)


def _signature(found: Any) -> str:
    signature = inspect.signature(found)
    plain = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else _Shown(p))
        for p in signature.parameters.values()
    ]
    plain.sort(key=lambda p: (p.kind, p.name if p.kind is p.KEYWORD_ONLY else ""))
    return str(inspect.Signature(plain))


class _Shown:
    """A default, the same in every process and for 1 and 1.0."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        self._value = parameter.default

    def __repr__(self) -> str:
        value = self._value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return getattr(value, "__qualname__", None) or without_addresses(repr(value))


def without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def refusals() -> list[tuple[str, str]]:
    """(expression, what is said of it), as the file has them."""
    lines = [line for line in REFUSALS.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return [(call, said.strip()) for call, said in zip(lines[::2], lines[1::2], strict=True)]


def said_of(call: str) -> str:
    """The error that a call of a door ends with, or the warning, or nothing."""
    import torch
    from torch import nn
    from torch.distributed import fsdp

    import gemini
    from bench.shared.models import Tower
    from gemini import integrations, optim
    from gemini.integrations import classic, lightning, parts, schedules
    from gemini.integrations.plugins import precision

    module = nn.Linear(2, 2)
    known = {
        **{name: getattr(gemini, name) for name in gemini.__all__},
        **{name: getattr(integrations, name) for name in integrations.__all__},
        **vars(precision), **vars(schedules), "classic": classic, "lightning": lightning,
        "gemini": gemini, "optim": optim, "torch": torch, "nn": nn, "fsdp": fsdp, "Tower": Tower,
        "module": module,
        "sgd": torch.optim.SGD(module.parameters(), lr=0.1),
    }  # fmt: skip
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "change nothing here" in record.getMessage())
    parts.log.addHandler(handler)
    parts.said_already.clear()
    try:
        eval(call, known)
    except Exception as error:
        heard.append(f"{type(error).__name__}: {error}")
    finally:
        parts.log.removeHandler(handler)
    return without_addresses(" | ".join(heard)) or "taken"


def main() -> None:
    SIGNATURES.write_text("\n".join(signatures()) + "\n", encoding="utf-8")
    head = [line for line in REFUSALS.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    pairs = [f"{call}\n    {said_of(call)}" for call, _ in refusals()]
    REFUSALS.write_text("\n".join([*head, *pairs]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
