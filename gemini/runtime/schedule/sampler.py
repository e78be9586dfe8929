"""Warm-up of one engine: the first iteration of a kind is sampled, moment by moment.

An engine that releases nothing has no hooks on modules: its moments are those of the root module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gemini.chunk.layout import ParamSpec
from gemini.memtracer.collector import MemStatsCollector, input_signature
from gemini.memtracer.forecast import bound, with_bytes_added
from gemini.memtracer.module_calls import Caller, is_compiled
from gemini.memtracer.monitor import PROCESS_NOISE_BYTES, ForwardTracker, SavedBytes
from gemini.memtracer.trace import Edge, Kind, Trace, TraceError
from gemini.placement.overruns import Overruns
from gemini.placement.tiers import Tier
from gemini.runtime.memory.backend import Backend
from gemini.runtime.memory.ledger import MemoryLedger
from gemini.units import ParamId

if TYPE_CHECKING:
    from gemini.memtracer.decoding import Decoding

    from .recompute import Layers

log = logging.getLogger("gemini")

MAX_SIGNATURES = 16  # of which traces are kept: those of the last used, and the largest


class Sampler:
    """Sampler of one engine: collects traces and hands each to `traced`.

    An iteration is sampled if none of its kind and signature was before, or if the last such one
    left its plan.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        backend: Backend,
        ledger: MemoryLedger,
        traced: Callable[[Trace], None],
        overruns: Overruns,
        given: Sequence[Trace],
    ) -> None:
        """given: traces that came with the module, as good as measured ones."""
        self._specs, self._given = specs, given
        self._device = backend.device.type
        self._everything = tuple(ParamId(i) for i in range(len(specs)))
        self._ledger = ledger
        self._overruns = overruns
        ledger.judge_by(overruns)
        self._traced = traced
        self.layers: Layers | None = None  # that may be computed again; None: none may
        self._key: tuple[Kind, str] | None = None  # of the iteration that began last
        self._cache_bytes: tuple[int, int] | None = None  # now and at most, of a decode step
        self._stale: set[tuple[Kind, str]] = set()  # iterations of these left their plan
        # the most bytes on the device in the last sampled iteration, and of each trace
        self._most_bytes = 0
        self.device_peaks: dict[tuple[Kind, str], int] = {}
        self._tracker = ForwardTracker() if backend.device.type == "cpu" else None
        # Memory that the allocator reuses does not raise the resident size, so operators are
        # counted too.
        monitor = backend.monitor()
        self.measures = monitor is not None
        monitors = [m for m in (monitor, self._tracker) if m is not None]
        apart = backend.has_host_tier  # host memory is no memory of the device
        counted = ledger.device_bytes if apart else ledger.memory_bytes
        overruns.noise_bytes = 0 if apart else PROCESS_NOISE_BYTES
        self.collector = MemStatsCollector(specs, monitors, counted, self._look)
        self.collector.deviations = overruns.found
        self.is_visiting = False

    def count_saved(self, saved: SavedBytes) -> None:
        """Count what autograd saves, in traces to come."""
        self.collector.count_saved(saved)

    def saved_changed(self, moved: bool) -> None:
        """Note that some of it is new or read, or has moved; see `MemStatsCollector`."""
        self.collector.saved_changed(moved)

    def recompute(self, layers: Layers) -> None:
        """Let `layers` choose which of them each iteration computes again."""
        self.layers = layers

    @property
    def is_measuring(self) -> bool:
        """Whether the iteration under way is sampled."""
        return self.collector.collecting

    def traces(self, kind: Kind | None = None) -> list[Trace]:
        """Traces of one kind, or of all; the last one of each signature."""
        traces = self.collector.traces.items()
        return [trace for (found, _), trace in traces if kind in (None, found)]

    def begin(self, inputs: Any, *, again: bool) -> None:
        """Begin to sample, if needed: a root forward is next. again: the last one left its plan."""
        self.end()
        if again and self._key is not None:
            self._stale.add(self._key)
        kind: Kind = "train" if torch.is_grad_enabled() else "eval"
        traces = self.collector.traces
        self._key = key = (kind, self._signature(kind, inputs))
        if self.layers is not None and self.layers.proves:
            return
        if key in traces:
            traces[key] = traces.pop(key)  # used last
            if key not in self._stale:
                return
        elif len(traces) >= MAX_SIGNATURES:
            self._forget_one(kind)
        self._stale.discard(key)
        self._most_bytes = 0  # peaks are of training, once there was some
        if kind == "train" or not self.traces("train"):
            self._ledger.take_peaks(anew=kind == "train")
        self.collector.begin(*key)
        step = _decoding(kind, inputs)
        self._cache_bytes = None if step is None else step.cache_bytes(inputs)
        if self.layers is not None:
            self.collector.recomputed = len(self.layers.names)

    def _signature(self, kind: Kind, inputs: Any) -> str:
        """Signature of inputs, and of the layers that are computed again."""
        if (decoding := _decoding(kind, inputs)) is not None:
            return decoding.signature
        signature = input_signature(inputs)
        return signature if self.layers is None else self.layers.choose(kind, signature)

    def choose_again(self, inputs: Any) -> None:
        """Begin the iteration anew if other layers are computed again by now: it was planned."""
        if self.layers is not None and self._key is not None:
            kind, signature = self._key
            if self._signature(kind, inputs) != signature:
                self.abandon()
                self.begin(inputs, again=False)

    def _forget_one(self, kind: Kind) -> None:
        """Forget the trace that was not used the longest, and is not the largest of this kind; one
        of this kind, if there are others: prompts of many lengths forget nothing of training."""
        traces = self.collector.traces
        mine = [trace for trace in traces.values() if trace.kind == kind]
        largest = max(mine, key=lambda trace: trace.peak_non_model_bytes, default=None)
        others = [key for key, trace in traces.items() if trace is not largest]
        key = next((key for key in others if key[0] == kind), others[0])
        del traces[key]
        self._stale.discard(key)

    def expected(self) -> Trace | None:
        """What the iteration that began last asks for: as it was measured, else a bound; None:
        nothing like it was measured."""
        if self._key is None:
            return None
        known = *self._given, *self.collector.traces.values()
        if self.layers is not None:
            known = tuple(self._as_chosen(trace) for trace in known)
        return self.measured() or bound(known, *self._key)

    def _as_chosen(self, trace: Trace) -> Trace:
        """Forecast of what was measured, with the layers of this iteration computed again."""
        from gemini.memtracer.layers import recomputing

        assert self.layers is not None
        return recomputing(trace, len(self.layers.names)) if trace.kind == "train" else trace

    def measured(self) -> Trace | None:
        """Trace of the iteration that began last, or of one like it."""
        return None if self._key is None else self.collector.traces.get(self._key)

    def keep(self, trace: Trace) -> None:
        """Keep this trace of such iterations: one asked for more than the trace there was."""
        self.collector.traces[trace.kind, trace.signature] = trace

    def forget(self, trace: Trace) -> None:
        """Forget a trace, so that such an iteration is sampled again: libraries may have allocated
        in the first one alone."""
        self.collector.traces.pop((trace.kind, trace.signature), None)

    def abandon(self) -> None:
        """Forget the iteration that began last, as it was broken off: it is sampled again."""
        if self.collector.collecting and self._key is not None:
            self._ledger.keep_peaks()
            self._stale.add(self._key)
            self.collector.abandon()

    def specs_changed(self, specs: Sequence[ParamSpec]) -> None:
        """Sample training again: frozen parameters are trained now, so iterations are others."""
        self._specs = specs
        self.remeasure()

    def remeasure(self) -> None:
        """Sample training again: its traces were measured in other homes."""
        self._stale.update(key for key in self.collector.traces if key[0] == "train")

    def state_dict(self) -> dict[str, Any]:
        """All traces, for a checkpoint."""
        return {
            "device": self._device,
            "traces": [trace.to_json() for trace in self.collector.traces.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, told_apart: bool) -> None:
        """Hand on the traces of an earlier run; the coming iteration is sampled all the same.

        told_apart: whether inputs are told apart here, as they are where chunks move. Traces with
        the other answer, of another kind of device or of another model are ignored.
        """
        for data in state["traces"] if state["device"] == self._device else ():
            try:
                trace = Trace.from_json(data)
                trace.check_model(self._specs)
            except TraceError as error:
                log.info("a trace of the checkpoint is not used: %s", error)
                continue
            if bool(trace.signature) == told_apart:
                self._traced(trace)

    def tracking(
        self, module: nn.Module, model_data: Callable[[], Iterable[Tensor]]
    ) -> AbstractContextManager[None]:
        """Context around the forward that `begin` announced. Compiled code is left alone."""
        if self._tracker is None or not self.collector.collecting:
            return nullcontext()
        if torch.compiler.is_compiling():
            return nullcontext()
        if any(is_compiled(inner) for inner in module.modules()):
            return nullcontext()
        self._tracker.ignore((*model_data(), *module.buffers()))
        return self._tracker.tracking()

    @property
    def key(self) -> tuple[Kind, str]:
        """Kind and signature of the iteration that began last."""
        assert self._key is not None
        return self._key

    @property
    def signature(self) -> str:
        """Signature of the inputs of the iteration that began last."""
        return "" if self._key is None else self._key[1]

    def at_root(self, edge: Edge) -> None:
        """Record an edge of the root module's forward or backward; nothing below it is hooked."""
        if self.collector.collecting:
            self.collector.record(edge, "", self._everything)

    def record(self, edge: Edge, caller: Caller) -> None:
        """Record that a call begins or has ended."""
        params = caller.traced or caller.params
        if self.collector.collecting and params and not self.is_visiting:
            self.collector.record(edge, caller.name, params)

    def begin_visit(self) -> None:
        """Record no calls until `end_visit`: one call of the trace stands for all that a layer has
        with all micro-batches."""
        self.is_visiting = True

    def end_visit(self) -> None:
        self.is_visiting = False

    def end(self) -> None:
        """End the iteration, as its step or another forward begins."""
        if not self.collector.collecting:
            self._overruns.settle()
            return
        if not self.collector.heard:  # broken off before its first call
            self.abandon()
            return
        self._ledger.keep_peaks()
        trace = self.collector.end()
        if self._cache_bytes is not None:  # it begins with a cache, which only grows
            trace = with_bytes_added(trace, self._cache_bytes[1])
            self._most_bytes += self._cache_bytes[0]
            self.keep(trace)
        self._overruns.settle()
        kept = self.collector.traces
        self.device_peaks = {key: n for key, n in self.device_peaks.items() if key in kept}
        self.device_peaks[trace.kind, trace.signature] = self._most_bytes
        self._traced(trace)

    def _look(self, non_model_bytes: int, where: str) -> None:
        """Check the budget at a period's end; its model data is what the ledger has now."""
        model_bytes = self._ledger.device_bytes()
        self._most_bytes = max(self._most_bytes, model_bytes + non_model_bytes)
        if self._overruns.limits_device:
            self._overruns.check(Tier.DEVICE, model_bytes, non_model_bytes, f"at {where}")


def _decoding(kind: Kind, inputs: Any) -> Decoding | None:
    """Decode step with these inputs, of iterations of this kind; None: it is none."""
    if kind == "train":
        return None
    from gemini.memtracer.decoding import decoding_of  # only who evaluates loads it

    return decoding_of(inputs)
