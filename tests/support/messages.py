"""The messages of our own errors and warnings, read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gemini", "optim", "io/nvme", "kernels_triton")
LOGS = ("log.warning", "log.error", "warnings.warn")
# not for users: own checks of what our code hands on; a PickleError is part of a CorruptError
INTERNAL = ("AssertionError", "AttributeError", "SystemExit", "OSError", "InterruptedError",
            "PickleError")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """One `raise` or log line; `text` has `…` for what varies, `""` if it is made elsewhere."""

    where: str
    kind: str  # the class, or the log call
    text: str

    @property
    def key(self) -> str:
        """The longest part that does not vary."""
        return max((part.strip(" ;:,.()") for part in self.text.split("…")), key=len)

    @property
    def says_what_was_expected(self) -> bool:
        return re.search(r"expected|must be|outside|;|positive|negative", self.text) is not None


def error_classes() -> list[str]:
    """Names of every exception that our packages define."""
    found = []
    for _, tree in _trees(PACKAGES):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                re.search(r"(Error|Exception|ModuleChanged)$", ast.unparse(base))
                for base in node.bases
            ):
                found.append(node.name)
    return found


def messages() -> Iterator[Message]:
    """Every message of the packages that a user may meet."""
    for path, tree in _trees(PACKAGES):
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            kind = ast.unparse(call.func)
            if not isinstance(node, ast.Raise) and kind not in LOGS:
                continue
            if kind in INTERNAL:
                continue
            texts = [_text(argument) for argument in call.args]
            yield Message(f"{path}:{node.lineno}", kind, max(texts, key=len, default=""))


@cache
def _trees(packages: tuple[str, ...]) -> list[tuple[str, ast.Module]]:
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return [
        (str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths
    ]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdg]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
    if isinstance(node, ast.BinOp):
        return (_text(node.left) or "…") + (_text(node.right) or "…")
    return ""
