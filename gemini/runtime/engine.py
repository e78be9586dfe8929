"""The engine behind a wrapped module: it turns moments of a step into chunk operations.

Forward and backward call in through `hooks.py`, the optimizer through `shard_target.py`. What is
gathered when is decided by `StatefulTensorMgr`'s plan; what is reduced when by `Reducer`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from gemini.chunk.dtypes import DTYPES
from gemini.chunk.gradient_view import GradientView
from gemini.chunk.layout import ChunkLayout
from gemini.chunk.parameter import ChunkView, ParamHandle, handle_of, take_gradient, wrap_in_place
from gemini.chunk.state import TensorState
from gemini.chunk.storage import Chunk
from gemini.memtracer.trace import Trace
from gemini.placement.sizes import Budgets
from gemini.placement.tiers import Tier
from gemini.trees import tensors_in
from gemini.units import ChunkId, ParamId
from nvme import NvmeError
from optim.binding import waiting_for
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
from .gradients import Gradients, PendingClip
from .integrity import Integrity
from .ledger import Ledger
from .materialise import Materialiser
from .numerics import Numerics
from .other_optimizers import refuse_other_optimizers
from .planning import Planning
from .reducer import Reducer
from .regather import Regather
from .sampler import Sampler
from .settling import Settling
from .shard_storage import Originals, ShardStorage
from .shard_target import ShardTarget
from .tensor_files import FileConfig
from .tensor_mgr import StatefulTensorMgr
from .thaw import thaw

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
        overlap_allgather: bool = False,
    ) -> None:
        self.params = list(params)
        self.layout = layout
        self.backend = backend
        self.comm = comm
        self.numerics = numerics
        self.dtype = DTYPES[numerics.dtype]
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
        limited = planning.inputs.budgets != Budgets()
        self.storage = ShardStorage(layout, planning.plan, backend, files, limited=limited)
        self.chunks = build_chunks(
            layout, self.params, values, backend, comm, planning.plan, self.storage,
            kept=self.kept, keep_originals=numerics.master_weights,
            gradients_travel_as=numerics.travels_as,
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
            self.agree_to_gather,
        )
        self.sampler = Sampler(
            layout.params, backend, self.manager.ledger, self._traced, planning.overruns
        )
        # every chunk stays gathered: hooks and on-demand fetches have nothing to do
        self.all_gathered = self.manager.releases_nothing
        self.regather = Regather(
            self.chunks,
            self.kept,
            self.params,
            overlaps=overlap_allgather,
            watches=self.all_gathered,
        )
        self.reducer = Reducer(
            self.chunks,
            by_moment=not self.all_gathered,
            puts_off=planning.plan.whole_grads,
            agree=partial(self.agree, "asks to reduce"),
        )
        # where nothing moves and nothing is limited, one iteration of a kind is as good as another
        self.tells_inputs_apart = not self.all_gathered or planning.overruns.limits_device
        self.open_calls: list[BackwardCall] = []  # module calls whose backward is under way
        self._viewed: dict[ChunkId, None] = {}  # plain views of them left their modules
        self._chunk_of_storage = {
            chunk.payload.untyped_storage()._cdata: chunk.spec.id for chunk in self.chunks
        }
        self.present = [False] * len(params)  # a gradient arrived since the last zero_grad
        # whose gradients were dropped since then, after an error in a backward
        self.broken: set[ParamId] = set()
        self.gradients = Gradients(self)
        self._target: ShardTarget | None = None
        self._last_trace: Trace | None = None  # of training
        self.settling = Settling(self)
        self._agreements_left = 0 if planning.has_trace else MAX_AGREEMENTS
        self._forward_depth = 0
        self._num_agreed = 0  # calls of this cycle when ranks met last
        self._owes_meeting = False  # before it gathers: the cycle before was not of steps
        self._reads_outside = False  # chunks were gathered outside a pass since the last one
        self._summoned = False
        self.hook_handles: list[Any] = []  # on modules and parameters
        self.is_unwrapped = False
        self.integrity: Integrity | None = None  # of the module that was wrapped
        self._unheard = [  # frozen: nothing takes their gradients
            ParamId(i) for i, param in enumerate(self.params) if not param.requires_grad
        ]
        before = {ParamId(i): take_gradient(param) for i, param in enumerate(self.params)}
        for i, param in enumerate(self.params):
            if param.requires_grad:
                self.listen(ParamId(i))
            wrap_in_place(param, ParamHandle(self, ParamId(i)))
        refuse_other_optimizers()
        self.adoption = Adoption(self.params)
        self.manager.before_release = self.adoption.adopt
        self.manager.release_all()
        for param_id, grad in before.items():  # what the module came with counts, as in torch
            if grad is not None:
                self.gradients.assign(param_id, grad)

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

    # -- the other ranks --

    def agree_to_gather(self, chunks: Sequence[ChunkId], follows_steps: bool) -> None:
        """Before a call of a pass gathers: the others know it, or are asked."""
        if not follows_steps or self._owes_meeting:
            self.agree("asks to gather", chunks)

    def agree(self, does: str, chunks: Sequence[ChunkId]) -> None:
        """Before collectives in a pass that no steps say: all ranks are about to do the same."""
        words = self._in_words(chunks)
        if self.manager.deviated:
            was_next, came = (self._in_words(call).values() for call in self.manager.left_steps)
            where = f", having come to {'; '.join(came)} where {'; '.join(was_next)} was next"
            words = {chunk: said + where for chunk, said in words.items()}
        self.comm.agree(does, words)
        self._has_met()

    def come_together(self) -> None:
        """Before collectives that follow a pass: every rank has come to its end.

        Ranks that have followed their steps to the end need not be asked: steps are the same on
        all. [Note: no step without agreement] So a collective is issued either along steps that
        all ranks follow, or when they have met for it. A rank that leaves its steps waits for the
        others, and two collectives that are not the same never meet.
        """
        self.end_reading()
        if self._is_ahead_of_meeting():
            self.comm.agree("ends", {"a pass": "a pass"})
            self._has_met()

    def _is_ahead_of_meeting(self) -> bool:
        """This rank came to where it is by calls that the others may not have made."""
        if self.comm.world_size == 1 or self.all_gathered:
            return False
        followed = self.manager.followed_steps or self._num_agreed == self.manager.num_calls
        return self._owes_meeting or not followed

    def _has_met(self) -> None:
        self._owes_meeting = False
        self._num_agreed = self.manager.num_calls

    def call(self, name: str) -> None:
        """A method begins that all ranks must call; see `Communicator.call`."""
        self.end_reading()
        self.comm.call(name)
        self._has_met()

    def read(self, wanted: Mapping[str, str]) -> bool:
        """Bring what any rank reads, each name in words; whether one does.

        Outside a pass ranks read in orders of their own: they agree on what any of them reads, and
        all bring that in one order.
        """
        self._reads_outside = self.comm.world_size > 1
        united = self.comm.unite(wanted)
        chunks = [ChunkId(int(what)) for kind, what in map(str.split, united) if kind == "chunk"]
        if chunks:
            self.at_moment(tuple(sorted(chunks)), planned=False)
        for kind, what in map(str.split, united):
            if kind == "gradient":
                self.gradients.bring(ParamId(int(what)), wanted=f"gradient {what}" in wanted)
            elif kind == "norm":
                self.gradients.measure(float(what))
        self._has_met()
        return bool(united)

    def end_reading(self) -> None:
        """Before collectives whose order all ranks know: help those that still read."""
        while self._reads_outside:
            self._reads_outside = self.read({})
            if not self._reads_outside:
                self.manager.release_all()  # what is gathered may differ

    def _in_words(self, chunks: Iterable[ChunkId]) -> dict[str, str]:
        return {f"chunk {chunk}": self._describe(chunk) for chunk in chunks}

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

    def find_optimizer(self) -> ShardTarget | None:
        """The same; one that was made before the module was wrapped is bound now."""
        if self._target is None:
            waiting = waiting_for(self.params)
            if len(waiting) == 1:
                waiting[0].bind_to(self)
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
        if self.integrity is not None:
            self.integrity.check()
        self.thaw_what_is_trained()
        self._notice_broken_backward()
        self.end_reading()
        self._owes_meeting = self._is_ahead_of_meeting()
        self._unpin()
        # inputs may differ between ranks, and what is gathered when may not
        signature = self.sampler.signature if self.comm.world_size == 1 else ""
        self.manager.begin_cycle("train" if torch.is_grad_enabled() else "eval", signature)
        self._num_agreed = 0
        if self.all_gathered:
            self.sampler.at_root("enter")

    def end_forward(self) -> None:
        self._forward_depth -= 1
        if self._forward_depth == 0 and not in_backward():
            if self.all_gathered:
                self.sampler.at_root("leave")
            self._unpin()

    def begin_backward(self, scaled: bool = False) -> None:
        """This module takes part in a backward: arm its end, once.

        Called by whatever comes first: the gradient of an output of the root or of a module
        below it, or of a parameter. `scaled`: by an output of the root, where a loss scale is put
        on.
        """
        if torch.is_grad_enabled():
            raise_double_backward()
        self.check_gradients_whole()
        if self.pending_clip is not None:
            raise RuntimeError(
                "backward() after gradients were clipped; call optimizer.step() or zero_grad() "
                "between, or clip after the last backward"
            )
        self._entered |= scaled
        if self.reducer.active:
            return
        self.reducer.begin()
        self.gradients.settle()
        if self._kept_scale is not None:
            for chunk in self.chunks:
                chunk.gradient.scale(self.scaler.scale / self._kept_scale)
            self._kept_scale = None
        if self.all_gathered:
            self.sampler.at_root("enter")
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        if self._viewed:  # operators that took such a view have no hook of their own
            self.manager.pin(tuple(self._viewed))
            self.at_moment(tuple(self._viewed), planned=False)

    def _notice_broken_backward(self) -> None:
        """One that began and did not end was ended by an error: what it left is incomplete."""
        if self.reducer.active and not in_backward():
            self.drop_gradients()
            self.broken.update(self._trainable())

    def _trainable(self) -> list[ParamId]:
        return [ParamId(i) for i, spec in enumerate(self.layout.params) if spec.trainable]

    def check_gradients_whole(self) -> None:
        """Raise RuntimeError where an error has cut a backward short since zero_grad."""
        self._notice_broken_backward()
        if self.broken:
            raise RuntimeError(
                "a backward ended in an error, so the gradients since zero_grad are incomplete; "
                "call zero_grad() before you go on"
            )

    def end_backward(self) -> None:
        """All gradients of this backward have arrived."""
        self._entered = False
        if not self.reducer.active:
            return
        if self.all_gathered:
            self.sampler.at_root("leave")
        self.come_together()
        self.sampler.collector.before_change()
        self.reducer.finish()
        self.sampler.collector.after_change()
        if self.reducer.synchronise:
            self.gradients.exchange_presence()
        self.manager.ledger.note()
        self._forget_calls()
        self._unpin()
        self.settling.graph_is_open = False

    def in_pass(self) -> bool:
        """Whether a forward, or a backward, of the root module is under way."""
        return in_backward() or self._forward_depth > 0

    def call_ended(self) -> None:
        """A call that `at_moment` began does not use its chunks any more."""
        if self.in_pass():
            self.sampler.collector.before_change()
            self.manager.call_ended()
            self.sampler.collector.after_change()

    def at_moment(self, chunks: tuple[ChunkId, ...], planned: bool = True) -> None:
        """These chunks are needed now. `planned`: by a call that the next iteration has too."""
        self.regather.arrive(chunks)
        if planned and not self.in_pass():
            self.at_reading(chunks)
            return
        if planned:
            self.end_reading()
        collector = self.sampler.collector
        collector.before_change()
        if planned and in_backward():
            self.reducer.at_moment(self.manager.follows_steps)
        try:
            self.manager.at_moment(chunks, planned)
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

    def listen(self, param: ParamId) -> None:
        """Take this parameter's gradients as autograd accumulates them."""
        hook = _gradient_hook(self, param)
        self.hook_handles.append(self.params[param].register_post_accumulate_grad_hook(hook))

    def thaw_what_is_trained(self) -> None:
        """Parameters that were frozen may require a gradient by now; see `thaw`."""
        thawed = [param for param in self._unheard if self.params[param].requires_grad]
        if thawed:
            thaw(self, thawed)
            self._unheard = [param for param in self._unheard if param not in thawed]
            for param in thawed:
                grad = take_gradient(self.params[param])
                if grad is not None:  # of a submodule that was called by itself
                    self.gradients.assign(param, grad)

    def gradient_arrived(self, index: ParamId, grad: Tensor) -> None:
        """Autograd has the whole gradient of a parameter: pack it."""
        if grad.requires_grad:
            raise_double_backward()
        if not self.reducer.active:
            self.begin_backward()
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

    def arrive(self, param: ParamId) -> None:
        self.regather.arrive((self.chunk_of[param],))

    def fetch(self, params: list[ParamId]) -> tuple[ChunkId, ...]:
        idle = (p for p in params if self.manager.state_of(p) is not TensorState.COMPUTE)
        chunks = tuple(sorted({self.chunk_of[param] for param in idle}))
        if chunks and not self._summoned:
            if self.in_pass():
                self.sampler.at_moment("enter", self._params_for(chunks))
            self.at_moment(chunks)
        return chunks

    def at_reading(self, chunks: tuple[ChunkId, ...]) -> None:
        """These chunks are read outside a pass, where ranks may read in any order.

        What is gathered already is left where it is, and nobody is asked.
        """
        if any(not self.chunks[chunk].gathered for chunk in chunks):
            self.read(self._in_words(chunks))
        for chunk in chunks:
            self.chunks[chunk].wait_gathered()

    def fetched(self, chunks: tuple[ChunkId, ...], arguments: Any, result: Any) -> None:
        in_pass = self.in_pass()
        if in_pass and not self._summoned:
            self.call_ended()
            self.sampler.at_moment("leave", self._params_for(chunks))
        if not torch.is_grad_enabled():
            return
        results = [t for t in tensors_in(result) if t.requires_grad and type(t) is not ChunkView]
        if results and self.scaler.active and self._forward_depth == 0 and not in_backward():
            self._refuse_unscaled(self.layout.chunks[chunks[0]].slots[0].param)
        if results:
            call = BackwardCall(self, chunks, traced=self._params_for(chunks), in_pass=in_pass)
            others = (t for t in tensors_in(arguments) if handle_of(t) is None)
            call.watch(results, [t for t in others if t.requires_grad])

    def _params_for(self, chunks: Iterable[ChunkId]) -> tuple[ParamId, ...]:
        """One parameter of each chunk, which stands for it in a trace."""
        return tuple(self.layout.chunks[chunk].slots[0].param for chunk in chunks)

    def check_address(self) -> None:
        if not (self._summoned or self.in_pass()):
            raise RuntimeError(
                "the address of a parameter that is released and gathered again says nothing about "
                "it; read addresses inside model.summon_full_params(), or copy the values"
            )

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
        kept = {} if writeback else {c: c.shard.clone() for c in self.chunks if c.in_payload}
        self._summoned = True
        try:
            yield
        finally:
            self._summoned = False
            if not writeback:
                for chunk in self.chunks:
                    self.adoption.forget(chunk)
                    if chunk.in_payload:
                        chunk.shard.copy_(kept[chunk])
            self.adopt_changes()
            self.manager.release_all()
            self.manager.ledger.judges = True
            self.shards_changed()

    def adopt_changes(self) -> None:
        """Shards and masters follow what the user wrote to parameters."""
        self.regather.end()
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
        if in_backward():
            raise RuntimeError(
                "step() inside a backward: other gradients are still to come, and to be reduced "
                "over ranks and clipped together; call it behind loss.backward()"
            )
        self.check_gradients_whole()
        self.come_together()
        self.thaw_what_is_trained()
        self.gradients.resolve()
        self.sampler.end()
        self.adopt_changes()

    def weights_changed(self, taken: Sequence[bool]) -> None:
        """A step has updated these parameters."""
        self.adoption.stepped([ParamId(i) for i, there in enumerate(taken) if there])

    def after_step(self) -> None:
        """Shards that are trained have changed: what is kept gathered is gathered again."""
        self.regather.begin(trained=True)
        self._viewed.clear()

    def shards_changed(self) -> None:
        """Any may have: the same for all that is kept."""
        self.regather.begin(trained=False)
        self._viewed.clear()

    def clip(self, clip: Clip) -> Tensor | None:
        """Clip the gradients of the coming step; the norm before, where a norm is asked for."""
        if self.find_optimizer() is None:
            raise RuntimeError(
                "this module has no optimizer yet, so there is nobody to clip for; make it, or "
                "call optimizer.clip_grad_norm_(max_norm)"
            )
        assert self._target is not None
        return self._target.clip(clip)

    def gradient_of(self, param: ParamId) -> GradientView | None:
        self._notice_broken_backward()
        return self.gradients.of(param)

    def set_gradient(self, param: ParamId, value: Tensor | None) -> None:
        self._notice_broken_backward()
        self.gradients.set(param, value)

    def place_of(self, param: ParamId) -> tuple[Chunk, int]:
        """The chunk of a parameter, and its slot there."""
        return self.chunks[self.chunk_of[param]], self._slot_of[param]

    def _refuse_unscaled(self, param: ParamId) -> None:
        raise RuntimeError(
            f"a loss reaches {self.layout.params[param].name}, or a parameter beside it, without "
            "passing through the outputs of the GeminiDDP; in fp16 its gradient would carry no "
            "loss scale. Compute that part inside the module's forward (or under torch.no_grad)"
        )

    def after_stepping(self) -> None:
        """A step has taken the gradients; they stay until they are dropped, as in torch."""
        if self.pending_clip is not None:
            self.gradients.keep_clip(self.pending_clip)
        self.pending_clip = None
        if self.scaler.active:
            self._kept_scale = self.scaler.used.clone()

    def zero_gradients(self) -> None:
        """Gradients become zeros, which a step takes as gradients."""
        self._notice_broken_backward()
        self.broken.clear()
        self.pending_clip = None
        self.gradients.dropped()
        for chunk in self.chunks:
            chunk.gradient.zero()

    def drop_gradients(self) -> None:
        self.broken.clear()
        self.pending_clip = None
        self.gradients.dropped()
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
