"""Iterations of several ranks, told apart by what the largest of them asks for. Pure.

Inputs differ between ranks and one plan is for all, so they agree on a number alone: the bytes that
the largest of their iterations asks for, rounded up. A level has a trace of its own once all ranks
have measured an iteration of it; before that, and in evaluation, every moment counts as its peak.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.memtracer.forecast import forward_of, with_bytes_added
from gemini.memtracer.trace import Kind, Trace
from gemini.placement.renting import rounded_up
from gemini.units import Bytes

MAX_LEVELS = 32


class Levels:
    """Levels of one engine: the same on all ranks.

    like: a trace of all ranks, whose calls those of the others are; None: there is none yet.
    """

    def __init__(self) -> None:
        self.like: Trace | None = None
        self._known: dict[int, Trace] = {}
        self._now = 0  # of the last iteration; 0: nobody knew what it asks for
        self._kind: Kind = "train"  # of the last iteration

    @property
    def signature(self) -> str:
        """Name of the present level, as the signature of inputs."""
        return f"level {self._now}" if self._now else ""

    @property
    def is_measured(self) -> bool:
        return self._kind == "train" and self._now in self._known

    @property
    def asks(self) -> bool:
        """Whether the traces of an iteration of this level are wanted."""
        return self._now > 0 and self._kind == "train" and not self.is_measured

    def begin(self, nbytes: int, kind: Kind = "train") -> Trace | None:
        """Trace of an iteration of which the largest asks for so many bytes; 0: nobody knows."""
        self._now, self._kind = rounded_up(nbytes), kind
        if not self._now or self.like is None:
            return None
        if self.is_measured:
            known = self._known[self._now] = self._known.pop(self._now)  # used last
            return known
        like = self.like if kind == "train" else forward_of(self.like)
        moments = tuple(
            replace(m, non_model_bytes=Bytes(self._now), saved_bytes=0) for m in like.moments
        )
        return replace(like, signature=self.signature, moments=moments)

    def take(self, reduced: Trace | None) -> None:
        """Take the trace that ranks have measured together; None where they ran other calls, and
        the level stays as it was assumed."""
        assumed = self.begin(self._now)
        found = assumed
        if reduced is not None:
            more = max(0, self._now - reduced.peak_non_model_bytes)
            found = replace(with_bytes_added(reduced, more), signature=self.signature)
        if found is not None:
            self._known[self._now] = found
        if len(self._known) > MAX_LEVELS:
            del self._known[next(iter(self._known))]
