"""Command `python -m gemini from-colossal`: scripts of Colossal-AI's, with the names from here;
and its configurations.

Pure. What has which name is in colossal.toml.
"""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gemini import strangers
from gemini.arguments import Parser, nearest

ROOT = "colossalai"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TABLE = Path(__file__).with_name("colossal.toml")


@dataclass(frozen=True, slots=True)
class Names:
    """Dotted names of Colossal-AI's documents.

    moved: to the names here. missing: to what is used instead. written: names of which one line is
    written otherwise, to that line. modules: all that have one of the names below them.
    """

    version: str
    moved: Mapping[str, str]
    missing: Mapping[str, str]
    written: Mapping[str, str]
    modules: tuple[str, ...]

    def said_of(self, name: str) -> str:
        """Why `name` is not here, and what to do."""
        for known, use in self.missing.items():
            if f"{name}.".startswith(f"{known}."):
                return f"{name} has no place here; in its place: {use}"
        near = nearest(name.rpartition(".")[2], [one.rpartition(".")[2] for one in self.moved])
        at = next((one for one in self.moved if one.endswith(f".{near}")), None)
        return f"{name} is no name of the documents; " + (
            f"did you mean {at}?" if at else "docs/from-colossal.md lists those"
        )


def config_in(path: Path) -> dict[str, Any]:
    """Names and values of a configuration in a trusted file: a `.py` file is run.

    Raises ValueError for a file of another kind.
    """
    if path.suffix == ".py":
        return runpy.run_path(str(path))
    if path.suffix in (".yml", ".yaml"):
        return strangers.read_yaml(path)
    raise ValueError(f"config={str(path)!r}; expected a .py, .yml or .yaml file, or a dict")


@cache
def names() -> Names:
    """The table, read once."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    moved = {
        f"{there}.{name}": f"{rows['to']}.{here}"
        for rows in table["moved"]
        for there in rows["from"]
        for name, here in [
            *((name, name) for name in rows.get("names", ())),
            *rows.get("renamed", {}).items(),
        ]
    }
    missing = {name: _plain(row["use"]) for row in table["missing"] for name in row["names"]}
    parts = [name.split(".")[:-1] for name in (*moved, *missing)]
    above = dict.fromkeys(".".join(path[:i]) for path in parts for i in range(1, len(path) + 1))
    modules = tuple(name for name in above if name not in moved)
    written = {row["name"]: row["here"] for row in table["written"]}
    return Names(table["version"], moved, missing, written, modules)


def _plain(text: str) -> str:
    """Markdown as a message has it."""
    text = re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", text)
    return re.sub(r"\s+", " ", text.replace("`", "")).strip()


@dataclass(slots=True)
class _Statement:
    """An import of theirs: what is imported in its place, and what stays."""

    node: ast.Import | ast.ImportFrom
    stays: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # packages of others in the same statement
    imports: dict[str, dict[str, str]] = field(default_factory=dict)  # module -> name -> as

    def lines(self) -> list[str]:
        found = [f"import {', '.join(self.others)}"] if self.others else []
        if isinstance(self.node, ast.ImportFrom) and self.stays:
            found.append(f"from {self.node.module} import {', '.join(self.stays)}")
        elif self.stays:
            found.append(f"import {', '.join(self.stays)}")
        for module, taken in self.imports.items():
            parts = (name if name == own else f"{name} as {own}" for name, own in taken.items())
            found.append(f"from {module} import {', '.join(parts)}")
        return found


class _Script:
    """One file that is rewritten: `text` is the new one, `left` what a person has to do."""

    def __init__(self, text: str, known: Names) -> None:
        self._known = known
        self._lines = text.encode().splitlines(keepends=True)
        self._edits: list[tuple[int, int, str]] = []
        self.left: list[tuple[int, str]] = []
        tree = ast.parse(text)
        self._taken = set(_bound_in(tree))
        self._own: dict[str, str] = {}  # names from here -> the script's
        self._statements: dict[ast.stmt, _Statement] = {}
        self._named: dict[str, str] = {}  # the script's names -> theirs, dotted
        self._imports: dict[str, list[tuple[ast.alias, _Statement]]] = {}  # of modules alone
        inner = (n for f in ast.walk(tree) if isinstance(f, _FUNCTIONS) for n in ast.walk(f))
        self._in_functions = set(inner)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and _is_theirs(node.module):
                self._from(node)
            elif isinstance(node, ast.Import) and any(_is_theirs(a.name) for a in node.names):
                self._import(node)
        self._uses(tree)
        for statement in self._statements.values():
            self._replace(statement)
        self.text = self._edited().decode()

    def _from(self, node: ast.ImportFrom) -> None:
        statement = self._statements[node] = _Statement(node)
        for alias in node.names:
            full, own = f"{node.module}.{alias.name}", alias.asname or alias.name
            if full in self._known.moved:
                module, _, name = self._known.moved[full].rpartition(".")
                statement.imports.setdefault(module, {})[name] = own
                self._taken.add(own)
                self._named[own] = full
            elif full in self._known.modules:
                self._bind(own, full, alias, statement)
            else:
                statement.stays.append(ast.unparse(alias))
                said = "write the names in place of *" if alias.name == "*" else None
                self.left.append((node.lineno, said or self._known.said_of(full)))

    def _import(self, node: ast.Import) -> None:
        statement = self._statements[node] = _Statement(node)
        for alias in node.names:
            if not _is_theirs(alias.name):
                statement.others.append(ast.unparse(alias))
            elif alias.name in self._known.moved and alias.asname:
                module, _, name = self._known.moved[alias.name].rpartition(".")
                statement.imports.setdefault(module, {})[name] = alias.asname
            else:
                full = alias.name if alias.asname else ROOT
                self._bind(alias.asname or ROOT, full, alias, statement)

    def _bind(self, own: str, full: str, alias: ast.alias, statement: _Statement) -> None:
        self._named[own] = full
        self._imports.setdefault(own, []).append((alias, statement))

    def _uses(self, tree: ast.Module) -> None:
        inner: set[ast.AST] = set()
        for node in ast.walk(tree):  # outer nodes first
            if isinstance(node, ast.Call):
                chain = list(_chain(node.func))[::-1]
                line = self._known.written.get(".".join(self._names_of(chain)))
                if line is not None:
                    self.left.append((node.lineno, f"in place of {ast.unparse(node)}: {line}"))
            if node in inner or not isinstance(node, ast.Attribute | ast.Name):
                continue
            chain = list(_chain(node))[::-1]
            inner.update(chain)
            first = chain[0]
            if isinstance(first, ast.Name) and isinstance(first.ctx, ast.Load):
                self._use(chain, self._imports.get(first.id, []))

    def _names_of(self, chain: list[ast.expr]) -> list[str]:
        """Parts of the dotted name of `a`, `a.b`, `a.b.c`; none of somebody else's."""
        first = chain[0]
        if not isinstance(first, ast.Name) or first.id not in self._named:
            return []
        rest = (node.attr for node in chain[1:] if isinstance(node, ast.Attribute))
        return [self._named[first.id], *rest]

    def _use(self, chain: list[ast.expr], imports: list[tuple[ast.alias, _Statement]]) -> None:
        """Name what `chain` names, and import it where the module was imported, if it was."""
        if not imports:
            return
        everywhere = [one for one in imports if one[1].node not in self._in_functions][:1]
        full = ""
        for node, part in zip(chain, self._names_of(chain), strict=True):
            full = f"{full}.{part}" if full else part
            if full in self._known.moved:
                own = ""
                for _, statement in everywhere or imports:
                    own = self._take(self._known.moved[full], statement)
                self._edits.append((self._at(node), self._at(node, end=True), own))
                return
            if full not in self._known.modules:
                break
        self.left.append((chain[0].lineno, self._known.said_of(full)))
        for alias, statement in everywhere or imports:
            if ast.unparse(alias) not in statement.stays:
                statement.stays.append(ast.unparse(alias))

    def _take(self, here: str, statement: _Statement) -> str:
        """Import a name from here in place of a statement; the name that the script uses."""
        module, _, name = here.rpartition(".")
        if here not in self._own:
            self._own[here] = f"colossal_{name}" if name in self._taken else name
            self._taken.add(self._own[here])
        statement.imports.setdefault(module, {})[name] = self._own[here]
        return self._own[here]

    def _replace(self, statement: _Statement) -> None:
        node = statement.node
        start, end = self._at(node), self._at(node, end=True)
        before = self._lines[node.lineno - 1][: node.col_offset]
        alone = not before.strip()
        between = f"\n{before.decode()}" if alone else "; "
        text = between.join(statement.lines())
        if not text and not before:  # with its line
            end += self._lines[(node.end_lineno or 1) - 1][node.end_col_offset :].strip() == b""
        self._edits.append((start, end, text or ("pass" if before else "")))

    def _at(self, node: ast.stmt | ast.expr, *, end: bool = False) -> int:
        """Where a node begins, in bytes from the file's first on; or ends."""
        line = (node.end_lineno or node.lineno) if end else node.lineno
        column = (node.end_col_offset or 0) if end else node.col_offset
        return sum(map(len, self._lines[: line - 1])) + column

    def _edited(self) -> bytes:
        text = b"".join(self._lines)
        for start, end, new in sorted(self._edits, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        return text


def _is_theirs(module: str | None) -> bool:
    return (module or "").partition(".")[0] == ROOT


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    """`a.b.c`, `a.b` and `a`."""
    while isinstance(node, ast.Attribute):
        yield node
        node = node.value
    yield node


def _bound_in(tree: ast.Module) -> Iterator[str]:
    """Names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Import | ast.ImportFrom):
            ours = isinstance(node, ast.ImportFrom) and _is_theirs(node.module)
            yield from (
                (alias.asname or alias.name).partition(".")[0]
                for alias in node.names
                if not ours and not _is_theirs(alias.name)
            )


def rewritten(text: str) -> tuple[str, list[tuple[int, str]]]:
    """A script with the names from here, and what is left to do: lines and why.

    Raises SyntaxError.
    """
    script = _Script(text, names())
    return script.text, sorted(script.left)


def main(arguments: Sequence[str]) -> int:
    """Show or write the new scripts; 1 if something is left to do by hand."""
    parser = Parser(
        prog="python -m gemini from-colossal",
        description="Change the imports of Colossal-AI's scripts. docs/from-colossal.md says what "
        "differs then. `python -m gemini run --colossalai` runs a script as it is.",
        epilog="exit status: 0 nothing is left, 1 the lines that are listed are changed by hand",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="in place; by default as a diff")
    options = parser.parse_args(arguments)
    is_left = False
    for path in options.files:
        try:
            before = path.read_text(encoding="utf-8")
            after, left = rewritten(before)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            parser.error(f"{path}: {error}")
        if options.write and after != before:
            path.write_text(after, encoding="utf-8")
        changed = list(
            difflib.unified_diff(
                before.splitlines(keepends=True), after.splitlines(keepends=True),
                str(path), str(path),
            )
        )  # fmt: skip
        if options.write:
            lines = sum(line[:1] == "+" for line in changed) - bool(changed)
            sys.stdout.write(f"{path}: {lines} lines changed\n")
        else:
            sys.stdout.write("".join(changed))
        for number, said in left:
            sys.stderr.write(f"{path}:{number}: {said}\n")
        is_left |= bool(left)
    return int(is_left)
