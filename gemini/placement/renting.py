"""When data is promoted again: rent against buying. Pure.

What lives lower than recent iterations ask for costs seconds in each of them; when these add up to
what it costs to bring it up, and down again, it comes up. So whatever batches come, iterations and
moves cost at most twice what the best moves would have cost, made by one who knows all batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gemini.memtracer.forecast import envelope
from gemini.memtracer.trace import Trace
from gemini.placement.cost import link_seconds
from gemini.placement.plan import Plan
from gemini.placement.problem import PlanInputs
from gemini.placement.result import PlanResult
from gemini.placement.sizes import Bandwidths
from gemini.placement.tiers import Tier
from gemini.units import ChunkId, format_bytes

LOOKS = (2, 4, 8)  # iterations that are looked back at; one promotes nothing

_KNOWN = {True: "measured", False: "a bound"}

Moved = Mapping[tuple[Tier, Tier], int]  # bytes, by where from and where to


def promoted_bytes(low: Plan, high: Plan) -> Moved:
    """Bytes that live nearer to the device in the second of two plans."""
    return sum(_promoted_by_chunk(low, high).values(), Counter())


def _promoted_by_chunk(low: Plan, high: Plan) -> dict[ChunkId, Counter[tuple[Tier, Tier]]]:
    order = list(Tier)
    found: dict[ChunkId, Counter[tuple[Tier, Tier]]] = {}
    for chunk, old, new in zip(low.chunks, low.shards, high.shards, strict=True):
        pairs = [(old.param_home, new.param_home, int(chunk.shard_bytes))]
        for block, was, now in zip(chunk.blocks, old.state_homes, new.state_homes, strict=True):
            pairs.append((was, now, int(block.state_bytes)))
        for was, now, nbytes in pairs:
            if order.index(now) < order.index(was):
                found.setdefault(chunk.id, Counter())[was, now] += nbytes
    return found


def price(moved: Moved, links: Bandwidths, *, has_host_tier: bool) -> float:
    """Seconds to bring these bytes up, and down again."""
    directed = [(*ends, nbytes) for pair, nbytes in moved.items() for ends in (pair, pair[::-1])]
    return sum(sum(link_seconds(*ends, links, has_host_tier).values()) for ends in directed)


def named(trace: Trace) -> str:
    """Name of an iteration, for reports."""
    return f"{trace.kind} iteration" + (f" of {trace.signature}" if trace.signature else "")


def iteration_in_words(trace: Trace, *, is_measured: bool) -> str:
    """An iteration that homes made room for, with what it asks for."""
    asks = format_bytes(trace.peak_non_model_bytes)
    return f"{named(trace)}, which asks for {asks} ({_KNOWN[is_measured]})"


@dataclass(slots=True)
class HomeMoves:
    """Moves of homes of one engine so far; `str` is a line for reports."""

    num_down: int = 0
    down_bytes: int = 0
    num_up: int = 0
    up_bytes: int = 0
    last: str = ""  # iteration that the last move down made room for, in words
    # of a chunk, what left and has not come back: bytes, and for which iteration; the last one last
    _left: dict[ChunkId, list[tuple[int, str]]] = field(default_factory=dict)

    def down(self, plan: Plan, high: Plan, reason: str) -> None:
        """Note a move to the homes of `plan`, made for an iteration."""
        self.num_down += 1
        self.last = reason
        for chunk, moved in _promoted_by_chunk(plan, high).items():
            self.down_bytes += moved.total()
            self._left.setdefault(chunk, []).append((moved.total(), reason))

    def up(self, low: Plan, plan: Plan) -> None:
        """Note a move to the homes of `plan`: what left last comes back first."""
        self.num_up += 1
        for chunk, moved in _promoted_by_chunk(low, plan).items():
            back = moved.total()
            self.up_bytes += back
            left = self._left.get(chunk, [])
            while left and back:
                nbytes, reason = left.pop()
                if nbytes > back:
                    left.append((nbytes - back, reason))
                back -= min(back, nbytes)

    def why(self, chunk: ChunkId) -> list[str]:
        """Lines on what of a chunk has left, and for which iterations."""
        return [
            f"left: {format_bytes(nbytes)}, for: {reason}"
            for nbytes, reason in self._left.get(chunk, ())
        ]

    def __str__(self) -> str:
        down = f"{self.num_down} down" + f" {format_bytes(self.down_bytes)}" * bool(self.num_down)
        up = f"{self.num_up} up" + f" {format_bytes(self.up_bytes)}" * bool(self.num_up)
        return f"moves {down}, {up}" + f"; the last one down for {self.last}" * bool(self.last)


@dataclass(frozen=True, slots=True)
class Raised:
    """Higher homes for the iterations of a trace."""

    inputs: PlanInputs
    result: PlanResult
    saved_seconds: float  # by each of them
    price_seconds: float


class Tenancy:
    """The last iterations in the present homes, and what was found for them."""

    def __init__(self) -> None:
        self._recent: deque[Trace] = deque(maxlen=max(LOOKS))
        self._looked: set[tuple[int, int]] = set()  # how many, and their peak: no promotion

    def note(self, trace: Trace) -> None:
        """Note an iteration of training, as it was measured or forecast."""
        self._recent.append(trace)

    def what_pays(self, raised: Callable[[Trace], Raised | None]) -> Raised | None:
        """Homes in which the last iterations would have been shorter by more than the moves take.

        raised: higher homes for a trace, or None. It is asked once for as many iterations of about
        the same peak.
        """
        for count in LOOKS:
            if count > len(self._recent):
                return None
            last = list(self._recent)[-count:]
            key = count, rounded_up(max(trace.peak_non_model_bytes for trace in last))
            if key in self._looked:
                continue
            self._looked.add(key)
            found = raised(envelope(last))
            if found is not None and found.saved_seconds * count >= found.price_seconds:
                return found
        return None

    def end(self) -> None:
        """Homes have changed."""
        self._recent.clear()
        self._looked.clear()


def rounded_up(nbytes: int) -> int:
    """Size rounded up to an eighth of an octave."""
    unit = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // unit) * unit
