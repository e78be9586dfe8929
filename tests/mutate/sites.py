"""Where a mutation is: statements or an expression of one function, found by what they mean. Pure.

Two sources are the same where `ast.dump` says so: line breaks, comments and quotes do not count.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Span = tuple[tuple[int, int], tuple[int, int]]  # lines from 1, and bytes of them


def scopes(tree: ast.AST, name: str) -> list[ast.AST]:
    """All that have a qualified name: a property and its setter are two."""
    found = [tree]
    for part in name.split(".") if name else ():
        found = [inner for scope in found for inner in _inner(scope) if inner.name == part]
    return found


def replaced(text: str, found: Sequence[ast.AST], old: str, new: str, nth: int = 0) -> str:
    """`text` with `new` for what is `old` in these scopes of it, and in none within them.

    `old` and `new` are two expressions, or statements that follow each other; a line `with x:` or
    `except E:` is the head of a statement whose body stays. ValueError where `old` is not there
    once, or fewer than `nth` times.
    """
    if old.endswith(":"):
        spans = [span for scope in found for span in _heads(scope, old)]
    elif _expression(old) and _expression(new):
        new, spans = f"({new})", [span for scope in found for span in _expressions(scope, old)]
    else:
        spans = [span for scope in found for span in _statements(scope, old)]
    if len(spans) < nth or (not nth and len(spans) != 1):
        raise ValueError(f"it occurs {len(spans)} times, expected {nth or 'once'}")
    (first, begin), (last, end) = sorted(spans)[max(nth, 1) - 1]
    lines = text.encode().splitlines(keepends=True)
    before = b"".join(lines[: first - 1]) + lines[first - 1][:begin]
    after = lines[last - 1][end:] + b"".join(lines[last:])
    indented = new.replace("\n", "\n" + " " * begin)
    if old.endswith(":"):
        kept = "el" if lines[first - 1][begin:].startswith(b"elif ") else ""
        indented = kept + indented + "\n" + " " * end
    return before.decode() + indented + after.decode()


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """What is in a scope, but for the definitions within it."""
    yield scope
    if isinstance(scope, ast.JoinedStr):  # Python 3.11 does not know where its parts are
        return
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, Definition):
            yield from _own(child)


def _inner(scope: ast.AST) -> Iterator[Definition]:
    for node in _own(scope):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition):
                yield child


def _expression(source: str) -> ast.expr | None:
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return None


def _expressions(scope: ast.AST, old: str) -> Iterator[Span]:
    wanted = ast.dump(ast.parse(old, mode="eval").body)
    for node in _own(scope):
        if isinstance(node, ast.expr) and ast.dump(node) == wanted:
            yield _span(node, node)


def _statements(scope: ast.AST, old: str) -> Iterator[Span]:
    wanted = [ast.dump(statement) for statement in ast.parse(old).body]
    for node in _own(scope):
        for block in ("body", "orelse", "finalbody"):
            there = getattr(node, block, None)
            if isinstance(there, list):
                dumps = [ast.dump(statement) for statement in there]
                for i in range(len(there) - len(wanted) + 1):
                    if dumps[i : i + len(wanted)] == wanted:
                        yield _span(there[i], there[i + len(wanted) - 1])


def _heads(scope: ast.AST, old: str) -> Iterator[Span]:
    """From where a statement begins to where its body does."""
    if old.startswith("except"):
        wanted = _head(ast.parse(f"try:\n  pass\n{old}\n  pass").body[0].handlers[0])  # type: ignore[attr-defined]
    else:
        wanted = _head(ast.parse(f"{old}\n  pass").body[0])
    for node in _own(scope):
        if isinstance(node, ast.stmt | ast.excepthandler) and _head(node) == wanted:
            yield _span(node, node)[0], _span(node.body[0], node.body[0])[0]  # type: ignore[attr-defined]


def _head(node: ast.AST) -> str:
    node = copy.copy(node)
    for block in {"body", "orelse", "finalbody", "handlers"} & set(node._fields):
        setattr(node, block, [])
    return ast.dump(node)


def _span(first: ast.AST, last: ast.AST) -> Span:
    decorators = getattr(first, "decorator_list", [])
    line = min([first.lineno, *(each.lineno for each in decorators)])  # type: ignore[attr-defined]
    return (line, first.col_offset), (last.end_lineno, last.end_col_offset)  # type: ignore[attr-defined]
