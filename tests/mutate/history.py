"""What a commit has changed, and what is known of it: the ledger of mutants."""

from __future__ import annotations

import ast
import json
import subprocess
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.mutate import sites
from tests.mutate.listed import ROOT, Mutant, tree_of


def changed_since(base: str, mutants: Sequence[Mutant]) -> list[Mutant]:
    """Those that a commit does not have, or whose function or tests are others there."""
    _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    return [mutant for mutant in mutants if _is_new(base, mutant) or _differs(base, mutant)]


class Ledger:
    """Verdicts by title, in a file of lines `title = [commit, verdict]`; in memory without one.

    A verdict is the test that failed, `survived`, `equivalent`, or how the tests ended instead. It
    is `known` as long as the mutated function and the tests that kill it are as they were at its
    commit; others stay in the file until there are new ones.
    """

    def __init__(self, path: Path | None, mutants: Sequence[Mutant] = ()) -> None:
        self.known: dict[str, str] = {}
        self._path = path
        self._all: dict[str, list[str]] = {}
        if path is None:
            return
        others = f":!{path.resolve().relative_to(ROOT)}" if ROOT in path.resolve().parents else "."
        other_ledgers = ":!tests/deep/*.toml"
        asked = ("status", "--porcelain", "--untracked-files=no", "--", ".", others, other_ledgers)
        if _git(*asked):
            raise SystemExit("a ledger is of a commit: commit what you have changed")
        self._commit = _git("rev-parse", "HEAD").strip()
        if path.exists():
            self._all = tomllib.loads(path.read_text(encoding="utf-8"))
        for mutant in mutants:
            at, said = self._all.get(mutant.title, ("", ""))
            if at and not (_is_new(at, mutant) or _differs(at, mutant)):
                self.known[mutant.title] = said

    def add(self, title: str, verdict: str) -> None:
        self.known[title] = verdict
        if self._path is not None:
            self._all[title] = [self._commit, verdict]
            lines = [f"{json.dumps(k)} = {json.dumps(self._all[k])}\n" for k in sorted(self._all)]
            self._path.write_text("".join(lines), encoding="utf-8")


def _is_new(base: str, mutant: Mutant) -> bool:
    text = _text_at(base, f"tests/mutate/{mutant.area}.toml")
    return text is None or mutant.name not in text


def _differs(base: str, mutant: Mutant) -> bool:
    named = [test.partition("::")[::2] for test in mutant.killed_by]
    for file, scope in [(mutant.file, mutant.scope), *named]:
        before = _tree_at(base, file)
        if before is None or _dumps(before, scope) != _dumps(tree_of(file), scope):
            return True
    return False


def _dumps(tree: ast.Module, scope: str) -> list[str]:
    return [ast.dump(node) for node in sites.scopes(tree, scope)]


@cache
def _tree_at(base: str, file: str) -> ast.Module | None:
    text = _text_at(base, file)
    return None if text is None else ast.parse(text)


@cache
def _text_at(base: str, file: str) -> str | None:
    try:
        return _git("show", f"{base}:{file}")
    except subprocess.CalledProcessError:
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return done.stdout.decode()
