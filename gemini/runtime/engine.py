"""The engine behind a wrapped module: it turns moments of a step into chunk operations.

Forward and backward call in through `hooks.py`, the optimizer through `shard_target.py`. What is
gathered when is decided by `StatefulTensorMgr`'s plan; what is reduced when by `Reducer`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.parameter import ParamHandle, wrap_in_place
from gemini.chunk.state import TensorState
from gemini.chunk.storage import Chunk
from gemini.placement.policy import Placement, StaticPlacement, leading_within
from gemini.units import ChunkId, ParamId
from optim.config import StateConfig
from optim.rules import UpdateRule
from optim.target import Group

from .backend import Backend
from .comm import Communicator
from .reducer import Reducer
from .shard_target import ShardTarget
from .tensor_mgr import StatefulTensorMgr
from .trees import tensors_in

log = logging.getLogger("gemini")


class OpenCall(Protocol):
    """A module call whose backward has begun; see `hooks.py`."""

    def gradient_arrived(self, param: ParamId) -> None: ...


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
        backend: Backend,
        comm: Communicator,
        placement: Placement,
        *,
        max_prefetch: int,
        max_norm: float,
    ) -> None:
        self.params = list(params)
        self.layout = layout
        self.backend = backend
        self.comm = comm
        self.max_norm = max_norm
        self.chunk_of = layout.chunk_of()
        self._slot_of = {
            slot.param: i for chunk in layout.chunks for i, slot in enumerate(chunk.slots)
        }
        self.originals: dict[ChunkId, Tensor] = {}  # [S] fp32 of 16-bit chunks, until `attach`
        self.chunks = [self._build_chunk(spec.id) for spec in layout.chunks]
        self.placement = placement
        sharded = leading_within(
            [spec.payload_bytes for spec in layout.chunks],
            placement.shard_param_frac if isinstance(placement, StaticPlacement) else 1.0,
        )
        self.kept = [spec.id for spec in layout.chunks if spec.id not in sharded]
        self.manager = StatefulTensorMgr(layout, self.chunks, self.kept, max_prefetch)
        self.reducer = Reducer(self.chunks)
        self.open_calls: list[OpenCall] = []  # module calls whose backward is under way
        self._viewed: dict[ChunkId, None] = {}  # views of them left their modules this forward
        self._chunk_of_storage = {
            chunk.payload.untyped_storage()._cdata: chunk.spec.id for chunk in self.chunks
        }
        self.present = [False] * len(params)  # a gradient arrived since the last zero_grad
        self._target: ShardTarget | None = None
        self._forward_depth = 0
        for i, param in enumerate(params):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_gradient_hook(self, ParamId(i)))
            wrap_in_place(param, ParamHandle(self, ParamId(i)))
        self.manager.release_all()

    # -- set-up --

    def _build_chunk(self, chunk_id: ChunkId) -> Chunk:
        """Fill one chunk from the parameters' values, rank 0's on every rank, and rebind them."""
        spec = self.layout.chunks[chunk_id]
        chunk = Chunk(spec, self.backend, self.comm, shard_on_host=self.backend.name == "sim")
        wider = any(
            self.params[slot.param].dtype.itemsize > chunk.dtype.itemsize for slot in spec.slots
        )
        keeps_original = spec.trainable and wider  # else the payload is the original
        source = chunk.payload
        if keeps_original:
            source = self.backend.allocate(spec.payload_numel, torch.float32)
        for start, end in spec.gaps():
            source[start:end].zero_()
        with torch.no_grad():
            for slot, place in enumerate(spec.slots):
                chunk.view(source, slot).copy_(self.params[place.param].data.reshape(-1))
            self.comm.broadcast(source)
            if keeps_original:
                chunk.payload.copy_(source)
                mine = self.comm.rank * spec.shard_numel
                original = source[mine : mine + spec.shard_numel]
                self.originals[chunk_id] = (
                    original if self.comm.world_size == 1 else original.clone()
                )
            chunk.keep_shard()
            for slot, place in enumerate(spec.slots):
                param = self.params[place.param]
                param.data = chunk.view(chunk.payload, slot).view(param.shape)
        return chunk

    def attach(self, groups: Sequence[Group], rule: UpdateRule, config: StateConfig) -> ShardTarget:
        """Make the optimizer's state from the fp32 originals; see `optim.target`."""
        if self._target is not None:
            raise ValueError(
                "this module has an optimizer already; close it before you make another"
            )
        self._target = ShardTarget(self, groups, rule, config)
        return self._target

    def detach(self) -> None:
        self._target = None

    # -- forward and backward --

    @property
    def all_gathered(self) -> bool:
        return self.manager.releases_nothing

    def begin_forward(self) -> None:
        """The root module's forward begins."""
        self._forward_depth += 1
        if self._forward_depth > 1 or in_backward():
            return
        if self.reducer.active:
            log.warning("a backward did not end; the gradients since zero_grad are dropped")
            self.drop_gradients()
        self.manager.unpin_all()
        self._viewed.clear()
        self.manager.begin_cycle("training" if torch.is_grad_enabled() else "evaluation")

    def end_forward(self) -> None:
        self._forward_depth -= 1
        if self._forward_depth == 0 and not in_backward():
            self.manager.unpin_all()

    def begin_backward(self) -> None:
        """The gradient of a root output has arrived: arm the end of this backward."""
        if not self.reducer.active:
            self.reducer.active = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            if self._viewed:  # operators that took such a view have no hook of their own
                self._keep(tuple(self._viewed))

    def end_backward(self) -> None:
        """All gradients of this backward have arrived."""
        if not self.reducer.active:
            return
        self.reducer.finish()
        self.open_calls.clear()
        self.manager.forget_users()
        self.manager.unpin_all()
        self.manager.hold_everything()

    def gradient_arrived(self, index: ParamId, grad: Tensor) -> None:
        """Autograd has the whole gradient of a parameter: pack it."""
        chunk = self.chunks[self.chunk_of[index]]
        with torch.no_grad():
            self.reducer.arrived(chunk, self._slot_of[index], grad)
        self.present[index] = True
        self.manager.set_state((index,), TensorState.READY_FOR_REDUCE)
        for call in list(self.open_calls):
            call.gradient_arrived(index)

    def keep_escaped_views(self, tensors: Sequence[Tensor]) -> None:
        """A module returned these: a view of a payload keeps its chunk for this pass."""
        for tensor in tensors:
            chunk = self._chunk_of_storage.get(tensor.untyped_storage()._cdata)
            if chunk is not None:
                self.manager.pin((chunk,))
                self._viewed[chunk] = None

    # -- parameters used outside their modules --

    def borrow(self, params: list[ParamId]) -> tuple[ChunkId, ...]:
        """Fetch what no module computes with, and keep it for the rest of this pass."""
        idle = (p for p in params if self.manager.state_of(p) is not TensorState.COMPUTE)
        chunks = tuple(dict.fromkeys(self.chunk_of[param] for param in idle))
        if chunks:
            self._keep(chunks)
        return chunks

    def borrowed(self, chunks: tuple[ChunkId, ...], result: Any) -> None:
        """Fetch again when the backward of `result` begins."""
        results = list(tensors_in(result))
        self.keep_escaped_views(results)
        for tensor in results:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda grads: self._keep(chunks))

    def _keep(self, chunks: tuple[ChunkId, ...]) -> None:
        self.manager.pin(chunks)
        self.manager.at_moment(chunks)

    def after_step(self) -> None:
        """Shards have changed: what is kept gathered is gathered again."""
        for chunk in self.chunks:
            if chunk.spec.id in self.kept and not chunk.is_whole:
                chunk.release()
                chunk.gather()
        for chunk in self.chunks:
            if chunk.spec.id in self.kept:
                chunk.wait_gathered()

    # -- gradients --

    def drop_gradients(self) -> None:
        self.reducer.drop_gradients()
        self.open_calls.clear()
        self.manager.forget_users()
        self.manager.hold_everything()
        self.present = [False] * len(self.present)


def _gradient_hook(engine: Engine, index: ParamId) -> Callable[[Tensor], None]:
    """Autograd keeps this on the parameter, where the garbage collector cannot see it: so weak."""
    reference = weakref.ref(engine)

    def arrived(param: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
            param.grad = None
        engine = reference()
        if engine is not None and grad is not None:
            engine.gradient_arrived(index, grad)

    return arrived


def in_backward() -> bool:
    """Whether this code runs inside a backward (recomputation in checkpointing does)."""
    return torch._C._current_graph_task_id() != -1
