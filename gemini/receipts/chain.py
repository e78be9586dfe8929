"""Receipts of a run: one line of JSON a step, each with the hash of the line before. Pure.

The first line is of the run: its flags and its code. The others are of steps: digests of weights,
of optimizer state where it was asked for, of the micro-batches since the line before, and of random
numbers to come. Digests are by name of a parameter, and do not depend on ranks, chunks or tiers.

A chain shows that lines are as they were written one after the other. Who changes a line can write
all that follow anew; that the values are those of the run only a second run shows (`audit`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gemini import strangers

FILE = "receipts.jsonl"
FORMAT = 1
MOST_BYTES = 512 << 20
_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Receipt:
    """Receipt of one step, a line. step: 0 is the run's own line, before any step.

    weights, state: by parameter and by `parameter/plane`; state is empty where it was not asked
    for. facts: of the run, in its own line. before: hash of the line before, empty in the first.
    """

    step: int
    before: str
    batch: str = ""
    random: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Text of the line, with its end."""
        return json.dumps(asdict(self), sort_keys=True) + "\n"

    @property
    def hash(self) -> str:
        """Hash of the line, which the next one has."""
        return hashlib.sha256(self.line().encode()).hexdigest()


def first_of(facts: Mapping[str, str]) -> Receipt:
    """The run's own line."""
    return Receipt(0, "", facts={"format": str(FORMAT), **facts})


def read(path: Path) -> list[Receipt]:
    """Receipts of a file, each of which follows the one before. Raises ValueError with the first
    line that does not, and OSError."""
    found: list[Receipt] = []
    for number, text in enumerate(strangers.read_text(path, MOST_BYTES).splitlines(), 1):
        try:
            one = _parsed(strangers.parsed(text.encode()))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: line {number} is no receipt ({error}); expected a line of --receipts"
            ) from None
        before = found[-1] if found else None
        if one.before != (before.hash if before else ""):
            raise ValueError(
                f"{path}: the line of step {one.step} does not follow the one before; expected its "
                "hash: one of the two was changed, or is another run's"
            )
        if one.step <= (before.step if before else -1):
            raise ValueError(f"{path}: step {one.step} comes too late; expected rising steps")
        found.append(one)
    if not found or found[0].step or found[0].facts.get("format") != str(FORMAT):
        raise ValueError(f"{path} does not begin with a run's line; expected format {FORMAT}")
    return found


def _parsed(given: Any) -> Receipt:
    names = set(Receipt.__dataclass_fields__)
    if not isinstance(given, dict) or set(given) != names:
        raise ValueError(f"its fields are others; expected {', '.join(sorted(names))}")
    tables = [given[name] for name in ("weights", "state", "facts")]
    texts = [given[name] for name in ("before", "batch", "random")]
    texts += [text for one in tables if isinstance(one, dict) for text in one.values()]
    well = type(given["step"]) is int and all(isinstance(one, dict) for one in tables)
    if not well or not all(isinstance(text, str) for text in texts):
        raise ValueError("its values are of other kinds; expected texts, by name")
    return Receipt(**given)


def first_difference(said: Sequence[Receipt], again: Sequence[Receipt]) -> str | None:
    """What a second run finds otherwise, first: step, and what of it; None: all is equal.

    again: of the same steps, or of some of them. Its hashes are not compared, which depend on
    where it began.
    """
    by_step = {one.step: one for one in said}
    for one in again:
        if one.step not in by_step:
            return f"step {one.step}: no receipt says of it"
        for what, names in _differences(by_step[one.step], one):
            shown = ", ".join(names[:_SHOWN])
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            return f"step {one.step}: {what}{' of ' if shown else ''}{shown}{more}"
    return None


def _differences(said: Receipt, again: Receipt) -> Iterator[tuple[str, list[str]]]:
    """(field, names that differ), in the order in which a step comes to them."""
    yield from _of_names("facts", said.facts, again.facts)
    for what in ("batch", "random"):
        one, other = getattr(said, what), getattr(again, what)
        if one and other and one != other:
            yield what, []
    yield from _of_names("weights", said.weights, again.weights)
    if said.state and again.state:
        yield from _of_names("state", said.state, again.state)


def _of_names(
    what: str, said: Mapping[str, str], again: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    names = [name for name in {**said, **again} if said.get(name) != again.get(name)]
    if names:
        yield what, names
