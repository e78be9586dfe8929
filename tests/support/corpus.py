"""What searches have found: `tests/corpus/AREA/*.json`, a find a file. `make test` replays them.

A search raises `Find` where something fails; `tests/deep` keeps it. What is kept is what to do
again, not what came of it: a number of a call is a moment of a run, whatever the run does by then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "corpus"


class Find(AssertionError):
    """What a search has found, in JSON's types."""

    def __init__(self, **found: Any) -> None:
        super().__init__(json.dumps(found)[:1000])
        self.found = found


def read(area: str) -> dict[str, Any]:
    """By name."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in (FOLDER / area).glob("*.json")
    }
    assert found, f"tests/corpus/{area} is empty"
    return dict(sorted(found.items()))


def keep(area: str, found: Any) -> Path:
    """Named for what it holds."""
    text = json.dumps(found, sort_keys=True, separators=(",", ":")) + "\n"
    path = FOLDER / area / f"{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@contextmanager
def keeping(area: str, **what: Any) -> Iterator[None]:
    """What is found while this lasts, with what the search was."""
    try:
        yield
    except Find as find:
        find.add_note(f"kept: {keep(area, what | find.found)}")
        raise
