"""Times that a test may ask for on any machine, whoever else is busy there.

What others do only adds to a time, so the least of some rounds counts, and a limit that is met ends
the rounds. A limit in seconds is that of a machine as quick as `REFERENCE_SECONDS` says; a slower
one has as much more.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.host.calls import cpu_seconds

ROUNDS = 12
REFERENCE_SECONDS = 0.05


def ratio(
    one: Callable[[], float], other: Callable[[], float], limit: float, *, at_least: int = 3
) -> float:
    """Least time of `one` over the least of `other`, in turns: until it is below `limit`."""
    ones, others = [], []
    for done in range(1, ROUNDS + 1):
        others.append(other())
        ones.append(one())
        if done >= at_least and min(ones) < limit * min(others):
            break
    return min(ones) / min(others)


def growth(
    work: Callable[[int], Callable[[], object]], n: int, limit: float, *, at_least: int = 3
) -> float:
    """How many times as long `work(2n)()` takes as `work(n)()`."""
    half, whole = work(n), work(2 * n)
    return ratio(lambda: cpu_seconds(whole), lambda: cpu_seconds(half), limit, at_least=at_least)


def reference_work() -> dict[int, int]:
    """Calls, branches and a dictionary, as planners have them."""
    found: dict[int, int] = {}
    for i in range(200_000):
        found[i % 5000] = max(found.get(i % 5000, 0), i)
    return found


def within(seconds: float, measure: Callable[[], float]) -> bool:
    """Whether a measurement is below `seconds`, on a machine as quick as the reference."""

    def reference() -> float:
        return max(REFERENCE_SECONDS, cpu_seconds(reference_work))

    limit = seconds / REFERENCE_SECONDS
    return ratio(measure, reference, limit, at_least=1) < limit
