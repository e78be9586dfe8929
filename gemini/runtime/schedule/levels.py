"""Iterations of several ranks, told apart by what the largest of them asks for. Pure.

Inputs differ between ranks and one plan is for all, so they agree on a number alone: the bytes that
the largest of their iterations asks for, rounded up. A level has a trace of its own once all ranks
have measured an iteration of it; before that every moment counts as its peak.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.memtracer.forecast import with_bytes_added
from gemini.memtracer.trace import Trace
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

    @property
    def signature(self) -> str:
        """Name of the present level, as the signature of inputs."""
        return f"level {self._now}" if self._now else ""

    @property
    def is_measured(self) -> bool:
        return self._now in self._known

    @property
    def asks(self) -> bool:
        """Whether the traces of an iteration of this level are wanted."""
        return self._now > 0 and not self.is_measured

    def begin(self, nbytes: int) -> Trace | None:
        """Trace of an iteration of which the largest asks for so many bytes; 0: nobody knows."""
        self._now = rounded_up(nbytes)
        if not self._now or self.like is None:
            return None
        known = self._known.pop(self._now, None)
        if known is not None:
            self._known[self._now] = known  # used last
            return known
        moments = tuple(replace(m, non_model_bytes=Bytes(self._now)) for m in self.like.moments)
        return replace(self.like, signature=self.signature, moments=moments)

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
