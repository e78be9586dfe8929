"""Owners of parameters, and calls that threads take in turns."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from gemini.optim.rules.config import StateConfig
from gemini.optim.rules.rule import UpdateRule

Group = dict[str, Any]  # a torch.optim param group
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class AmpInputs:
    """Inputs that `torch.amp.GradScaler` hands to an optimizer for one step."""

    grad_scale: Tensor | None  # 0-d: gradients are to be divided by it
    found_inf: Tensor | None  # 0-d: above 0 where a gradient is not finite


@runtime_checkable
class ParameterOwner(Protocol):
    """Owner of the parameters of a wrapped module: its engine.

    ignored: `{id(param): name}` of parameters that are not sharded (`ignored_params`).
    lock: held by whoever reads or changes weights, gradients or state. It is taken by `with lock:`
        alone, in which no signal comes between the lock and the body.
    """

    ignored: Mapping[int, str]

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def attach(
        self, groups: Sequence[Group], rule: UpdateRule, config: StateConfig
    ) -> Sequence[Any]:
        """Make the state of these groups and take over their update: targets that step together.

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
    return pipeline_owner_of(handle.owner) if handle is not None else None


def pipeline_owner_of(owner: ParameterOwner) -> ParameterOwner:
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
