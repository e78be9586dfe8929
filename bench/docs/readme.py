"""`make readme-tables`: writes the tables of README.md and docs/.

Measured ones are made from bench/results/*.json, those that follow from the code by `doc_tables`.
One stands between `<!-- table NAME -->` and `<!-- end -->`; nothing in it is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.converge import table as converge_table
from bench.muon import table as muon_table
from bench.rows import summary
from bench.support.matmul import NATIVE
from bench.ways import table as ways_table
from gemini.units import format_bytes

from . import commands, doc_tables, supported
from .remake import squashed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
OF = {"headline": "capacity-cpu", "comparison": "train-cpu"}  # results of tables with other names
COMPARED = {  # peers, and ours that does the same
    "torch/adamw-bf16": "ours/resident",
    "fsdp2/w2": "ours/w2",
    "deepspeed/zero3-nvme": "ours/nvme",
}
SHOWN = {  # names of rows in README
    "torch/adamw-bf16": "PyTorch AdamW, bf16 weights",
    "ours/resident": "Gemini, with fp32 masters",
    "fsdp2/w2": "FSDP2, 2 processes",
    "ours/w2": "Gemini, 2 processes",
    "deepspeed/zero3-nvme": "DeepSpeed ZeRO-3, state on NVMe",
    "ours/nvme": "Gemini, state on NVMe",
}


def _ways(result: dict[str, Any]) -> str:
    return ways_table(result["rows"], result["mixed_disk_gb_per_s"]) + "\n\n" + _where(result)


def _converge(result: dict[str, Any]) -> str:
    what = f"{result['numel']:,} parameters, {result['steps']} steps, {result['seeds']} seeds. "
    return f"{converge_table(result)}\n\n{what}{_where(result)}"


def _muon(result: dict[str, Any]) -> str:
    what = f"{result['numel']:,} parameters, {result['rounds']} rounds. "
    return f"{muon_table(result)}\n\n{what}{_where(result)}"


def _train(result: dict[str, Any]) -> str:
    peers = result["peer_versions"].get("deepspeed_zero", {})
    beside = f"DeepSpeed {peers.get('deepspeed', 'absent')} with torch {peers.get('torch')}. "
    return "\n\n".join(
        [summary.table(result), summary.ratio_table(result), beside + _where(result)]
    )


def _meshes(result: dict[str, Any]) -> str:
    what = f"{result['model']}, batch {result['batch']} x {result['seq']} over all ranks. "
    return "\n\n".join([summary.table(result), summary.ratio_table(result), what + _where(result)])


def _activations(result: dict[str, Any]) -> str:
    from bench.activations import table

    what = (
        f"{result['model']}, 1 x {result['seq']} tokens{', dropout' * result['dropout']}; "
        f"a budget of model data and {result['room_mib']} MiB. "
    )
    return f"{table(result['rows'])}\n\n{what}{_where(result)}"


def _serving(result: dict[str, Any]) -> str:
    from bench.serving import table

    what = (
        f"{result['model']} in bf16, {result['weights_mib']:.0f} MiB, of which "
        f"{result['room']:.0%} have room; {result['rounds']} rounds. "
    )
    return f"{table(result['rows'])}\n\n{what}{_where(result)}"


def _where(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    now_in = squashed().get(versions["commit"])
    commit = versions["commit"] + (f", which is in {now_in} now" if now_in else "")
    products = machine.get("bf16_products", NATIVE)
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB; "
        + (f"bf16 products {products}; " if products != NATIVE else "")
        + f"torch {versions['torch']}, Python {versions['python']}, commit {commit}."
        + (f" Made by `{result['command']}`." if "command" in result else "")
    )


def _capacity(result: dict[str, Any]) -> str:
    header = (
        f"{result['model']}, {result['num_params'] / 1e6:.0f} M parameters, batch 1 x 128, "
        f'`update="{result["update"]}"`.\n\n'
        "| limit, MiB | norm at most | moments | peak RSS, MiB | step, s | bound by the disk, s "
        "| by compute | by the cores | read a step, GB | written a step, GB | on disk, GB "
        "| loss, first and last |\n"
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    )
    rows = [
        f"| {r['rss_limit_mib']} | {r['max_norm']:g} | {r['state']} "
        f"| {r['peak_rss_mib']:.0f} | {r['step_seconds']:.1f} "
        f"| {r['disk_bound_seconds']:.1f} | {r['compute_seconds']:.1f} "
        f"| {r['core_bound_seconds']:.1f} "
        f"| {r['bytes_read'] / 1e9:.1f} | {r['bytes_written'] / 1e9:.1f} "
        f"| {r['nvme_bytes'] / 1e9:.1f} | {r['losses'][0]:.4f}, {r['losses'][-1]:.4f} |"
        for r in result["runs"]
    ]
    speed = f"Disk, reads and writes mixed half and half: {result['mixed_disk_gb_per_s']:.2f} GB/s"
    shares = [
        other["step_seconds"] / run["step_seconds"]
        for run in result["runs"]
        for other in result["runs"]
        if (run["state"], other["state"]) == ("fp32", "8bit")
        and all(run[same] == other[same] for same in ("rss_limit_mib", "max_norm"))
    ]
    said = f"With moments of 8 bits a step takes {min(shares):.2f} to {max(shares):.2f} of fp32's."
    return "\n".join([header, *rows, "", f"{speed}. {said}", "", _where(result)])


def _qlora(result: dict[str, Any]) -> str:
    header = (
        f"{result['model']} in NF4 with adapters on all projections, 1 x {result['seq']} tokens, "
        "gradient checkpointing.\n\n"
        "| files | budget, MiB | peak RSS, MiB | limit, MiB | least peak, MiB | step, s "
        "| plain peft, s | by reads, s | of the larger | read a step, GB | of planned |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    rows = [
        f"| {'on the disk' if r['cold'] else 'cached'} | {r['device_budget'] >> 20} "
        f"| {r['peak_rss_mib']:.0f} | {r['rss_limit_mib']} | {r['least_peak_mib']:.0f} "
        f"| {r['step_seconds']:.2f} | {r['compute_seconds']:.2f} | {r['read_bound_seconds']:.2f} "
        f"| {r['of_bound']:.2f} | {r['bytes_read'] / 1e9:.2f} "
        f"| {r['bytes_read'] / max(1, r['planned_read_bytes']):.2f} |"
        for r in result["runs"]
    ]
    shared = result["shared"]
    said = (
        f"Everything resident: {result['pair']['overhead']:.3f} of plain peft's step. "
        f"{shared['runs']} runs of one base take {format_bytes(shared['pss_bytes'])} and "
        f"{format_bytes(shared['base_bytes'])} of files: {shared['share']:.3f} of one base and "
        "as many runs alone."
    )
    return "\n".join([header, *rows, "", said, "", _where(result)])


def _picture(result: dict[str, Any]) -> str:
    on_disk = sum(
        row["measured_bytes"]
        for row in result["rows"]
        if row["tier"] == "nvme" and row["kind"] == "total"
    )
    return (
        f"{result['model']}, {result['num_params'] / 1e6:.0f} M parameters, batch "
        f"{result['batch']} x {result['seq']}, under a device budget of "
        f"{format_bytes(result['device_budget_bytes'])} (dashed), with {format_bytes(on_disk)} in "
        "files: bytes of every kind over the seconds of one iteration, and when the disk is busy. "
        f"On {_where(result)}"
    )


def _certificate(result: dict[str, Any]) -> str:
    bars, families = result["bars"], result["killed_by_family"]
    killed = ", ".join(f"{name} {count}" for name, count in sorted(families.items()))
    rows = [
        "| of drawn models under their plans | found | bar |",
        "|---|---:|---:|",
        f"| accepted and killed, of {result['accepted']} | {result['killed']} | {bars['killed']} |",
        f"| slack of the others, the median | {result['median_slack']:.1%} "
        f"| {bars['median_slack']:.0%} |",
        f"| refused that do not fit with 5 % more, of {result['refused']} "
        f"| {result['refused_rightly']:.0%} | {bars['refused_rightly']:.0%} |",
    ]
    floor = f"Floor of a process: {format_bytes(result['process']['floor'])}. "
    without = f"Killed: {killed or 'none'}. Not drawn: {result['without']}. "
    made = f"Draws made: {result['draws']} of the {result['asked']} that were asked."
    return "\n".join([*rows, "", floor + without + made, "", _where(result)])


def _headline(result: dict[str, Any]) -> str:
    run = min(result["runs"], key=lambda run: run["rss_limit_mib"])
    return (
        f"**{result['model']}, {result['num_params'] / 1e6:.0f} M parameters, trains with at most "
        f"{run['peak_rss_mib']:.0f} MiB of resident memory (its limit: {run['rss_limit_mib']}), "
        f"{run['step_seconds']:.1f} s a step of 128 tokens**, on "
        f"{_where(result)} With everything in memory it takes 16 bytes a parameter, "
        f"{16 * result['num_params'] / 2**20:.0f} MiB. On a GPU it was not measured yet."
    )


def _compared(result: dict[str, Any]) -> dict[str, Any]:
    """The rows of README's table and chart."""
    rows = {row["name"]: row for row in result["rows"] if "reason" not in row}
    chosen = (rows[name] for pair in COMPARED.items() for name in pair)
    return {**result, "rows": [{**row, "name": SHOWN[row["name"]]} for row in chosen]}


def _comparison(result: dict[str, Any]) -> str:
    rows = [
        "| run | step, s | peak RAM, MiB | on disk, GB |",
        "|---|---:|---:|---:|",
    ]
    compared = {row["name"]: row for row in _compared(result)["rows"]}
    for name, row in compared.items():
        rows.append(
            f"| {name} | {summary.with_spread(row, 'step_seconds', 2)} "
            f"| {summary.with_spread(row, 'peak_rss_mib', 0)} | {row['nvme_bytes'] / 1e9:.2f} |"
        )
    alike = [
        f"{SHOWN[ours]} and {SHOWN[peer]}"
        for peer, ours in COMPARED.items()
        if _overlap(compared[SHOWN[ours]], compared[SHOWN[peer]])
    ]
    said = f"Step times overlap, so no difference is measured: {'; '.join(alike)}. "
    what = f"{result['model']} in bf16, batch {result['batch']} x {result['seq']}. "
    return "\n".join([*rows, "", (said if alike else "") + what + _where(result)])


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    (low, high), (least, most) = (row["spread"]["step_seconds"] for row in (one, other))
    return bool(low <= most and least <= high)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "activations-cpu": _activations,
    "serving-cpu": _serving,
    "ways": _ways,
    "converge-cpu": _converge,
    "muon-cpu": _muon,
    "train-cpu": _train,
    "meshes-cpu": _meshes,
    "capacity-cpu": _capacity,
    "qlora-cpu": _qlora,
    "certificate-cpu": _certificate,
    "headline": _headline,
    "comparison": _comparison,
    "picture": _picture,
}
COMPUTED: dict[str, Callable[[], str]] = {
    "bytes": doc_tables.bytes_per_parameter,
    "what-fits": doc_tables.what_fits,
    "placement-example": doc_tables.placement,
    "from-colossal": doc_tables.from_colossal,
    "colossal-lines": doc_tables.colossal_lines,
    "without-a-door": doc_tables.without_a_door,
    "commands": commands.commands_table,
    "environment": commands.environment_table,
    "accumulation-orders": doc_tables.accumulation_orders,
    **{f"trainers-{name}": partial(supported.table, name) for name in supported.SUPPORTED},
}

TESTED = {"meshes"}  # what ranks answer: a test of theirs compares the table


def pages() -> list[Path]:
    """README and the pages of docs/ that have tables."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if "<!-- table " in page.read_text(encoding="utf-8")]


def render(text: str) -> str:
    """A page with every table made anew."""

    def one(match: re.Match[str]) -> str:
        name = match[1]
        if name in TESTED:
            return match[0]
        if name in COMPUTED:
            return f"<!-- table {name} -->\n{COMPUTED[name]()}\n<!-- end -->"
        result = json.loads((RESULTS / f"{OF.get(name, name)}.json").read_text(encoding="utf-8"))
        return f"<!-- table {name} -->\n{TABLES[name](result)}\n<!-- end -->"

    return re.sub(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", one, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in pages():
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    trained = json.loads((RESULTS / "train-cpu.json").read_text(encoding="utf-8"))
    summary.draw(_compared(trained), ROOT / "docs/comparison.svg")
