"""Calls: where passes, and the module calls in them, begin and end.

`Calls` listens to `ModuleCalls`, to operators that use parameters outside their modules, and to
gradients. It tells three others, each once: `StatefulTensorMgr`, which gathers and releases along
its steps; `Reducer`, which knows what is reduced when; and `Sampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from gemini.chunk.parameter import ChunkView, handle_of, take_gradient
from gemini.memtracer.module_calls import (
    Caller,
    GatherWhole,
    ModuleCalls,
    around_forward,
    callers_of,
    gets_gradient,
    in_backward,
)
from gemini.nvme import NvmeError
from gemini.optim.state.deferred_signals import DeferredSignals
from gemini.runtime.events import EngineEvent
from gemini.runtime.gradients.waiting import Gradients
from gemini.runtime.meetings import Meetings
from gemini.runtime.overlap import UpdateOverlap
from gemini.runtime.passes import Passes, taking_turns
from gemini.runtime.schedule.planning import PlanInUse
from gemini.runtime.schedule.tensor_mgr import TensorState
from gemini.runtime.step.homes import MovingHomes
from gemini.runtime.weights import Weights
from gemini.trees import tensors_in
from gemini.units import ChunkId, ParamId

from .gradient_hooks import gradient_hook, refuse_double_backward, refuse_unscaled, unscaling_hook
from .midway import Midway

if TYPE_CHECKING:
    from .attempt import Attempt


R = TypeVar("R")


class Calls:
    """Passes and module calls of one engine, as they begin and end; see `CallListener`."""

    def __init__(
        self,
        *, passes: Passes, weights: Weights, overlap: UpdateOverlap, in_use: PlanInUse,
        meetings: Meetings, gradients: Gradients, homes: MovingHomes,
        forward: EngineEvent[[]], unfreeze: Callable[[list[ParamId]], None],
    ) -> None:  # fmt: skip
        """forward: of the whole module, begins. unfreeze: what requires gradients by now."""
        sharding = self._sharding = weights.sharding
        self._passes, self._weights, self._overlap = passes, weights, overlap
        self._planning, self._ledger = in_use.planning, in_use.ledger
        self._cycle, self._forward, self._unfreeze = gradients.cycle, forward, unfreeze
        self._meetings, self._gradients, self._homes = meetings, gradients, homes
        self.midway = Midway(sharding, in_use, passes, homes)
        self.hook_handles: list[Any] = []  # on modules and parameters
        self._graph_was_open = False  # as the last forward from outside began
        self._announced = False  # the forward that is next, by the wrapper
        self._manager, self._reducer = in_use.manager, gradients.cycle.reducer
        self._sampler, self._collector = in_use.sampler, in_use.sampler.collector
        self._modules = ModuleCalls(self, sharding.params)
        self._entered = False  # this backward came in through the boundary, with its loss scale
        self._for_stage = False  # see `taken_by_stage`
        self._chunk_of_storage = {
            chunk.payload.untyped_storage()._cdata: chunk.spec.id for chunk in sharding.chunks
        }
        self._unheard: list[ParamId] = []  # frozen: nothing takes their gradients
        # without moves and limits one trace of a kind serves inputs of any shape
        limited = self._planning.overruns.limits_device
        self.tells_inputs_apart = not sharding.all_gathered or limited
        meetings.answer("chunk", self._gather_read)

    # -- hooks --

    def hook(self, root: nn.Module, gather_whole: GatherWhole) -> None:
        """Listen to the root module, and to every caller below it if chunks are released."""
        handles = self.hook_handles
        if not self._sharding.all_gathered:
            callers = callers_of(root, _own_params, gather_whole)
            for _, caller in callers:
                caller.chunks = tuple(sorted({self._sharding.chunk_of[p] for p in caller.params}))
            handles += self._modules.hook(callers)
            self._modules.trained(self._is_trained)
        elif self._weights.regather.overlaps or self._overlap.communicator is not None:
            for module, caller in callers_of(root, _own_params, gather_whole):
                waits = partial(self._wait, caller.params)
                handles.append(module.register_forward_pre_hook(waits, prepend=True))
        handles += self.midway.hook(root)
        # last, so that these hooks are around the root's own, if it is a caller
        handles += around_forward(root, self.begin_forward, self.end_forward)

    def keep(self, handles: Iterable[Any]) -> None:
        """Remove these hooks, too, when the module is unwrapped."""
        self.hook_handles += handles

    def listen(self) -> None:
        """Take gradients as autograd accumulates them, of parameters that require one."""
        for i, param in enumerate(self._sharding.params):
            if param.requires_grad:
                self._listen_to(ParamId(i))
            else:
                self._unheard.append(ParamId(i))

    def _listen_to(self, param: ParamId) -> None:
        hook = gradient_hook(self.gradient_arrived, param)
        tensor, handles = self._sharding.params[param], self.hook_handles
        handles.append(tensor.register_post_accumulate_grad_hook(hook))
        if self._cycle.control_vector.active:
            handles.append(tensor.register_hook(unscaling_hook(self.taken_out, param)))

    @taking_turns
    def unfreeze_trained(self) -> None:
        """Unfreeze frozen parameters that require a gradient by now; see `unfreeze`."""
        params = self._sharding.params
        unfrozen = [param for param in self._unheard if params[param].requires_grad]
        if not unfrozen:
            return
        with DeferredSignals():  # Ctrl-C finds them frozen, or trained and listened to
            self._unfreeze(unfrozen)
            self._modules.trained(self._is_trained)
            self._unheard = [param for param in self._unheard if param not in unfrozen]
            for param in unfrozen:
                self._listen_to(param)
                grad = take_gradient(params[param])
                if grad is not None:  # of a submodule that was called by itself
                    self._gradients.assign(param, grad)

    def _is_trained(self, param: ParamId) -> bool:
        return self._sharding.layout.params[param].trainable

    @_disable_dynamo
    def _wait(self, params: Sequence[ParamId], module: nn.Module, args: Any) -> None:
        """Wait, before a call where nothing is released, for gathers and updates of its chunks."""
        for param in params:
            self.arrive(param)

    # -- passes --

    @_disable_dynamo
    @taking_turns
    def begin_iteration(self, inputs: Any) -> None:
        """Begin to sample, where needed, as the wrapper is called from outside with `inputs`."""
        if (
            not self._passes.in_pass()
            and not self._weights.is_summoned
            and not self._passes.in_schedule
        ):
            told_apart = inputs if self.tells_inputs_apart else None
            self._sampler.begin(told_apart, again=self._manager.deviated)
            if self._sharding.comm.world_size > 1:  # a collective may follow
                self._meetings.end_reading()
            try:
                self._homes.before_forward()
            except BaseException:
                self._sampler.abandon()
                raise
            self._sampler.choose_again(told_apart)
            self._passes.note_graph()
            self.midway.begin()
        self._announced = True

    def attempt(self, module: nn.Module, inputs: Any) -> Attempt | None:
        """What is asked when the outermost forward of `module`, which is next, has no memory; None
        where homes do not follow what forwards ask for."""
        counts = self._sharding.backend.has_host_tier and torch.is_grad_enabled()
        if (
            not counts
            or in_backward()
            or self._passes.in_schedule
            or not self._planning.homes_follow
        ):
            return None
        from .attempt import Attempt

        return Attempt(self._sharding, self._passes, self._sampler, self._homes, module, inputs)

    def again(self, attempt: Attempt, inputs: Any) -> None:
        """Make room for a forward that had no memory, and begin it anew."""
        self.forget()
        self.unpin()
        attempt.make_room(inputs if self.tells_inputs_apart else None)
        self.midway.begin()

    def forward_failed(self, depth: int) -> None:
        """End a forward of the wrapper that raised; as it began, `depth` others were open."""
        self.cut_short(depth)
        self._announced = False
        if not (depth or in_backward() or self._passes.in_schedule):
            self._passes.drop_graph()
            self._sampler.abandon()  # it says nothing of a whole iteration

    def tracking(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context around the forward that `begin_iteration` announced."""
        chunks = self._sharding.chunks
        return self._sampler.tracking(module, lambda: [chunk.payload for chunk in chunks])

    @_disable_dynamo
    @taking_turns
    def begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a forward of the root module, by whichever entry point it is called."""
        self._weights.refuse_parked()
        outermost = not (self._passes.depth or in_backward() or self._announced)
        # `generate` calls the module by itself; what only decodes was planned before it ran
        if outermost and not torch.is_grad_enabled() and self._planning.plan.kind == "train":
            self.begin_iteration((args, kwargs))
        self._announced = False
        if not self._passes.enter():
            return
        if not torch.is_grad_enabled():
            self._weights.settle()  # there may be no backward that would say so
        self._sharding.comm.check_unchanged()
        if self._sharding.opaque:
            self._weights.take_replaced()
        for listener in self._forward.listeners:
            listener()
        self.unfreeze_trained()
        self._gradients.notice_broken_backward()
        if not self._passes.in_schedule:
            self.begin_cycle()
        if self._sharding.all_gathered:
            self._sampler.at_root("enter")

    def cut_short(self, depth: int = 0) -> None:
        """Lower the count of open forwards to `depth`: Ctrl-C ends a forward without its hook."""
        self._passes.cut_short(depth)

    def begin_cycle(self) -> None:
        """Begin a cycle: a forward outside the cycle before, or all micro-batches of a schedule."""
        self._meetings.begin_cycle()
        self.unpin()  # and as inputs may differ between ranks, what is gathered when may not:
        one_rank = self._sharding.comm.world_size == 1
        levels = self._planning.levels
        signature = self._sampler.signature if one_rank else levels.signature
        self._manager.begin_cycle("train" if torch.is_grad_enabled() else "eval", signature)

    @_disable_dynamo
    @taking_turns
    def end_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._passes.leave()
        if not self._passes.in_pass():
            if self._sharding.all_gathered:
                self._sampler.at_root("leave")
            self.midway.end(failed=output is None)
            if not self._passes.in_schedule:
                self.unpin()

    @taking_turns
    def begin_backward(self, scaled: bool = False) -> None:
        """Begin the backward in which this module takes part: arm its end, once.

        The first gradient calls it: of an output of the root or of a module below it, or of a
        parameter. scaled: the caller is an output of the root, where a loss scale is put on.
        """
        if torch.is_grad_enabled():
            refuse_double_backward()
        self._check_backward()
        self._entered |= scaled
        if self._reducer.active:
            return
        self._start_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _check_backward(self) -> None:
        self._weights.settle()
        self._gradients.check_backward()

    def _start_backward(self) -> None:
        manager = self._manager
        self._reducer.begin(manager.calls if manager.follows_steps else (), manager.num_calls)
        self._meetings.begin_backward()
        self._gradients.begin_backward()
        if self._sharding.all_gathered:
            self._sampler.at_root("enter")
        viewed = tuple(self._weights.viewed)
        if viewed:  # operators that took such a view have no hook of their own
            self._manager.pin(viewed)
            self.gather(viewed, in_cycle=False)

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Run a backward, or a part of one, in the body, and reduce nothing at its end."""
        lock = self._passes.lock
        with lock:
            self._check_backward()
        with self._reducer.holding():
            with lock:
                self._start_backward()
            yield
            with lock:
                if self._sharding.all_gathered:
                    self._sampler.at_root("leave")
                self._reducer.finish()
        with lock:
            self._ledger.note()
            self.forget()

    @contextmanager
    def taken_by_stage(self) -> Iterator[None]:
        """Context around the half of a backward in which a stage takes gradients out for us."""
        self._for_stage = True
        try:
            yield
        finally:
            self._for_stage = False

    @taking_turns
    def _end_backward(self) -> None:
        """Reduce the rest and end the backward: all its gradients have arrived."""
        self._entered = False
        if not self._reducer.active:
            return
        if self._sharding.all_gathered:
            self._sampler.at_root("leave")
        # Ranks may have come here by other calls; `finish` issues collectives in one order.
        self._meetings.barrier()
        self._collector.before_change()
        self._reducer.finish()
        self._collector.after_change()
        self._ledger.note()
        self.forget()
        self.unpin()
        self._passes.end_graph()
        if self._reducer.synchronise:
            self._gradients.end_backward()

    def forget(self) -> None:
        """Forget open module calls: the backward has ended."""
        self._modules.forget()
        self._manager.forget_users()
        self._manager.reset_states()

    def unpin(self) -> None:
        """Allow the release of chunks that were pinned for a pass."""
        if not self._weights.is_summoned:
            self._manager.unpin_all()

    # -- calls --

    @taking_turns
    def begins(self, caller: Caller) -> None:
        if self._collector.collecting:
            self._sampler.record("enter", caller)
        try:
            self._make_there(caller.chunks)
        except Exception:  # torch runs the hook that ends the call, but not after Ctrl-C
            self._manager.begin_use(caller.chunks, caller.params)
            raise
        self._manager.begin_use(caller.chunks, caller.params)

    @taking_turns
    def ends(self, caller: Caller, outputs: Sequence[Tensor], *, recorded: bool) -> bool:
        for tensor in outputs:  # a plain view of a payload keeps its chunk for this pass
            if type(tensor) is not ChunkView:
                chunk = self._chunk_of_storage.get(tensor.untyped_storage()._cdata)
                if chunk is not None:
                    self._manager.pin((chunk,))
                    self._weights.show(chunk)
        state = TensorState.HOLD_AFTER_FORWARD if recorded else TensorState.HOLD
        self._manager.end_use(caller.chunks, caller.params, state)
        backward = torch._C._current_graph_task_id() != -1
        is_in_pass = backward or self._passes.depth > 0
        if is_in_pass:
            self.let_go()
        if self._collector.collecting:
            self._sampler.record("leave", caller)
        if recorded and is_in_pass and not backward:
            self._reducer.announce(caller.chunks)
        return is_in_pass

    @taking_turns
    def backward_begins(self, caller: Caller, *, in_pass: bool) -> None:
        if not self._reducer.active:
            self.begin_backward()
        if in_pass and self._collector.collecting:  # others come in no cycle
            self._sampler.record("enter", caller)
        if in_pass:
            self._make_there(caller.chunks)
        else:
            self._make_readable(caller.chunks)
        self._manager.begin_use(caller.chunks, caller.params)
        if in_pass:
            self._reducer.opened(caller.chunks, caller.whole)

    @taking_turns
    def backward_ends(self, caller: Caller, *, in_pass: bool) -> None:
        self._manager.end_use(caller.chunks, caller.params, TensorState.HOLD_AFTER_BACKWARD)
        if in_pass:
            self._reducer.closed(caller.chunks, caller.whole)
            self.let_go()
        if in_pass and self._collector.collecting:
            self._sampler.record("leave", caller)

    def gradient_arrived(self, param: ParamId, grad: Tensor) -> None:
        """Pack the whole gradient of a parameter, as autograd has accumulated it."""
        sharding = self._sharding
        if grad.requires_grad:
            refuse_double_backward()
        with self._passes.lock:  # here, as `held` is a call more for every gradient
            if not self._reducer.active:
                self.begin_backward()
            if self._cycle.control_vector.active and not self._entered:
                refuse_unscaled(sharding.layout, param)
            chunk = sharding.chunks[sharding.chunk_of[param]]
            watched = self._ledger.watched and chunk.gradient.next_changes_memory
            if watched:
                self._collector.before_change()
            self._reducer.arrived(chunk, sharding.slot_of[param], grad)
            if watched:
                self._collector.after_change()
                self._ledger.note()
            self._manager.gradient_arrived(param)
            self._modules.gradient_arrived(param)

    def taken_out(self, param: ParamId, grad: Tensor) -> Tensor | None:
        """`grad` without the loss scale, for `torch.autograd.grad`; None: it is for `.grad`."""
        taken = not (self._for_stage or gets_gradient(self._sharding.params[param]))
        if not self._entered or not taken:
            return None
        return (grad / self._cycle.control_vector.scale).to(grad.dtype)

    # -- operators that use parameters outside their modules; see `gemini.chunk.parameter` --

    @taking_turns
    def arrive(self, param: ParamId) -> None:
        """Wait for what is under way before `param` is read, where nothing is released.

        A step's gather or its updates may be under way. Outside a pass, where the reader may also
        write, the whole step must count.
        """
        chunks = (self._sharding.chunk_of[param],)
        self._weights.regather.arrive(chunks)
        if self._passes.in_pass():
            self._weights.updating.arrive(chunks)
        else:
            self._weights.settle()

    @taking_turns
    def fetch(self, params: list[ParamId]) -> tuple[ChunkId, ...]:
        """Make parameters readable that no module has in use; returns their chunks."""
        idle: set[ChunkId] = set()
        for param in params:
            if self._manager.state_of(param) is not TensorState.COMPUTE:
                idle.add(self._sharding.chunk_of[param])
        chunks = tuple(sorted(idle))
        if chunks and not self._weights.is_summoned:
            if self._passes.in_pass():
                self._sampler.record("enter", self._caller_for(chunks))
            self._make_there(chunks)
        return chunks

    @taking_turns
    def fetched(self, chunks: tuple[ChunkId, ...], arguments: Any, result: Any) -> None:
        """End an operator's use of `chunks`; the backward of its `result` may read them again."""
        is_in_pass = self._passes.in_pass()
        caller = self._caller_for(chunks)
        if is_in_pass and not self._weights.is_summoned:
            self.let_go()
            self._sampler.record("leave", caller)
        results = [t for t in tensors_in(result) if t.requires_grad and type(t) is not ChunkView]
        if results and torch.is_grad_enabled():
            if self._cycle.control_vector.active and not is_in_pass:
                refuse_unscaled(self._sharding.layout, caller.traced[0])
            others = [t for t in tensors_in(arguments) if handle_of(t) is None]
            self._modules.watch(caller, results, others, in_pass=is_in_pass)

    def borrowed(self, params: Sequence[ParamId], body: Callable[[tuple[ChunkId, ...]], R]) -> R:
        """`body(chunks)`, an operator in a thread that does not train: parameters are those of the
        last step, and stay so.

        Chunks that are released are gathered for the body alone, one after the other for all
        threads: no plan sees them. Raises RuntimeError where other ranks had to gather too, while
        this rank runs a pass.
        """
        self._weights.updating.behind.wait()  # without the lock: whoever trains goes on meanwhile
        with self._passes.lock:
            self._weights.settle()
            self._weights.regather.end()
            ids = tuple(sorted({self._sharding.chunk_of[param] for param in params}))
            chunks = [self._sharding.chunks[chunk] for chunk in ids]
            missing = [chunk for chunk in chunks if not chunk.gathered]
            if missing and self._sharding.comm.world_size > 1:
                self._read_between_passes(ids)
                missing = []
            try:
                for chunk in missing:
                    chunk.gather()
                for chunk in chunks:
                    chunk.wait_gathered()
                return body(ids)
            finally:
                for chunk in missing:
                    if chunk.gathered:
                        self._weights.user_writes.write_back(chunk)
                        chunk.release()

    def _read_between_passes(self, chunks: tuple[ChunkId, ...]) -> None:
        """Gather chunks with all ranks. Raises RuntimeError beside a pass."""
        if self._passes.has_pass_elsewhere():
            said = " ".join(self._meetings.in_words(chunks[:1]).values())
            raise RuntimeError(
                f"{said} is released, and read while another thread runs a forward or a backward, "
                "in which ranks gather in one order; read it between iterations, or in the thread "
                "that trains"
            )
        self._make_readable(chunks)

    def owns_memory_of(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of a chunk."""
        return tensor.untyped_storage()._cdata in self._chunk_of_storage

    def _caller_for(self, chunks: Iterable[ChunkId]) -> Caller:
        """Caller for chunks: one parameter of each stands for it in a trace, none has a state."""
        layout = self._sharding.layout
        traced = tuple(layout.chunks[chunk].slots[0].param for chunk in chunks)
        name = layout.params[traced[0]].name.rpartition(".")[0] if traced else ""
        return Caller(name, (), chunks=tuple(chunks), traced=traced)

    # -- inside --

    def _make_there(self, chunks: tuple[ChunkId, ...]) -> None:
        """Gather the chunks of a call that begins; in a pass, the next iteration repeats it."""
        if not (self._passes.depth or torch._C._current_graph_task_id() != -1):
            self._make_readable(chunks)
            return
        visits, there = self._sampler.is_visiting, self._sharding.chunks
        if visits and all(there[chunk].gathered for chunk in chunks):
            return
        if self._meetings.reads_outside:
            self._meetings.end_reading()
        self.gather(chunks, in_cycle=not (self._manager.holds or visits))

    def gather(self, chunks: tuple[ChunkId, ...], *, in_cycle: bool) -> None:
        """Gather the chunks of a call; `in_cycle`: by the steps, of which it is one."""
        manager = self._manager
        if self._weights.regather.arriving:
            self._weights.regather.arrive(chunks)
        if self._weights.updating.coming:
            self._weights.updating.arrive(chunks)
        measured = self._collector.collecting
        if measured:
            self._collector.before_change()
        if in_cycle and manager.advance_to(chunks) and torch._C._current_graph_task_id() != -1:
            self._reducer.reduce_due(manager.num_calls, manager.follows_steps)
        try:
            manager.prepare(chunks, in_cycle)
        except NvmeError as error:
            self._sharding.note_readable_params(error)
            raise
        if measured:
            self._collector.after_change()

    def let_go(self) -> None:
        """End a call's use of its chunks, in a pass."""
        if self._sampler.is_visiting:
            return
        if self._collector.collecting:
            self._collector.before_change()
            self._manager.call_ended()
            self._collector.after_change()
        else:
            self._manager.call_ended()

    def _make_readable(self, chunks: tuple[ChunkId, ...]) -> None:
        """Gather chunks that are read outside a pass, where ranks may read in any order.

        Gathered chunks stay where they are, and no other rank is asked.
        """
        self._weights.settle()
        there = self._sharding.chunks
        if any(not there[chunk].gathered for chunk in chunks):
            self._meetings.read(self._meetings.in_words(chunks))
        for chunk in chunks:
            there[chunk].wait_gathered()

    def _gather_read(self, names: Sequence[str], wanted: Container[str]) -> None:
        """Gather the chunks that any rank reads. Collective."""
        self.gather(tuple(sorted(ChunkId(int(name)) for name in names)), in_cycle=False)


def _own_params(module: nn.Module, whole: bool) -> list[ParamId]:
    handles = [handle_of(param) for param in module.parameters(recurse=whole)]
    return [handle.param for handle in handles if handle is not None]
