"""GeminiDDP: a module whose model data is sharded over ranks and placed on tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from gemini.chunk.layout import ChunkLayout, ParamSpec, training_layout
from gemini.chunk.local import mesh_dims
from gemini.chunk.sizing.search import ChunkConfiguration, cut, search_chunk_configuration
from gemini.comm.communicator import Communicator
from gemini.comm.connect import (
    Connections,
    check_canonical,
    check_stages,
    connect,
    is_pipeline,
    stage_of,
    this_device,
)
from gemini.digests import digest_of
from gemini.memtracer.collector import MemStatsCollector
from gemini.memtracer.trace import Trace
from gemini.optim.rules.clipping import asked_norm
from gemini.optim.target import changes, reads
from gemini.placement.homes.budgets import first_that_fits
from gemini.placement.policy import AutoPlacement, Placement, parse_placement, spills
from gemini.placement.timetable.updates import current_update, goes_on
from gemini.runtime.autograd.gradient_hooks import refuse_transforms
from gemini.runtime.autograd.io_casts import Boundary
from gemini.runtime.engine import GeminiEngine
from gemini.runtime.inspect.reports import MemoryReport, explain, memory_report, memory_timeline
from gemini.runtime.memory.backend import Backend, make_backend
from gemini.runtime.schedule.begin import begin_planning
from gemini.runtime.schedule.planning import Planning
from gemini.runtime.wrap.keep_fp32 import (
    buffers_as_weights,
    cast_at_boundary,
    find_fp32_modules,
    param_dtypes,
)
from gemini.runtime.wrap.materialise import Materialiser
from gemini.runtime.wrap.module_check import ModuleCheck
from gemini.runtime.wrap.precision import check_travelling
from gemini.runtime.wrap.shared_memory import check_memory, note_shared_memory
from gemini.runtime.wrap.specs import (
    Collected,
    check_module,
    check_split,
    collect_params,
    find_ignored,
    padded,
)
from gemini.saved_names import SavedNames

from .dtypes import DTYPES
from .module_face import ModuleFace, face_of
from .options import (
    ChunkSearch,
    Options,
    PrecisionPolicy,
    Unasked,
    Wrapping,
    field_docs,
    groups_of,
    takes_options,
)

if TYPE_CHECKING:
    from gemini.runtime.gradients.by_name import ChangeGradient
    from gemini.runtime.pipeline.together import PipelineOwner


log = logging.getLogger("gemini")
NOTHING_STAYS = (
    "overlap_allgather=True gathers behind a step what is never released, and here all is; "
    'expected placement_policy="zero1", "zero2" or StaticPlacement(shard_param_frac < 1), or leave '
    "it away"
)
NO_GRAPH = (
    "GeminiDDP gathers parameters between calls of modules, which no graph holds: compile what is "
    "called between (for block in model.blocks: block.compile(fullgraph=True)), and not the wrapper"
)


class GeminiDDP(ModuleFace):
    """A wrapped module: its parameters are sharded over ranks, and its model data is placed on
    tiers. The interface is the module's own.

    The module is changed in place: its parameters keep their identity and become views of chunks
    in the compute dtype. Every rank starts with rank 0's parameters and buffers, and loading a
    state dict gives all ranks rank 0's values; otherwise each rank's buffers are its own. Use plain
    `loss.backward()`.

    module: on the CPU or on `device`; wrapped once.
    device: where modules compute; None is the CUDA device of this process, else the CPU. A
        `gemini.runtime.memory.backend.Backend` is taken as it is.
    placement_policy: `"auto"` (model data that fits `AutoPlacement.device_budget`, by default the
        free memory, stays on the device, payloads until backward too; other optimizer state goes to
        NVMe), `"static"` or `"cuda"` (everything on the device), or a placement dataclass.
        Parameters are sharded as in ZeRO-3, except with `"zero1"`, `"zero2"` and
        `StaticPlacement(shard_param_frac)`.
    max_norm: every step clips gradients to this norm over all parameters and ranks; 0 does not.
    norm_type: p of that norm; above 0, or inf.
    trace: of an iteration, see `gemini.trace`; the first iteration is planned with it, and chunks
        are in the order of its first uses.
    update: `"serial"`: a step has ended when `step()` returns. `"tail"`: blocks are updated while
        the next forward runs, which waits for the parameters it reads; this needs state on NVMe,
        and nothing else there, or state in host memory with a device. `"speculate"`: on a device,
        state in host memory is updated in backward. `"both"`: so, and the rest as a tail. The bits
        are the same. An error of a disk is raised by the next backward, or by an earlier read of
        weights or state, if there is a tail.
        See docs/adr/0002-when-a-step-counts.md.

    The other arguments are the fields of `gemini.PrecisionPolicy`, `gemini.ChunkSearch`,
    `gemini.options.Communication` and `gemini.options.Wrapping`, each by its own name, or all of a
    class in one value: `precision=`, `chunks=`, `communication=`, `wrapping=`.

    Raises ValueError, before anything is changed, for a module that cannot be wrapped.
    """

    @takes_options
    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | Backend | None = None,
        placement_policy: str | Placement = "auto",
        *,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        trace: Trace | None = None,
        update: str = "serial",
        **options: Unpack[Options],
    ) -> None:
        precision, chunks, communication, wrapping = groups_of(options)
        super().__init__()
        check_module(module)
        precision_settings = precision.settings(max_norm, norm_type)
        placement = parse_placement(placement_policy)
        check_travelling(precision_settings, placement.budgets())
        self._dtype = DTYPES[precision_settings.dtype]
        fp32_modules = find_fp32_modules(
            module, precision.keep_fp32, cast_buffers=precision.cast_buffers
        )
        dtypes = param_dtypes(module, fp32_modules, precision_settings.dtype)
        process_group, mesh = communication.process_group, communication.mesh
        scaled = precision_settings.scale_options is not None
        asked = wrapping.ignored_params
        ignored = {} if asked is None else find_ignored(module, asked, scaled=scaled)
        found = collect_params(module, dtypes, meshed=mesh is not None, ignored=ignored)
        params, own_specs = found.params, found.specs
        memory = check_memory(module, found.plain, given=wrapping.init_state_dict is not None)
        values = _values(module, wrapping, ignored, found)
        split = sorted({name for param in params for name in mesh_dims(param)})
        if split:
            check_split(trace=trace, init_state_dict=wrapping.init_state_dict)
        together, ties = None, None
        if is_pipeline(process_group, mesh):
            together = _joined(mesh, split)
            own_specs, ties = together.ties.take(params, own_specs)
            process_group, mesh = stage_of(mesh)
        connections = connect(process_group, mesh, split, {s.group for s in own_specs}, ties)
        _check_order(precision, connections, is_stage=together is not None)
        comm = connections.comm
        _tell_dtype(module, precision, comm.rank)
        specs = padded(own_specs, comm)
        configurations = _configurations(chunks, specs)
        order = None if trace is None else _order_of(trace, specs, ignored)
        backend = _spilling(_backend(device), placement) if spills(placement) else _backend(device)
        update = current_update(update, by_kernels=backend.updates_by_triton)

        def planned(sized: ChunkConfiguration) -> tuple[ChunkConfiguration, ChunkLayout, Planning]:
            num_shards, num_replicas = connections.num_shards, connections.num_replicas
            layout = training_layout(specs, sized.capacities, num_shards, order, num_replicas)
            same = _of_any_host(placement), precision_settings, communication.max_prefetch, update
            if comm.world_size > 1:
                _check_same_set_up(comm, layout, module, same)
            planning = begin_planning(
                layout, placement, backend, comm,
                master_weights=precision.master_weights, keep_originals=precision.keep_originals,
                itemsizes=[dtype.itemsize for dtype in found.dtypes], canonical=precision.canonical,
                max_prefetch=communication.max_prefetch, update=update, trace=trace,
                ranks_per_node=None if together is None else together.ranks_here,
            )  # fmt: skip
            return sized, layout, planning

        self.chunk_configuration, layout, planning = first_that_fits(configurations, planned)
        if communication.overlap_allgather and not planning.never_released:
            raise ValueError(NOTHING_STAYS)
        self.module = module
        self.engine = GeminiEngine(
            found, layout.with_params(own_specs), values, backend, connections, planning,
            name=type(module).__name__, max_prefetch=communication.max_prefetch,
            precision_settings=precision_settings,
            overlap_allgather=communication.overlap_allgather,
            tail_communicator=comm.for_thread() if goes_on(update) else None,
            update=update, together=together,
        )  # fmt: skip
        note_shared_memory(self.engine, memory)
        values.fill_buffers()
        self._cast_by(precision, list(fp32_modules.values()))
        self.broadcast_buffers = communication.broadcast_buffers
        self._broadcast_buffers()
        self.engine.watch(ModuleCheck(module, ignored))
        self.engine.calls.hook(module, wrapping.gather_whole)
        self._around_forward = self.engine.around_forwards(module, spills=spills(placement))
        self.__class__ = face_of(type(self), type(module))  # type: ignore[assignment]

    def _cast_by(self, precision: PrecisionPolicy, in_fp32: Sequence[nn.Module]) -> None:
        """Cast buffers now, and from now on the inputs and outputs of the module, and of the
        modules `in_fp32`, in every call."""
        self._boundary = Boundary(
            self._dtype,
            self.engine.backend.device,
            self.engine.control_vector,
            partial(self.engine.calls.begin_backward, scaled=True),
            force_outputs_fp32=precision.force_outputs_fp32,
            cast_inputs=precision.cast_inputs,
        )
        theirs = {id(buffer) for inner in in_fp32 for buffer in inner.buffers()}
        always = buffers_as_weights(self.module)
        self._buffer_dtypes = {id(buffer): buffer.dtype for buffer in self.module.buffers()}
        for buffer in self.module.buffers():
            casts = precision.cast_buffers or id(buffer) in always
            casts = casts and buffer.is_floating_point() and id(buffer) not in theirs
            dtype = self._dtype if casts else buffer.dtype
            buffer.data = buffer.data.to(self.engine.backend.device, dtype)
        for inner in in_fp32:
            self.engine.calls.keep(cast_at_boundary(inner, self._dtype))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner module's forward. Raises RuntimeError after `unwrap()`, and inside a
        transform of torch.func where parameters are not on the device."""
        if self.engine.is_unwrapped:
            raise RuntimeError("this module was unwrapped; use model.module, or wrap it again")
        self.engine.weights.refuse_parked()
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=NO_GRAPH)
        if self.broadcast_buffers:
            self.engine.meetings.barrier()
            self._broadcast_buffers()
        calls, given = self.engine.calls, (args, kwargs)
        self._boundary.look(given)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            refuse_transforms(self.engine.plan)
        calls.begin_iteration(given)
        args, kwargs = self._boundary.enter(given)
        depth = self.engine.passes.depth
        attempt = calls.attempt(self.module, (args, kwargs)) if depth == 0 else None
        while True:
            try:
                with self._around_forward(self.module):
                    outputs = self.module(*args, **kwargs)
            except BaseException as error:
                calls.forward_failed(depth)
                if attempt is None or not attempt.may_be_repeated(error):
                    raise
            else:
                return self._boundary.leave(outputs)
            # outside of the handler, whose traceback keeps what the forward had made
            calls.again(attempt, given)
            attempt = None

    @property
    def is_unwrapped(self) -> bool:
        """Whether `unwrap()` made the inner module plain."""
        return self.engine.is_unwrapped

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to every rank."""
        for buffer in self.module.buffers():
            self.engine.comm.broadcast(buffer)

    @changes
    def unwrap(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return the inner module as a plain one, with full parameters from fp32 masters on every
        rank. All ranks call.

        Parameters are the same objects, on `device`, in the dtypes they had before wrapping. Hooks,
        chunks, files, gradients and the optimizer's state are gone. It may be wrapped again.
        Raises RuntimeError if it was unwrapped already, and MemoryError, before anything is
        changed, if a rank has no room for all parameters.
        """
        if self.is_unwrapped:
            raise RuntimeError("this module was unwrapped already; use model.module")
        self.engine.call("model.unwrap()")
        self.engine.unwrap(torch.device(device))
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(device, self._buffer_dtypes.get(id(buffer), buffer.dtype))
        return self.module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backwards reduce nothing: gradients add up on this rank, in fp32, until
        a backward outside reduces them.

        `step()` reduces gradients that no backward has. At world size 1, and with `canonical=True`,
        it changes nothing.
        """
        with self.engine.reducer.holding():
            yield

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Context with full parameters, in the compute dtype, to read or change in place. All ranks
        enter.

        With `writeback`, shards and fp32 masters take the values of changed parameters, which must
        be the same on all ranks; without it changes are undone.
        """
        self.engine.call("summon_full_params()")
        with self.engine.summoned(writeback):
            yield

    @reads
    def digest(self) -> str:
        """Hash of weights, step counts and loss scale, 16 hexadecimal digits. All ranks call.

        It is equal on all ranks unless values that each rank has for itself have diverged: compare
        it to find out. It does not depend on placement or world size.
        """
        from gemini.runtime.inspect.digest import digest

        self.engine.call("model.digest()")
        return digest(self.engine.weights, self.engine.control_vector)

    @changes
    def rewind(self, steps: int) -> None:
        """Undo the last `steps` steps. All ranks call.

        Weights, optimizer state, step counts (which seed the noise of rounding), the loss scale and
        persistent buffers become those before the first undone step; a skipped step counts as part
        of the one before it. The caller's own values stay: data, random numbers, learning rates and
        their schedule, `ignored_params`. Gradients are dropped: they were of other weights. No
        block is written. A later rewind counts from the state after this one.

        The optimizer must keep versions: `HybridAdam(..., nvme_offload_fraction=1.0,
        nvme=NvmeConfig(keep_versions=8))`. Raises, on every rank: ValueError for more steps than
        are kept since the state was made, loaded or rewound, RuntimeError if none are kept, or the
        model has an EMA or is a part of a pipeline, and `nvme.NvmeError`, before anything is
        changed, for a version that cannot be read.
        """
        engine = self.engine
        target = engine.find_optimizer()
        if target is None or engine.together is not None:
            raise RuntimeError(
                "rewind() of a module without an optimizer, or of a part of a pipeline; expected a "
                "GeminiDDP of its own whose optimizer keeps versions"
            )
        if engine.is_summoned:
            raise RuntimeError("rewind() while parameters are summoned; leave the context first")
        engine.call("model.rewind()")
        target.rewind(steps)
        params = enumerate(engine.layout.params)
        engine.weights.user_writes.stepped([i for i, spec in params if spec.trainable])
        self.zero_grad()
        engine.manager.release_all()
        engine.shards_changed()

    @changes
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or make them zeros: those in chunks, where `p.grad` is only a view,
        and those of `ignored_params`."""
        for _, param in self.ignored_parameters():
            if param.grad is not None and not set_to_none:
                param.grad.zero_()
            elif set_to_none:
                param.grad = None
        if set_to_none:
            self.engine.drop_gradients()
        else:
            self.engine.zero_gradients()

    @changes
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the coming step of this module's optimizer; see `optimizer.clip_grad_norm_`.

        Returns the norm of all gradients, before they are clipped.
        """
        norm = self.engine.clip(asked_norm(max_norm, norm_type))
        assert norm is not None
        return norm

    def named_gradients(self, *, full: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of every parameter that has one, between backward and step.

        Gradients are fp32 copies of the mean over ranks, without loss scale, clipped if the coming
        step was asked to clip. full: in the parameter's shape; else this rank's part, flat.
        Collective, also without `full`: every rank must go through all of them.
        """
        from gemini.runtime.gradients.by_name import named_gradients

        engine, own = self.engine, self._own_names()
        found = named_gradients(engine.gradients, full=full)
        while True:
            with engine.lock:
                engine.weights.refuse_parked()
                engine.refuse_beside_pass("named_gradients()")
                one = next(found, None)
            if one is None:
                return
            yield own(one[0]), one[1]

    @changes
    def map_gradients(self, change: ChangeGradient) -> None:
        """Call `change(name, part)` for every parameter with a gradient, between backward and step.

        part: this rank's elements of the mean over ranks, flat, fp32, without loss scale, before
            clipping. Change it in place, or return another one of its shape, equal on all replicas
            of a shard. A rank without elements of a parameter makes no call for it. Collective.
        """
        from gemini.runtime.gradients.by_name import map_gradients

        engine, own = self.engine, self._own_names()

        def change_own(name: str, part: Tensor) -> Tensor | None:
            return change(own(name), part)

        map_gradients(engine.gradients, change_own)

    def _own_names(self) -> Callable[[str], str]:
        """Function from a saved name to the one of `named_parameters`."""
        names = (name for name, _ in self.named_parameters(remove_duplicate=False))
        return SavedNames(self.module).found(names)

    @reads
    def explain(self, name: str) -> str:
        """Home of a parameter, its reason and its cost, in words. Raises ValueError for an unknown
        name."""
        saved = SavedNames(self.module).saved
        ignored = {saved(left): param for left, param in self.ignored_parameters()}
        engine, own = self.engine, saved(name)
        return explain(engine.sharding, engine.planning, engine.overlap, engine.cycle, own, ignored)

    @reads
    def memory_report(self) -> MemoryReport:
        """Table of bytes by tier and kind, predicted and measured; made to be printed."""
        engine = self.engine
        return memory_report(
            engine.planning, engine.ledger, engine.sampler, engine.backend, engine.saved_tensors,
            (param for _, param in self.ignored_parameters()),
        )  # fmt: skip

    @reads
    def memory_timeline(self, path: str | Path, title: str | None = None) -> None:
        """Draw device, host and NVMe over one iteration: `.svg`, `.png`, `.pdf`, or `.json` in
        Chrome's trace format. title: model and batch, say; None is the number of parameters.
        Raises ValueError for another suffix, ImportError without matplotlib."""
        engine = self.engine
        memory_timeline(engine.sharding, engine.planning, engine.sampler, path, title)

    @property
    def memory_stats(self) -> MemStatsCollector:
        """Collector of traces of iterations, by kind and signature of the inputs."""
        return self.engine.sampler.collector


if GeminiDDP.__doc__:  # `python -OO` has none
    GeminiDDP.__doc__ += f"\n{field_docs()}    "


def _configurations(chunks: ChunkSearch, specs: list[ParamSpec]) -> Iterable[ChunkConfiguration]:
    """Chunks that were given; or what is found, and what a budget may have cut of it."""
    if chunks.chunks is not None:
        chunks.chunks.check_specs(specs)
        return (chunks.chunks,)
    found = search_chunk_configuration(
        specs, chunks.search_range_m, chunks.hidden_dim, chunks.min_chunk_size_m
    )
    return cut(found, chunks.hidden_dim)


def _check_order(precision: PrecisionPolicy, connections: Connections, *, is_stage: bool) -> None:
    """Raise ValueError for ranks at which `canonical` has no order that others have, too."""
    if precision.canonical:
        check_canonical(connections, is_stage=is_stage)


def _tell_dtype(module: nn.Module, precision: PrecisionPolicy, rank: int) -> None:
    """Warn on rank 0 where fp32 weights give back bf16, and nobody asked for it."""
    asked = not isinstance(precision.precision, Unasked) or precision.force_outputs_fp32
    if (
        rank == 0
        and not asked
        and any(param.dtype == torch.float32 for param in module.parameters())
    ):
        log.warning(
            '%s has fp32 parameters, and its outputs will be bf16: precision="fp32" keeps fp32, '
            'force_outputs_fp32=True casts the outputs alone, precision="bf16" says that it is '
            "meant",
            type(module).__name__,
        )


def _values(
    module: nn.Module, wrapping: Wrapping, ignored: Iterable[int], found: Collected
) -> Materialiser:
    """Values of parameters that are on `meta`, or that are given."""
    keep_theirs = {*ignored, *(id(one.param) for one in found.opaque.values())}
    values = Materialiser(module, wrapping.init_fn, wrapping.init_state_dict, keep_theirs)
    values.check()
    return values


def _backend(device: torch.device | str | Backend | None) -> Backend:
    if not isinstance(device, str | torch.device | None):
        return device
    return make_backend(this_device(device))


def _spilling(backend: Backend, placement: AutoPlacement) -> Backend:
    """The backend, if activations have a tier below its memory."""
    from gemini.nvme import check_folder

    placement.check_lower_tier(has_host_tier=backend.has_host_tier)
    if placement.nvme_dir is not None and placement.has_files:
        check_folder(placement.nvme_dir)
    return backend


def _joined(mesh: Any, split: Sequence[str]) -> PipelineOwner:
    """Owner of all stages of a mesh with "pp". Collective the first time."""
    from gemini.runtime.pipeline.together import together_of

    check_stages(mesh, split)
    return together_of(mesh)


def _order_of(
    trace: Trace, specs: Sequence[ParamSpec], ignored: Mapping[int, str]
) -> tuple[str, ...]:
    """Names in the order of a trace. Raises ValueError if it is of another model."""
    if ignored:
        raise ValueError(
            f"trace= is of all parameters, and {next(iter(ignored.values()))} is in "
            "ignored_params; expected one of the two: without trace= the first iteration is "
            "measured"
        )
    trace.check_model(specs)
    return trace.param_order(specs)


def _of_any_host(placement: Placement) -> Placement:
    """The placement without the name of a host's folder."""
    if not isinstance(placement, AutoPlacement) or placement.nvme_dir is None:
        return placement
    return replace(placement, nvme_dir="a folder of each host")


def _check_same_set_up(
    comm: Communicator, layout: ChunkLayout, module: nn.Module, options: object
) -> None:
    """Raise ValueError, with the first difference, on every rank if models or options differ."""
    # buffers, too: rank 0's are sent one by one
    buffers = tuple((name, tuple(x.shape), str(x.dtype)) for name, x in module.named_buffers())
    digests = comm.gather_objects((layout.digest(), digest_of(options), buffers))
    if len(set(digests)) == 1:
        return
    names = comm.gather_objects([(p.name, p.shape, p.trainable) for p in layout.params])
    given = comm.gather_objects(repr(options))
    for rank, other in enumerate(names):
        for mine, theirs in zip(names[0], other, strict=False):
            if mine != theirs:
                raise ValueError(
                    f"rank {rank} has parameter {theirs[0]} of shape {theirs[1]} "
                    f"(trainable: {theirs[2]}) where rank 0 has {mine[0]} of shape {mine[1]} "
                    f"(trainable: {mine[2]}); all ranks must wrap the same module"
                )
        if len(other) != len(names[0]):
            raise ValueError(
                f"rank {rank} has {len(other)} parameters and rank 0 has {len(names[0])}; "
                "all ranks must wrap the same module"
            )
        for first, own in zip_longest(digests[0][2], digests[rank][2]):
            if first != own:
                raise ValueError(
                    f"rank {rank} has the buffer {own} where rank 0 has {first}; all ranks must "
                    "wrap the same module, with its buffers in the same order"
                )
        if digests[rank] != digests[0]:
            raise ValueError(
                f"rank {rank} was given the options {given[rank]} and rank 0 "
                f"{given[0]}; they, and the chunk options, must be the same everywhere"
            )
