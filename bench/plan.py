"""Does a model fit, where does everything go, and how long does a step take: asked on any machine.

    python -m bench.plan --model llama-7b --device-mem 24GiB --host-mem 64GiB --nvme 1TB --seq 2048

No weights, no GPU. Activations are those of a trace on fake tensors (`bench.support.activations`),
of parameters in bf16 under Adam with fp32 master and moments. Exit status 1: it does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.support.activations import Activations, activations_of, constant_activations
from gemini.chunk.layout import ChunkLayout, training_layout
from gemini.chunk.sizing.search import search_chunk_configuration
from gemini.memtracer.trace import sequential_trace
from gemini.placement.fit import fit, usual_block_numel
from gemini.placement.planner import PlanInputs, PlanResult
from gemini.placement.policy import AutoPlacement
from gemini.placement.sizes import (
    UNLIMITED,
    Bandwidths,
    BudgetError,
    Budgets,
    StateBytes,
    wider_chunks,
)
from gemini.placement.tiers import Tier
from gemini.placement.timeline import planned_timeline, write_timeline
from gemini.placement.timetable.updates import priced_in_words
from gemini.units import BLOCK_NUMEL, ChunkId, format_bytes, parse_bytes

from .support import models

ADAM = StateBytes(per_element=12, has_master=True)
# Where nothing was measured: an accelerator on PCIe 4, one disk; and a desktop's cores
TYPICAL = {
    "cuda": Bandwidths(
        host_to_device=24e9, device_to_host=24e9, nvme_read=5e9, nvme_write=3e9, collective=40e9,
        device_memory=1.4e12, host_memory=120e9, flops=120e12,
    ),
    "cpu": Bandwidths(
        nvme_read=2e9, nvme_write=2e9, collective=2e9, device_memory=20e9, host_memory=20e9,
        flops=3e11,
    ),
}  # fmt: skip
MAX_BATCH = 1 << 16


@dataclass(frozen=True, slots=True)
class Machine:
    """What is asked about; memory and disk are of one device and of one node."""

    world_size: int
    ranks_per_node: int
    device_mem: int
    host_mem: int
    nvme: int
    bandwidths: Bandwidths
    device: str = "cuda"

    def budgets(self) -> Budgets:
        """Of one rank. On `cpu` the device is the node's RAM, and there is no host tier."""
        if self.device == "cpu":
            node = Budgets.parse(min(self.device_mem, self.host_mem), 0, self.nvme)
            return node.divided(self.ranks_per_node, self.ranks_per_node)
        node = Budgets.parse(self.device_mem, self.host_mem, self.nvme)
        return node.divided(self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class Question:
    """A model, a machine and a batch of each rank."""

    layout: ChunkLayout
    activations: Activations
    machine: Machine
    batch: int
    seq: int
    nvme_frac: float = 0.0  # of the optimizer's state, at least, on NVMe
    with_originals: frozenset[ChunkId] = frozenset()  # chunks of parameters that came in fp32

    def planned(self) -> PlanResult:
        """Raises BudgetError where it does not fit."""
        split = frozenset(chunk.id for chunk in self.layout.chunks)
        while True:
            found = fit(
                self.inputs(split), AutoPlacement(), is_measured=True, least_block_numel=BLOCK_NUMEL
            )[1]
            in_files = {s.chunk for s in found.plan.shards if s.param_home is Tier.NVME}
            if not split & in_files:
                return found
            split -= in_files  # masters are whole there

    def inputs(self, split: frozenset[ChunkId] = frozenset()) -> PlanInputs:
        """split: chunks whose masters on disk are what their parameters lack of them."""
        numel = sum(spec.numel for spec in self.layout.params)
        inputs = PlanInputs(
            layout=self.layout,
            trace=self.activations.at(self.batch),
            state=replace(ADAM, split_on_disk=split),
            budgets=self.machine.budgets(),
            bandwidths=self.machine.bandwidths,
            has_host_tier=self.machine.device != "cpu",
            flops=6.0 * numel * self.batch * self.seq,  # 2 forward, 4 backward
            nvme_state_frac=self.nvme_frac,
            with_originals=self.with_originals,
        )
        return replace(inputs, block_numel=usual_block_numel(inputs))

    def fits(self) -> bool:
        try:
            self.planned()
        except BudgetError:
            return False
        return True


def largest_batch(question: Question) -> int:
    """The largest batch of a rank that fits; 0 where not even 1 does."""
    low, high = 0, 1
    while high <= MAX_BATCH and replace(question, batch=high).fits():
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if replace(question, batch=middle).fits():
            low = middle
        else:
            high = middle
    return low


def enough(question: Question) -> tuple[Question, PlanResult]:
    """The same question with as much more of each tier as it takes to fit."""
    machine = question.machine
    while True:
        asked = replace(question, machine=machine)
        try:
            return asked, asked.planned()
        except BudgetError as error:
            machine = _with_more(machine, error)


def _with_more(machine: Machine, error: BudgetError) -> Machine:
    ranks = machine.ranks_per_node
    if error.tier is Tier.NVME:
        return replace(machine, nvme=machine.nvme + ranks * error.missing_bytes)
    if machine.device == "cpu":
        more = min(machine.device_mem, machine.host_mem) + ranks * error.missing_bytes
        return replace(machine, device_mem=more, host_mem=more)
    if error.tier is Tier.HOST:
        return replace(machine, host_mem=machine.host_mem + ranks * error.missing_bytes)
    return replace(machine, device_mem=machine.device_mem + error.missing_bytes)


def suggestion(question: Question, batch: int) -> str | None:
    """The cheapest change with which it fits, each checked by a plan.

    From cheap to dear: a smaller batch, disk, RAM, both, device memory (with the rest), ranks.
    """
    if batch:
        return f"--batch {batch}"
    least, _ = enough(question)
    machine = question.machine
    for names in _CHANGES:
        changed = replace(machine, **{name: getattr(least.machine, name) for name in names})
        if changed != machine and replace(question, machine=changed).fits():
            return " ".join(
                f"--{name.replace('_', '-')} {format_bytes_up(getattr(changed, name))}"
                for name in names
                if getattr(changed, name) != getattr(machine, name)
            )
    return None


_CHANGES = (
    ("nvme",), ("host_mem",), ("nvme", "host_mem"), ("device_mem",),
    ("nvme", "host_mem", "device_mem"),
)  # fmt: skip


def format_bytes_up(nbytes: int) -> str:
    """As an argument: whole MiB, rounded up."""
    return f"{-(-nbytes // (1 << 20))}MiB"


def homes(planned: PlanResult) -> dict[str, dict[str, int]]:
    """Bytes of every kind on every tier, of one rank."""
    kinds = ("parameters", "gradients", "state", "originals")
    found = {kind: Counter[str]() for kind in kinds}
    for sizes, shard in zip(planned.plan.chunks, planned.plan.shards, strict=True):
        found["parameters"][shard.param_home.value] += sizes.shard_bytes
        if shard.grad_home is not None:
            found["gradients"][shard.grad_home.value] += sizes.shard_bytes
        for block, home in zip(sizes.blocks, shard.state_homes, strict=True):
            found["state"][home.value] += block.held_on(home)
        if sizes.original_bytes:
            found["originals"][planned.plan.original_home.value] += sizes.original_bytes
    return {kind: dict(tiers) for kind, tiers in found.items() if tiers or kind != "originals"}


def update_in_words(planned: PlanResult) -> str:
    """What a tail hides of it, or what is against one."""
    tail = planned.tail
    if tail is None:
        return f"serial, as {planned.against_tail or 'nothing is computed'}"
    where = "" if planned.plan.has_host_tier else "where no budget is given, "
    return (
        f'with update="tail", {where}{tail}: {tail.seconds:.2f} s a step, and '
        f"{tail.serial_seconds:.2f} s without"
    )


def answer(question: Question) -> tuple[dict[str, Any], PlanResult]:
    """What is written as JSON; where it does not fit, of the least budgets with which it would."""
    started = time.perf_counter()
    try:
        planned = question.planned()
        missing: BudgetError | None = None
    except BudgetError as error:
        missing = error
        _, planned = enough(question)
    seconds = time.perf_counter() - started
    batch = largest_batch(question)
    moved = planned.plan.bytes_moved()
    ahead = planned.speculation
    gathered = sum(planned.plan.chunks[g.chunk].payload_bytes for g in planned.plan.gathers)
    result = {
        "fits": missing is None,
        "peaks": {tier.value: planned.profile.peak(tier) for tier in Tier},
        "bytes_moved_per_step": sum(moved.values()),
        "step_seconds": planned.cost.seconds,
        "bound_by": planned.cost.bound_by,
        "tail": None if planned.tail is None else asdict(planned.tail),
        "update": update_in_words(planned),
        "seconds_by_update": planned.seconds_by_update,
        "best_update": planned.best_update,
        "updated_in_backward": None if ahead is None else str(ahead),
        "largest_batch": batch,
        "suggestion": None if missing is None else suggestion(question, batch),
        "missing": None if missing is None else str(missing),
        "homes": homes(planned),
        "peaks_by_kind": planned.profile.peaks(),
        "bytes_by_link": {f"{src.value} to {dst.value}": n for (src, dst), n in moved.items()},
        "bytes_gathered_per_step": gathered,
        "gather_gap": planned.plan.forecast.gather_gap,
        "stall_seconds": planned.cost.stall_seconds,
        "busy_seconds": planned.cost.busy,
        "num_chunks": len(question.layout.chunks),
        "planner_seconds": seconds,
    }
    return result, planned


def report(result: dict[str, Any], question: Question) -> str:
    return "\n".join(_lines(result, question))


def _lines(result: dict[str, Any], question: Question) -> Iterator[str]:
    budgets = question.machine.budgets()
    if result["fits"]:
        yield "fits"
    else:
        yield f"does not fit: {result['missing']}"
        yield "what follows is of the least that would do"
    yield f"of a rank with {question.batch} x {question.seq} a step, in bf16 under Adam"
    yield f"{'a rank':10s} {'peak':>12s} {'budget':>12s}   at the peak"
    for tier in Tier:
        parts = result["peaks_by_kind"][tier.value]
        listed = ", ".join(
            f"{kind} {format_bytes(n)}" for kind, n in parts.items() if n and kind != "total"
        )
        budget = budgets.of(tier)
        limit = "-" if budget >= UNLIMITED else format_bytes(budget)
        yield f"{tier.value:10s} {format_bytes(parts['total']):>12s} {limit:>12s}   {listed}"
    for kind, tiers in result["homes"].items():
        places = ", ".join(f"{format_bytes(n)} on {tier}" for tier, n in tiers.items())
        yield f"{kind}: {places}"
    for link, nbytes in result["bytes_by_link"].items():
        yield f"moved a step, {link}: {format_bytes(nbytes)}"
    yield f"gathered a step: {format_bytes(result['bytes_gathered_per_step'])}"
    yield (
        f"step: {result['step_seconds']:.2f} s, of which {result['stall_seconds']:.2f} s waiting; "
        f"bound by {result['bound_by']}"
    )
    yield f"update: {result['update']}"
    if result["tail"] is not None:
        yield priced_in_words(result["seconds_by_update"])
    if result["updated_in_backward"]:
        yield f'with update="both", in backward: {result["updated_in_backward"]}'
    yield f"largest batch of a rank: {result['largest_batch']}"
    if result["suggestion"]:
        yield f"cheapest change: {result['suggestion']}"
    yield f"planned in {result['planner_seconds']:.2f} s, {result['num_chunks']} chunks"


def read_bandwidths(path: Path | None, device: str) -> Bandwidths:
    """`TYPICAL`, with what the file says instead."""
    if path is None:
        return TYPICAL[device]
    given = json.loads(path.read_text())
    Bandwidths.from_json(given)  # refuses unknown names
    return replace(TYPICAL[device], **{name: float(value) for name, value in given.items()})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plan", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--model", default="gpt2", help="a name, a config.json or package.module:factory"
    )
    parser.add_argument("--lora", type=int, metavar="RANK")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, help="default: at most 8")
    parser.add_argument("--device", choices=sorted(TYPICAL), default="cuda")
    parser.add_argument("--device-mem", type=parse_bytes, default=parse_bytes("24GiB"))
    parser.add_argument("--host-mem", type=parse_bytes, default=parse_bytes("64GiB"))
    parser.add_argument("--nvme", type=parse_bytes, default=parse_bytes("1TB"))
    parser.add_argument(
        "--nvme-fraction", type=float, default=0.0, help="of the state, at least, on NVMe"
    )
    parser.add_argument("--batch", type=int, default=1, help="of a rank")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--bandwidths", type=Path, help="JSON, bytes a second; see Bandwidths")
    parser.add_argument("--activation-bytes", type=parse_bytes, help="of a batch of 1; not traced")
    parser.add_argument("--timeline", type=Path, help=".html, .png or .json")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    for name in ("world_size", "batch", "seq"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= args.nvme_fraction <= 1:
        parser.error("--nvme-fraction must be from 0 to 1")
    args.ranks_per_node = args.ranks_per_node or min(8, args.world_size)
    if not 1 <= args.ranks_per_node <= args.world_size:
        parser.error("--ranks-per-node must be at least 1 and at most --world-size")
    return args


def ask(args: argparse.Namespace) -> Question:
    """Build the model on the meta device, search its chunks and trace it."""
    model = models.build(args.model)
    if args.lora is not None:
        model = models.add_lora(model, args.lora)
    found = search_chunk_configuration(model, world_size=args.world_size)
    layout = training_layout(found.layout.params, found.capacities, args.world_size)
    if args.activation_bytes is None:
        activations = activations_of(model, layout.params, args.seq)
    else:
        activations = constant_activations(sequential_trace(layout.params), args.activation_bytes)
    machine = Machine(
        args.world_size, args.ranks_per_node, args.device_mem, args.host_mem, args.nvme,
        read_bandwidths(args.bandwidths, args.device), args.device,
    )  # fmt: skip
    wider = wider_chunks(layout, models.itemsizes(model))
    return Question(layout, activations, machine, args.batch, args.seq, args.nvme_fraction, wider)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        question = ask(args)
    except (ValueError, OSError) as error:
        sys.exit(f"bench.plan: {error}")
    result, planned = answer(question)
    print(report(result, question))
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model, **result}, indent=1))
    if args.timeline is not None:
        timeline = planned_timeline(planned.plan, planned.profile, question.activations.one)
        write_timeline(timeline, args.timeline)
    return 0 if result["fits"] else 1


if __name__ == "__main__":
    sys.exit(main())
