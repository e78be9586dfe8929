"""One iteration of an engine in which layers, and not micro-batches, follow each other.

For the engine it is one forward, open from the first prologue to the last backward: one trace, one
plan, one cycle of gathers. A visit of a layer is one call in it, with that layer's weights for all
micro-batches. A chunk is reduced once, as the last visit that adds to its gradient has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gemini.chunk.parameter import handle_of
from gemini.chunk.storage import Chunk
from gemini.ddp import GeminiDDP
from gemini.memtracer.module_calls import Caller
from gemini.memtracer.trace import Phase
from gemini.units import ParamId

from .chain import NoChainError

FORMED = "some gradients had been formed, and all were dropped: call zero_grad() before you go on"
AT_END = -1  # a chunk of the prologue, or of anything else


class Iteration:
    """Iteration of one wrapped module; a context, which nothing of it outlives.

    An error before the first backward leaves gradients as they were; one behind it drops them all,
    and `zero_grad` must follow, as after any backward that ended in an error: a NoChainError says
    so.
    """

    def __init__(
        self, model: GeminiDDP, layers: Sequence[nn.Module], name: str, batches: Sequence[Any]
    ) -> None:
        self._model, self._engine = model, model.engine
        self._batches = batches
        self._callers = [self._caller_of(f"{name}.{i}", layer) for i, layer in enumerate(layers)]
        self._layer_of = {p: i for i, caller in enumerate(self._callers) for p in caller.params}
        self._unreduced: list[Chunk] = []
        self._begun: list[Chunk] = []  # reductions that nobody has waited for
        self._has_gradients = False

    def _caller_of(self, name: str, layer: nn.Module) -> Caller:
        handles = [handle_of(param) for param in layer.parameters()]
        params = tuple(dict.fromkeys(handle.param for handle in handles if handle is not None))
        sharding = self._engine.sharding
        chunks = tuple(sorted({sharding.chunk_of[param] for param in params}))
        return Caller(name, params, chunks=chunks)

    # -- begin and end --

    def __enter__(self) -> Iteration:
        model, engine, calls = self._model, self._engine, self._engine.calls
        if model.broadcast_buffers:
            engine.meetings.barrier()
            model._broadcast_buffers()
        # shapes of all micro-batches, and another signature than that of one forward with them
        calls.begin_iteration((self._batches, torch.empty(len(self._batches), 0)))
        try:
            calls.begin_forward(model.module, (), {})
        except BaseException:
            calls.forward_failed(0)
            raise
        chunks = [chunk for chunk in engine.chunks if chunk.spec.trainable]
        self._unreduced = chunks if engine.reducer.synchronise else []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> None:
        engine, calls = self._engine, self._engine.calls
        if kind is not None:
            self._broken_off()
            if self._has_gradients and isinstance(error, NoChainError):
                raise NoChainError(f"{error}; {FORMED}") from error
            return
        self.reduce(AT_END)
        engine.meetings.barrier()
        calls.end_forward(self._model.module, (), {}, True)
        if engine.reducer.synchronise:
            engine.reducer.reduce_held((), after=self._begun)
        engine.ledger.note()
        calls.forget()
        calls.unpin()
        engine.passes.end_graph()
        if engine.reducer.synchronise:
            engine.gradients.end_backward()

    def _broken_off(self) -> None:
        engine = self._engine
        engine.sampler.end_visit()
        for chunk in self._begun:
            chunk.gradient.end_reduce()
        engine.calls.forward_failed(0)
        if self._has_gradients:
            engine.gradients.drop_broken()
        engine.calls.forget()
        engine.manager.let_go()

    # -- calls --

    def is_no_sample(self) -> None:
        """Forget what was measured of this iteration: one epilogue more than in those that follow
        is about to run, and a plan of its calls would be none of theirs."""
        self._engine.sampler.abandon()

    def root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the whole module, as its wrapper gives it."""
        model = self._model
        args, kwargs = model._boundary.enter((args, kwargs))
        with self.saving(model.module):
            return model._boundary.leave(model.module(*args, **kwargs))

    def saving(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context of a forward of the root, or of a layer: what it saves may leave the device."""
        return self._model._around_forward(module)

    @contextmanager
    def visit(self, layer: int, *, backward: bool) -> Iterator[None]:
        """Context in which the weights of one layer stay, for its calls with all micro-batches."""
        engine, caller = self._engine, self._callers[layer]
        phase: Phase = "backward" if backward else "forward"
        if engine.sharding.all_gathered:
            yield
            return
        collector = engine.sampler.collector
        with engine.lock:
            collector.record("enter", caller.name, caller.params, phase)
            engine.calls.gather(caller.chunks, in_cycle=not engine.manager.holds)
            engine.manager.pin(caller.chunks)
            engine.sampler.begin_visit()
        yield
        with engine.lock:
            engine.sampler.end_visit()
            engine.calls.unpin()
            engine.calls.let_go()
            collector.record("leave", caller.name, caller.params, phase)

    def backward(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None],
        leaves: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Run one backward, which adds to gradients and reduces none. leaves: whose gradients it
        forms alone; None: of all."""
        with self._engine.calls.microbatch():
            self._has_gradients = True
            torch.autograd.backward(outputs, grads, inputs=leaves)

    def reduce(self, stage: int, of_prologue: tuple[ParamId, ...] | None = None) -> None:
        """Begin to reduce what no visit adds to any more, as a stage has ended: a layer by its
        index, the epilogues behind the last one, or `AT_END`.

        of_prologue: parameters that get gradients behind all layers, too. Collective.
        """
        due = [c for c in reversed(self._unreduced)
               if stage == AT_END or self._is_final(c, stage, of_prologue)]  # fmt: skip
        if not due:
            return
        taken = {chunk.spec.id for chunk in due}
        self._unreduced = [c for c in self._unreduced if c.spec.id not in taken]
        collector = self._engine.sampler.collector
        with self._engine.lock:
            collector.before_change()
            self._engine.reducer.reduce_held(due, after=self._begun)
            collector.after_change()
        self._begun = due

    def _is_final(
        self, chunk: Chunk, stage: int, of_prologue: tuple[ParamId, ...] | None
    ) -> bool:  # fmt: skip
        for slot in chunk.spec.slots:
            layer = self._layer_of.get(slot.param)
            if layer is None:
                if of_prologue is None or slot.param in of_prologue:
                    return False
            elif layer < stage:
                return False
        return True

    # -- boundaries --

    def keep(self, tensor: Tensor) -> Any:
        """What stands for a boundary between two layers, which may leave the device meanwhile."""
        saved = self._engine.saved_tensors
        return tensor if saved is None else saved.keep(tensor)

    def brought(self, boundary: Any) -> Tensor:
        """Boundary that `keep` has taken."""
        saved = self._engine.saved_tensors
        return boundary if saved is None else saved.brought(boundary)


def params_among(leaves: Sequence[Tensor]) -> tuple[ParamId, ...]:
    """Ids of the wrapped parameters among these leaves."""
    handles = [handle_of(leaf) for leaf in leaves]
    return tuple(dict.fromkeys(handle.param for handle in handles if handle is not None))
