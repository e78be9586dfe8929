"""Room in the middle of an iteration: where a forward takes more than was known, state leaves.

A look at a block's call compares what the device holds with the budget. Parameters cannot leave
there, as the graph has views of them; state and payloads that no call uses can.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from gemini.memtracer.forecast import covers, grown
from gemini.memtracer.module_calls import blocks_of, in_backward
from gemini.memtracer.trace import Trace
from gemini.placement.tiers import Tier
from gemini.runtime.parts import Parts, is_elsewhere, taking_turns
from gemini.runtime.schedule.sampler import MAX_SIGNATURES
from gemini.runtime.step.homes import MovingHomes, waiting_bytes

log = logging.getLogger("gemini")


class Midway:
    """Looks of one engine, at one rank, where a budget of the device limits activations."""

    def __init__(self, parts: Parts, homes: MovingHomes) -> None:
        self._parts = weakref.proxy(parts)
        self._homes = homes
        # bytes besides model data at each look of forwards like one, and at its end; last used last
        self._known: dict[tuple[str, str], list[int]] = {}
        self._seen: list[int] | None = None  # of this forward; None: nobody looks
        self._like: list[int] = []  # what is known of forwards like this one
        self._most = 0  # that one call has added
        self._base = 0  # bytes of others

    def hook(self, root: nn.Module) -> None:
        """Look at every block's call, if homes follow what iterations ask for."""
        parts = self._parts
        counts = parts.planning.homes_follow and parts.backend.has_host_tier
        if not counts or parts.comm.world_size > 1:
            return
        for module in dict.fromkeys(blocks_of(root)):
            hook = module.register_forward_pre_hook(self._before_call, prepend=True)
            parts.hook_handles.append(hook)

    def begin(self) -> None:
        """Begin a forward that the sampler knows the inputs of."""
        parts = self._parts
        self._seen = None
        if not parts.planning.homes_follow or parts.target is None or parts.comm.world_size > 1:
            return
        in_use = parts.backend.bytes_in_use()
        if in_use is not None:
            self._base = in_use - parts.ledger.device_bytes()
            self._seen, self._like = [], self._known.get(parts.sampler.key, [])
            self._most = max((b - a for a, b in pairwise(self._like)), default=0)

    @_disable_dynamo
    def _before_call(self, module: nn.Module, args: Any) -> None:
        if not (self._seen is None or in_backward() or is_elsewhere(self._parts)):
            self._look(is_end=False)

    def end(self, *, failed: bool) -> None:
        """End the forward, and make room for its loss and its backward: what it took more, or less,
        than a known one did, they will, too."""
        if self._seen is None or failed:
            self._seen = None
            return
        self._look(is_end=True)
        parts, seen, like = self._parts, self._seen, self._like
        self._seen = None
        forecast = self._forecast(seen[-1])
        key = parts.sampler.key
        self._known.pop(key, None)
        self._known[key] = [max(both) for both in zip_longest(seen, like, fillvalue=0)]
        if len(self._known) > MAX_SIGNATURES:
            del self._known[next(iter(self._known))]
        if forecast is None:
            return
        if parts.sampler.measured() is not None and not parts.sampler.collector.collecting:
            parts.sampler.keep(forecast)
        if torch.is_grad_enabled() and not parts.planning.has_room(forecast, waiting_bytes(parts)):
            self._sink("backward")

    def _forecast(self, at_end: int) -> Trace | None:
        """Trace of an iteration whose forward ended with so many bytes: a known one in proportion.

        None where it asks for no more than was known before the forward.
        """
        sampler = self._parts.sampler
        kind, signature = sampler.key
        expected, own = sampler.expected(), sampler.measured()
        traces = sampler.traces(kind) if own is None else [own]
        known = [(self._known[kind, t.signature][-1], t) for t in traces
                 if (kind, t.signature) in self._known]  # fmt: skip
        if not known:
            return None
        end, like = min(known, key=lambda pair: abs(pair[0] - at_end))
        if end <= 0 or (like is own and at_end <= end):
            return None
        forecast = replace(grown(like, at_end / end), signature=signature)
        return None if expected is not None and covers(expected, forecast) else forecast

    @taking_turns
    def _look(self, *, is_end: bool) -> None:
        parts, seen = self._parts, self._seen
        in_use = parts.backend.bytes_in_use()
        if in_use is None or seen is None:
            return
        held = in_use - self._base
        other = held - parts.ledger.device_bytes()
        self._most = max(self._most, other - seen[-1] if seen else 0)
        seen.append(other)
        as_known = len(seen) <= len(self._like) and other <= self._like[len(seen) - 1]
        budget = int(parts.planning.inputs.budgets.device)
        if as_known or held + (0 if is_end else self._most) <= budget:
            return
        parts.planning.overruns.check(
            Tier.DEVICE, held - other, other, "in the middle of a forward"
        )
        if is_end:
            return
        parts.sampler.collector.before_change()
        parts.manager.make_room()
        parts.sampler.collector.after_change()
        if parts.ledger.device_bytes() + other + self._most > budget:
            self._sink("forward")

    def _sink(self, part: str) -> None:
        collector = self._parts.sampler.collector
        collector.before_change()
        self._homes.sink_state(part)
        collector.after_change()
