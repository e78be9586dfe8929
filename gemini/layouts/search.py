"""Search of layouts: every one that the plugins run is priced, and what does not fit left out.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gemini.optim.rules.state_layout import kind_of
from gemini.units import format_bytes

from .cluster import Cluster
from .layout import GlobalBatch, ParallelLayout, meshes_of, runs_of
from .price import Price, Pricing
from .shape import ModelShape

SHOWN = 5  # layouts that lose, of which a user is told
WORDS = {
    "compute": "computing", "tensor": "between ranks that split layers",
    "sequence": "between ranks that share sequences", "experts": "between ranks with experts",
    "bubble": "waiting in the pipeline", "messages": "messages of the pipeline",
    "shards": "gathers and reductions of shards", "update": "update",
    "homes": "state and parameters below the device",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """Candidate of a search: a layout with its price."""

    layout: ParallelLayout
    price: Price

    def in_words(self) -> str:
        price = self.price
        left = f", {format_bytes(int(price.left))} below it" if price.left else ""
        peak = format_bytes(int(price.peak))
        return f"{price.total:.3g} s a step, {peak} on the device{left}: {self.layout}"


@dataclass(frozen=True, slots=True)
class Found:
    """Outcome of a search: layouts that fit, the fastest first, and how many do not."""

    shape: ModelShape
    cluster: Cluster
    step: GlobalBatch
    ranked: tuple[Candidate, ...]
    too_large: int
    least_bytes: float = field(default=0.0)  # of the layout that needs least, if none fits

    @property
    def best(self) -> Candidate:
        """Raises ValueError if none fits."""
        if not self.ranked:
            raise ValueError(
                f"{self.shape.name} fits in no layout of {self.cluster.ranks} ranks with "
                f"{format_bytes(self.cluster.device_bytes)} each; the smallest needs "
                f"{format_bytes(int(self.least_bytes))}; expected more ranks, or a shorter or "
                "smaller batch"
            )
        return self.ranked[0]

    def explain(self) -> str:
        """Say what was chosen, and of the next ones why each loses."""
        best = self.best
        tokens = self.step.sequences * self.step.seq
        lines = [
            best.in_words(),
            f"{tokens / best.price.total:,.0f} tokens/s of {self.cluster.ranks} ranks; "
            f"{_parts(best.price.seconds, best.price.total)}",
            f"{len(self.ranked)} layouts fit, {self.too_large} do not",
        ]
        lines += [f"+{_percent(one, best)}: {one.layout}: {_why(one, best)}"
                  for one in self.distinct(SHOWN + 1)[1:]]  # fmt: skip
        return "\n".join(lines)

    def distinct(self, number: int) -> list[Candidate]:
        """The best of each mesh, at most `number`."""
        seen: dict[tuple[object, ...], Candidate] = {}
        for one in self.ranked:
            seen.setdefault(mesh_of(one.layout), one)
            if len(seen) == number:
                break
        return list(seen.values())


def mesh_of(layout: ParallelLayout) -> tuple[object, ...]:
    """What tells meshes apart, sizes of micro-batches left out."""
    return (
        layout.data, layout.replicas, layout.tp, layout.pp, layout.style, layout.sp,
        layout.sp_mode, layout.ep, layout.zero,
    )  # fmt: skip


def _parts(seconds: Mapping[str, float], total: float) -> str:
    most = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{s / total:.0%} {WORDS[name]}" for name, s in most if s > 0.01 * total)


def _percent(one: Candidate, best: Candidate) -> str:
    return f"{one.price.total / best.price.total - 1:.1%}"


def _why(one: Candidate, best: Candidate) -> str:
    """The parts that take longer, and if there is none, that it has more dimensions."""
    own, least = one.price.seconds, best.price.seconds
    more = {name: seconds - least.get(name, 0.0) for name, seconds in own.items()}
    longest = [name for name, s in sorted(more.items(), key=lambda item: -item[1]) if s > 0][:2]
    said = [f"{more[name]:.2g} s more {WORDS[name]}" for name in longest]
    return " and ".join(said) or "as fast, with more to set up"


def search(
    shape: ModelShape, cluster: Cluster, step: GlobalBatch, *, state: str = "fp32",
    recompute: bool | None = None,
) -> Found:  # fmt: skip
    """Price every layout and rank those that fit.

    state: of `HybridAdam`. recompute: whether layers are computed again in backward; None: where
        it is faster, or nothing else fits.

    Raises ValueError for another state.
    """
    kind_of(state)
    fit: list[Candidate] = []
    too_large, least = 0, float("inf")
    for layout in _all(shape, cluster, step):
        if recompute is not None and layout.recompute != recompute:
            continue
        pricing = Pricing(shape, cluster, step, layout, state)
        price = pricing.price()
        if price is None:
            too_large += 1
            least = min(least, pricing.needed)
        else:
            fit.append(Candidate(layout, price))
    return Found(shape, cluster, step, tuple(_ranked(fit)), too_large, least)


def _all(shape: ModelShape, cluster: Cluster, step: GlobalBatch) -> Iterator[ParallelLayout]:
    for mesh in meshes_of(shape, cluster, step):
        yield from runs_of(mesh, shape)


def _ranked(found: list[Candidate]) -> list[Candidate]:
    """By seconds; layouts that are as fast by what there is to set up."""
    return sorted(found, key=lambda one: (one.price.total, _dimensions(one.layout)))


def _dimensions(layout: ParallelLayout) -> int:
    sizes = (layout.tp, layout.pp, layout.sp, layout.ep, layout.replicas)
    return sum(size > 1 for size in sizes) + layout.in_sequence + layout.recompute
