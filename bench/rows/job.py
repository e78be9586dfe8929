"""What one process of `bench.train` is told: a value that travels as JSON. Standard library only.

A peer is a module of this folder with three functions:

    load()                   import the package and what it needs: what start-up counts as import
    settings(job)            everything that a user would have to write, as nested dictionaries
    wrap(model, job, given)  a `Trainer` made from exactly those settings
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.01


@dataclass(frozen=True)
class Job:
    """One rank of one row."""

    peer: str  # module of bench.peers
    model: str  # see gemini.plan.models.build
    batches: str  # file of int64 [steps, batch, seq]
    folder: str  # of this row; what is on disk is measured below it
    options: dict[str, Any] = field(default_factory=dict)  # of the row, read by the peer's module
    device: str = "cpu"
    seed: int = 0
    max_norm: float = 1.0  # gradients are clipped to it
    batch: int = 4  # sequences a step, over all ranks
    rank: int = 0
    world_size: int = 1
    threads: int = 1

    @property
    def own_batch(self) -> slice:
        """This rank's sequences of a batch; ranks that split layers, are stages or share sequences
        have the same."""
        mesh = self.options.get("mesh", {})
        same = prod(mesh.get(name, 1) for name in ("tp", "pp", "cp"))
        place, places = self.rank // same, self.world_size // same
        return slice(place * self.batch // places, (place + 1) * self.batch // places)

    @property
    def state_folder(self) -> Path:
        """Where files of optimizer state go."""
        return Path(self.folder) / "state"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))


@dataclass(frozen=True)
class Trainer:
    """The three parts of a step, which are timed one by one. `step` clips, updates and zeroes."""

    forward: Callable[[Any], Any]  # int64 [batch, seq] to the loss
    backward: Callable[[Any], object]
    step: Callable[[], object]
    # what the step before did behind itself, in seconds, asked when another has been taken
    behind: Callable[[], dict[str, float]] = dict
    settle: Callable[[], object] = lambda: None  # wait until nothing of a step is under way


def number_of_settings(given: Any) -> int:
    """Values in nested dictionaries: what the user had to give."""
    if isinstance(given, dict):
        return sum(number_of_settings(value) for value in given.values())
    return 1
