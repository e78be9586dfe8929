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

from gemini.checkpoint.format.manifest import CheckpointError, CorruptError, MismatchError
from gemini.checkpoint.ranks import Ranks
from gemini.checkpoint.untrusted.torch_files import safe_load
from gemini.optim.base import TieredOptimizer
from gemini.optim.rules.saved import MOST_STEPS, is_alike, is_count, number_of
from gemini.optim.state.deferred_signals import DeferredSignals

COMMON = "gemini.common"
_GROUP = re.compile(r"param_groups\.(\d+)\.(\w+)")
_NO_GROUP = re.compile(r"param_groups(\.\d+)?")


def rank_key(rank: int) -> str:
    return f"gemini.rank.{rank}"


def params_of_group(saved: Any, names: Sequence[str], what: str) -> list[Any]:
    """Names of a saved group's parameters; positions that `names` has become names.

    Raises CorruptError, whose text begins with `what`, for anything but names or positions, each
    once.
    """
    kinds = {*map(type, saved)} if isinstance(saved, (list, tuple)) else {object}
    positions = kinds == {int} and min(saved) >= 0
    if not (kinds <= {str} or positions) or len(set(saved)) < len(saved):
        raise CorruptError(
            f"{what} says what no checkpoint has: {saved!r:.80}; expected parameters, each once"
        )
    if not positions:
        return [*saved]
    return [names[place] if place < len(names) else place for place in saved]


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

    def check_groups(self, keys: Collection[str], path: Path) -> None:
        """Raise CorruptError for values in the place of param groups."""
        for key in keys:
            if key.startswith(self.optim) and _NO_GROUP.fullmatch(key.removeprefix(self.optim)):
                raise CorruptError(
                    f"{path}, {key}, says what no checkpoint has: expected groups of options"
                )

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
    with DeferredSignals():  # what a handler raises says nothing of the value
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
    numpy.random.set_state(_of_numpy(state))
    random.setstate(_of_python(state))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def check_random_state(state: Any) -> None:
    """Raise the error of a generator that does not take its state: others of its kind try."""
    torch.Generator().set_state(state["torch"])
    numpy.random.RandomState().set_state(_of_numpy(state))
    random.Random().setstate(_of_python(state))
    if "cuda" in state and torch.cuda.is_available():
        torch.Generator("cuda").set_state(state["cuda"])


def _of_numpy(state: Mapping[str, Any]) -> Any:
    """State of numpy's generator, of its plain numbers."""
    name, keys, *rest = state["numpy"]
    return (name, numpy.array(keys, dtype=numpy.uint32), *rest)


def _of_python(state: Mapping[str, Any]) -> Any:
    """State of Python's generator."""
    version, internal, gauss = state["python"]
    return (version, tuple(internal), gauss)


def known_stores(optimizer: torch.optim.Optimizer | None, ranks: Ranks) -> dict[str, Any]:
    """Stores of all ranks, for a checkpoint; see `stores_of_run`. Collective."""
    mine: tuple[dict[str, int], int | None] = {}, None
    if isinstance(optimizer, TieredOptimizer):
        mine = optimizer.stores_of_run()
    found = ranks.gather(mine)
    began = {name: at for stores, _ in found for name, at in stores.items()}
    return {"began": began, "step": min((n for _, n in found if n is not None), default=0)}


def stores_of(saved: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """(step, step at which each store began) of `known_stores`. Raises the errors of values that
    are none."""
    if not saved:
        return 0, {}
    return int(saved["step"]), {str(name): int(at) for name, at in saved["began"].items()}


def take_over_stores(saved: Mapping[str, Any], optimizer: TieredOptimizer) -> None:
    """Let the optimizer continue from a checkpoint with these `known_stores`; empty: do nothing."""
    if saved:
        optimizer.go_on_from(*stores_of(saved))


# -- values that no shape tells to be wrong: each has the kind and range of what it replaces --


def step_count(value: Any, where: str) -> Tensor:
    """Step count [], fp32 if it was saved as a number. Raises CorruptError for anything else."""
    if not is_count(value):
        raise CorruptError(
            f"{where} cannot be read: it is no number of steps; {value!r:.80}, expected a whole "
            f"number from 0 to {MOST_STEPS - 1}"
        )
    return value.reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value))


def as_corrupt(where: str, what: str, work: Callable[[], object]) -> None:
    """Run `work`, which makes nothing; any error becomes a CorruptError.

    What has no schema is wrong in any way.
    """
    try:
        work()
    except Exception as error:
        raise CorruptError(
            f"{where} holds {what} that cannot be read: {type(error).__name__}: {error}"
        ) from error


def check_schedule(scheduler: Any, saved: Any) -> None:
    """Raise ValueError unless `saved` has the like of the schedule's own values.

    torch's schedules take a state dict over as their attributes, whatever it has.
    """
    own = scheduler.state_dict()
    if not isinstance(saved, Mapping) or not isinstance(own, Mapping):
        if not isinstance(saved, type(own)):
            raise ValueError(f"a {type(saved).__name__}, expected a {type(own).__name__}")
        return
    for name, value in saved.items():
        known = isinstance(name, str) and not hasattr(type(scheduler), name)
        if not (_fits(own[name], value) if name in own else known):
            raise ValueError(
                f"{name!r:.80}={value!r:.80}, expected the like of {own.get(name)!r:.80}"
            )


def _fits(own: Any, value: Any) -> bool:
    """`is_alike`, but lists and dicts may be of any length, and numbers infinite."""
    if own is None:
        return True
    if isinstance(own, (list, tuple)) and isinstance(value, (list, tuple)):
        last = len(own) - 1
        return not own or all(_fits(own[min(i, last)], one) for i, one in enumerate(value))
    if isinstance(own, dict) and isinstance(value, dict):
        return all(_fits(own[key], one) for key, one in value.items() if key in own)
    numbers = number_of(own), number_of(value)
    if None not in numbers:
        return numbers[1] == numbers[1]  # and no NaN
    return is_alike(own, value)
