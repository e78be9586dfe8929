"""When chunks are gathered and released over one forward and backward. Pure.

From the sequence of moments that was traced (which chunks each needs), the plan keeps gathered
bytes within a limit and evicts the chunk whose next use is farthest (Belady's OPT), so that no
chunk is gathered again while another one lies idle for longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemini.units import Bytes, ChunkId


@dataclass(frozen=True, slots=True)
class GatherStep:
    """What happens at one moment, in this order."""

    release: tuple[ChunkId, ...]
    gather: tuple[ChunkId, ...]  # needed now, not there yet
    prefetch: tuple[ChunkId, ...]  # needed soon: begun now, waited for at their own moment


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """One `GatherStep` for every traced moment."""

    needs: tuple[tuple[ChunkId, ...], ...]
    steps: tuple[GatherStep, ...]
    peak_bytes: Bytes  # gathered at once, at most


def plan_gathers(
    needs: Sequence[tuple[ChunkId, ...]],
    nbytes: Mapping[ChunkId, int],
    limit_bytes: int,
    max_prefetch: int,
    gathered: Sequence[ChunkId] = (),
) -> GatherPlan:
    """Plan the traced sequence. `nbytes` names the chunks that may be released.

    `gathered` is what is there at the first moment. The limit is passed only by a single moment
    that needs more than it allows; prefetch never passes it, and holds at most `max_prefetch`
    chunks that are not needed yet.
    """
    uses: dict[ChunkId, list[int]] = {}
    for moment, chunks in enumerate(needs):
        for chunk in chunks:
            uses.setdefault(chunk, []).append(moment)

    def next_use(chunk: ChunkId, after: int) -> int:
        """First use behind moment `after`; uses repeat with the next iteration."""
        times = uses.get(chunk)
        if not times:
            return 2 * len(needs)
        i = bisect_right(times, after)
        return times[i] if i < len(times) else len(needs) + times[0]

    there = {chunk: None for chunk in gathered if chunk in nbytes}  # an ordered set
    ahead: dict[ChunkId, None] = {}  # prefetched and not used yet
    peak = 0
    steps = []
    for moment, chunks in enumerate(needs):
        wanted = [chunk for chunk in chunks if chunk in nbytes]
        missing = [chunk for chunk in wanted if chunk not in there]
        total = sum(nbytes[chunk] for chunk in there) + sum(nbytes[chunk] for chunk in missing)
        victims = sorted(
            (chunk for chunk in there if chunk not in wanted),
            key=lambda chunk: (-next_use(chunk, moment), chunk),
        )
        release = []
        while total > limit_bytes and victims:
            victim = victims.pop(0)
            release.append(victim)
            total -= nbytes[victim]
            del there[victim]
            ahead.pop(victim, None)
        there.update(dict.fromkeys(missing))
        for chunk in wanted:
            ahead.pop(chunk, None)

        prefetch: list[ChunkId] = []
        later = moment + 1
        while later < len(needs) and len(ahead) < max_prefetch:
            for chunk in needs[later]:
                if chunk not in nbytes or chunk in there or len(ahead) >= max_prefetch:
                    continue
                while total + nbytes[chunk] > limit_bytes and victims:
                    if next_use(victims[0], moment) <= later:
                        break
                    victim = victims.pop(0)
                    release.append(victim)
                    total -= nbytes[victim]
                    del there[victim]
                    ahead.pop(victim, None)
                if total + nbytes[chunk] > limit_bytes:
                    later = len(needs)
                    break
                total += nbytes[chunk]
                there[chunk] = None
                ahead[chunk] = None
                prefetch.append(chunk)
            later += 1
        peak = max(peak, total)
        steps.append(GatherStep(tuple(release), tuple(missing), tuple(prefetch)))
    return GatherPlan(tuple(tuple(chunks) for chunks in needs), tuple(steps), Bytes(peak))
