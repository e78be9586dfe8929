"""Passes of one engine: which thread runs its forwards and backwards, and whether one runs now."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from gemini.memtracer.module_calls import in_backward
from gemini.runtime.schedule.reducer import Reducer
from gemini.runtime.sharding import refuse_copies

P = ParamSpec("P")
R = TypeVar("R")


class Passes:
    """Passes of one engine, and whose turn it is.

    lock: held by whoever looks at, or changes, what an engine has: by the thread that trains in
        each event of a pass and in a step, by others for an operator or a call. No thread of ours
        (a tail, a disk) takes it, so it may be held while one of these is waited for.
    depth: forwards of the root module inside each other, now.
    in_schedule: in micro-batches of a pipeline's schedule, which begins and ends cycles and
        backwards.
    stage: of a pipeline, (index, number of stages); None: it is none.
    graph_is_open: a forward was recorded, and no backward has ended since.
    """

    def __init__(self, lock: AbstractContextManager[Any], reducer: Reducer) -> None:
        self.lock = lock
        self.depth = 0
        self.in_schedule = False
        self.stage: tuple[int, int] | None = None
        self.graph_is_open = self._graph_was_open = False  # the second: as an iteration began
        self._thread = threading.get_ident()  # it began the last forward or step: it trains
        self._reducer = reducer  # active in a backward

    __reduce_ex__ = refuse_copies

    def enter(self) -> bool:
        """Begin a forward of the root module. Returns whether it is the outermost of a pass, and
        then this thread trains."""
        self.depth += 1
        if self.depth > 1 or in_backward():
            return False
        self.graph_is_open |= torch.is_grad_enabled()
        self.train_here()
        return True

    def leave(self) -> None:
        """End a forward of the root module."""
        self.depth = max(0, self.depth - 1)

    def cut_short(self, depth: int) -> None:
        """Lower the count of open forwards to `depth`: Ctrl-C ends a forward without its hook."""
        if not in_backward():
            self.depth = min(depth, self.depth)

    def note_graph(self) -> None:
        """Note whether a graph is open as a forward of the wrapper begins."""
        self._graph_was_open = self.graph_is_open

    def drop_graph(self) -> None:
        """Note that this forward failed: nobody has its outputs."""
        self.graph_is_open = self._graph_was_open

    def end_graph(self) -> None:
        """Note that the backward of what was recorded has ended: homes may move."""
        self.graph_is_open = False

    def train_here(self) -> None:
        """Note that this thread trains."""
        self._thread = threading.get_ident()

    def begin_schedule(self) -> None:
        self.in_schedule = True

    def end_schedule(self) -> None:
        self.in_schedule = False

    def check_stage(self, index: int, count: int) -> None:
        """Raise ValueError for a module that is another stage of a pipeline already."""
        if self.stage not in (None, (index, count)):
            raise ValueError(
                f"this module is stage {self.stage[0]} of {self.stage[1]} already, and cannot "
                f"be stage {index} of {count}; wrap each stage's layers by themselves"
            )

    def become_stage(self, index: int, count: int) -> None:
        """Note which stage of a pipeline the module is, of how many."""
        self.stage = index, count

    def in_pass(self) -> bool:
        """Whether this thread runs a forward, or a backward, of the root module."""
        return in_backward() or (self.depth > 0 and threading.get_ident() == self._thread)

    def is_elsewhere(self) -> bool:
        """Whether this thread is another one than the one that trains."""
        return threading.get_ident() != self._thread and not in_backward()

    def has_pass_elsewhere(self) -> bool:
        """Whether another thread runs a forward or a backward. One that has ended does not."""
        if not (self.is_elsewhere() and (self.depth > 0 or self._reducer.active)):
            return False
        return any(thread.ident == self._thread for thread in threading.enumerate())

    def refuse_beside_pass(self, changes: str) -> None:
        """See `ParameterOwner.refuse_beside_pass`."""
        if self.has_pass_elsewhere():
            raise RuntimeError(
                f"{changes} while another thread runs a forward or a backward of this module; call "
                "it there, or between iterations. Any thread may read weights and state meanwhile"
            )


class HasPasses(Protocol):
    """Wing of an engine."""

    _passes: Passes


W = TypeVar("W", bound=HasPasses)


def taking_turns(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Method of a wing that holds the engine's lock."""

    @functools.wraps(method)
    def holding(wing: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with wing._passes.lock:
            return method(wing, *args, **kwargs)

    return holding
