"""Names of tensors in a checkpoint: those of torch's own `get_state_dict`. Pure.

model.NAME                  weights: fp32 masters where there are any
optim.state.NAME.PLANE      exp_avg, ...
optim.state.NAME.step
optim.param_groups.I.OPTION
gemini.common, gemini.rank.R    what torch has no place for; see `extras.py`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

COMMON = "gemini.common"
_GROUP = re.compile(r"param_groups\.(\d+)\.(\w+)")


def rank_key(rank: int) -> str:
    return f"gemini.rank.{rank}"


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a checkpoint keeps what: other programs choose other prefixes."""

    model: str = "model."
    optim: str = "optim."
    # of tied parameters: under which of its names it was saved, where not under the first
    weight_names: Mapping[str, str] = field(default_factory=dict)
    state_names: Mapping[str, str] = field(default_factory=dict)

    def weight(self, name: str) -> str:
        return f"{self.model}{self.weight_names.get(name, name)}"

    def plane(self, name: str, plane: str) -> str:
        return f"{self.optim}state.{self.state_names.get(name, name)}.{plane}"

    def groups(self, keys: Collection[str]) -> dict[int, dict[str, str]]:
        """Key of every option of every param group that is saved."""
        found: dict[int, dict[str, str]] = {}
        for key in keys:
            if key.startswith(self.optim):
                match = _GROUP.fullmatch(key.removeprefix(self.optim))
                if match is not None:
                    found.setdefault(int(match[1]), {})[match[2]] = key
        return found

    @classmethod
    def find(cls, keys: Collection[str], params: Sequence[Sequence[str]]) -> Keys:
        """The prefixes under which `keys` hold most of the parameters, each with all its names."""
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
