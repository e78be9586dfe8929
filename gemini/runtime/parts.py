"""Parts of one engine: a record without behaviour, which its wings take; and its events."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gemini.chunk.layout import ChunkLayout
from gemini.chunk.opaque import Opaque
from gemini.chunk.parameter import unwatch
from gemini.chunk.storage import Chunk
from gemini.comm.ballot import Agreement, Scope
from gemini.comm.communicator import Communicator
from gemini.comm.links import Links
from gemini.memtracer.module_calls import in_backward
from gemini.nvme import NvmeError
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.target import new_lock
from gemini.placement.plan import Plan
from gemini.placement.timetable.allowed import OverlapFacts, against, against_tail, allowed
from gemini.runtime.events import EngineEvent as EngineEvent
from gemini.runtime.memory.backend import Backend
from gemini.runtime.memory.ledger import MemoryLedger
from gemini.runtime.memory.originals import Originals
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.runtime.memory.user_writes import UserWrites
from gemini.runtime.schedule.planning import Planning
from gemini.runtime.schedule.reducer import Reducer
from gemini.runtime.schedule.regather import Regather
from gemini.runtime.schedule.sampler import Sampler
from gemini.runtime.schedule.tensor_mgr import StatefulTensorMgr
from gemini.runtime.schedule.updating import Updating
from gemini.runtime.wrap.module_check import ModuleCheck
from gemini.runtime.wrap.precision import PrecisionSettings
from gemini.units import WORLD, ChunkId, ParamId

if TYPE_CHECKING:
    from gemini.activations.saved_tensors import SavedTensors
    from gemini.optim.state.parking import Parked
    from gemini.placement.orders import Accumulated
    from gemini.runtime.schedule.all_reduce_hook import AllReduceHook

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """All kinds of events of one engine."""

    forward: EngineEvent[[]] = field(default_factory=EngineEvent)  # of the whole module, begins
    # a gradient of a chunk, in a backward
    arrived: EngineEvent[[Chunk]] = field(default_factory=EngineEvent)
    # the gradient of a chunk is reduced while its backward runs
    final: EngineEvent[[Chunk]] = field(default_factory=EngineEvent)
    dropped: EngineEvent[[]] = field(default_factory=EngineEvent)  # all gradients were
    # before a shard gets what the user wrote to its payload
    keeping: EngineEvent[[Chunk]] = field(default_factory=EngineEvent)


class Attached(Protocol):
    """Optimizer's state, as the rest of an engine sees it; see `step.target`."""

    joint: Any  # what steps it with other modules; None: it steps alone

    @property
    def needs_wholes(self) -> bool:
        """Whether updates need more than one rank's part of a parameter."""
        ...

    @property
    def has_master(self) -> bool:
        """Whether state has fp32 weights."""
        ...

    @property
    def by_kernels(self) -> bool:
        """Whether kernels of a device update every element alike, in one pass."""
        ...

    @property
    def committed_step(self) -> int:
        """Step that files of state have; 0 where there are none."""
        ...

    def read_master(self, chunk: Chunk) -> Tensor:
        """Weights [S] fp32 of a trainable chunk's shard, as the optimizer has them."""
        ...

    def write_master(self, chunk: Chunk, values: Tensor) -> None:
        """Replace the weights of a trainable chunk's shard by `values` [S] fp32."""
        ...

    def settle(self) -> None:
        """Wait until the last step counts. Raises what ended it; then it is undone."""
        ...

    def follow_shards(self, chunks: Set[ChunkId]) -> None:
        """Make masters follow these shards, which the user wrote to."""
        ...

    def shown_state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """Step counts by parameter."""
        ...

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Keep state of these chunks too, which were frozen."""
        ...

    def raise_state(self, plan: Plan) -> None:
        """Raise blocks of state to their homes in a plan."""
        ...

    def lower_state(self, plan: Plan) -> None:
        """Lower blocks of state to their homes in a plan."""
        ...

    def homes_changed(self) -> None:
        """Follow changed homes of shards and of state, also of chunks that are new."""
        ...

    def close(self, keep_masters: bool = True) -> None:
        """Remove files and threads."""
        ...


@dataclass(frozen=True, slots=True)
class PendingClip:
    """Clip of the coming step, and what was measured for it already."""

    clip: Clip
    norm: Tensor | None = None  # fp64 0-d, unscaled, where a norm was asked for
    agreement: Agreement | None = None  # where the host knows it
    present: tuple[bool, ...] | None = None  # where it does not: some rank has a gradient, by param


@dataclass(eq=False, kw_only=True)
class Parts:
    """Chunks of one module on one rank, and the state of its pass.

    Invariants: a parameter is a view of its chunk's payload for the whole life of the engine; a
    payload that a module call is using is never released; between a step and the next gather the
    shards alone hold the weights.

    lock: held by whoever looks at, or changes, anything here: by the thread that trains in each
        event of a pass and in a step, by others for an operator or a call. No thread of ours (a
        tail, a disk) takes it, so it may be held while one of these is waited for.
    thread: that began the last forward or step: it trains.
    """

    lock: AbstractContextManager[Any] = field(default_factory=new_lock)
    thread: int = field(default_factory=threading.get_ident)
    params: Sequence[nn.Parameter]
    layout: ChunkLayout  # another one where parameters are thawed
    chunks: list[Chunk]
    never_released: frozenset[ChunkId]  # by the policy: never released
    chunk_of: dict[ParamId, ChunkId]
    slot_of: dict[ParamId, int]
    original_dtypes: Sequence[torch.dtype]
    opaque: Mapping[ParamId, Opaque]  # quantised parameters, whose class computes with them
    backend: Backend
    comm: Communicator  # of all ranks, for what they agree on
    links: Mapping[str, Links]  # of every sharding group
    scope: Scope
    planning: Planning
    storage: ShardStorage
    precision_settings: PrecisionSettings
    control_vector: ControlVector
    manager: StatefulTensorMgr
    ledger: MemoryLedger
    events: EngineEvents
    sampler: Sampler
    reducer: Reducer
    regather: Regather
    updating: Updating
    user_writes: UserWrites
    # whether every chunk stays gathered: hooks and on-demand fetches have nothing to do
    all_gathered: bool
    target: Attached | None = None  # the optimizer's state, once there is one
    module_check: ModuleCheck | None = None  # of the module that was wrapped
    saved_tensors: SavedTensors | None = None  # where activations may leave the device
    accumulated: Accumulated | None = None  # by the last `gemini.accumulate`
    all_reduce_hook: AllReduceHook | None = None  # of the user; None: there is none
    hook_handles: list[Any] = field(default_factory=list)  # on modules and parameters
    forward_depth: int = 0  # forwards of the root module inside each other, now
    is_summoned: bool = False
    is_unwrapped: bool = False
    parked: Parked | None = None  # model data that `model.park` has moved; None: it is here
    # in micro-batches of a pipeline's schedule, which begins and ends cycles and backwards
    in_schedule: bool = False
    stage: tuple[int, int] | None = None  # of a pipeline: (index, number of stages)
    present: list[bool]  # a gradient arrived since the last zero_grad
    # parameters whose gradients were dropped since zero_grad, after an error in a backward
    broken: set[ParamId] = field(default_factory=set)
    pending_clip: PendingClip | None = None  # asked for since the last backward
    viewed: dict[ChunkId, None] = field(default_factory=dict)  # plain views left their modules
    carried_scale: Tensor | None = None  # of gradients that outlived their step
    # Tails vote while the loop's collectives run, so they have a group of all ranks to themselves;
    # None: steps end before they return.
    tail_communicator: Communicator | None = None
    # when to update blocks, as the user asked: see `gemini.placement.timetable.updates`
    update: str = "serial"

    @property
    def plan(self) -> Plan:
        """Plan of training, as it holds now."""
        return self.planning.plan

    @property
    def is_canonical(self) -> bool:
        """Whether gradients are summed in the order of micro-batches."""
        return self.precision_settings.canonical

    @property
    def originals(self) -> Originals:
        """fp32 values of 16-bit chunks: frozen ones for good, others until an optimizer is made."""
        return self.storage.originals


def refuse_parked(parts: Parts) -> None:
    """Raise RuntimeError where model data is not here."""
    if parts.parked is not None:
        raise RuntimeError("model data is parked; call model.resume() first, on all ranks")


def is_back(parts: Parts) -> None:
    """Give copies up: what was parked is back in its memory, on this rank."""
    away, parts.parked = parts.parked, None
    if parts.all_gathered:
        for param in parts.params:
            unwatch(param)
    if away is not None:
        away.close()


def settle(parts: Parts) -> None:
    """Wait, before weights are read, until the last step counts, or is undone: raises its error."""
    refuse_parked(parts)
    if parts.target is not None:
        parts.target.settle()


def in_pass(parts: Parts) -> bool:
    """Whether this thread runs a forward, or a backward, of the root module."""
    return in_backward() or (parts.forward_depth > 0 and threading.get_ident() == parts.thread)


def is_elsewhere(parts: Parts) -> bool:
    """Whether this thread is another one than the one that trains."""
    return threading.get_ident() != parts.thread and not in_backward()


def has_pass_elsewhere(parts: Parts) -> bool:
    """Whether another thread runs a forward or a backward. One that has ended does not."""
    if not (is_elsewhere(parts) and (parts.forward_depth > 0 or parts.reducer.active)):
        return False
    return any(thread.ident == parts.thread for thread in threading.enumerate())


def refuse_beside_pass(parts: Parts, changes: str) -> None:
    """See `ParameterOwner.refuse_beside_pass`."""
    if has_pass_elsewhere(parts):
        raise RuntimeError(
            f"{changes} while another thread runs a forward or a backward of this module; call "
            "it there, or between iterations. Any thread may read weights and state meanwhile"
        )


class HasParts(Protocol):
    """Wing of an engine."""

    _parts: Parts


W = TypeVar("W", bound=HasParts)


def taking_turns(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Method of a wing that holds the engine's lock."""

    @functools.wraps(method)
    def holding(wing: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with wing._parts.lock:
            return method(wing, *args, **kwargs)

    return holding


def update_of(parts: Parts) -> str:
    """Value of `update=` that runs; the same on all ranks."""
    return allowed(parts.update, _facts_of(parts))


def against_tail_of(parts: Parts) -> str | None:
    """Rule that is against a tail, the same on all ranks; None: none is."""
    return against_tail(_facts_of(parts))


def against_update_of(parts: Parts) -> str | None:
    """Rule that is against the `update=` that was asked for; None: none is."""
    return against(parts.update, _facts_of(parts))


def _facts_of(parts: Parts) -> OverlapFacts:
    return replace(
        parts.planning.result.facts,
        is_gathered=parts.regather.is_needed,
        is_stage=parts.stage is not None,
        is_split=set(parts.links) != {WORLD},
        is_joint=parts.target is not None and parts.target.joint is not None,
        needs_wholes=parts.target is not None and parts.target.needs_wholes,
        has_masters=parts.target is not None and parts.target.has_master,
        by_kernels=parts.target is not None and parts.target.by_kernels,
    )


def say_what_is_left(parts: Parts, error: NvmeError) -> None:
    """Add to the error which parameters are still in memory: one could not be read."""
    for chunk in parts.chunks:
        with suppress(NvmeError):  # what was begun ahead may be lost too; then it is not there
            chunk.wait_gathered()
    chunks = [c for c in parts.chunks if (c.gathered and c.pending is None) or c.files is None]
    names = [parts.layout.params[slot.param].name for c in chunks for slot in c.spec.slots]
    error.add_note(
        f"{len(names)} of {len(parts.params)} parameters are in memory, with the 16 or 32 bits "
        f"in which they compute; model.salvage() has {', '.join(names) or 'none'}. The others, "
        "and fp32 masters on disk, are those of the last step if the disk comes back; "
        "else load a checkpoint"
    )
