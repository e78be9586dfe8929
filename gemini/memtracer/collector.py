"""MemStatsCollector: traces from begins and ends of module calls and from a monitor's readings.

At every moment the period before it ends: the most that was in use, less the model data there was,
is what that period needed besides. What is saved for backward and has left the device meanwhile is
added, so that a trace is of an iteration in which all stays. Bytes that are saved or read split a
period. Of bytes saved as a part begins, and as it ends, the fewer are there all the time. The most
of all bytes and of those beside the saved are what a moment has, and the difference is said to be
saved: so neither number is too low for a plan that lets some of them leave, however many stay.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.arguments import by_name
from gemini.chunk.layout import ParamSpec, specs_of
from gemini.saved_names import SavedNames, params_by_path
from gemini.trees import map_tensors, tensors_in
from gemini.units import Bytes, ParamId

from .module_calls import (
    Caller,
    GatherWhole,
    ModuleCalls,
    callers_of,
    has_experts,
    in_backward,
    repeated_blocks,
)
from .monitor import Monitor, SavedBytes, SavedCounter, StorageTracker
from .trace import (
    Departure,
    Edge,
    Kind,
    Layer,
    Phase,
    Trace,
    TraceMoment,
    model_digest,
)

log = logging.getLogger("gemini")

_MASKS = threading.RLock()  # of what `_in_one_sequence` puts in place
_OBJECTS = 2  # levels of a user's own objects that are searched for inputs


@by_name
class MemStatsCollector:
    """Collector of one model's traces, by kind and input signature.

    Between `begin` and `end` it is told of moments (`record`). A sequence that was not seen before,
    or not like this, becomes the trace of its kind and signature.

    collecting: an iteration is being listened to.

    monitors: read at every moment; the largest reading counts, less `model_bytes()` for those that
        include model data.
    saved: what is saved for backward; None: nobody counts it, and traces say 0.
    look: called with every reading, as far as it is certain, and with its moment in words.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        monitors: Sequence[Monitor],
        model_bytes: Callable[[], int] = lambda: 0,
        look: Callable[[int, str], None] = lambda nbytes, where: None,
        saved: SavedBytes | None = None,
    ) -> None:
        self._model_digest = model_digest(specs)
        self._monitors = list(monitors)
        self._model_bytes = model_bytes
        self._look = look
        self._saved = saved
        # as the period began, or since bytes were saved or read: saved bytes, and those of them
        # that are not on the device
        self._saved_before = 0, 0
        self._most_used = self._most_rest = 0  # in this period, up to then
        self.traces: dict[tuple[Kind, str], Trace] = {}
        # iterations that differed from their trace, or passed a budget
        self.deviations: list[Departure] = []
        self._key: tuple[Kind, str] | None = None
        self.collecting = False
        self._moments: list[TraceMoment] = []
        # blocks in the order of their calls, and how many of them are computed again
        self.layers: dict[str, Layer] = {}
        self.recomputed = 0
        self._model_at_begin = 0  # what monitors that include model data start from
        self._model_before = 0  # model data as the period began, or when it changed last
        self._used = 0  # most non-model bytes in this period, up to that change
        self._started = 0.0

    @property
    def heard(self) -> int:
        """Number of moments of the iteration that is being listened to."""
        return len(self._moments)

    def begin(self, kind: Kind, signature: str = "") -> None:
        """Begin an iteration."""
        self._key, self.collecting = (kind, signature), True
        self._moments, self.layers, self.recomputed = [], {}, 0
        for monitor in self._monitors:
            monitor.start()
            monitor.period()
        self._used = self._most_rest = self._most_used = 0
        self._saved_before = self._count_saved()
        self._model_at_begin = self._model_before = self._model_bytes()
        self._started = time.perf_counter()

    def record(
        self, edge: Edge, module: str, params: tuple[ParamId, ...], phase: Phase | None = None
    ) -> None:
        """Record that a call begins or ends: the period before it ends. phase: None: whether this
        code runs inside a backward."""
        if not self.collecting:
            return
        self._end_period()
        if phase is None:
            phase = "backward" if in_backward() else "forward"
        self._moments.append(TraceMoment(phase, edge, module, params, Bytes(0)))

    def add_layer(self, layer: Layer) -> None:
        """Note the call of a block; more calls of one add up."""
        known = self.layers.get(layer.name)
        if known is not None:
            layer = replace(
                layer,
                saved_bytes=Bytes(known.saved_bytes + layer.saved_bytes),
                input_bytes=Bytes(known.input_bytes + layer.input_bytes),
                seconds=known.seconds + layer.seconds,
            )
        self.layers[layer.name] = layer

    def before_change(self) -> None:
        """Note that model data is about to be allocated or freed within a period."""
        # A reading knows only what is in use in all: model data that changes within a period splits
        # it, so that each part is compared with its own model data.
        if self.collecting:
            self._used = max(self._used, self._reading())
            self._pause(True)

    def after_change(self) -> None:
        """Note that it was: what was in use meanwhile does not count."""
        if self.collecting:
            for monitor in self._monitors:
                monitor.period()
            self._pause(False)
            self._model_before = self._model_bytes()

    def count_saved(self, saved: SavedBytes) -> None:
        """Count these saved bytes from the next iteration on."""
        self._saved = saved

    def saved_changed(self, moved: bool = False) -> None:
        """Note that bytes were saved, or are read. So the most of what is saved and of the rest are
        known where no call begins or ends meanwhile. moved: since it was noted last, bytes have
        left the device or come back, and what was in use meanwhile does not count."""
        if self.collecting and moved:
            self.after_change()
            self._saved_before = self._count_saved()
        elif self.collecting:
            self._end_part()

    def _pause(self, paused: bool) -> None:
        """Tell trackers whether new storages are model data."""
        for monitor in self._monitors:
            if isinstance(monitor, StorageTracker):
                monitor.paused = paused

    def end(self) -> Trace:
        """End the iteration. Returns its trace, which is kept. Raises RuntimeError if none was
        begun."""
        if self._key is None:
            raise RuntimeError("end() of an iteration that was not begun; call begin() before")
        self._end_period()
        for monitor in self._monitors:
            monitor.stop()
        kind, signature = self._key
        layers, recomputed = tuple(self.layers.values()), min(self.recomputed, len(self.layers))
        traced = Trace(
            kind, signature, self._model_digest, tuple(self._moments), layers, recomputed
        )  # fmt: skip
        known = self.traces.get(self._key)
        if known is not None:
            deviation = known.deviation_of(traced)
            if deviation is not None:
                self.deviations.append(deviation)
                log.warning("an iteration left its trace, the next one is planned anew: %s",
                            deviation)  # fmt: skip
        self.traces[self._key] = traced
        self._key, self.collecting = None, False
        return traced

    def abandon(self) -> None:
        """Forget an iteration that did not end."""
        if self._key is not None:
            for monitor in self._monitors:
                monitor.stop()
            self._key, self.collecting = None, False

    def dump_memory_stats(self, path: str | Path) -> None:
        """Write all traces and deviations as JSON."""
        data = {
            "traces": [trace.to_json() for trace in self.traces.values()],
            "deviations": [str(deviation) for deviation in self.deviations],
        }
        Path(path).write_text(json.dumps(data, indent=1), encoding="utf-8")

    def _end_period(self) -> None:
        now = time.perf_counter()
        self._end_part()
        if self._moments:
            self._moments[-1] = replace(
                self._moments[-1],
                non_model_bytes=Bytes(self._most_used),
                seconds=now - self._started,
                saved_bytes=self._most_used - self._most_rest,
            )
        self._most_rest = self._most_used = 0
        self._model_before = self._model_bytes()
        self._started = time.perf_counter()

    def _end_part(self) -> None:
        """End a part of a period, in which saved bytes were no fewer than at one of its ends."""
        used, self._used = max(self._used, self._reading()), 0
        (live, away), (live_now, away_now) = self._saved_before, self._count_saved()
        used += max(away, away_now)
        saved = min(live, live_now, used)
        self._saved_before = live_now, away_now
        self._most_rest = max(self._most_rest, used - saved)
        self._most_used = max(self._most_used, used)

    def _count_saved(self) -> tuple[int, int]:
        """Bytes saved for backward, and how many of them are not on the device."""
        if self._saved is None:
            return 0, 0
        live = self._saved.live_bytes
        return live, live - self._saved.resident_bytes

    def _reading(self) -> int:
        """Most non-model bytes since the last reading."""
        model = self._model_before - self._model_at_begin
        most = certain = 0
        for monitor in self._monitors:
            counted = model if monitor.includes_model_data else 0
            most = max(most, monitor.period() - counted)
            certain = max(certain, monitor.certain_bytes - counted)
        where = str(self._moments[-1]) if self._moments else "the begin of the iteration"
        self._look(certain, where)
        return most


class Moments:
    """Begins and ends of a module's calls, told to a collector; see `CallListener`."""

    def __init__(self, collector: MemStatsCollector) -> None:
        self._collector = collector

    def begins(self, caller: Caller) -> None:
        self._collector.record("enter", caller.name, caller.params)

    def ends(self, caller: Caller, outputs: Sequence[Tensor], *, recorded: bool) -> bool:
        self._collector.record("leave", caller.name, caller.params)
        return True

    def backward_begins(self, caller: Caller, *, in_pass: bool) -> None:
        self.begins(caller)

    def backward_ends(self, caller: Caller, *, in_pass: bool) -> None:
        self._collector.record("leave", caller.name, caller.params)


@contextmanager
def listening(
    module: nn.Module,
    params: Sequence[Tensor],
    ids: Mapping[str, ParamId],
    moments: Moments,
    gather_whole: GatherWhole = has_experts,
) -> Iterator[None]:
    """Context in which a module's calls are told. params: by id. ids: of the module's parameters,
    by name."""
    saved = SavedNames(module).saved
    by_param = {id(param): ids[saved(path)] for path, param in params_by_path(module)}

    def params_of(inner: nn.Module, whole: bool) -> list[ParamId]:
        return [by_param[id(param)] for param in inner.parameters(recurse=whole)]

    calls = ModuleCalls(moments, params)
    handles = calls.hook(callers_of(module, params_of, gather_whole))
    calls.trained(lambda param: params[param].requires_grad)

    def arrived(param: ParamId) -> Callable[[Tensor], None]:
        return lambda _: calls.gradient_arrived(param)

    handles += [
        tensor.register_post_accumulate_grad_hook(arrived(ParamId(i)))
        for i, tensor in enumerate(params)
        if tensor.requires_grad
    ]
    try:
        yield
    finally:
        calls.forget()
        for handle in handles:
            handle.remove()


@contextmanager
def _noting_layers(
    module: nn.Module, collector: MemStatsCollector, saved: SavedBytes
) -> Iterator[None]:
    """Context in which a collector is told what every repeated block saves."""
    from .blocks import BegunCall, BlockMeter  # only traces ahead of a run load it

    meter = BlockMeter(saved)
    begun: dict[str, BegunCall] = {}

    def begins(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not in_backward():
            begun[name] = meter.begin((args, kwargs))

    def ends(name: str, block: nn.Module, args: Any, outputs: Any) -> None:
        if not in_backward():
            collector.add_layer(meter.end(name, begun.pop(name), outputs))

    handles = []
    for name, block in repeated_blocks(module):
        handles.append(block.register_forward_pre_hook(partial(begins, name), with_kwargs=True))
        handles.append(block.register_forward_hook(partial(ends, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def input_signature(inputs: Any) -> str:
    """Shapes and dtypes of all tensors in `inputs`, in order; a user's objects are opened."""
    leaves = tensors_in(inputs, objects=_OBJECTS)
    return ",".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in leaves)


@by_name
def trace(
    module: nn.Module,
    example_inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    precision: str = "bf16",
    kind: Kind = "train",
    gather_whole: GatherWhole = has_experts,
) -> Trace:
    """Trace one iteration on fake CPU tensors: no memory is used, nothing is computed.

    module: with values or on the meta device; it is not changed.
    example_inputs: a mapping of keyword arguments, or a tuple of positional ones; only shapes and
        dtypes matter.
    loss: a scalar from the outputs; default: `outputs.loss`, `outputs["loss"]`, or the sum of the
        outputs.
    precision: `"bf16"` or `"fp32"`, as in `GeminiDDP`; floating inputs are cast to it.
    gather_whole: as in `GeminiDDP`.

    Gradients count until they are accumulated, as in an engine, which packs and drops each. Raises
    ValueError for outputs without a gradient and no `loss`, and for inputs in objects that cannot
    be opened.
    """
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    specs = specs_of(module, str(dtype).removeprefix("torch."))
    ids = {name: ParamId(i) for i, spec in enumerate(specs) for name in spec.names}
    tracker = StorageTracker()
    saved_bytes = SavedCounter(tracker)
    collector = MemStatsCollector(specs, [tracker], saved=saved_bytes)
    with FakeTensorMode(), _GroupsInFp32():
        made = [
            torch.empty(spec.shape, dtype=dtype, requires_grad=spec.trainable) for spec in specs
        ]
        saved = SavedNames(module).saved
        actual = {path: made[ids[saved(path)]] for path, _ in params_by_path(module)}
        buffers = {
            name: torch.empty(buffer.shape, dtype=buffer.dtype)
            for name, buffer in module.named_buffers()
        }
        inputs = map_tensors(example_inputs, lambda tensor: _fake_input(tensor, dtype))
        drops = [
            param.register_post_accumulate_grad_hook(_drop_grad)
            for param in made
            if param.requires_grad
        ]
        _check_all_fake(inputs)
        tracker.ignore([*made, *buffers.values(), *tensors_in(inputs)])
        keywords = inputs if isinstance(inputs, Mapping) else {}
        positional = () if isinstance(inputs, Mapping) else inputs
        collector.begin(kind, input_signature(example_inputs))
        try:
            with (
                # not `functional_call`: checkpointed modules run again in backward
                _reparametrize_module(module, {**actual, **buffers}),
                saved_bytes.counting(collector.saved_changed),
                listening(module, made, ids, Moments(collector), gather_whole),
                _noting_layers(module, collector, saved_bytes),
                _in_one_sequence(keywords),
                torch.set_grad_enabled(kind == "train"),
            ):
                outputs = module(*positional, **keywords)
                if kind == "train":
                    (loss or _default_loss)(outputs).backward()
                del outputs
            traced = collector.end()
            # fake tensors take time too, which says nothing of real ones
            return replace(traced, moments=tuple(replace(m, seconds=0.0) for m in traced.moments))
        finally:
            collector.abandon()
            for drop in drops:
                drop.remove()


class _GroupsInFp32(TorchDispatchMode):
    """Lets products of experts in fp32 be traced: torch computes them on fake tensors in bf16
    alone, though on real ones in both."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            first, second, *others = args
            return func(first.bfloat16(), second.bfloat16(), *others, **(kwargs or {})).float()
        return func(*args, **(kwargs or {}))


@contextmanager
def _in_one_sequence(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Context in which a row is one sequence to transformers, unless positions are given.

    It asks their values, which fake ones have not, and makes a mask of rows x columns to be safe;
    of positions that a model makes by itself the answer is known.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    asks = "find_packed_sequence_indices"
    if inputs.get("position_ids") is not None or not hasattr(masks, asks):
        yield
        return
    with _MASKS:  # what one thread puts in place is no other's to put back
        before = getattr(masks, asks)
        setattr(masks, asks, lambda position_ids: None)
        try:
            yield
        finally:
            setattr(masks, asks, before)


def _fake_input(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    fake = torch.empty(tensor.shape, dtype=wanted, requires_grad=tensor.requires_grad)
    # a leaf has no place in the graph for hooks to watch
    return fake.view_as(fake) if fake.requires_grad else fake


def _check_all_fake(inputs: Any) -> None:
    for tensor in tensors_in(inputs, objects=_OBJECTS):
        if not isinstance(tensor, FakeTensor):
            raise ValueError(
                f"example_inputs hold a tensor of shape {tuple(tensor.shape)} in an object that "
                "cannot be opened; give tensors, lists, mappings or dataclasses"
            )


def _drop_grad(param: Tensor) -> None:
    param.grad = None


def _default_loss(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [t for t in tensors_in(outputs) if t.requires_grad]
    if not tensors:
        raise ValueError(
            "no output has a gradient; give `loss`, a function from the outputs to a scalar"
        )
    total = tensors[0].float().sum()
    for tensor in tensors[1:]:
        total = total + tensor.float().sum()
    return total
