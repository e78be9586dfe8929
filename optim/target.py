"""Targets of an optimizer: the parameters of a plain module, or the shards of an engine."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.config import StateConfig
from gemini.optim.rules.report import StepReport
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.rules.state_layout import Plane

if TYPE_CHECKING:
    from gemini.nvme import BlockStore
    from gemini.optim.state.state_stream import StateStream


Group = dict[str, Any]  # a torch.optim param group
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class AmpInputs:
    """Inputs that `torch.amp.GradScaler` hands to an optimizer for one step."""

    grad_scale: Tensor | None  # 0-d: gradients are to be divided by it
    found_inf: Tensor | None  # 0-d: above 0 where a gradient is not finite


class Counters(Protocol):
    """Loss scale and skipped steps."""

    @property
    def skipped_steps(self) -> int: ...

    def state_dict(self) -> dict[str, float | int]: ...

    def load_state_dict(self, counters: Mapping[str, Any]) -> None: ...


class Target(Protocol):
    """Parameters, gradients and state of some param groups, wherever they live."""

    def step(self, groups: Sequence[Group], amp: AmpInputs | None = None) -> StepReport:
        """Update once. On an error the parameters and the state are those of the last step."""
        ...

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop gradients that the target holds outside `p.grad`, or make them zeros."""
        ...

    def set_groups(self, groups: Sequence[Group]) -> None:
        """Take over all groups, after one was added over parameters that the target has already."""
        ...

    @property
    def untouched(self) -> bool:
        """Whether no step was taken and nothing loaded, so that state need not travel."""
        ...

    @property
    def planes(self) -> Sequence[Plane]:
        """Planes that the target keeps of every parameter, masters too."""
        ...

    @property
    def names(self) -> Mapping[int, str] | None:
        """Name by id of the parameter, by which a state dict is keyed; None: by position."""
        ...

    @property
    def counters(self) -> Counters | None:
        """Loss scale and skipped steps, which belong to a state dict."""
        ...

    def shown_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Views of the state that costs nothing to show, for `optimizer.state`."""
        ...

    def clip(self, clip: Clip) -> Tensor | None:
        """Clip the gradients of the coming step; returns the norm before, where one is asked."""
        ...

    def streams(self, names: Mapping[int, str]) -> Sequence[StateStream]:
        """Streams of this process's state. names: of the parameters, by id."""
        ...

    def blend(self, plane: str, weights: Sequence[float]) -> None:
        """Move the weights of each group its share of the way to a plane: w + share * (plane - w).

        In fp32, whatever they are rounded to; a parameter that was never updated stays.
        """
        ...

    def offloaded_state(self, cut: bool) -> Mapping[Tensor, dict[str, Tensor]]:
        """Copies of the state that `optimizer.state` does not show, shaped like the parameters.

        cut: of a wrapped module every rank has its parts, as DTensors; else rank 0 has all.
        """
        ...

    def load_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take over state, shaped like the parameters."""
        ...

    def movable(self) -> Sequence[Tensor]:
        """Tensors that parking moves: parameters, gradients and state in memory.

        Nothing is under way afterwards.
        """
        ...

    @property
    def stores(self) -> Sequence[BlockStore]:
        """Stores on disk."""
        ...

    def close(self, keep_masters: bool = True) -> None:
        """Remove files and threads. `keep_masters`: give fp32 weights back to who owns them."""
        ...


@runtime_checkable
class ParameterOwner(Protocol):
    """Owner of the parameters of a wrapped module: its engine.

    ignored: names by id of parameters of the module that it leaves as they are.
    lock: held by whoever reads or changes weights, gradients or state. It is taken by `with lock:`
        alone, in which no signal comes between the lock and the body.
    """

    ignored: Mapping[int, str]

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def attach(self, groups: Sequence[Group], rule: UpdateRule, config: StateConfig) -> Target:
        """Make the state of these groups and take over their update.

        Raises ValueError for a parameter of another owner, and for a second optimizer.
        """
        ...

    def refuse_beside_pass(self, changes: str) -> None:
        """Raise RuntimeError while another thread runs a pass. changes: a call that changes
        weights, gradients or state."""
        ...


OWNER_ATTRIBUTE = "_gemini_owner"  # the one attribute that wrapping adds to a parameter


def owner_of(param: Tensor) -> ParameterOwner | None:
    """Owner that attaches an optimizer to a parameter, or None for a plain one."""
    handle = getattr(param, OWNER_ATTRIBUTE, None)
    return speaker_of(handle.owner) if handle is not None else None


def speaker_of(owner: ParameterOwner) -> ParameterOwner:
    """Owner that attaches optimizers for an engine: the engine, or the joint owner of several."""
    return getattr(owner, "together", None) or owner


class Shared(Protocol):
    """Object whose methods several threads may call; see `ParameterOwner`."""

    @property
    def _turns(self) -> AbstractContextManager[Any]: ...

    def _refuse_beside_pass(self, changes: str) -> None: ...


S = TypeVar("S", bound=Shared)


def reads(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Method that any thread may call while another one trains."""

    @functools.wraps(method)
    def alone(this: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with this._turns:
            return method(this, *args, **kwargs)

    return alone


def changes(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Method that changes weights, state or gradients: refused while another thread runs a pass."""

    @functools.wraps(method)
    def alone(this: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with this._turns:
            this._refuse_beside_pass(f"{method.__name__.strip('_')}()")
            return method(this, *args, **kwargs)

    return alone


_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> AbstractContextManager[Any]:
    """Lock that one thread may take several times. A forked child has it free: whoever held it in
    the parent, in another thread, is not there to give it back."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def free_in_child() -> None:
    """Free all locks that this thread does not hold, in a process that was just forked."""
    for lock in sorted(_locks, key=id):
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=free_in_child)
