"""GeminiDDP, the front door."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from gemini.chunk.dtypes import DTYPES
from gemini.chunk.layout import ChunkLayout, training_layout
from gemini.chunk.search import search_chunk_configuration
from gemini.memtracer.collector import MemStatsCollector
from gemini.memtracer.trace import Trace
from gemini.placement.policy import Placement, parse_placement
from gemini.runtime.backend import Backend, make_backend
from gemini.runtime.boundary import Boundary
from gemini.runtime.comm import Communicator
from gemini.runtime.digest import digest
from gemini.runtime.engine import Engine
from gemini.runtime.full import full_parameters, load_full_parameters, salvageable
from gemini.runtime.gradients import named_gradients
from gemini.runtime.hooks import GatherWhole, ModuleHooks, has_experts
from gemini.runtime.integrity import Integrity
from gemini.runtime.kept import KeepFp32, cast_at_boundary, kept_modules, param_dtypes
from gemini.runtime.materialise import InitFn, Materialiser
from gemini.runtime.numerics import Numerics
from gemini.runtime.planning import begin_planning
from gemini.runtime.reports import MemoryReport, explain, memory_report, memory_timeline
from gemini.runtime.specs import collect_params
from optim.clipping import asked_norm
from optim.loss_scale import LossScale


class GeminiDDP(nn.Module):
    """Shards a module over ranks and places its model data, behind the module's own interface.

    The module is changed in place: its parameters keep their identity and become views of chunks
    in the compute dtype. Every rank starts with rank 0's values. Use plain `loss.backward()`.

    module: on the CPU or on `device`; wrapped once.
    device: where modules compute; None is the CUDA device of this process, else the CPU. A
        `gemini.runtime.backend.Backend` is taken as it is.
    placement_policy: `"auto"` (what fits `AutoPlacement.device_budget` on the device, optimizer
        state that does not on NVMe), `"static"` or `"cuda"` (everything on the device), or a
        placement dataclass. Parameters are sharded as in ZeRO-3 but for
        `StaticPlacement(shard_param_frac)`.
    precision: `"bf16"`, `"fp16"` or `"fp32"`: dtype of parameters, activations and gradients.
        Floating inputs are cast to it; buffers keep theirs, and each rank its own. fp16 has a
        dynamic loss scale, and its outputs are raised to fp32.
    keep_fp32: true for (qualified name, module) of modules that stay in fp32 with all below them;
        what they take and return is cast.
    cast_buffers: floating buffers are cast to the precision too.
    master_weights: fp32 weights behind 16-bit ones, from the original weights. Without (bf16 only)
        an update is rounded at random, up or down, by `rounding_seed`, the step and the element:
        the same run has the same bits, wherever its state lives.
    process_group: None is the default group, or no group where torch.distributed is not set up.
    search_range_m, hidden_dim, min_chunk_size_m: see `search_chunk_configuration`.
    max_prefetch: chunks gathered ahead of their use.
    force_outputs_fp32: floating outputs are cast to fp32.
    max_norm: every step clips gradients to this L2 norm over all parameters and ranks; 0 does not.
    loss_scale: options of the loss scale of fp16; None is `optim.LossScale()`.
    on_nonfinite: a gradient with a NaN or an Inf on any rank lets all of them `"skip"` the step,
        which changes nothing, or `"raise"` `optim.NonFiniteGradientError` (and wait for each step).
    gather_whole: modules whose parameters are gathered all together, because what runs below them
        depends on data and so differs between ranks; by default those with a child `experts`.
    init_fn: initialises a module on the meta device that cannot do it itself; see
        `gemini.init_empty`.
    init_state_dict: values for the parameters instead of those they have, on rank 0.
    trace: of an iteration, see `gemini.trace`; the first one is planned with it, and chunks are in
        the order of its first uses.

    Raises ValueError, before anything is changed, for a module that cannot be wrapped.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | Backend | None = None,
        placement_policy: str | Placement = "auto",
        *,
        precision: str = "bf16",
        process_group: dist.ProcessGroup | None = None,
        search_range_m: float | None = None,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        max_prefetch: int = 1,
        force_outputs_fp32: bool = False,
        max_norm: float = 0.0,
        loss_scale: LossScale | None = None,
        on_nonfinite: str = "skip",
        keep_fp32: KeepFp32 | None = None,
        cast_buffers: bool = False,
        master_weights: bool = True,
        rounding_seed: int = 0,
        gather_whole: GatherWhole = has_experts,
        init_fn: InitFn | None = None,
        init_state_dict: Mapping[str, Tensor] | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__()
        numerics = Numerics(
            precision=precision,
            max_norm=max_norm,
            loss_scale=loss_scale,
            on_nonfinite=on_nonfinite,
            master_weights=master_weights,
            rounding_seed=rounding_seed,
        )
        if max_prefetch < 0:
            raise ValueError(f"max_prefetch={max_prefetch} is negative; 0 does not prefetch")
        placement = parse_placement(placement_policy)
        self._dtype = DTYPES[numerics.dtype]
        kept = kept_modules(module, keep_fp32)
        params, specs = collect_params(module, param_dtypes(module, kept, numerics.dtype))
        values = Materialiser(module, init_fn, init_state_dict)
        values.check()
        comm = Communicator(process_group)
        chunks = search_chunk_configuration(
            specs,
            search_range_m=search_range_m,
            hidden_dim=hidden_dim,
            min_chunk_size_m=min_chunk_size_m,
        )
        if trace is not None:
            trace.check_model(specs)
        order = None if trace is None else trace.param_order(specs)
        layout = training_layout(specs, chunks.capacities, comm.world_size, order)
        _check_same_set_up(comm, layout, (placement, numerics, max_prefetch))
        backend = _backend(device)
        planning = begin_planning(
            layout, placement, backend, comm,
            has_master=master_weights and any(c.dtype != "float32" for c in layout.chunks),
            max_prefetch=max_prefetch, trace=trace,
        )  # fmt: skip
        self.module = module
        self.engine = Engine(
            params,
            layout,
            values,
            backend,
            comm,
            planning,
            max_prefetch=max_prefetch,
            numerics=numerics,
        )
        values.fill_buffers()
        self._boundary = Boundary(
            self._dtype,
            backend.device,
            self.engine.scaler,
            partial(self.engine.begin_backward, scaled=True),
            force_outputs_fp32=force_outputs_fp32,
        )
        in_fp32 = {id(buffer) for inner in kept.values() for buffer in inner.buffers()}
        for buffer in module.buffers():
            casts = cast_buffers and buffer.is_floating_point() and id(buffer) not in in_fp32
            buffer.data = buffer.data.to(backend.device, self._dtype if casts else buffer.dtype)
        for inner in kept.values():
            cast_at_boundary(inner, self._dtype)
        frozen = [
            (spec.name, param)
            for spec, param in zip(specs, params, strict=True)
            if not spec.trainable
        ]
        self._integrity = Integrity(module, frozen)
        self._hooks = ModuleHooks(self.engine, module, gather_whole)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the inner module's: `config`, `generate`, ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._integrity.check()
        self.engine.begin_iteration((args, kwargs))
        args, kwargs = self._boundary.enter((args, kwargs))
        with self.engine.tracking(self.module):
            outputs = self.module(*args, **kwargs)
        return self._boundary.leave(outputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing: gradients add up here, in fp32, until one outside.

        `step()` reduces what no backward did. At world size 1 there is nothing to save.
        """
        before = self.engine.reducer.synchronise
        self.engine.reducer.synchronise = False
        try:
            yield
        finally:
            self.engine.reducer.synchronise = before

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Whole parameters, in the compute dtype, for the body to read or change in place.

        With `writeback`, shards and fp32 masters take the values of the parameters that were
        changed, which must be the same on all ranks; without, changes are undone. All ranks enter.
        """
        self.engine.call("summon_full_params()")
        with self.engine.summoned(writeback):
            yield

    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The inner module's state dict, with its names; whole on rank 0, empty on the others.

        All ranks call. Parameters are the fp32 masters, in the dtype they had before wrapping, on
        the CPU; they are gathered a chunk at a time. `keep_vars` is not possible.
        """
        if keep_vars:
            raise ValueError("keep_vars=True: whole parameters are copies, and not variables")
        self.engine.call("model.state_dict()")
        state = {} if destination is None else destination
        values = dict(full_parameters(self.engine))
        if self.engine.comm.rank == 0:
            for name in _state_names(self.module):
                state[prefix + name] = values.get(name)
            state.update(
                (prefix + name, buffer.detach()) for name, buffer in saved_buffers(self.module)
            )
        return state

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """As Hugging Face's models do, with the fp32 masters. All ranks call; rank 0 writes.

        Rank 0 holds all weights meanwhile; `gemini.export_safetensors` writes them one by one.
        Raises AttributeError where the inner module has no such method, and RuntimeError on every
        rank where it fails.
        """
        save: Callable[..., Any] = self.module.save_pretrained  # type: ignore[assignment]
        state = self.state_dict()
        error: Exception | None = None
        if self.engine.comm.rank == 0:
            try:
                save(save_directory, state_dict=state, **options)
            except Exception as raised:
                error = raised
        said = self.engine.comm.gather_objects(None if error is None else str(error))[0]
        if error is not None:
            raise error
        if said is not None:
            raise RuntimeError(f"save_pretrained() failed on rank 0: {said}")

    def salvage(self) -> dict[str, Tensor]:
        """Parameters that are in memory, in the compute dtype: what is left if the files are lost.

        Not collective. A checkpoint has more: all parameters, as fp32 masters.
        """
        return salvageable(self.engine)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Take rank 0's values, with the inner module's names; all ranks call.

        Shards and fp32 masters follow, whether the optimizer is there already or not; its moments
        stay. Raises RuntimeError, before anything is changed, for missing and unexpected names
        (`strict`), ValueError for another shape; `assign` is not possible.
        """
        if assign:
            raise ValueError("assign=True: a wrapped parameter keeps its memory")
        self.engine.call("model.load_state_dict()")
        params = {name for spec in self.engine.layout.params for name in spec.names}
        buffers = dict(saved_buffers(self.module))
        expected = params | buffers.keys()
        mine = _IncompatibleKeys(
            sorted(expected - state_dict.keys()), sorted(state_dict.keys() - expected)
        )
        keys: _IncompatibleKeys = self.engine.comm.gather_objects(mine)[0]
        if strict and (keys.missing_keys or keys.unexpected_keys):
            raise RuntimeError(
                f"the state dict does not fit: missing {keys.missing_keys}, "
                f"unexpected {keys.unexpected_keys}"
            )
        load_full_parameters(self.engine, state_dict)
        for name, buffer in buffers.items():
            if name in state_dict:
                buffer.copy_(state_dict[name])
        return keys

    def digest(self) -> str:
        """A name for weights, step counts and loss scale. All ranks call.

        Equal on all ranks, unless something that each has for itself has diverged: compare it to
        find out. It does not depend on placement or world size.
        """
        self.engine.call("model.digest()")
        return digest(self.engine)

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, buffer) of the inner module's buffers that a state dict has."""
        return saved_buffers(self.module)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, which are in chunks and not in `p.grad`, or make them zeros."""
        if set_to_none:
            self.engine.drop_gradients()
        else:
            self.engine.zero_gradients()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `optimizer.clip_grad_norm_`, for the optimizer that this module has."""
        norm = self.engine.clip(asked_norm(max_norm, norm_type))
        assert norm is not None
        return norm

    def named_gradients(self, *, full: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of every parameter that has one, between backward and step.

        fp32 copies of the mean over ranks, without loss scale, clipped where the coming step was
        asked to. full: in the parameter's shape; else this rank's part, flat.
        Collective, also where `full` is false: every rank must go through all of it.
        """
        return named_gradients(self.engine, full=full)

    def explain(self, name: str) -> str:
        """Where a parameter lives, why, and what it costs. Raises ValueError for no such name."""
        return explain(self.engine, name)

    def memory_report(self) -> MemoryReport:
        """Bytes by tier and kind, predicted beside measured; print it."""
        return memory_report(self.engine)

    def memory_timeline(self, path: str | Path) -> None:
        """Draw device, host and NVMe over one iteration: `.html` (offline), `.png`, or `.json` in
        Chrome's trace format. Raises ValueError for another suffix."""
        memory_timeline(self.engine, path)

    @property
    def memory_stats(self) -> MemStatsCollector:
        """What was sampled: traces of iterations, by kind and signature of the inputs."""
        return self.engine.sampler.collector

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GeminiDDP:
        """`to`, `half`, `cuda` and the like: what changes nothing is allowed."""
        probe = torch.empty(0, dtype=self._dtype, device=self.engine.backend.device)
        changed = fn(probe)
        if (changed.dtype, changed.device) != (probe.dtype, probe.device):
            raise ValueError(
                f"a wrapped module stays in {probe.dtype} on {probe.device}; give precision= and "
                "device= to GeminiDDP"
            )
        for buffer in self.module.buffers():
            buffer.data = fn(buffer.data)
        return self


def _backend(device: torch.device | str | Backend | None) -> Backend:
    if not isinstance(device, str | torch.device | None):
        return device
    if device is None:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
    return make_backend(torch.device(device))


def _state_names(module: nn.Module) -> Iterator[str]:
    """Names of all parameters, tied ones under each of their names, in the module's order."""
    for name, _ in module.named_parameters(remove_duplicate=False):
        yield name


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers."""
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _check_same_set_up(comm: Communicator, layout: ChunkLayout, options: object) -> None:
    """All ranks must have the same model and options: else the first difference, on every rank."""
    digests = comm.gather_objects((layout.digest(), repr(options)))
    if len(set(digests)) == 1:
        return
    names = comm.gather_objects([(p.name, p.shape, p.trainable) for p in layout.params])
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
        if digests[rank] != digests[0]:
            raise ValueError(
                f"rank {rank} was given the options {digests[rank][1]} and rank 0 "
                f"{digests[0][1]}; they, and the chunk options, must be the same everywhere"
            )
