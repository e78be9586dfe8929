"""Room in the middle of an iteration: where a forward takes more than was known, state leaves.

A look at a block's call compares what the device holds with the budget. Parameters cannot leave
there, as the graph has views of them; state and payloads that no call uses can.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once
from torch.utils.hooks import RemovableHandle

from gemini.memtracer.forecast import covers, grown
from gemini.memtracer.module_calls import blocks_of, in_backward
from gemini.memtracer.trace import Trace
from gemini.placement.tiers import Tier
from gemini.runtime.passes import Passes, taking_turns
from gemini.runtime.schedule.planning import PlanInUse
from gemini.runtime.schedule.sampler import MAX_SIGNATURES
from gemini.runtime.sharding import Sharding
from gemini.runtime.step.homes import MovingHomes

log = logging.getLogger("gemini")


class Midway:
    """Looks of one engine, at one rank, where a budget of the device limits activations."""

    def __init__(
        self, sharding: Sharding, in_use: PlanInUse, passes: Passes, homes: MovingHomes
    ) -> None:
        self._sharding, self._passes, self._homes = sharding, passes, homes
        self._planning, self._sampler, self._ledger = in_use.planning, in_use.sampler, in_use.ledger
        self._collector = self._sampler.collector
        # bytes besides model data at each look of forwards like one, and at its end; last used last
        self._known: dict[tuple[str, str], list[int]] = {}
        self._seen: list[int] | None = None  # of this forward; None: nobody looks
        self._like: list[int] = []  # what is known of forwards like this one
        self.most_bytes = 0  # that one call has added
        self._base = 0  # bytes of others

    def hook(self, root: nn.Module) -> list[RemovableHandle]:
        """Look at every block's call, if homes follow what iterations ask for. Returns hooks."""
        counts = self._planning.homes_follow and self._sharding.backend.has_host_tier
        if not counts or self._sharding.comm.world_size > 1:
            return []
        return [
            module.register_forward_pre_hook(self._before_call, prepend=True)
            for module in dict.fromkeys(blocks_of(root))
        ]

    def begin(self) -> None:
        """Begin a forward that the sampler knows the inputs of."""
        self._seen = None
        if not self._homes.follow_alone:
            return
        in_use = self._sharding.backend.bytes_in_use()
        if in_use is not None:
            self._base = in_use - self._ledger.device_bytes()
            self._seen, self._like = [], self._known.get(self._sampler.key, [])
            self.most_bytes = max((b - a for a, b in pairwise(self._like)), default=0)

    @_disable_dynamo
    def _before_call(self, module: nn.Module, args: Any) -> None:
        if not (self._seen is None or in_backward() or self._passes.is_elsewhere()):
            self._look(is_end=False)

    def end(self, *, failed: bool) -> None:
        """End the forward, and make room for its loss and its backward: what it took more, or less,
        than a known one did, they will, too."""
        if self._seen is None or failed:
            self._seen = None
            return
        self._look(is_end=True)
        seen, like = self._seen, self._like
        self._seen = None
        forecast = self._forecast(seen[-1])
        key = self._sampler.key
        self._known.pop(key, None)
        self._known[key] = [max(both) for both in zip_longest(seen, like, fillvalue=0)]
        if len(self._known) > MAX_SIGNATURES:
            del self._known[next(iter(self._known))]
        if forecast is None:
            return
        if self._sampler.measured() is not None and not self._collector.collecting:
            self._sampler.keep(forecast)
        waiting = self._homes.waiting_bytes()
        if torch.is_grad_enabled() and not self._planning.has_room(forecast, waiting):
            self._demote_state("backward")

    def _forecast(self, at_end: int) -> Trace | None:
        """Trace of an iteration whose forward ended with so many bytes: a known one in proportion.

        None where it asks for no more than was known before the forward.
        """
        sampler = self._sampler
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
        seen = self._seen
        in_use = self._sharding.backend.bytes_in_use()
        if in_use is None or seen is None:
            return
        held = in_use - self._base
        other = held - self._ledger.device_bytes()
        self.most_bytes = max(self.most_bytes, other - seen[-1] if seen else 0)
        seen.append(other)
        as_known = len(seen) <= len(self._like) and other <= self._like[len(seen) - 1]
        overruns = self._planning.overruns
        budget = overruns.limits[Tier.DEVICE]
        if as_known or held + (0 if is_end else self.most_bytes) <= budget:
            return
        where = "in the middle of a forward"
        overruns.check(Tier.DEVICE, held - other, other, where)
        if is_end:
            return
        self._collector.before_change()
        self._homes.release_idle()
        self._collector.after_change()
        if self._ledger.device_bytes() + other + self.most_bytes > budget:
            self._demote_state("forward")

    def _demote_state(self, part: str) -> None:
        self._collector.before_change()
        self._homes.demote_all_state(part)
        self._collector.after_change()
