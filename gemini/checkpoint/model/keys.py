"""Keys of a checkpoint: those of torch's own `get_state_dict`, and `gemini.` keys for the rest.

    model.NAME                  weights: fp32 masters where there are any
    optim.state.NAME.PLANE      exp_avg, ...
    optim.state.NAME.step
    optim.param_groups.I.OPTION
    gemini.common, gemini.rank.R    counters, schedulers, random numbers, buffers, extra, and the
                                    names of a run's store files

Each value under `gemini.` is one uint8 tensor, written by torch.save and read with `weights_only`.
Numpy's generator is saved as plain numbers.

Killed processes of a run leave files on disk, and a checkpoint has the names of all of them. A run
that loads it removes the files whose last step is not later than its own. A store counts the steps
of its own process, so a checkpoint also has the step at which each store began.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from gemini.checkpoint.dcp.ranks import Ranks
from gemini.checkpoint.format.manifest import CheckpointError, CorruptError, MismatchError
from gemini.checkpoint.untrusted.torch_files import safe_load
from gemini.optim.base import TieredOptimizer

COMMON = "gemini.common"
_GROUP = re.compile(r"param_groups\.(\d+)\.(\w+)")


def rank_key(rank: int) -> str:
    return f"gemini.rank.{rank}"


@dataclass(frozen=True, slots=True)
class Keys:
    """Prefixes of a checkpoint's keys: other programs choose others."""

    model: str = "model."
    optim: str = "optim."
    # first name of a tied parameter -> the name under which it was saved
    weight_names: Mapping[str, str] = field(default_factory=dict)
    state_names: Mapping[str, str] = field(default_factory=dict)

    def weight(self, name: str) -> str:
        return f"{self.model}{self.weight_names.get(name, name)}"

    def plane(self, name: str, plane: str) -> str:
        return f"{self.optim}state.{self.state_names.get(name, name)}.{plane}"

    def groups(self, keys: Collection[str]) -> dict[int, dict[str, str]]:
        """Saved param groups: group number -> option -> key."""
        found: dict[int, dict[str, str]] = {}
        for key in keys:
            if key.startswith(self.optim):
                match = _GROUP.fullmatch(key.removeprefix(self.optim))
                if match is not None:
                    found.setdefault(int(match[1]), {})[match[2]] = key
        return found

    def unexpected(self, keys: Collection[str], known: Collection[str]) -> list[str]:
        """Saved keys of weights that the model does not have."""
        others = ("gemini.", self.optim)
        return [
            key
            for key in keys
            if key.startswith(self.model) and key not in known and not key.startswith(others)
        ]

    @classmethod
    def find(cls, keys: Collection[str], params: Sequence[Sequence[str]]) -> Keys:
        """Prefixes under which `keys` have the most parameters. params: each with all its names."""
        wanted = {name for names in params for name in names}
        models: dict[str, int] = {}
        optims: dict[str, int] = {}
        for key in keys:
            parts = key.split(".")
            for i in range(min(len(parts), 5)):
                prefix = ".".join([*parts[:i], ""])
                if ".".join(parts[i:]) in wanted:
                    models[prefix] = models.get(prefix, 0) + 1
                if parts[i] == "state" and ".".join(parts[i + 1 : -1]) in wanted:
                    optims[prefix] = optims.get(prefix, 0) + 1
        default = cls()
        model, optim = _most(models, default.model), _most(optims, default.optim)
        states = {key.rpartition(".")[0] for key in keys if key.startswith(f"{optim}state.")}
        return cls(
            model,
            optim,
            _saved_names(params, lambda name: f"{model}{name}" in keys),
            _saved_names(params, lambda name: f"{optim}state.{name}" in states),
        )


def _saved_names(
    params: Sequence[Sequence[str]], is_saved: Callable[[str], bool]
) -> dict[str, str]:
    """First name of every tied parameter -> the first of its names that was saved."""
    return {
        names[0]: next((name for name in names if is_saved(name)), names[0])
        for names in params
        if len(names) > 1
    }


def _most(counts: dict[str, int], default: str) -> str:
    return max(counts, key=lambda prefix: (counts[prefix], prefix == default), default=default)


def differences(
    sizes: Mapping[str, torch.Size | None], wanted: Mapping[str, torch.Size]
) -> list[str]:
    """Texts: wanted tensors that are missing, or were saved in another shape."""
    texts = []
    for key, size in wanted.items():
        if key not in sizes:
            texts.append(f"missing {key}")
        elif (there := sizes[key]) != size:
            shape = "no tensor" if there is None else f"of shape {tuple(there)}"
            texts.append(f"{key} is {shape}, expected {tuple(size)}")
    return texts


def check_fits(path: Path, texts: Sequence[str]) -> None:
    """Raise MismatchError with all differences, if there are any."""
    if texts:
        raise MismatchError(
            f"{path} does not fit the model; strict=False loads what does: " + "; ".join(texts)
        )


# -- values under the keys of `gemini` --


def encode(what: str, value: Any) -> Tensor:
    """Encode a value as uint8 [n]. Raises CheckpointError if `weights_only` cannot load it."""
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        # Loaded at once: a value that no load accepts must fail the save, and not the restart.
        torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{what} holds something that a checkpoint cannot hold; expected tensors, numbers, "
            f"strings, and lists, tuples and dicts of them ({first})"
        ) from error
    return torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)


def decode(value: Tensor, what: str) -> dict[str, Any]:
    """Decode a dict of `encode`. Raises CorruptError."""
    found = safe_load(io.BytesIO(value.numpy().tobytes()), what)
    if not isinstance(found, dict):
        raise CorruptError(f"{what} cannot be read: it is a {type(found).__name__}")
    return found


def random_state() -> dict[str, Any]:
    """State of this process's generators: torch, the CUDA device in use, numpy and Python."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def known_stores(optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    """Stores of all ranks, for a checkpoint; see `stores_of_run`. Collective."""
    mine: tuple[dict[str, int], int | None] = {}, None
    if isinstance(optimizer, TieredOptimizer):
        mine = optimizer.stores_of_run()
    found = ranks.gather(mine)
    began = {name: at for stores, _ in found for name, at in stores.items()}
    return {"began": began, "step": min((n for _, n in found if n is not None), default=0)}


def take_over_stores(saved: Mapping[str, Any], optimizer: TieredOptimizer) -> None:
    """Let the optimizer continue from a checkpoint with these `known_stores`; empty: do nothing."""
    if saved:
        began = {str(name): int(at) for name, at in saved["began"].items()}
        optimizer.go_on_from(int(saved["step"]), began)
