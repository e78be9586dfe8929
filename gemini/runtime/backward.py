"""The backward of one call: of a module, or of an operator that used parameters outside theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gemini.chunk.state import TensorState
from gemini.units import ChunkId, ParamId

if TYPE_CHECKING:
    from .engine import Engine


class BackwardCall:
    """Holds the chunks of a call from the first gradient of its outputs on.

    Until the gradients of its inputs, and of the parameters it waits for, have arrived: what reads
    the chunks in backward lies between. Without inputs, until the backward ends; so too where an
    input takes no part in it.

    Hooks are on the graph, where the garbage collector cannot see them: they must not keep a node
    of the graph, as `register_multi_grad_hook` does, or neither graph nor engine would ever die.

    params: take part in states; `awaited`: those of them whose gradient ends the call; `traced`:
        those that stand for the call in a trace, by default all.
    whole: the call of a module that is gathered whole; see `Reducer`.
    in_pass: false for an operator outside any forward, in whose order ranks may differ.
    """

    def __init__(
        self,
        engine: Engine,
        chunks: tuple[ChunkId, ...],
        params: tuple[ParamId, ...] = (),
        awaited: tuple[ParamId, ...] = (),
        whole: bool = False,
        traced: tuple[ParamId, ...] = (),
        in_pass: bool = True,
    ) -> None:
        self._engine = engine
        self._chunks = chunks
        self._params = params
        self._traced = traced or params
        self._awaits = awaited
        self._whole = whole
        self._in_pass = in_pass
        self._awaited: set[ParamId] = set()  # not arrived yet in this backward
        self._num_inputs = 0
        self._inputs_pending = 0
        self._ends_with_backward = False
        self._open = False
        self._task = -1  # the backward in which it was open last

    def watch(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Hook the call's place in the graph; all of these require a gradient."""
        for tensor in outputs:
            tensor.register_hook(self._output_arrived)
        leaves = any(tensor.is_leaf for tensor in inputs)  # autograd.grad cannot count these
        hooked = {id(tensor): tensor for tensor in inputs if not tensor.is_leaf}
        for tensor in hooked.values():
            tensor.register_hook(self._input_arrived)
        self._num_inputs = len(hooked)
        self._ends_with_backward = leaves or not (hooked or self._awaits)

    def gradient_arrived(self, param: ParamId) -> None:
        """The gradient of one parameter has arrived, of this module or of another."""
        if param in self._awaited:
            self._awaited.discard(param)
            self._close_if_done()

    def abandon(self) -> None:
        """The backward ended before this call did."""
        self._open = False

    def _output_arrived(self, grad: Tensor) -> None:
        """The gradient of an output; the first of a backward begins the call."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        engine = self._engine
        if not engine.reducer.active:
            engine.begin_backward()
        engine.sampler.at_moment("enter", self._traced)
        if self._in_pass:
            engine.at_moment(self._chunks)
        else:
            engine.at_reading(self._chunks)
        engine.manager.begin_use(self._chunks, self._params)
        self._open = True
        engine.open_calls.append(self)
        if self._in_pass:
            engine.reducer.opened(self._chunks, self._whole)
        self._inputs_pending = self._num_inputs
        self._awaited = set(self._awaits)
        if len(self._awaited) > 1:  # some may take no part: experts, branches, what was frozen
            self._awaited = {p for p in self._awaited if gets_gradient(engine.params[p])}
        self._close_if_done()

    def _input_arrived(self, grad: Tensor) -> None:
        """The gradient of an input, from this call and from all others that took it."""
        if self._open:
            self._inputs_pending -= 1
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._inputs_pending or self._awaited or self._ends_with_backward or not self._open:
            return
        self._open = False
        engine = self._engine
        engine.manager.end_use(self._chunks, self._params, TensorState.HOLD_AFTER_BACKWARD)
        engine.open_calls.remove(self)
        if self._in_pass:
            engine.reducer.closed(self._chunks, self._whole)
            engine.call_ended()
        engine.sampler.at_moment("leave", self._traced)


def gets_gradient(param: Tensor) -> bool:
    """Whether this backward will accumulate a gradient into `param`."""
    with torch._C.DisableTorchFunctionSubclass():
        if not param.requires_grad:  # frozen since it was wrapped
            return False
        try:
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
        except RuntimeError:  # autograd.grad takes it out instead
            return False
