"""Bounds: what an iteration with inputs of other shapes asks for at most, from known traces. Pure.

Bytes of a period are a maximum of sums of storages, and a storage's bytes are a product of sizes of
the inputs and constants, none of them negative. The batch enters once, a length at most twice
(attention that writes its weights, or has a mask). So bytes never fall as a size grows, they are
convex along one size, and so are bytes by the size, as no term is negative; and from inputs that
are r times as long they grow by r * r at most. Four bounds follow: a larger known trace, the chord
between two, the chord of bytes by the size, growth from a smaller one. At every moment the least of
them counts.

Between sizes l and r * l, bytes that are one sum c + d n + e n^2 are passed by at most a share of
(sqrt(r) - 1)^2 / (2 sqrt(r)): 1/4 for r = 4, where the first chord alone has 9/16. No bound is
nearer for what two traces say. Where another sum becomes the maximum between them, truth may be
half of it for r = 4.

What is saved for backward all through a period is one such sum, and the rest is a maximum of sums:
the other storages, whenever. So both numbers of a moment are bounded alike. As a sum of two least
bounds is at most the least bound of the sum, bytes less those saved are not below the rest either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

import numpy as np
import numpy.typing as npt

from gemini.units import Bytes

from .layers import least_of
from .trace import Kind, Trace

Sizes = tuple[tuple[int, ...], ...]  # of every input, in order
_ROUNDING = 1e-14  # of products of a few numbers, relative
_Row = npt.NDArray[np.float64]  # bytes of every period
_Known = tuple[Sizes, _Row]
_INPUT = re.compile(r"([a-z0-9_]+)\[([0-9, ]*)\]")
# Tensors with a size of 1 are contiguous in any order, which saves some copies: from them bytes
# grow by more
_FROM_ONE = 1.3


def sizes_of(signature: str) -> tuple[str, Sizes]:
    """What two signatures must share, dtypes and numbers of dimensions, and the sizes."""
    found = [
        (dtype, tuple(int(n) for n in dims.split(",") if n.strip()))
        for dtype, dims in _INPUT.findall(signature)
    ]
    return ",".join(f"{dtype}{len(dims)}" for dtype, dims in found), tuple(d for _, d in found)


def bound(traces: Iterable[Trace], kind: Kind, signature: str) -> Trace | None:
    """Trace that an iteration to come does not pass; None where nothing like it was measured.

    An evaluation that is like none before asks for no more than the forward of training.
    """
    form, sizes = sizes_of(signature)
    known = [(trace, *sizes_of(trace.signature)) for trace in traces]
    like = [(trace, of) for trace, its, of in known if its == form and trace.kind == kind]
    if not like and kind == "eval":
        like = [(forward_of(trace), of) for trace, its, of in known if its == form]
    if not like or not sizes:
        return None
    events = _events(like[-1][0])
    like = [(trace, of) for trace, of in like if _events(trace) == events]
    bytes_, saved = (
        _least_bound([(of, row(trace)) for trace, of in like], sizes) for row in (_bytes, _saved)
    )
    layers = least_of([trace for trace, _ in like])
    return _with_bytes(replace(like[-1][0], signature=signature, layers=layers), bytes_, saved)


def _least_bound(like: Sequence[_Known], sizes: Sizes) -> _Row:
    bounds = [mine * (_growth(of, sizes) * _margin(sizes, of)) for of, mine in like]
    for low, high in permutations(like, 2):
        bounds += _chords(low, sizes, high)
    least: _Row = np.min(np.array(bounds), axis=0)
    return least


def envelope(traces: Sequence[Trace]) -> Trace:
    """The last trace with the most of every period of all of them, saved and of the rest; those of
    other calls count with their peak, as if nothing were saved."""
    last = traces[-1]
    events = _events(last)
    rest, saved = [_bytes(last) - _saved(last)], [_saved(last)]
    for trace in dict.fromkeys(traces[:-1]):
        if _events(trace) == events:
            rest.append(_bytes(trace) - _saved(trace))
            saved.append(_saved(trace))
        else:
            rest.append(np.full(len(last.moments), trace.peak_non_model_bytes, np.float64))
    most = np.max(np.array(saved), axis=0)
    return _with_bytes(last, np.max(np.array(rest), axis=0) + most, most, keep_seconds=True)


def covers(known: Trace, trace: Trace, noise_bytes: int = 0) -> bool:
    """Whether an iteration asks nowhere for more than a known one, nor for more that cannot leave
    the device, if that was counted."""
    if len(known.moments) != len(trace.moments):
        return trace.peak_non_model_bytes <= known.peak_non_model_bytes + noise_bytes
    mine, its = _bytes(trace), _bytes(known)
    if (
        trace.peak_saved_bytes
        and not (mine - _saved(trace) <= its - _saved(known) + noise_bytes).all()
    ):
        return False
    return bool((mine <= its + noise_bytes).all())


def with_bytes_added(trace: Trace, nbytes: int | Sequence[int]) -> Trace:
    """Trace with more (negative: with less) at every moment, the same or its own number. None of
    it is saved for backward."""
    most = np.maximum(_bytes(trace) + np.asarray(nbytes), 0)
    return _with_bytes(trace, most, _saved(trace), keep_seconds=True)


def without_saved(trace: Trace) -> Trace:
    """Trace of which nobody has counted what is saved: all of it stays."""
    if not trace.peak_saved_bytes:
        return trace
    return replace(trace, moments=tuple(replace(m, saved_bytes=0) for m in trace.moments))


def forward_of(trace: Trace) -> Trace:
    """Trace of an evaluation that asks for what the forward of training does."""
    moments = tuple(moment for moment in trace.moments if moment.phase == "forward")
    return replace(trace, kind="eval", moments=moments, layers=(), recomputed=0)


def grown(trace: Trace, factor: float) -> Trace:
    """Trace with so many times the bytes at every moment."""
    most, saved = _bytes(trace) * factor, _saved(trace) * factor
    return _with_bytes(trace, most, saved, keep_seconds=True)


def _with_bytes(trace: Trace, most: _Row, saved: _Row, *, keep_seconds: bool = False) -> Trace:
    # bytes are whole: what bounds them still does rounded down, which leaves the rest its bound
    saved = np.floor(saved * (1 + _ROUNDING))
    moments = tuple(
        replace(
            moment,
            non_model_bytes=Bytes(int(nbytes)),
            seconds=moment.seconds if keep_seconds else 0.0,
            saved_bytes=int(min(of_it, nbytes)),
        )
        for moment, nbytes, of_it in zip(trace.moments, np.ceil(most), saved, strict=True)
    )
    return replace(trace, moments=moments)


def _bytes(trace: Trace) -> _Row:
    return np.array([moment.non_model_bytes for moment in trace.moments], np.float64)


def _saved(trace: Trace) -> _Row:
    return np.array([moment.saved_bytes for moment in trace.moments], np.float64)


def _events(trace: Trace) -> list[object]:
    return [moment.event for moment in trace.moments]


def _growth(old: Sizes, new: Sizes) -> float:
    """Factor by which bytes grow at most. The first of several sizes is the batch."""
    batch = length = 1.0
    for was, now in zip(old, new, strict=True):
        ratios = [max(1.0, b / max(1, a)) for a, b in zip(was, now, strict=True)]
        if len(ratios) > 1:
            batch = max(batch, ratios.pop(0))
        length = max(length, prod(ratios))
    return batch * length * length


def _margin(new: Sizes, *known: Sizes) -> float:
    """Factor for what a size of 1 in the known inputs hides."""
    pairs = [
        (a, b)
        for old in known
        for was, now in zip(old, new, strict=True)
        for a, b in zip(was, now, strict=True)
    ]
    return _FROM_ONE if any(a <= 1 < b for a, b in pairs) else 1.0


def _chords(low: _Known, new: Sizes, high: _Known) -> list[_Row]:
    """Chords from one to the other, of bytes and of bytes by the size; none where `new` is not on
    the way, along which one size grows."""
    steps = dict.fromkeys(
        (x, y, z)
        for a, n, b in zip(low[0], new, high[0], strict=True)
        for x, y, z in zip(a, n, b, strict=True)
        if not x == y == z
    )
    x, y, z = next(iter(steps)) if len(steps) == 1 else (0, 0, 0)
    if not x < y < z:
        return []
    place, (_, mine), (_, theirs) = (y - x) / (z - x), low, high
    by_size = y * (mine / x + place * (theirs / z - mine / x))
    margin = _margin(new, low[0], high[0])
    return [(mine + place * (theirs - mine)) * margin, by_size * margin]
