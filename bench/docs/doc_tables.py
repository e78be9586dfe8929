"""Tables of docs/ that follow from the code alone: bytes per parameter, a worked placement.

`make readme-tables` writes them; a test compares.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from gemini.chunk.layout import ChunkLayout, ParamSpec
from gemini.memtracer.trace import sequential_trace
from gemini.migrate import colossal
from gemini.optim.adam import AdamRule
from gemini.optim.adaptive import AdagradRule, LionRule, NAdamRule
from gemini.optim.lamb import LambRule
from gemini.optim.rules.matrix_rule import MOMENTUM
from gemini.optim.rules.state_layout import StateLayout
from gemini.optim.sgd import SGDRule
from gemini.placement.planner import PlanInputs, PlanResult, make_plan
from gemini.placement.policy import AutoPlacement
from gemini.placement.sizes import Bandwidths, Budgets, StateBytes
from gemini.placement.tiers import Tier
from gemini.plan import table
from gemini.units import MIB, NUM_VERSIONS, format_bytes

OPTIMIZERS: dict[str, StateLayout] = {
    "Adam, AdamW": AdamRule.layout,
    "the same with `amsgrad`": AdamRule("amsgrad").layout,
    'the same with `state="bf16"`': AdamRule(state="bf16").layout,
    'the same with `state="8bit"`': AdamRule(state="8bit").layout,
    "Lion": LionRule.layout,
    "SGD with momentum": SGDRule.layout,
    "Adagrad, RMSprop": AdagradRule.layout,
    "Adamax, NAdam, RAdam, Adadelta, schedule-free": NAdamRule.layout,
    "LAMB": LambRule.layout,
    "Muon's matrices": StateLayout((MOMENTUM,)),
}
PRECISIONS = {  # bytes of a parameter and of a gradient; with masters, whole or split, or not
    "fp32": (4, None),
    "bf16 or fp16": (2, "whole"),
    "bf16, shards apart": (2, "split"),
    "bf16, `master_weights=False`": (2, None),
}

# The worked example: 8 layers of 4 Mi parameters in bf16 under Adam, on one device
LAYERS, NUMEL = 8, 4 << 20
NON_MODEL_BYTES = 100 * MIB
BUDGETS = Budgets.parse("256MiB", "192MiB", None)
LINKS = Bandwidths(
    host_to_device=20e9, device_to_host=20e9, nvme_read=2e9, nvme_write=2e9, collective=10e9,
    device_memory=1e12, host_memory=20e9,
)  # fmt: skip


# README's choice of docs/what-fits
FITS = (
    ("llama-3.2-1b", "all parameters"), ("llama-3.1-8b", "all parameters"),
    ("llama-3.1-8b", "LoRA adapters"), ("qwen3-32b", "LoRA adapters"),
)  # fmt: skip
FIT_CARDS = ("rtx4080", "rtx4090", "l40s", "h100")


def what_fits() -> str:
    """Some rows of docs/what-fits.html as a markdown table."""
    found = table.rows_of(
        (Path(__file__).resolve().parents[2] / "docs/what-fits.html").read_text(encoding="utf-8")
    )
    asked = [
        (model, f", {training}", [r for r in found if (r.model, r.training) == (model, training)])
        for model, training in FITS
    ]
    return "\n".join(table.lines(asked, FIT_CARDS))


def from_colossal() -> str:
    """Names of Colossal-AI's documents and where they are here, a row for each pair of modules."""
    lines = ["| there | names | here |", "|---|---|---|"]
    for row in tomllib.loads(colossal.TABLE.read_text(encoding="utf-8"))["moved"]:
        renamed = (f"`{name}`, which is `{own}`" for name, own in row.get("renamed", {}).items())
        taken = ", ".join([*(f"`{name}`" for name in row.get("names", ())), *renamed])
        lines.append(f"| {_code(row['from'])} | {taken} | `{row['to']}` |")
    return "\n".join(lines)


def colossal_lines() -> str:
    """Lines that are written otherwise here."""
    lines = ["| there | write |", "|---|---|"]
    for row in tomllib.loads(colossal.TABLE.read_text(encoding="utf-8"))["written"]:
        lines.append(f"| `{row['there']}` | `{row['here']}` |")
    return "\n".join(lines)


def without_a_door() -> str:
    """Names of Colossal-AI that are not here, and what is used in their place."""
    lines = ["| there | use |", "|---|---|"]
    for row in tomllib.loads(colossal.TABLE.read_text(encoding="utf-8"))["missing"]:
        names = dict.fromkeys(name.rpartition(".")[2] for name in row["names"])
        use = " ".join(row["use"].split())
        lines.append(f"| {row.get('title') or _code(names)} | {use} |")
    return "\n".join(lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def bytes_per_parameter() -> str:
    """A markdown table; the state is that of each rule's planes."""
    lines = [
        "| optimizer | precision | parameter | gradient | state | in memory | state on disk |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, planes in OPTIMIZERS.items():
        for precision, (itemsize, masters) in PRECISIONS.items():
            layout = planes.with_master() if masters else planes
            in_memory = layout.with_remainder() if masters == "split" else layout
            if masters == "split" and in_memory == layout:
                continue
            state = in_memory.bytes_per_element
            undo = 0 if masters else layout.undo_itemsize
            on_disk = NUM_VERSIONS * (layout.bytes_per_element + undo)
            lines.append(
                f"| {name} | {precision} | {itemsize} | {itemsize} | {state:g} "
                f"| {2 * itemsize + state:g} | {on_disk:g} |"
            )
    return "\n".join(lines)


def placement_example() -> PlanResult:
    """`make_plan` of the worked example."""
    specs = [ParamSpec(f"layers.{i}.weight", (NUMEL,), "bfloat16") for i in range(LAYERS)]
    return make_plan(
        PlanInputs(
            layout=ChunkLayout.build(specs, NUMEL),
            trace=sequential_trace(specs, NON_MODEL_BYTES),
            state=StateBytes(per_element=12, has_master=True),
            budgets=BUDGETS,
            bandwidths=LINKS,
        ),
        AutoPlacement(steady_cap_ratio=1.0),
    )


def placement() -> str:
    """The plan of the worked example as a markdown table, and what it is predicted to take."""
    planned = placement_example()
    plan = planned.plan
    lines = [
        "| chunk | parameters | gradient | state, by block | update |",
        "|---:|---|---|---|---|",
    ]
    for shard in plan.shards:
        assert shard.grad_home is not None
        homes = ", ".join(tier.value for tier in shard.state_homes)
        paths = ", ".join(dict.fromkeys(plan.path_of(home).value for home in shard.state_homes))
        lines.append(
            f"| {shard.chunk} | {shard.param_home.value} | {shard.grad_home.value} "
            f"| {homes} | {paths} |"
        )
    lines.append("")
    for tier in Tier:
        peak, budget = planned.profile.peak(tier), plan.budgets.of(tier)
        of = f" of {format_bytes(budget)}" if tier is not Tier.NVME else ""
        lines.append(f"* {tier.value}: {format_bytes(peak)}{of} at its peak")
    for (src, dst), nbytes in plan.bytes_moved().items():
        lines.append(f"* moved a step, {src.value} to {dst.value}: {format_bytes(nbytes)}")
    staging = plan.device_staging
    lines.append(f"* staging on the device: {staging.count} x {format_bytes(staging.buffer_bytes)}")
    staging = plan.host_staging
    lines.append(f"* staging on the host: {staging.count} x {format_bytes(staging.buffer_bytes)}")
    lines.append(
        f"* predicted step: {planned.cost.seconds * 1e3:.0f} ms, bound by {planned.cost.bound_by}"
    )
    return "\n".join(lines)


def accumulation_orders(layers: int = 3, batches: str = "ab") -> str:
    """Picture of both orders of micro-batches: calls of layers in turn, and where weights come."""
    forward = range(1, layers + 1)
    backward = list(reversed(forward))
    one_by_one = [
        (i, b, mark) for b in batches for run, mark in ((forward, ""), (backward, "'"))
        for i in run
    ]  # fmt: skip
    by_layer = [
        (i, b, mark) for run, mark in ((forward, ""), (backward, "'")) for i in run for b in batches
    ]
    lines = []
    for order, calls in (("batches", one_by_one), ("layers", by_layer)):
        comes = [now != was for was, now in pairwise((0, *(i for i, _, _ in calls)))]
        cells = [f"{i}{b}{mark}" for i, b, mark in calls]
        lines.append(f"{order:9}" + "".join(f"{cell:5}" for cell in cells).rstrip())
        lines.append(f"{'':9}" + "".join(f"{'^' * come:5}" for come in comes).rstrip())
    what = (
        f"layer 1 to {layers} of micro-batch {' and '.join(batches)}; ': backward; ^: weights come"
    )
    return "\n".join(["```text", *lines, what, "```"])
