"""Chunks of known models: what the search tries, what it chooses and what that costs a rank.

    python -m bench.chunk_search --model llama-7b --lora 16 --world-size 8 --plot waste.png

No weights are allocated. Sizes are of bf16 parameters under Adam with fp32 master and moments.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.support.machine import write_result
from gemini.chunk.layout import ChunkLayout
from gemini.chunk.sizing.packing import Packing
from gemini.chunk.sizing.search import (
    MAX_PEAK_FOR_WASTE,
    MAX_WASTE,
    ChunkConfiguration,
    GroupChoice,
    search_chunk_configuration,
)
from gemini.plan import models
from gemini.units import MIB, format_bytes

STATE_BYTES = 12  # an element: master, exp_avg and exp_avg_sq in fp32
SHOWN = 8  # candidates in the table


def search(name: str, world_size: int, lora: int | None) -> tuple[str, ChunkConfiguration]:
    """The model's label and its chunks."""
    model = models.build(name)
    if lora is not None:
        model = models.add_lora(model, lora)
        name = f"{name}+lora{lora}"
    return name, search_chunk_configuration(model, world_size=world_size)


def bytes_per_rank(found: ChunkConfiguration) -> dict[str, dict[str, int]]:
    """Bytes of a rank in every tier, for three placements: what persists, and gathered payloads.

    At world size 1 a shard on the device is its chunk's payload. Buffers of gradients that are
    under way are not counted.
    """
    parts = rank_parts(found.layout)
    gathered = found.peak_gathered_bytes if found.layout.world_size > 1 else 0
    device, state = gathered + parts["parameters"] + parts["gradients"], parts["state"]
    return {
        "all on the device": {"device": device + state, "host": 0, "nvme": 0},
        "state on the host": {"device": device, "host": state, "nvme": 0},
        "state on NVMe": {"device": device, "host": 0, "nvme": state},
    }


def rank_parts(layout: ChunkLayout) -> dict[str, int]:
    """Bytes that persist on a rank: shards, their reduced gradients and their optimizer state."""
    trained = [chunk for chunk in layout.chunks if chunk.trainable]
    return {
        "parameters": sum(chunk.payload_bytes for chunk in layout.chunks) // layout.world_size,
        "gradients": sum(chunk.payload_bytes for chunk in trained) // layout.world_size,
        "state": STATE_BYTES * sum(chunk.shard_numel for chunk in trained),
    }


def result(name: str, found: ChunkConfiguration) -> dict[str, Any]:
    """What is written as JSON. `capacity` and `candidates` are of the key with most elements."""
    main = max(found.groups, key=lambda group: group.used_numel)
    return {
        "model": name,
        "capacity": main.capacity,
        "num_chunks": found.num_chunks,
        "used_numel": found.used_numel,
        "used_bytes": found.used_bytes,
        "gathered_waste_numel": found.gathered_waste_numel,
        "gathered_waste_bytes": found.gathered_waste_bytes,
        "gathered_waste_fraction": found.gathered_waste_fraction,
        "persistent_waste_numel": found.persistent_waste_numel,
        "persistent_waste_bytes": found.persistent_waste_bytes,
        "persistent_waste_fraction": found.persistent_waste_fraction,
        "peak_gathered_bytes": found.peak_gathered_bytes,
        "world_size": found.layout.world_size,
        "bytes_per_rank": bytes_per_rank(found),
        "seconds": found.seconds,
        "groups": [
            {"key": group.key, "capacity": group.capacity, "tight": _candidate(group, group.tight)}
            for group in found.groups
        ],
        "candidates": [_candidate(main, packing) for packing in main.candidates],
    }


def _candidate(group: GroupChoice, packing: Packing) -> dict[str, Any]:
    return {
        "capacity": packing.capacity,
        "num_chunks": packing.num_chunks,
        "gathered_waste_numel": packing.gathered_waste_numel,
        "gathered_waste_bytes": packing.gathered_waste_numel * group.itemsize,
        "gathered_waste_fraction": group.waste_fraction(packing),
        "peak_gathered_bytes": packing.peak_gathered_bytes,
        "traffic_bytes": packing.traffic_bytes,
        "cost_bytes": packing.cost_bytes,
        "chosen": packing == group.chosen,
    }


def report(name: str, found: ChunkConfiguration) -> str:
    """The table of candidates of every key, the choice, and the bytes of a rank."""
    lines = []
    for group in found.groups:
        lines += [f"{name}: {_kind(group)}, {group.used_numel / MIB:.2f} Mi elements", ""]
        lines += [*_candidates_table(group), "", _tight_line(group), ""]
    lines += [
        f"chosen: {found.num_chunks} chunks; left over {found.gathered_waste_numel:,} elements, "
        f"{format_bytes(found.gathered_waste_bytes)}; "
        f"persists {found.persistent_waste_numel:,} elements, "
        f"{format_bytes(found.persistent_waste_bytes)} "
        f"({100 * found.persistent_waste_fraction:.4f} %)",
        "",
        f"bytes per rank at world size {found.layout.world_size}:",
        "",
        "| placement | device | host | NVMe |",
        "|---|---:|---:|---:|",
    ]
    for placement, tiers in bytes_per_rank(found).items():
        cells = [format_bytes(tiers[tier]) for tier in ("device", "host", "nvme")]
        lines.append(f"| {placement} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", found.summary()])


def _kind(group: GroupChoice) -> str:
    process_group, dtype, trainable = group.key
    return f"{'trainable' if trainable else 'frozen'} {dtype} of group {process_group}"


def _candidates_table(group: GroupChoice) -> list[str]:
    """Those of least cost and the choice, by capacity; all are in the JSON."""
    shown = sorted(group.candidates, key=lambda packing: packing.cost_bytes)[:SHOWN]
    if group.chosen not in shown:
        shown.append(group.chosen)
    lines = [
        "| | capacity, Mi | chunks | left over, Mi | left over, MiB | left over, % | peak gathered "
        "| traffic a step | cost |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for p in sorted(shown, key=lambda packing: packing.capacity):
        lines.append(
            f"| {'*' if p == group.chosen else ''} | {p.capacity / MIB:.3f} | {p.num_chunks} "
            f"| {p.gathered_waste_numel / MIB:.2f} "
            f"| {p.gathered_waste_numel * group.itemsize / MIB:.2f} "
            f"| {100 * group.waste_fraction(p):.3f} | {format_bytes(p.peak_gathered_bytes)} "
            f"| {format_bytes(p.traffic_bytes)} | {format_bytes(p.cost_bytes)} |"
        )
    return [*lines, f"(* chosen; {len(shown)} of {len(group.candidates)} candidates)"]


def _tight_line(group: GroupChoice) -> str:
    """What it would cost to waste little, where that was not chosen."""
    if group.waste_fraction(group.chosen) <= MAX_WASTE:
        return f"left over: {100 * group.waste_fraction(group.chosen):.3f} %"
    more = group.tight.peak_gathered_bytes / group.chosen.peak_gathered_bytes - 1
    return (
        f"left over at most {MAX_WASTE:.0%} would cost {more:+.0%} of peak gathered bytes "
        f"(at most {MAX_PEAK_FOR_WASTE - 1:+.0%} is accepted): capacity "
        f"{group.tight.capacity / MIB:.3f} Mi, {group.tight.num_chunks} chunks, peak "
        f"{format_bytes(group.tight.peak_gathered_bytes)}"
    )


def draw(found: list[tuple[str, ChunkConfiguration]], path: Path) -> None:
    """Waste and peak against capacity, a row for every model's largest key."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(found), 2, figsize=(10, 3.2 * len(found)), squeeze=False, layout="constrained"
    )
    for (name, configuration), (waste, peak) in zip(found, rows, strict=True):
        group = max(configuration.groups, key=lambda g: g.used_numel)
        capacities = [p.capacity / MIB for p in group.candidates]
        wastes = [100 * group.waste_fraction(p) for p in group.candidates]
        peaks = [p.peak_gathered_bytes / MIB for p in group.candidates]
        chosen = group.chosen
        marks = (100 * group.waste_fraction(chosen), chosen.peak_gathered_bytes / MIB)
        labels = ("left over in gathered chunks, %", "peak gathered, MiB")
        for axes, values, mark, label in zip(
            (waste, peak), (wastes, peaks), marks, labels, strict=True
        ):
            axes.plot(capacities, values, ".-")
            axes.plot([chosen.capacity / MIB], [mark], "o", color="C3", label="chosen")
            axes.set(xlabel="capacity, 2^20 elements", ylabel=label, title=name)
            axes.legend()
        waste.axhline(100 * MAX_WASTE, color="gray", linestyle=":")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--model", default="gpt2", help=f"{', '.join(models.MODELS)}, all, or PATH-to-config.json"
    )
    what.add_argument("--module", metavar="PKG:FACTORY", help="called without arguments")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--lora", type=int, metavar="R", help="adapters of this rank, by PEFT")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH")
    args = parser.parse_args()
    if args.model == "all":
        runs = [(name, args.lora) for name in models.MODELS]
        runs += [] if args.lora else [("llama-7b", 16)]
    else:
        runs = [(args.module or args.model, args.lora)]
    try:
        found = [search(name, args.world_size, lora) for name, lora in runs]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("\n\n".join(report(*one) for one in found))
    if args.json:
        results = [result(*one) for one in found]
        whole = results[0]
        if args.model == "all":  # choices alone
            choices = [{k: v for k, v in one.items() if k != "candidates"} for one in results]
            whole = {"models": choices}
        write_result(args.json, whole)
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
