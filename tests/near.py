"""The tests nearest to what was changed: python -m tests.near [BASE], a file a line.

A test file is near where it was changed itself, or imports what was changed; the nearest import
little else. What is changed is what differs from BASE, which is HEAD unless given.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_FILES = 12  # about what 40 s take on two cores


def main(arguments: Sequence[str]) -> int:
    base = arguments[0] if arguments else "HEAD"
    print("\n".join(nearest(changed_since(base), test_files())))
    return 0


def changed_since(base: str) -> set[str]:
    """Paths from the root, of files that git does not know too."""
    asked = (["git", "diff", "--name-only", base], ["git", "ls-files", "-o", "--exclude-standard"])
    return {
        line
        for command in asked
        for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    }


def test_files() -> dict[str, frozenset[str]]:
    """By path, the modules that each names in an import. Not those of tests/deep/."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return {
        str(path.relative_to(ROOT)): frozenset(imported(path.read_text(encoding="utf-8")))
        for path in paths
        if "deep" not in path.parts
    }


def nearest(changed: set[str], tests: dict[str, frozenset[str]]) -> list[str]:
    """At most MOST_FILES of `tests`, nearest first."""
    names = {module_of(path) for path in changed if path.endswith(".py")}
    found = []
    for path, modules in tests.items():
        share = len(names & modules) / max(1, len(modules))
        if path in changed or share:
            found.append((path not in changed, -share, path))
    return [path for *_, path in sorted(found)[:MOST_FILES]]


def module_of(path: str) -> str:
    """How tests import a file; `io/` is a source root."""
    return path.removeprefix("io/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
