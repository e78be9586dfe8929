"""The mutations that tests must notice, as data: one file of them an area, `AREA.toml`. Pure.

["what is broken, in words"]
where = "module:Class.method"      # or "module:Class" and "module:", for what is in no function
old = "statements, or an expression, that occur once in it"
nth = 2                            # where they occur more often
new = "what they are replaced by"  # else `pass`
killed_by = "a test that must fail"                 # or several, of which one must; or, of none:
equivalent = "why nobody could tell the two apart"
promise = "a sentence of docs/guarantees.md that it holds"   # of those that `make ci` runs

What has moved to another module is found there by its name.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from tests.mutate import sites

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("gemini", "optim", "kernels_triton", "io/nvme", "bench")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutation; see the file."""

    area: str
    name: str
    where: str
    old: str
    new: str = "pass"
    nth: int = 0
    killed_by: tuple[str, ...] = ()
    equivalent: str = ""
    promise: str = ""

    @property
    def title(self) -> str:
        return f"{self.area}: {self.name}"

    @property
    def scope(self) -> str:
        return self.where.partition(":")[2]

    @property
    def file(self) -> str:
        """From the root of the repository. ValueError where nothing has its name."""
        return file_of(self.where)

    def applied(self) -> str:
        """The text of its file with the mutation. ValueError where it does not apply."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        found = sites.scopes(tree_of(self.file), self.scope)
        return sites.replaced(text, found, self.old, self.new, self.nth)


@cache
def file_of(where: str) -> str:
    module, _, scope = where.partition(":")
    path = Path("io" if module.startswith("nvme.") else "", *module.split("."))
    for file in (str(path.with_suffix(".py")), str(path / "__init__.py")):
        if (ROOT / file).exists() and sites.scopes(tree_of(file), scope):
            return file
    everywhere = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    files = [str(path.relative_to(ROOT)) for path in everywhere]
    having = [file for file in files if scope and sites.scopes(tree_of(file), scope)]
    if len(having) != 1:
        raise ValueError(f"{where}: not in its module, and {len(having)} others have its name")
    return having[0]


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def areas() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def read(area: str) -> list[Mutant]:
    """Raises ValueError for a field that is none, or both or neither of tests and a reason."""
    path = Path(__file__).parent / f"{area}.toml"
    found = []
    for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
        unknown = entry.keys() - {field.name for field in fields(Mutant)}
        if unknown:
            raise ValueError(f"{path.name}: {name} has {sorted(unknown)}")
        tests = entry.pop("killed_by", ())
        tests = (tests,) if isinstance(tests, str) else tuple(tests)
        mutant = Mutant(area=area, name=name, killed_by=tests, **entry)
        if bool(mutant.killed_by) == bool(mutant.equivalent):
            raise ValueError(f"{mutant.title} needs tests, or a reason why there are none")
        found.append(mutant)
    return found


def everything() -> list[Mutant]:
    return [mutant for area in areas() for mutant in read(area)]


def do_not_apply(mutants: Sequence[Mutant]) -> list[str]:
    """Why, of those that are not where they say, or leave no Python."""
    wrong = []
    for mutant in mutants:
        try:
            ast.parse(mutant.applied())
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.title}: {error}")
    return wrong
