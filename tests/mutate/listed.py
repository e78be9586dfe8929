"""The mutations that tests must notice, as data: one file of them an area, `AREA.toml`. Pure.

[[mutant]]
name = "what is broken, in words"
file = "where, from the root of the repository"
old = "text that occurs once in it"
new = "what it is replaced by"
killed_by = ["tests of which one must fail"]      # or, where none can:
equivalent = "why nobody could tell the two apart"
promise = "a sentence of README.md that it holds" # of those that `make ci` runs
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutation; see the file."""

    area: str
    name: str
    file: str
    old: str
    new: str
    killed_by: tuple[str, ...] = ()
    equivalent: str = ""
    promise: str = ""

    @property
    def title(self) -> str:
        return f"{self.area}: {self.name}"

    def applied_to(self, text: str) -> str:
        """The text of its file with the mutation. Raises ValueError where it does not apply."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.title}: {self.file} has its text {count} times, expected once")
        return text.replace(self.old, self.new)


def areas() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def read(area: str) -> list[Mutant]:
    """Raises ValueError for a field that is none, or both or neither of tests and a reason."""
    path = Path(__file__).parent / f"{area}.toml"
    found = []
    for entry in tomllib.loads(path.read_text())["mutant"]:
        unknown = entry.keys() - {field.name for field in fields(Mutant)}
        if unknown:
            raise ValueError(f"{path.name}: {entry.get('name')} has {sorted(unknown)}")
        entry["killed_by"] = tuple(entry.get("killed_by", ()))
        mutant = Mutant(area=area, **entry)
        if bool(mutant.killed_by) == bool(mutant.equivalent):
            raise ValueError(f"{mutant.title} needs tests, or a reason why there are none")
        found.append(mutant)
    return found


def everything() -> list[Mutant]:
    return [mutant for area in areas() for mutant in read(area)]


def do_not_apply(mutants: Sequence[Mutant]) -> list[str]:
    """Why, of those whose text is not in its file, or is there more than once."""
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in mutants}
    wrong = []
    for mutant in mutants:
        try:
            mutant.applied_to(texts[mutant.file])
        except ValueError as error:
            wrong.append(str(error))
    return wrong
