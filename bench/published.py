"""Layouts whose speed others published, beside what is predicted for them.

    python -m bench.published [--json PATH] [--fit]

Points and their sources are in `bench/published_layouts.json`: the model's sizes, ranks, layout,
tokens a second of a rank, and the memory of a rank where it was told. A machine there is a card,
its links and the program that ran on it. Links and memory have what a data sheet says, less a
sixth. One point each determines (`fit`) the rate of products, that of attention, and for one
program the share of passes over memory that its kernels do not fuse; those points count in no
error, and `--fit` determines the constants again and prints them. What no point determines was set
once for a machine, by what its program is known to do, and for no row: the other shares of passes,
the share of collectives that runs beside products (none in torch's first FSDP), and the rate of
attention whose scores are kept.

Where a source does not tell sizes of micro-batches and the pipeline's schedule, those that are
predicted to be fastest are taken. Layers that are recomputed selectively keep half of what they
save. Memory is that of the programs that were measured, which keep gradients and their sums
otherwise than this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.support.machine import write_result
from gemini.layouts.cluster import Cluster, Link
from gemini.layouts.layout import INTERLEAVED, ONE, GlobalBatch, ParallelLayout
from gemini.layouts.price import Price, Pricing
from gemini.layouts.shape import SCORE_BYTES, ModelShape, Saved, decoder
from gemini.placement.sizes import Bandwidths
from gemini.units import GIB

FILE = Path(__file__).with_name("published_layouts.json")
SELECTIVE = 0.5  # of saved bytes that stay
PER_NODE = 8
_LATENCIES = (8e-6, 2e-5)  # of links inside a node, and across
_BATCHES = (1, 2, 4, 8)  # of a micro-batch that is not told
_BOUNDS = {"flops": (3e13, 4e15), "attention": (2e13, 4e15), "passes": (0.05, 8.0)}
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Prediction:
    """A point with what is predicted for it. speed: predicted by published tokens a second."""

    point: Mapping[str, Any]
    layout: ParallelLayout
    price: Price
    speed: float

    @property
    def memory(self) -> float | None:
        """Predicted by published bytes; None where none were published."""
        gib = self.point.get("gib")
        return None if gib is None else self.price.peak / GIB / gib


def published() -> dict[str, Any]:
    """What the file has."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def cluster_of(ranks: int, machine: Mapping[str, Any]) -> Cluster:
    names = ("inside", "across")
    inside, across = (
        Link(latency, machine[name]) for latency, name in zip(_LATENCIES, names, strict=True)
    )
    speeds = Bandwidths(flops=machine["flops"], device_memory=machine["memory"])
    return Cluster(
        ranks, PER_NODE, 80 * GIB, 0, speeds, machine["attention"], machine["attention"],
        machine["memory"], inside, across, has_host_tier=False, overlap=machine["overlap"],
    )  # fmt: skip


def shape_of(
    point: Mapping[str, Any], told: Mapping[str, Any], machine: Mapping[str, Any]
) -> ModelShape:
    shape = decoder(point["model"], **told["models"][point["model"]])
    scores = SCORE_BYTES * shape.heads if machine.get("scores") else 0.0
    shape = replace(shape, passes=machine["passes"], scores=scores)
    if point["layout"]["recompute"] == "selective":
        saved = Saved(SELECTIVE * shape.saved.whole, SELECTIVE * shape.saved.split)
        # the passes are those of a whole layer, and of half of it again
        passes = machine["passes"] / SELECTIVE
        shape = replace(shape, saved=saved, passes=passes)
    return shape


def layouts_of(point: Mapping[str, Any]) -> Iterator[ParallelLayout]:
    """The layout that was told, with every schedule and micro-batch that was not."""
    told = {**point["layout"], "recompute": point["layout"]["recompute"] == "full"}
    rows = point["sequences"] // told["data"]
    is_told = "style" in told or told.get("pp", 1) == 1
    for style in [told.get("style", ONE)] if is_told else [ONE, INTERLEAVED]:
        for batch in [told["batch"]] if "batch" in told else _BATCHES:
            times = told.get("micro_batches", rows // batch)
            if times * batch > rows or (style == INTERLEAVED and times % told["pp"]):
                continue
            yield ParallelLayout(**{**told, "batch": batch, "style": style, "micro_batches": times,
                            "chunks": 1 if style == ONE else 2})  # fmt: skip


def predicted(point: Mapping[str, Any], told: Mapping[str, Any]) -> Prediction:
    """The fastest of the layouts that a point may have had."""
    machine = machine_of(point["machine"], told)
    shape, cluster = shape_of(point, told, machine), cluster_of(point["ranks"], machine)
    step = GlobalBatch(point["sequences"], point["seq"])
    priced = []
    for layout in layouts_of(point):
        price = Pricing(shape, cluster, step, layout).price(fits=False)
        assert price is not None
        priced.append((price.total, layout, price))
    seconds, layout, price = min(priced, key=lambda one: one[0])
    speed = step.sequences * step.seq / seconds / point["ranks"] / point["tokens_per_s"]
    return Prediction(point, layout, price, speed)


def machine_of(name: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Constants of a machine; those that it lacks are of the one that it is like."""
    own = told["machines"][name]
    return {**machine_of(own["like"], told), **own} if "like" in own else dict(own)


def fit(told: dict[str, Any]) -> None:
    """Determine constants, each from its point, several times: those of a machine depend on each
    other."""
    points = [point for point in told["points"] if "fit" in point]
    for point in points:
        told["machines"][point["machine"]].setdefault(point["fit"], _BOUNDS[point["fit"]][1] / 8)
    for _ in range(_ROUNDS):
        for point in points:
            _fit_one(point, told)


def _fit_one(point: Mapping[str, Any], told: dict[str, Any]) -> None:
    low, high = _BOUNDS[point["fit"]]
    is_rising = point["fit"] != "passes"
    for _ in range(40):
        middle = (low * high) ** 0.5
        told["machines"][point["machine"]][point["fit"]] = float(f"{middle:.4g}")
        if (predicted(point, told).speed > 1) == is_rising:
            high = middle
        else:
            low = middle


def summary(found: Sequence[Prediction]) -> dict[str, Any]:
    """Errors of the points that determine nothing."""
    free = [one for one in found if "fit" not in one.point]
    speeds = [abs(one.speed - 1) for one in free]
    memory = [abs(one.memory - 1) for one in found if one.memory is not None]
    return {
        "points": len(found), "determine constants": len(found) - len(free),
        "median error": statistics.median(speeds), "largest error": max(speeds),
        "median error of memory": statistics.median(memory), "largest of memory": max(memory),
    }  # fmt: skip


def rows(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [
        {
            "source": one.point["source"], "model": one.point["model"], "ranks": one.point["ranks"],
            "seq": one.point["seq"], "layout": str(one.layout), "fit": one.point.get("fit"),
            "tokens_per_s": one.point["tokens_per_s"], "speed": one.speed, "memory": one.memory,
        }
        for one in found
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    told = published()
    if args.fit:
        fit(told)
        print(json.dumps(told["machines"], indent=1))
    found = [predicted(point, told) for point in told["points"]]
    for row in rows(found):
        memory = "" if row["memory"] is None else f", memory {row['memory'] - 1:+.0%}"
        speed = f"{row['speed'] - 1:+5.0%} {row['fit'] or '':9}{memory}"
        what = f"{row['source'][:10]:10} {row['model']:15} {row['ranks']:5} x {row['seq']:6}"
        print(f"{what}  {speed}  {row['layout']}")
    result = summary(found)
    print(json.dumps(result, indent=1))
    if args.json:
        write_result(args.json, result | {"rows": rows(found)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
