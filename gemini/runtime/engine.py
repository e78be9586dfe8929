"""Engine of a wrapped module: it makes the wings, and gives each what it uses.

Calls of forward and backward come in through `Calls`, which meets the other ranks where it must
(`Meetings`) and hands gradients on (`Gradients`); the optimizer comes in through `ShardTarget`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gemini.callers import module_conversion
from gemini.chunk.layout import ChunkLayout
from gemini.chunk.local import is_dtensor
from gemini.chunk.parameter import (
    EngineHandle,
    ParamHandle,
    learn_dtensors,
    take_gradient,
    wrap_in_place,
)
from gemini.comm.communicator import Communicator
from gemini.comm.connect import Connections
from gemini.dtypes import DTYPES
from gemini.memtracer.module_calls import in_backward
from gemini.memtracer.trace import Trace
from gemini.optim.base import refuse_other_optimizers
from gemini.optim.binding import waiting_for
from gemini.optim.rules.clipping import Clip
from gemini.optim.rules.config import StateConfig
from gemini.optim.rules.control_vector import ControlVector
from gemini.optim.rules.loss_scale import LossScale
from gemini.optim.rules.rule import UpdateRule
from gemini.optim.target import Group, new_lock
from gemini.placement.plan import Plan
from gemini.placement.tiers import Tier
from gemini.runtime.autograd.calls import Calls
from gemini.runtime.events import EngineEvents
from gemini.runtime.gradients.cycle import GradientCycle
from gemini.runtime.gradients.waiting import Gradients
from gemini.runtime.inspect.reports import say_start
from gemini.runtime.memory.backend import Backend, FileConfig
from gemini.runtime.memory.ledger import MemoryLedger
from gemini.runtime.memory.originals import Originals
from gemini.runtime.memory.shard_storage import ShardStorage
from gemini.runtime.overlap import UpdateOverlap
from gemini.runtime.schedule.planning import PlanInUse, Planning
from gemini.runtime.schedule.reducer import Reducer
from gemini.runtime.schedule.sampler import Sampler
from gemini.runtime.schedule.tensor_mgr import StatefulTensorMgr
from gemini.runtime.step.homes import MovingHomes
from gemini.runtime.step.target import ShardTarget
from gemini.runtime.wrap.build_chunks import build_chunks
from gemini.runtime.wrap.materialise import Materialiser
from gemini.runtime.wrap.module_check import ModuleCheck
from gemini.runtime.wrap.precision import PrecisionSettings
from gemini.runtime.wrap.specs import Collected
from gemini.units import ChunkId, ParamId

from .meetings import Meetings, describe
from .passes import Passes
from .sharding import Sharding, refuse_copies
from .step.state.shard_state import StepCalls
from .weights import Weights

if TYPE_CHECKING:
    from gemini.activations.saved_tensors import SavedTensors
    from gemini.runtime.pipeline.together import PipelineOwner
    from gemini.runtime.pipeline.window import Window


LABEL_CHARACTERS = 40  # of a model's name in names of files
MAX_AGREEMENTS = 3  # steps at which ranks try to agree on a trace


class GeminiEngine:
    """Engine of one module on one rank; parameters and optimizer call it."""

    def __init__(
        self,
        found: Collected,
        layout: ChunkLayout,
        values: Materialiser,
        backend: Backend,
        connections: Connections,
        planning: Planning,
        *,
        name: str,
        max_prefetch: int,
        precision_settings: PrecisionSettings,
        overlap_allgather: bool = False,
        tail_communicator: Communicator | None = None,
        update: str = "serial",
        together: PipelineOwner | None = None,
    ) -> None:
        """together: the owner that attaches optimizers for a pipeline, or None."""
        comm, links = connections.comm, connections.links
        events, files = EngineEvents(), _files_of(name, comm.rank, planning, backend)
        storage = ShardStorage(layout, planning.plan, backend, files)
        params, settings = found.params, precision_settings
        chunks = build_chunks(
            layout, params, found.opaque, values, backend, links, planning.plan, storage,
            never_released=planning.never_released,
            with_originals=planning.inputs.with_originals,
            gradients_travel_as=settings.travels_as,
            in_micro_batches=settings.canonical,
            in_float8=settings.dtype if settings.fp8_communication else None,
        )  # fmt: skip
        planning.keep_originals(storage.originals.chunks)
        comm.describe = lambda chunk: describe(self.layout, chunk)
        host = Tier.HOST if backend.has_host_tier else Tier.DEVICE
        ledger = MemoryLedger(chunks, storage, host)
        manager = StatefulTensorMgr(
            layout, chunks, planning.never_released, max_prefetch, ledger,
            planning.payload_room_bytes, planning.steps_for,
            agree=self._agree_to_gather if comm.world_size > 1 else None, opaque=found.opaque,
        )  # fmt: skip
        self.sharding = Sharding(
            params=list(params), layout=layout, chunks=chunks,
            never_released=planning.never_released, all_gathered=manager.releases_nothing,
            chunk_of=layout.chunk_of(),
            slot_of={slot.param: i for c in layout.chunks for i, slot in enumerate(c.slots)},
            original_dtypes=found.dtypes, opaque=found.opaque,
            backend=backend, comm=comm, links=links, scope=connections.scope,
            precision_settings=settings,
        )  # fmt: skip
        self.params, self.chunks = self.sharding.params, chunks
        self.backend, self.comm = backend, comm
        self.planning, self.storage, self.events = planning, storage, events
        self.manager, self.ledger = manager, ledger
        self.control_vector = ControlVector(
            settings.scale_options, backend.device, rounding_seed=settings.rounding_seed
        )
        self.sampler = Sampler(
            planning.inputs.layout.params, backend, ledger, self.traced, planning.overruns,
            [planning.inputs.trace] if planning.has_trace else [],
        )  # fmt: skip
        self.reducer = Reducer(
            chunks, by_moment=not manager.releases_nothing,
            puts_off=planning.plan.unsharded_grads,
            at_end={c.spec.id for c in chunks if links[c.spec.group].is_sent_data},
            agree=self._agree_to_reduce if comm.world_size > 1 else None,
            arrived=events.arrived, final=events.final, whole=settings.canonical,
        )  # fmt: skip
        self.passes = Passes(new_lock() if together is None else together.lock, self.reducer)
        self.in_use = PlanInUse(planning, storage, manager, self.sampler, ledger)
        self.weights = Weights(
            self.sharding, self.in_use, self.passes,
            keeping=events.keeping, overlap_allgather=overlap_allgather,
        )  # fmt: skip
        self.cycle = GradientCycle(comm, self.reducer, self.control_vector)
        self.overlap = UpdateOverlap(update, tail_communicator, planning, self.weights, self.passes)
        self.dtype = DTYPES[settings.dtype]
        self.together, self.ignored = together, found.ignored
        self.saved_tensors: SavedTensors | None = None  # where activations may leave the device
        self.module_check: ModuleCheck | None = None  # of the module that was wrapped
        self._last_trace: Trace | None = None  # of training
        self._has_said_start = self.is_swapped = self.is_unwrapped = False
        self._agreements_left = 0 if planning.has_trace else MAX_AGREEMENTS
        if comm.world_size > 1 and manager.releases_nothing:
            planning.keep_homes()
        self._make_wings()
        self._wrap(params)

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Lock of whoever looks at an engine, or changes it; see `Passes`."""
        return self.passes.lock

    @property
    def layout(self) -> ChunkLayout:
        """Layout of chunks; another one where parameters are unfrozen."""
        return self.sharding.layout

    @property
    def plan(self) -> Plan:
        """Plan of training, as it holds now."""
        return self.planning.plan

    @property
    def target(self) -> ShardTarget | None:
        """The optimizer's state, once there is one."""
        return cast("ShardTarget | None", self.weights.target)

    @property
    def originals(self) -> Originals:
        """fp32 values of 16-bit chunks: frozen ones for good, others until an optimizer is made."""
        return self.storage.originals

    @property
    def precision_settings(self) -> PrecisionSettings:
        """Precision, clipping and loss scale; an optimizer may bring others."""
        return self.sharding.precision_settings

    @property
    def is_summoned(self) -> bool:
        """Whether it is inside `summon_full_params`."""
        return self.weights.is_summoned

    @property
    def is_canonical(self) -> bool:
        """Whether gradients are summed in the order of micro-batches."""
        return self.sharding.is_canonical

    # Manager and reducer are made before `meetings`, so they get methods that look it up late.
    def _agree_to_gather(self, chunks: Sequence[ChunkId]) -> None:
        self.meetings.agree("asks to gather", chunks)

    def _agree_to_reduce(self, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        return self.meetings.reduce_now(chunks)

    def _make_wings(self) -> None:
        sharding, weights, passes, cycle = self.sharding, self.weights, self.passes, self.cycle
        self.homes = MovingHomes(weights, self.in_use, passes)
        self.meetings = Meetings(sharding, self.manager, self.reducer, weights)
        self.gradients = Gradients(
            sharding, self.meetings, cycle, passes, weights, self._gradients_dropped
        )
        self.calls = Calls(
            passes=passes, weights=weights, overlap=self.overlap, in_use=self.in_use,
            meetings=self.meetings, gradients=self.gradients, homes=self.homes,
            forward=self.events.forward, unfreeze=self._unfreeze,
        )  # fmt: skip
        # methods of wings that optimizers and `GeminiDDP` call
        self.call = self.meetings.call
        self.drop_gradients, self.zero_gradients = self.gradients.drop, self.gradients.zero_all

    @cached_property
    def window(self) -> Window:
        """Window of a pipeline's schedule."""
        from gemini.runtime.pipeline.window import Window

        return Window(self.in_use, self.passes, self.calls, self.meetings, self.gradients)

    def _wrap(self, params: Sequence[nn.Parameter]) -> None:
        sharding = self.sharding
        before = {ParamId(i): take_gradient(param) for i, param in enumerate(params)}
        self.calls.listen()
        if any(map(is_dtensor, params)):
            learn_dtensors()
        handle = EngineHandle(
            all_gathered=sharding.all_gathered,
            is_elsewhere=self.passes.is_elsewhere,
            borrowed=self.calls.borrowed,
            arrive=self.calls.arrive,
            fetch=self.calls.fetch,
            check_address=self.check_address,
            fetched=self.calls.fetched,
            gradient_of=self.gradients.of,
            set_gradient=self.gradients.set,
            owns_memory_of=self.calls.owns_memory_of,
            written=self.weights.user_writes.written,
            assign=self.assign,
        )
        for i, param in enumerate(params):
            mine = ParamHandle(self, handle, ParamId(i))
            if ParamId(i) in sharding.opaque:
                sharding.opaque[ParamId(i)].wrap(mine)
            else:
                wrap_in_place(param, mine)
        refuse_other_optimizers()
        self.manager.ask_before_release(self.weights.user_writes.write_back)
        self.manager.release_all()
        for param_id, grad in before.items():  # what the module came with counts, as in torch
            if grad is not None:
                self.gradients.assign(param_id, grad)

    __reduce_ex__ = refuse_copies

    # -- the optimizer --

    def attach(self, groups: Sequence[Group], rule: UpdateRule, config: StateConfig) -> list[Any]:
        """Make the optimizer's state from the fp32 originals; see `optim.target`."""
        with self.lock:
            self.refuse_beside_pass("an optimizer is made")
            return [self._attach(groups, rule, config)]

    def _attach(
        self, groups: Sequence[Group], rule: UpdateRule, config: StateConfig
    ) -> ShardTarget:
        if self.target is not None:
            raise ValueError(
                "this module has an optimizer already; use parameter groups for other options, "
                "wrap the parts for other optimizers, or close it before you make another"
            )
        if self.is_canonical:
            from .canonical.order import check_rule

            check_rule(rule)
        calls = StepCalls(
            self.begin_step,
            self.agree_on_trace,
            self.meetings.call,
            self.detach,
            self.gradients,
            self._persistent_buffers,
        )
        if self.saved_tensors is not None and config.nvme.meter is not None:
            self.saved_tensors.attach_meter(config.nvme.meter)
        target = ShardTarget(
            in_use=self.in_use, weights=self.weights, passes=self.passes, overlap=self.overlap,
            events=self.events, calls=calls, groups=groups, rule=rule, config=config,
        )  # fmt: skip
        self.weights.attach(target)
        if not self._has_said_start and (self.together or self).comm.rank == 0:
            self._has_said_start = True
            decays = tuple(float(group.get("weight_decay", 0.0)) for group in groups)
            path = target.executor.path
            say_start(self.sharding, self.planning, self.overlap, config, path, decays)
        return target

    def refuse_beside_pass(self, changes: str) -> None:
        self.passes.refuse_beside_pass(changes)

    def detach(self) -> None:
        self.weights.attach(None)

    def find_optimizer(self) -> ShardTarget | None:
        """State of the optimizer; an optimizer made before the module was wrapped is bound now."""
        if self.target is None:
            waiting = waiting_for(self.params)
            if len(waiting) == 1:
                waiting[0].bind_to(self.params)
        return self.target

    def reconfigure(
        self,
        *,
        max_norm: float | None,
        loss_scale: LossScale | None,
        norm_type: float | None = None,
    ) -> None:
        """Take over settings that an optimizer was given; None leaves one. Raises ValueError."""
        self.sharding.configure(max_norm, norm_type, loss_scale)
        if loss_scale is not None:
            self.control_vector.configure(loss_scale)

    def _unfreeze(self, params: list[ParamId]) -> None:
        """Unfreeze parameters that were frozen; see `unfreeze`. Collective."""
        from .unfreeze import unfreeze

        chunks = unfreeze(self.in_use, self.weights, self.meetings, params)
        if chunks:
            self.reducer.add(chunks)

    def watch(self, check: ModuleCheck) -> None:
        """Check the module before each forward."""
        self.module_check = check
        self.events.forward.listen(check.check)

    def _persistent_buffers(self) -> Iterable[Tensor]:
        return () if self.module_check is None else self.module_check.persistent_buffers()

    def around_forwards(
        self, root: nn.Module, *, spills: bool
    ) -> Callable[[nn.Module], AbstractContextManager[None]]:
        """Context of every forward of the root module. spills: activations may leave the device."""
        if not spills:
            return self.calls.tracking
        from gemini.runtime.autograd.saved import SavedCalls

        saved_calls = SavedCalls(
            self.sharding, self.in_use, root, self.calls.owns_memory_of, self.calls.tracking
        )  # fmt: skip
        self.saved_tensors = saved_calls.saved
        return saved_calls.around

    @torch.no_grad()
    def unwrap(self, device: torch.device) -> None:
        """Give every rank all parameters on `device`; hooks, state and all files go. Collective."""
        from .unwrap import check_room, unwrap

        check_room(self.sharding, self.planning.machine.ranks_per_node, device)
        unwrap(self.weights, self.gradients, self.manager, device)
        for handle in self.calls.hook_handles:
            handle.remove()
        self.is_unwrapped = True
        if self.target is not None:
            self.target.close(keep_masters=False)
        layers = self.sampler.layers
        if layers is not None:
            layers.close()
        if self.saved_tensors is not None:
            self.saved_tensors.close()
        self.originals.clear()
        self.storage.close()

    # -- traces --

    def traced(self, trace: Trace) -> None:
        """Receive the trace of a sampled iteration; one rank alone plans with it."""
        if trace.kind == "train":
            self._last_trace = trace
        if not self.sampler.measures:
            return
        sharding = self.sharding
        if self.comm.world_size == 1 and self.planning.replan(
            trace, is_coarse=sharding.all_gathered
        ):
            self._adopt_plan()
        elif self.planning.should_remeasure():
            self.sampler.forget(trace)

    def agree_on_trace(self) -> None:
        """Plan, before a step, with the traces of all ranks, once they have some. Collective."""
        if self.comm.world_size == 1 or self.sharding.all_gathered:
            return
        if not self._agreements_left:
            self.homes.agree_on_level()
            return
        self._agreements_left -= 1
        trace = self._last_trace if self.sampler.measures else None
        if self.planning.replan_together(trace):
            self._agreements_left = 0
            self._adopt_plan()
        elif self.planning.should_remeasure():
            if trace is not None:
                self.sampler.forget(trace)
        elif self.planning.levels.like is not None:  # it fits in other homes, or in none
            self._agreements_left = 0
        self.homes.meet()

    def _adopt_plan(self) -> None:
        """Adopt the new plan of a measured iteration; homes stay until promotion is allowed."""
        self.in_use.follow()
        self.homes.propose()

    # -- parameters; see `gemini.chunk.parameter` --

    def check_address(self) -> None:
        if not (self.weights.is_summoned or self.passes.in_pass()):
            raise RuntimeError(
                "the address of a parameter that is released and gathered again says nothing about "
                "it; read addresses inside model.summon_full_params(), or copy the values"
            )

    def assign(self, param: ParamId, value: Tensor) -> None:
        mine = self.params[param]
        if value.shape != mine.shape:
            raise ValueError(
                f"{self.layout.params[param].name} of shape {tuple(mine.shape)} cannot be given "
                f"data of shape {tuple(value.shape)}: a wrapped parameter keeps its size"
            )
        conversion = module_conversion()
        if conversion == "to_empty":
            raise ValueError(TO_EMPTY)
        if conversion is not None:
            check_stays(mine, value)
        self.calls.fetch([param])
        with torch.no_grad():
            mine.copy_(value)

    def summoned(self, writeback: bool) -> AbstractContextManager[None]:
        """Gather all chunks and keep them so in the body; then shards follow writes, or not."""
        return self.weights.summoned(writeback)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Refuse steps in the body, as averages stand in for the weights."""
        assert not self.is_swapped
        self.is_swapped = True
        try:
            yield
        finally:
            self.is_swapped = False

    def keep_average(self, average: Originals, nbytes: tuple[tuple[Tier, int], ...]) -> None:
        """Count an average, of `nbytes` by tier, in plans and reports. Collective.

        Raises BudgetError where it does not fit, and then nothing has changed.
        """
        total = Counter(dict(self.planning.inputs.average))
        total.update(dict(nbytes))
        self._plan_averages(total)
        self.storage.averages.append(average)

    def forget_average(self, average: Originals, nbytes: tuple[tuple[Tier, int], ...]) -> None:
        """Count an average that was given back no more. Collective."""
        self.storage.averages.remove(average)
        total = Counter(dict(self.planning.inputs.average))
        total.subtract(dict(nbytes))
        self._plan_averages(total)

    def _plan_averages(self, total: Counter[Tier]) -> None:
        self.planning.keep_averages(tuple((tier, n) for tier, n in total.items() if n))
        self.in_use.follow()

    def write_back_changes(self) -> None:
        """Make shards and masters follow what the user wrote to parameters."""
        self.weights.write_back_changes()

    # -- the step --

    def begin_step(self) -> None:
        """End windows and sampling, meet, and let masters follow what the user wrote."""
        self.weights.refuse_parked()
        if self.weights.is_summoned:
            raise RuntimeError("step() while parameters are summoned; leave the context first")
        if self.is_swapped:
            raise RuntimeError("step() while the average is swapped in; leave the context first")
        if in_backward():
            raise RuntimeError(
                "step() inside a backward: other gradients are still to come, and to be reduced "
                "over ranks and clipped together; call it behind loss.backward()"
            )
        self.passes.train_here()
        if self.passes.in_schedule:
            self.window.end()
        self.gradients.check_complete()
        # Ranks may have come here by other calls, and collectives follow.
        self.meetings.barrier()
        self.calls.unfreeze_trained()
        self.gradients.resolve()
        self.sampler.end()
        self.write_back_changes()

    def clip(self, clip: Clip) -> Tensor | None:
        """Clip the coming step's gradients; returns the norm before, if one is asked."""
        target = self.find_optimizer()
        if target is None:
            raise RuntimeError(
                "this module has no optimizer yet, so there is nobody to clip for; make it, or "
                "call optimizer.clip_grad_norm_(max_norm)"
            )
        return target.clip([target], clip)

    def shards_changed(self) -> None:
        """Gather again all chunks that stay gathered: any shard may have changed."""
        self.weights.after_step(trained=False)

    def _gradients_dropped(self) -> None:
        self.storage.forget_gradients()
        self.calls.cut_short()
        self.calls.forget()
        self.events.dropped()
        self.homes.gradients_dropped()


def _files_of(name: str, rank: int, planning: Planning, backend: Backend) -> FileConfig:
    """Configuration of a rank's files; `name` is the model's class, with any characters."""
    of_model = re.sub(r"\W", "_", name)[:LABEL_CHARACTERS]
    label = f"{of_model}-rank{rank}-"
    numel = planning.inputs.block_numel
    return FileConfig(planning.nvme_folder, numel, label=label, memory=backend)


TO_EMPTY = (
    "to_empty() leaves a module without values, and a wrapped one keeps its own; expected the "
    "module as it is, or parameters on the meta device before it is wrapped"
)


def check_stays(tensor: Tensor, moved: Tensor) -> None:
    """Raise ValueError if `moved`, what a conversion of a module makes of `tensor`, has another
    dtype or device."""
    if (moved.dtype, moved.device) != (tensor.dtype, tensor.device):
        raise ValueError(
            f"a wrapped module stays in {tensor.dtype} on {tensor.device}; give precision= and "
            "device= to GeminiDDP, or take the module out with model.unwrap()"
        )
