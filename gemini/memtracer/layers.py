"""Layers of a trace: what each saves for backward, and the forecast of an iteration in which some
are computed again in backward. Pure.

A layer that is computed again keeps what it was given, and what it saves lives a second time as its
backward begins. The first layers come first: what they save stays the longest, and when their
backward comes what the others saved is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemini.units import Bytes

from .trace import Layer, Trace, TraceMoment

_CHOICE = "; recomputed: "


def chosen(signature: str, number: int) -> str:
    """Signature of inputs with the number of layers that are computed again: traces of one choice
    are not taken for another's."""
    plain = without_choice(signature)
    return f"{plain}{_CHOICE}{number}" if number else plain


def without_choice(signature: str) -> str:
    """Signature of the inputs alone."""
    return signature.partition(_CHOICE)[0]


@dataclass(frozen=True, slots=True)
class _Span:
    """Moments of a layer, first and last: of its forward and of its backward. `alone`: none of the
    trace's moments is of a layer, and these are of the whole model."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    alone: bool = True


def with_seconds(trace: Trace, seconds: Sequence[float]) -> Trace:
    """Trace that nobody timed, with seconds of every moment, and of layers what their moments take
    in forward."""
    moments = tuple(replace(m, seconds=s) for m, s in zip(trace.moments, seconds, strict=True))
    spans = [_span(trace.moments, layer.name) for layer in trace.layers]
    layers = tuple(
        replace(layer, seconds=sum(seconds[span.forward[0] : span.forward[1] + 1]))
        if span is not None and span.alone
        else layer
        for layer, span in zip(trace.layers, spans, strict=True)
    )
    return replace(trace, moments=moments, layers=layers)


def recomputing(trace: Trace, number: int) -> Trace:
    """Forecast of the iteration of `trace` if the first `number` of its layers are computed again.

    The calls are those of `trace`: the ones that come twice are measured with the first such
    iteration. Bytes are bounds, as long as a layer saves as much the second time. Nothing counts
    twice: a layer's backward needs what it needed before, or its forward beside the gradient that
    arrives.
    """
    number = min(number, len(trace.layers))
    if number == trace.recomputed:
        return trace
    saved = [m.saved_bytes for m in trace.moments]
    rest = [int(m.rest_bytes) for m in trace.moments]
    seconds = [m.seconds for m in trace.moments]
    before = list(saved)
    again: dict[int, list[int]] = {}  # bytes that live twice, of layers without moments
    for i, layer in enumerate(trace.layers):
        change = (i < number) - (i < trace.recomputed)  # 1: it is computed again from now on
        span = _span(trace.moments, layer.name)
        if not change or span is None:
            continue
        freed = max(0, layer.saved_bytes - layer.input_bytes)
        (first, last), (back, end) = span.forward, span.backward
        seconds[back] += change * layer.seconds
        if not span.alone:
            for j in range(first, end + 1):
                saved[j] -= change * freed
            again.setdefault(back, []).append(layer.saved_bytes)
            continue
        for j in range(last, back):
            saved[j] -= change * freed
        if change < 0:
            for j in range(back, end + 1):
                saved[j] += freed
            continue
        # its forward in backward: beside what is there then, as much as in forward
        grown = [max(0, n - before[first]) for n in before]
        forward = max((grown[j] + rest[j] for j in range(first, last)), default=0)
        forward += min(rest[back - 1], rest[back]) + layer.input_bytes
        for j in (*range(first, last), *range(back, end + 1)):
            saved[j] -= grown[j]
            rest[j] += grown[j] + (layer.input_bytes if j >= back else 0)
        rest[back] = max(rest[back], forward)
    for back, twice in again.items():
        rest[back] += max(twice) if number > trace.recomputed else 0
    moments = tuple(
        replace(
            m, saved_bytes=there, non_model_bytes=Bytes(max(0, more) + there),
            seconds=max(0.0, lasts),
        )
        for m, there, more, lasts in zip(
            trace.moments, (max(0, n) for n in saved), rest, seconds, strict=True
        )
    )  # fmt: skip
    signature = chosen(trace.signature, number)
    return replace(trace, signature=signature, moments=moments, recomputed=number)


def _span(moments: Sequence[TraceMoment], name: str) -> _Span | None:
    """Moments of a layer; None where it has no backward."""

    def of(phase: str, *, all_: bool = False) -> tuple[int, int] | None:
        mine = [
            i
            for i, m in enumerate(moments)
            if m.phase == phase and (all_ or m.module == name or m.module.startswith(f"{name}."))
        ]
        return (mine[0], mine[-1]) if mine else None

    forward, backward = of("forward"), of("backward")
    if forward is not None and backward is not None:
        return _Span(forward, backward)
    whole, back = of("forward", all_=True), of("backward", all_=True)
    if whole is None or back is None:
        return None
    return _Span(whole, (back[0], back[0]), alone=False)


def least_of(traces: Sequence[Trace]) -> tuple[Layer, ...]:
    """Layers with the least bytes of these traces, which no such layer of longer inputs saves less
    of; none where they have others."""
    first, *others = (trace.layers for trace in traces)
    for other in others:
        if [layer.name for layer in other] != [layer.name for layer in first]:
            return ()
        first = tuple(
            replace(
                a,
                saved_bytes=Bytes(min(a.saved_bytes, b.saved_bytes)),
                input_bytes=Bytes(max(a.input_bytes, b.input_bytes)),
            )
            for a, b in zip(first, other, strict=True)
        )
    return first
