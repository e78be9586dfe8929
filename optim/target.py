"""What an optimizer updates: the parameters of a plain module, or the shards of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from .config import StateConfig
from .report import StepReport
from .rules import UpdateRule

Group = dict[str, Any]  # a torch.optim param group


class Target(Protocol):
    """Parameters, gradients and state of some param groups, wherever they live."""

    def step(self, groups: Sequence[Group]) -> StepReport:
        """One update. On an error the parameters and the state are those of the last step."""
        ...

    def zero_grad(self) -> None:
        """Drop gradients that the target holds outside `p.grad`."""
        ...

    def offloaded_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Copies of the state that `optimizer.state` does not show, shaped like the parameters."""
        ...

    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take over state, shaped like the parameters."""
        ...

    @property
    def nvme_bytes(self) -> int:
        """Bytes on disk, both versions of every block."""
        ...

    def close(self) -> None:
        """Remove files and threads."""
        ...


@runtime_checkable
class ParameterOwner(Protocol):
    """What stands behind the parameters of a wrapped module."""

    def attach(self, groups: Sequence[Group], rule: UpdateRule, config: StateConfig) -> Target:
        """Make the state of these groups and take over their update.

        Raises ValueError for a parameter that is not its own, and for a second optimizer.
        """
        ...


OWNER_ATTRIBUTE = "_gemini_owner"  # the one attribute that wrapping adds to a parameter


def owner_of(param: Tensor) -> ParameterOwner | None:
    """The engine behind a parameter, or None for a plain one."""
    owner = getattr(param, OWNER_ATTRIBUTE, None)
    return owner.owner if owner is not None else None
