"""Interface of a wrapped module to torch: the names and the state dict of the inner module."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from gemini.callers import torchs_wrapper, wants_dtensors
from gemini.chunk.parameter import handle_of
from gemini.optim.target import changes, reads
from gemini.runtime.engine import TO_EMPTY, GeminiEngine, check_stays
from gemini.runtime.wrap.module_check import changed
from gemini.saved_names import (
    SavedNames,
    peeled,
    renamed,
    without_wrappers,
    wrappers_aside,
)
from gemini.units import parse_bytes

if TYPE_CHECKING:
    from gemini.optim.state.parking import Where
    from gemini.transfer.outgoing import WeightBucket, WeightVersion
    from gemini.transfer.parking import ParkedBytes


class ModuleFace(nn.Module):
    """Base of `GeminiDDP` with the methods of `nn.Module`: names, state dicts, moves and copies."""

    module: nn.Module
    engine: GeminiEngine
    _is_wrapped = False  # the class of `face_of` is, whose writes reach the inner module

    def __init__(self) -> None:
        super().__init__()
        self._inner_prefix = "module."  # by which a parent's load_state_dict knows the inner module
        self.register_load_state_dict_post_hook(_forget_inner_names)

    @property
    def _turns(self) -> AbstractContextManager[Any]:
        return self.engine.lock

    def _refuse_beside_pass(self, changes: str) -> None:
        self.engine.refuse_beside_pass(changes)

    def __getattr__(self, name: str) -> Any:
        """Attribute of the inner module that the wrapper lacks: `config`, `generate`, ..."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute where reading finds it: on the inner module, but for the wrapper's own.

        Raises ModuleChanged for a parameter, or a module with parameters, that was not wrapped.
        """
        if self._is_wrapped and name == "module":
            _check_wrapped(((f"module.{below}", p) for below, p in value.named_parameters()), "new")
        if self._owns(name):
            super().__setattr__(name, value)
            if name == "training" and self._is_wrapped:  # both have one, which `train` sets on all
                peeled(self.module).training = value
        else:
            self._check_change(name, value)
            setattr(peeled(self.module), name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute where reading finds it. Raises ModuleChanged for a parameter."""
        if self._owns(name):
            super().__delattr__(name)
        else:
            self._check_change(name, None)
            delattr(peeled(self.module), name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer to the inner module."""
        peeled(self.module).register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a wrapped parameter to the inner module. Raises ModuleChanged for another."""
        self._check_change(name, param)
        peeled(self.module).register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child to the inner module. Raises ModuleChanged for one with new parameters."""
        self._check_change(name, module)
        peeled(self.module).add_module(name, module)

    def _owns(self, name: str) -> bool:
        """Whether an attribute is the wrapper's own; so is a private one that nobody has yet."""
        if not self._is_wrapped or name in vars(self) or hasattr(type(self), name):
            return True
        if name in self._modules:
            return True
        return name.startswith("_") and not hasattr(self.module, name)

    def _check_change(self, name: str, value: Any) -> None:
        """Raise ModuleChanged for a write that the next forward would refuse."""
        inner = peeled(self.module)
        before = inner._parameters.get(name)
        if before is not None and before is not value and handle_of(before) is not None:
            raise changed(name, "is gone" if value is None else "is another")
        if isinstance(value, nn.Parameter) and before is None:
            _check_wrapped([(name, value)], "new")
        elif isinstance(value, nn.Module) and value is not inner._modules.get(name):
            new = ((f"{name}.{below}", param) for below, param in value.named_parameters())
            _check_wrapped(new, "another" if name in inner._modules else "new")

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of the wrapper and the inner modules; the wrapper adds nothing to names.

        Raises RuntimeError inside the constructor of torch's own wrappers.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        _refuse_torchs_own()
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._root.named_modules(memo, prefix, remove_duplicate)

    @reads
    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """State dict of the inner module, with its names, those of torch's wrappers inside it too;
        full on rank 0, empty on the others.

        All ranks call. Parameters come from the fp32 masters, in the dtype they had before
        wrapping, on the CPU; they are gathered a chunk at a time. Raises ValueError for
        `keep_vars`. Under `get_model_state_dict` of torch.distributed.checkpoint every rank gets
        DTensors, in the masters' own dtype.
        """
        from gemini.runtime.inspect.full_parameters import cut_parameters, full_parameters

        if keep_vars:
            raise ValueError("keep_vars=True: whole parameters are copies, and not variables")
        self.engine.call("model.state_dict()")
        state = destination
        if state is None:
            state = OrderedDict()
            state._metadata = OrderedDict()  # type: ignore[attr-defined]
        cuts, sharding = wants_dtensors(), self.engine.sharding
        values = dict((cut_parameters if cuts else full_parameters)(self.engine.weights))
        before, saved = set(state), SavedNames(self.module).saved
        # torch's own walk, with extra state and hooks. It collects the parameters themselves, whose
        # memory may be released: values take their places below.
        with ExitStack() as stack:
            for one in sharding.opaque.values():  # of which modules read some to save it
                stack.enter_context(one.bound_to(torch.zeros(one.form.nbytes, dtype=torch.uint8)))
            self._root.state_dict(destination=state, prefix=prefix, keep_vars=True)
        for name in [name for name in state if name not in before]:
            value = state[name]
            handle = handle_of(value) if isinstance(value, Tensor) else None
            if self.engine.comm.rank != 0 and not cuts:
                del state[name]
            elif saved(name[len(prefix) :]) in values:
                state[name] = values[saved(name[len(prefix) :])]
            elif handle is not None:
                state[name] = values[self.engine.layout.params[handle.param].name]
            elif isinstance(value, Tensor):
                state[name] = value.detach()
        return state

    @property
    def _root(self) -> nn.Module:
        """Inner module, whose names are the wrapper's. For torch.distributed.checkpoint it is the
        one that torch's own wrappers are around: that knows them below the root alone."""
        inner = peeled(self.module)
        return inner if inner is not self.module and wants_dtensors() else self.module

    def _fqn_modifiers(self) -> dict[str, str]:
        """Answer to torch.distributed.checkpoint: the attribute `module` is in no name."""
        return {"": "module"}

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        state_dict: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Save by the inner module's `save_pretrained`, with the fp32 masters. All ranks call; rank
        0 writes.

        Values have the dtype from before wrapping, which the saved config names. The module's own
        config stays as it is. state_dict: whole values to write in their place, on rank 0.
        Rank 0 has all weights in memory meanwhile; `gemini.export_safetensors` writes them one by
        one. Raises AttributeError if the inner module has no such method. If it fails, rank 0
        raises its error and the others RuntimeError.
        """
        from gemini.saved_config import substituted_configs, written_dtype

        save: Callable[..., Any] = self.module.save_pretrained  # type: ignore[assignment]
        state = self.state_dict() if state_dict is None else state_dict
        error: Exception | None = None
        if self.engine.comm.rank == 0:
            try:
                state = dict(renamed(state, SavedNames(self.module).saved))
                tensors = {n: v.dtype for n, v in state.items() if isinstance(v, Tensor)}
                dtype = written_dtype(self.module, tensors)
                substituted = substituted_configs(getattr(save, "__self__", self.module), dtype)
                with substituted, wrappers_aside(self.module):
                    save(save_directory, state_dict=state, **options)
            except Exception as raised:
                error = raised
        said = self.engine.comm.gather_objects(None if error is None else str(error))[0]
        if error is not None:
            raise error
        if said is not None:
            raise RuntimeError(f"save_pretrained() failed on rank 0: {said}")

    def weights(
        self,
        *,
        bytes: int | str = "256MiB",
        since: WeightVersion | None = None,
        deltas: bool = False,
    ) -> Iterator[WeightBucket]:
        """Go through all parameters in buckets of at most `bytes`, for a sampler, say.

        Buffers and `ignored_params` are in no bucket: they are whole on the module.

        A parameter that is larger is alone in its bucket. Besides one bucket, nothing is gathered;
        of parameters in files the shard of one chunk is in memory. Values are those that the model
        computes with, of the last step that counts: a step that may still be undone is waited for.
        Every rank gets every bucket, and goes through all of them. Collective.

        since: the `version` of an earlier bucket of this process: parameters that have not changed
            since are left out.
        deltas: of a parameter that has changed, its changed elements leave, in `bucket.deltas`;
            `bucket.apply(weights)` puts them in place. From the first such call on, updates mark
            what they change, at 1/8 byte a trained parameter, which budgets count. What else
            changes weights (a load, a rewind, the user) lets all of a parameter leave, and so does
            a `since` older than what the last such call has sent. It is for one receiver.

        Raises RuntimeError if weights change before the last bucket, and beside another thread's
        pass.
        """
        from gemini.transfer.outgoing import leaving

        engine, nbytes = self.engine, parse_bytes(bytes)
        engine.call("model.weights()")
        own = engine.weights, engine.passes, engine.planning, engine.storage
        yield from leaving(*own, nbytes, since, deltas)

    @changes
    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], Any] | None, *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call `hook(shard)` between reduction and step, as FSDP2 does, to average over replica
        groups that are no part of `process_group` or `mesh`; None: no more.

        shard: this rank's reduced gradients of a chunk, flat, on the device, fp32 or in the compute
            dtype, with the loss scale. The hook changes it in place; a Work that it returns is
            waited for. stream: on which it runs, of a CUDA device, without replicas in the mesh.

        Once a step, behind the backward that reduces (behind `no_sync` alone in `step()`), for
        every chunk with a gradient, in the same order on all ranks and in all groups that train the
        same parameters. A skip follows the averages, so all groups skip together. Gradients in RAM
        or a file are brought, and written back. If it raises, on any rank, all ranks raise, and
        weights and state are those of the last step. `ignored_params` and tables of
        `gemini.CachedEmbedding` do not come to it.

        Raises ValueError for `update="speculate"` and pipelines, RuntimeError beside gradients, and
        then in a backward that would add to gradients which the hook has had.
        """
        from gemini.runtime.gradients.by_name import set_all_reduce_hook

        if self.engine.together is not None:
            raise ValueError(
                "set_all_reduce_hook() of a stage of a pipeline; expected a module without stages"
            )
        set_all_reduce_hook(self.engine.gradients, self.engine.overlap, hook, stream)

    @changes
    def park(self, where: Where = "host") -> ParkedBytes:
        """Move parameters, gradients, optimizer state, originals and averages out of memory, while
        a sampler has the device. All ranks call; `resume` moves them back, bit for bit.

        where: `"host"`, from the device to RAM; `"nvme"`, from the device and RAM to files in the
            folder of the optimizer, or of the placement policy. What is in files already stays, and
            so do staging buffers, and gradients that wait in RAM beside a device.

        Returns the bytes that this rank has moved. Until `resume` whatever reads or changes model
        data raises RuntimeError; a plain view that the loop has kept must not be read.
        `optimizer.close()` resumes this rank first. An error on the way out, on any rank, leaves
        everything in place on all.

        Raises BudgetError for copies that a budget, or the machine, has no room for, and ValueError
        for another `where`; RuntimeError where it is parked, summoned or unwrapped.
        """
        from gemini.transfer.parking import park

        engine = self.engine
        if engine.is_unwrapped:
            raise RuntimeError("this module was unwrapped; use model.module, or wrap it again")
        if engine.is_summoned or engine.is_swapped:
            raise RuntimeError(
                "park() while parameters are summoned, or an average is swapped in; leave the "
                "context first"
            )
        engine.call("model.park()")
        target, begin = engine.find_optimizer(), engine.begin_step
        return park(engine.weights, engine.planning, engine.ledger, target, begin, where)

    @changes
    def resume(self) -> None:
        """Move back what `park` has moved. All ranks call.

        After an error, on any rank, model data is parked still on all, and it may be called again.
        Raises RuntimeError for a module that is not parked.
        """
        from gemini.transfer.parking import resume

        resume(self.engine.weights)

    @reads
    def salvage(self) -> dict[str, Tensor]:
        """Parameters that this rank has in memory, in the compute dtype, for when files are lost.

        Not collective. A checkpoint has more: all parameters, as fp32 masters.
        """
        from gemini.runtime.inspect.full_parameters import salvageable

        self.engine.weights.refuse_parked()
        return salvageable(self.engine.weights)

    @changes
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load rank 0's state dict, with the inner module's names, or with those of the same module
        under other wrappers of torch. All ranks call.

        Shards and fp32 masters take the values, before and after an optimizer was made; its moments
        stay. Buffers, ignored parameters and extra state become rank 0's on every rank. Of a
        DTensor every rank gives its part. Raises RuntimeError, before anything is changed, for
        missing and unexpected names (`strict`), ValueError for another shape, for a value that is a
        DTensor on some ranks only, and for `assign`.
        """
        _refuse_assign(assign)
        self.engine.call("model.load_state_dict()")
        given = self._as_saved(state_dict)
        keys = self._compared(given)
        if strict and (keys.missing_keys or keys.unexpected_keys):
            raise RuntimeError(
                f"the state dict does not fit: missing {keys.missing_keys}, "
                f"unexpected {keys.unexpected_keys}"
            )
        self._take(given)
        return keys

    @changes
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the part of a parent's state dict, with the inner module's names below `prefix`."""
        _refuse_assign(bool(local_metadata.get("assign_to_params_buffers")))
        self._inner_prefix = f"{prefix}module."
        self.engine.call("load_state_dict()")
        inner = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        given = self._as_saved(inner)
        keys = self._compared(given)
        missing_keys += [prefix + name for name in keys.missing_keys]
        unexpected_keys += [prefix + name for name in keys.unexpected_keys]
        try:
            self._take(given)
        except ValueError as error:
            error_msgs.append(str(error))

    def _as_saved(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """State dict as modules load it, under the names that are saved."""
        own = SavedNames(self.module).saved
        known = [name for spec in self.engine.layout.params for name in spec.names]
        plain = without_wrappers([*known, *(name for name, _ in self.saved_tensors())])
        return renamed(_renamed(self.module, state_dict), lambda name: plain(own(name)))

    def _compared(self, state_dict: Mapping[str, Any]) -> _IncompatibleKeys:
        """Missing and unexpected names of rank 0's state dict, on every rank. Collective."""
        sharding = self.engine.sharding
        params = sharding.layout.params
        expected = {name for spec in params if spec.form is None for name in spec.names}
        opaque: dict[str, Any] = {}
        for one in sharding.opaque.values():
            opaque |= one.saved(torch.zeros(one.form.nbytes, dtype=torch.uint8))
        expected |= self._as_saved(opaque).keys()  # what loading modules leave of it
        expected |= {name for name, _ in self.saved_tensors()}
        expected |= {name for name, _ in _with_extra_state(self.module)}
        mine = _IncompatibleKeys(
            sorted(expected - state_dict.keys()), sorted(state_dict.keys() - expected)
        )
        keys: _IncompatibleKeys = self.engine.comm.gather_objects(mine)[0]
        return keys

    @torch.no_grad()
    def _take(self, state_dict: Mapping[str, Any]) -> None:
        """Load rank 0's values into the parameters, buffers and extra state that they name."""
        from gemini.runtime.inspect.full_parameters import load_full_parameters

        comm = self.engine.comm
        others = dict(self.saved_tensors())
        self._check_made(others, state_dict)
        # `set_model_state_dict` fills up what it was not given with the parameters themselves
        own = {id(param) for param in self.engine.params}
        given = {n: v for n, v in state_dict.items() if id(v) not in own}
        load_full_parameters(self.engine.weights, self.engine.manager, given)
        for name in comm.gather_objects([name for name in others if name in state_dict])[0]:
            if comm.rank == 0:
                others[name].copy_(state_dict[name])
            comm.broadcast(others[name])
        extra = {n: state_dict[n] for n, _ in _with_extra_state(self.module) if n in state_dict}
        extra = comm.gather_objects(extra)[0]
        for name, inner in _with_extra_state(self.module):
            if name in extra:
                inner.set_extra_state(extra[name])

    def _check_made(self, saved: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
        """Raise ValueError if rank 0 gives another value for a tensor that a module makes only when
        it saves: no tensor of the module could take it."""
        wrong = [
            name
            for name, again in self.saved_tensors()
            if name in given
            and again.data_ptr() != saved[name].data_ptr()
            and not torch.equal(given[name].cpu(), again.cpu())
        ]
        wrong = self.engine.comm.gather_objects(wrong)[0]
        if wrong:
            raise ValueError(
                f"{wrong[0]} is of an ignored parameter, whose module makes it from numbers on it; "
                "expected what the module has: load the base by its library, and then wrap it"
            )

    def ignored_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of every parameter of `ignored_params`."""
        return ((n, p) for n, p in self.named_parameters() if handle_of(p) is None)

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of a state dict's tensors that are in no chunk: persistent buffers, and
        ignored parameters in the form in which their modules save them, maybe as several tensors.
        """
        yield from saved_buffers(self.module)
        own = SavedNames(self.module).saved
        for prefix, child in self.module.named_modules():
            if all(handle_of(p) is not None for p in child.parameters(recurse=False)):
                continue
            saved: dict[str, Any] = {}
            child._save_to_state_dict(saved, f"{prefix}." * bool(prefix), keep_vars=True)
            buffers = {id(buffer) for buffer in child.buffers(recurse=False)}
            for name, value in saved.items():
                is_own = isinstance(value, Tensor) and handle_of(value) is None
                if is_own and id(value) not in buffers:
                    yield own(name), value.detach()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError: the engine cannot be copied or pickled."""
        self.engine.__reduce_ex__(protocol)

    def share_memory(self) -> NoReturn:
        """Raise RuntimeError: chunks free and refill their memory."""
        next(self.parameters()).share_memory_()
        raise AssertionError("a wrapped parameter was shared")

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Raise ValueError: a wrapped module keeps its values."""
        raise ValueError(TO_EMPTY)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleFace:
        """Apply `to`, `cuda` and the like to buffers, which keep dtypes. Raises ValueError for a
        change of dtype or device."""
        device, dtype = self.engine.backend.device, self.engine.dtype
        probe = torch.empty(0, dtype=dtype, device=device)
        check_stays(probe, fn(probe))
        for buffer in self.module.buffers():
            moved = fn(buffer.data)
            if moved.dtype == buffer.dtype:  # that of statistics stays with that of their weights
                buffer.data = moved
        return self


def _refuse_torchs_own() -> None:
    """Raise RuntimeError inside the constructor of torch's DDP or FSDP.

    Both send or flatten the memory of parameters, also of released ones.
    """
    name = torchs_wrapper()
    if name is not None:
        raise RuntimeError(
            f"a GeminiDDP inside torch's {name}: both reduce gradients over ranks; use the "
            "GeminiDDP alone, and in a loop of Hugging Face's use GeminiTrainer or "
            "GeminiAccelerator"
        )


_FACES: weakref.WeakKeyDictionary[type, dict[type, type]] = weakref.WeakKeyDictionary()


def face_of(wrapper: type[nn.Module], inner: type[nn.Module]) -> type[nn.Module]:
    """Subclass of `wrapper` with the signature and docstring of `inner.forward`, and its name.

    Hugging Face's Trainer reads the columns of its data, and labels, from that signature.
    """
    faces = _FACES.setdefault(inner, {})
    if wrapper not in faces:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper.forward(self, *args, **kwargs)

        forward.__doc__ = inner.forward.__doc__
        with suppress(ValueError, TypeError):  # one that is written in C has none
            forward.__signature__ = inspect.signature(inner.forward)  # type: ignore[attr-defined]
        name = f"{wrapper.__name__}[{inner.__name__}]"
        members = {"forward": forward, "__doc__": wrapper.__doc__,
                   "__module__": wrapper.__module__, "_is_wrapped": True}  # fmt: skip
        faces[wrapper] = type(name, (wrapper,), members)
    return faces[wrapper]


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(saved name, buffer) of every persistent buffer."""
    saved = SavedNames(module).saved
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield saved(f"{prefix}.{name}" if prefix else name), buffer


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(saved name, module) of every module with extra state."""
    saved = SavedNames(module).saved
    for prefix, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield saved(f"{prefix}." * bool(prefix) + _EXTRA_STATE_KEY_SUFFIX), child


def _renamed(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """State dict after the modules' own load hooks, which rename keys of older versions."""
    hooked = [
        (f"{prefix}." * bool(prefix), child)
        for prefix, child in module.named_modules()
        if child._load_state_dict_pre_hooks
    ]
    if not hooked:
        return state_dict
    changed = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", None) or {}
    for prefix, child in hooked:
        for hook in child._load_state_dict_pre_hooks.values():
            hook(changed, prefix, metadata.get(prefix[:-1], {}), True, [], [], [])
    return changed


def _check_wrapped(named: Iterable[tuple[str, nn.Parameter]], what: str) -> None:
    """Raise ModuleChanged, which says what it is, for the first parameter that was not wrapped."""
    for name, param in named:
        if handle_of(param) is None:
            raise changed(name, f"is {what}")


def _refuse_assign(assign: bool) -> None:
    if assign:
        raise ValueError("assign=True: a wrapped parameter keeps its memory")


def _forget_inner_names(module: nn.Module, keys: _IncompatibleKeys) -> None:
    """Remove names below the attribute `module`, under which torch has looked as well."""
    assert isinstance(module, ModuleFace)
    for names in keys:
        names[:] = [name for name in names if not name.startswith(module._inner_prefix)]
