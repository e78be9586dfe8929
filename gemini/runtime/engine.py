"""The engine behind a wrapped module: it turns moments of a step into chunk operations.

Forward and backward call in through `hooks.py`, the optimizer through `shard_target.py`. What is
gathered when is decided by `StatefulTensorMgr`'s plan; what is reduced when by `Reducer`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.parameter import ChunkView, ParamHandle, handle_of, take_gradient, wrap_in_place
from gemini.chunk.state import TensorState
from gemini.memtracer.trace import Trace
from gemini.placement.tiers import Tier
from gemini.trees import tensors_in
from gemini.units import ChunkId, ParamId
from nvme import NvmeError
from optim.clipping import Clip
from optim.config import StateConfig
from optim.loss_scale import LossScale
from optim.rules import UpdateRule
from optim.scaler import Scaler
from optim.target import Group

from .adoption import Adoption
from .backend import Backend
from .backward import BackwardCall
from .build import build_chunks
from .comm import Communicator
from .ledger import Ledger
from .materialise import Materialiser
from .numerics import Numerics
from .planning import Planning
from .reducer import Reducer
from .sampler import Sampler
from .settling import Settling
from .shard_storage import Originals, ShardStorage
from .shard_target import PendingClip, ShardTarget
from .tensor_files import FileConfig
from .tensor_mgr import StatefulTensorMgr

log = logging.getLogger("gemini")

MAX_AGREEMENTS = 3  # steps at which ranks try to agree on a trace


class Engine:
    """Chunks of one module on one rank.

    Invariants: a parameter is a view of its chunk's payload for the whole life of the engine; a
    payload that a module call is using is never released; between a step and the next gather the
    shards alone hold the weights.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: ChunkLayout,
        values: Materialiser,
        backend: Backend,
        comm: Communicator,
        planning: Planning,
        *,
        max_prefetch: int,
        numerics: Numerics,
    ) -> None:
        self.params = list(params)
        self.layout = layout
        self.backend = backend
        self.comm = comm
        self.numerics = numerics
        self.scaler = Scaler(
            numerics.scale_options, backend.device, rounding_seed=numerics.rounding_seed
        )
        self.pending_clip: PendingClip | None = None  # asked for since the last backward
        self._entered = False  # this backward came in through the boundary, with its loss scale
        self._kept_scale: Tensor | None = None  # of gradients that outlived their step
        self.chunk_of = layout.chunk_of()
        self.original_dtypes = [param.dtype for param in params]
        self._slot_of = {
            slot.param: i for chunk in layout.chunks for i, slot in enumerate(chunk.slots)
        }
        self.planning = planning
        self.kept = planning.kept
        files = FileConfig(
            planning.nvme_folder, planning.inputs.block_numel, label=f"rank{comm.rank}-"
        )
        self.storage = ShardStorage(layout, planning.plan, backend, files)
        self.chunks = build_chunks(
            layout, self.params, values, backend, comm, planning.plan, self.storage,
            kept=self.kept, keep_originals=numerics.master_weights,
        )  # fmt: skip
        comm.describe = self._describe
        host = Tier.HOST if backend.has_host_tier else Tier.DEVICE
        self.manager = StatefulTensorMgr(
            layout,
            self.chunks,
            self.kept,
            max_prefetch,
            Ledger(self.chunks, self.storage, host),
            planning.payload_room_bytes,
            planning.steps_for,
        )
        self.sampler = Sampler(
            layout.params, backend, self.manager.ledger, self._traced, planning.overruns
        )
        # every chunk stays gathered: hooks and on-demand fetches have nothing to do
        self.all_gathered = self.manager.releases_nothing
        # where nothing moves and nothing is limited, one iteration of a kind is as good as another
        self.tells_inputs_apart = not self.all_gathered or planning.overruns.limits_device
        self.reducer = Reducer(self.chunks, by_moment=not self.all_gathered)
        self.open_calls: list[BackwardCall] = []  # module calls whose backward is under way
        self._viewed: dict[ChunkId, None] = {}  # plain views of them left their modules
        self._chunk_of_storage = {
            chunk.payload.untyped_storage()._cdata: chunk.spec.id for chunk in self.chunks
        }
        self.present = [False] * len(params)  # a gradient arrived since the last zero_grad
        self._target: ShardTarget | None = None
        self._last_trace: Trace | None = None  # of training
        self.settling = Settling(self)
        self._agreements_left = 0 if planning.has_trace else MAX_AGREEMENTS
        self._forward_depth = 0
        self._summoned = False
        for i, param in enumerate(self.params):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_gradient_hook(self, ParamId(i)))
            wrap_in_place(param, ParamHandle(self, ParamId(i)))
        self.adoption = Adoption(self.params)
        self.manager.before_release = self.adoption.adopt
        self.manager.release_all()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a wrapped module cannot be copied; copy it before it is wrapped, or load "
            "model.state_dict() into a plain one"
        )

    def _describe(self, chunk: int) -> str:
        """A chunk in words, for errors."""
        slots = self.layout.chunks[chunk].slots
        first, last = (self.layout.params[slot.param].name for slot in (slots[0], slots[-1]))
        return f"chunk {chunk} ({first if first == last else f'{first} ... {last}'})"

    # -- the optimizer --

    def attach(self, groups: Sequence[Group], rule: UpdateRule, config: StateConfig) -> ShardTarget:
        """Make the optimizer's state from the fp32 originals; see `optim.target`."""
        if self._target is not None:
            raise ValueError(
                "this module has an optimizer already; close it before you make another"
            )
        self._target = ShardTarget(self, groups, rule, config)
        return self._target

    @property
    def originals(self) -> Originals:
        """fp32 values of 16-bit chunks, until `attach`."""
        return self.storage.originals

    def reconfigure(self, *, max_norm: float | None, loss_scale: LossScale | None) -> None:
        """Take over what an optimizer was given; None leaves what there is. Raises ValueError."""
        numerics = self.numerics
        if max_norm is not None:
            numerics = replace(numerics, max_norm=float(max_norm))
        if loss_scale is not None:
            numerics = replace(numerics, loss_scale=loss_scale)
            self.scaler.configure(loss_scale)
        self.numerics = numerics

    def detach(self) -> None:
        self._target = None

    @property
    def target(self) -> ShardTarget | None:
        """The optimizer's state, once there is one."""
        return self._target

    def _traced(self, trace: Trace) -> None:
        """An iteration was sampled. Alone, this rank plans with it."""
        if trace.kind == "train":
            self._last_trace = trace
        if not self.sampler.measures:
            return
        if self.all_gathered and self.planning.has_trace:
            return  # there are no hooks: what was traced is coarser than what was given
        if self.comm.world_size == 1 and self.planning.follow(trace):
            self.manager.payload_room_bytes = self.planning.payload_room_bytes
            self.settling.propose()
        elif self.planning.take_doubt():
            self.sampler.measure_again(trace)

    def agree_on_trace(self) -> None:
        """Before a step: plan with what all ranks measured, once they have. Collective."""
        if self.comm.world_size == 1 or self.all_gathered or not self._agreements_left:
            return
        self._agreements_left -= 1
        trace = self._last_trace if self.sampler.measures else None
        if self.planning.follow_all(trace):
            self.manager.payload_room_bytes = self.planning.payload_room_bytes
            self._agreements_left = 0
            self.settling.propose()
        elif self.planning.take_doubt() and trace is not None:
            self.sampler.measure_again(trace)

    # -- forward and backward --

    @_disable_dynamo
    def begin_iteration(self, inputs: Any) -> None:
        """The wrapper is called from outside, with these inputs."""
        if self._forward_depth == 0 and not in_backward() and not self._summoned:
            told_apart = inputs if self.tells_inputs_apart else None
            self.sampler.begin(told_apart, again=self.manager.deviated)

    def tracking(self, module: nn.Module) -> AbstractContextManager[None]:
        """Around the forward that `begin_iteration` announced."""
        return self.sampler.tracking(module, lambda: [chunk.payload for chunk in self.chunks])

    def begin_forward(self) -> None:
        """The root module's forward begins."""
        self._forward_depth += 1
        if self._forward_depth > 1 or in_backward():
            return
        self.settling.graph_is_open |= torch.is_grad_enabled()
        self.comm.check_unchanged()
        if self.reducer.active:
            log.warning("a backward did not end; the gradients since zero_grad are dropped")
            self.drop_gradients()
        self._unpin()
        # inputs may differ between ranks, and what is gathered when may not
        signature = self.sampler.signature if self.comm.world_size == 1 else ""
        self.manager.begin_cycle("train" if torch.is_grad_enabled() else "eval", signature)
        if self.all_gathered:
            self.sampler.at_root("enter")

    def end_forward(self) -> None:
        self._forward_depth -= 1
        if self._forward_depth == 0 and not in_backward():
            if self.all_gathered:
                self.sampler.at_root("leave")
            self._unpin()

    def begin_backward(self) -> None:
        """The gradient of a root output has arrived: arm the end of this backward."""
        if torch.is_grad_enabled():
            raise_double_backward()
        if self.pending_clip is not None:
            raise RuntimeError(
                "backward() after gradients were clipped; call optimizer.step() or zero_grad() "
                "between, or clip after the last backward"
            )
        self._entered = True
        if self._kept_scale is not None:
            for chunk in self.chunks:
                chunk.gradient.scale(self.scaler.scale / self._kept_scale)
            self._kept_scale = None
        if not self.reducer.active:
            self.reducer.active = True
            if self.all_gathered:
                self.sampler.at_root("enter")
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            if self._viewed:  # operators that took such a view have no hook of their own
                self.manager.pin(tuple(self._viewed))
                self.at_moment(tuple(self._viewed), planned=False)

    def end_backward(self) -> None:
        """All gradients of this backward have arrived."""
        self._entered = False
        if not self.reducer.active:
            return
        if self.all_gathered:
            self.sampler.at_root("leave")
        self.sampler.collector.before_change()
        self.reducer.finish()
        self.sampler.collector.after_change()
        self.manager.ledger.note()
        self._forget_calls()
        self._unpin()
        self.settling.graph_is_open = False

    def _in_cycle(self) -> bool:
        """Whether a forward, or a backward, of the root module is under way."""
        return in_backward() or self._forward_depth > 0

    def call_ended(self) -> None:
        """A call that `at_moment` began does not use its chunks any more."""
        self.sampler.collector.before_change()
        self.manager.call_ended()
        self.sampler.collector.after_change()

    def at_moment(self, chunks: tuple[ChunkId, ...], planned: bool = True) -> None:
        """These chunks are needed now. `planned`: by a call that the next iteration has too."""
        backward = in_backward()
        collector = self.sampler.collector
        collector.before_change()
        if backward:
            self.reducer.at_moment()
        try:
            self.manager.at_moment(chunks, planned and self._in_cycle())
        except NvmeError as error:
            self._say_what_is_left(error)
            raise
        collector.after_change()

    def _say_what_is_left(self, error: NvmeError) -> None:
        """A parameter could not be read: nothing can compute, and memory holds only a part."""
        for chunk in self.chunks:
            with suppress(NvmeError):  # what was begun ahead may be lost too; then it is not there
                chunk.wait_gathered()
        chunks = [chunk for chunk in self.chunks if chunk.gathered or chunk.files is None]
        names = [self.layout.params[slot.param].name for c in chunks for slot in c.spec.slots]
        error.add_note(
            f"{len(names)} of {len(self.params)} parameters are in memory, with the 16 or 32 bits "
            f"in which they compute; model.salvage() has {', '.join(names) or 'none'}. The others, "
            "and fp32 masters on disk, are those of the last step if the disk comes back; "
            "else load a checkpoint"
        )

    def gradient_arrived(self, index: ParamId, grad: Tensor) -> None:
        """Autograd has the whole gradient of a parameter: pack it."""
        if grad.requires_grad:
            raise_double_backward()
        if self.scaler.active and not self._entered:
            self._refuse_unscaled(index)
        chunk = self.chunks[self.chunk_of[index]]
        watched = self.manager.ledger.watched and chunk.gradient.next_changes_memory
        if watched:
            self.sampler.collector.before_change()
        self.reducer.arrived(chunk, self._slot_of[index], grad)
        if watched:
            self.sampler.collector.after_change()
            self.manager.ledger.note()
        self.present[index] = True
        self.manager.set_state((index,), TensorState.READY_FOR_REDUCE)
        if self.open_calls:
            for call in list(self.open_calls):
                call.gradient_arrived(index)

    def keep_escaped_views(self, tensors: Sequence[Tensor]) -> None:
        """A module returned these: a plain view of a payload keeps its chunk for this pass."""
        for tensor in tensors:
            if type(tensor) is ChunkView:
                continue
            chunk = self._chunk_of_storage.get(tensor.untyped_storage()._cdata)
            if chunk is not None:
                self.manager.pin((chunk,))
                self._viewed[chunk] = None

    # -- parameters used outside their modules; see `gemini.chunk.parameter` --

    def fetch(self, params: list[ParamId]) -> tuple[ChunkId, ...]:
        idle = (p for p in params if self.manager.state_of(p) is not TensorState.COMPUTE)
        chunks = tuple(sorted({self.chunk_of[param] for param in idle}))
        if chunks and not self._summoned:
            planned = self._in_cycle()
            if planned:
                self.sampler.at_moment("enter", self._params_for(chunks))
            self.at_moment(chunks, planned)
        return chunks

    def fetched(self, chunks: tuple[ChunkId, ...], arguments: Any, result: Any) -> None:
        if self._in_cycle() and not self._summoned:
            self.call_ended()
            self.sampler.at_moment("leave", self._params_for(chunks))
        if not torch.is_grad_enabled():
            return
        results = [t for t in tensors_in(result) if t.requires_grad and type(t) is not ChunkView]
        if results and self.scaler.active and self._forward_depth == 0 and not in_backward():
            self._refuse_unscaled(self.layout.chunks[chunks[0]].slots[0].param)
        if results:
            call = BackwardCall(self, chunks, traced=self._params_for(chunks))
            others = (t for t in tensors_in(arguments) if handle_of(t) is None)
            call.watch(results, [t for t in others if t.requires_grad])

    def _params_for(self, chunks: Iterable[ChunkId]) -> tuple[ParamId, ...]:
        """One parameter of each chunk, which stands for it in a trace."""
        return tuple(self.layout.chunks[chunk].slots[0].param for chunk in chunks)

    def owns_memory_of(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._chunk_of_storage

    def written(self, param: ParamId) -> None:
        self.adoption.written(param)

    def assign(self, param: ParamId, value: Tensor) -> None:
        mine = self.params[param]
        if value.shape != mine.shape:
            raise ValueError(
                f"{self.layout.params[param].name} of shape {tuple(mine.shape)} cannot be given "
                f"data of shape {tuple(value.shape)}: a wrapped parameter keeps its size"
            )
        self.fetch([param])
        with torch.no_grad():
            mine.copy_(value)

    def _unpin(self) -> None:
        if not self._summoned:
            self.manager.unpin_all()

    @contextmanager
    def summoned(self, writeback: bool) -> Iterator[None]:
        """All chunks are gathered and stay so; then shards follow what was written, or not."""
        if self._summoned:
            raise RuntimeError("parameters are summoned already")
        self.adopt_changes()
        everything = tuple(chunk.spec.id for chunk in self.chunks)
        self.manager.ledger.judges = False  # it is the user who asks for all of it
        self.manager.pin(everything)
        self.manager.at_moment(everything, planned=False)
        kept = {} if writeback else {c: c.payload.clone() for c in self.chunks if c.is_whole}
        self._summoned = True
        try:
            yield
        finally:
            self._summoned = False
            if not writeback:
                for chunk in self.chunks:
                    self.adoption.forget(chunk)
                    if chunk.is_whole:
                        chunk.payload.copy_(kept[chunk])
            self.adopt_changes()
            self.manager.release_all()
            self.manager.ledger.judges = True
            self.after_step()

    def adopt_changes(self) -> None:
        """Shards and masters follow what the user wrote to parameters."""
        for chunk in self.chunks:
            if chunk.gathered:
                self.adoption.adopt(chunk)
        if self.adoption.stale and self._target is not None:
            self._target.follow_shards(self.adoption.stale)
            self.adoption.stale.clear()

    # -- the step --

    def begin_step(self) -> None:
        """End what is under way, and let masters follow what the user wrote."""
        if self._summoned:
            raise RuntimeError("step() while parameters are summoned; leave the context first")
        self.end_backward()
        self.sampler.end()
        self.adopt_changes()

    def after_step(self) -> None:
        """Shards have changed: what is kept gathered is gathered again."""
        for chunk in self.chunks:
            if chunk.spec.id in self.kept and not chunk.is_whole:
                chunk.release()
                chunk.gather()
        for chunk in self.chunks:
            if chunk.spec.id in self.kept:
                chunk.wait_gathered()
        self._viewed.clear()

    def clip(self, clip: Clip) -> Tensor | None:
        """Clip the gradients of the coming step; the norm before, where a norm is asked for."""
        if self._target is None:
            raise RuntimeError(
                "this module has no optimizer yet, so there is nobody to clip for; make it, or "
                "call optimizer.clip_grad_norm_(max_norm)"
            )
        return self._target.clip(clip)

    def gradient_read(self, param: ParamId) -> None:
        """`.grad` of a parameter is read: None would be a lie where its chunk has the gradient."""
        if self.present[param]:
            raise RuntimeError(
                f"the gradient of {self.layout.params[param].name} is in its chunk and not in "
                ".grad; use model.named_gradients() to look at gradients, "
                "model.clip_grad_norm_(max_norm) or optimizer.clip_grad_by_value(value) to clip "
                "them (not torch.nn.utils), and model.zero_grad() to drop them"
            )

    def _refuse_unscaled(self, param: ParamId) -> None:
        raise RuntimeError(
            f"a loss reaches {self.layout.params[param].name}, or a parameter beside it, without "
            "passing through the outputs of the GeminiDDP; in fp16 its gradient would carry no "
            "loss scale. Compute that part inside the module's forward (or under torch.no_grad)"
        )

    def after_stepping(self) -> None:
        """A step has taken the gradients; they stay until they are dropped, as in torch."""
        self.pending_clip = None
        if self.scaler.active:
            self._kept_scale = self.scaler.used.clone()

    def zero_gradients(self) -> None:
        """Gradients become zeros, which a step takes as gradients."""
        self.end_backward()
        self.pending_clip = None
        for chunk in self.chunks:
            chunk.gradient.zero()

    def drop_gradients(self) -> None:
        self.pending_clip = None
        self._kept_scale = None
        self.reducer.drop_gradients()
        self.storage.forget_gradients()
        self._forget_calls()
        self.present = [False] * len(self.present)
        self.settling.gradients_dropped()

    def _forget_calls(self) -> None:
        """No module call is open any more."""
        for call in self.open_calls:
            call.abandon()
        self.open_calls.clear()
        self.manager.forget_users()
        self.manager.hold_everything()


def _gradient_hook(engine: Engine, index: ParamId) -> Callable[[Tensor], None]:
    """Autograd keeps this on the parameter, where the garbage collector cannot see it: so weak."""
    reference = weakref.ref(engine)

    def arrived(param: Tensor) -> None:
        grad = take_gradient(param)
        engine = reference()
        if engine is not None and grad is not None:
            engine.gradient_arrived(index, grad)

    return arrived


def raise_double_backward() -> NoReturn:
    raise RuntimeError(
        "a backward with create_graph=True cannot go through a wrapped module: gradients "
        "are packed into chunks as they arrive, and have no graph"
    )


def in_backward() -> bool:
    """Whether this code runs inside a backward (recomputation in checkpointing does)."""
    return torch._C._current_graph_task_id() != -1
