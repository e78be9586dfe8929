"""Answers in words: five lines and the assumptions, all details, arguments of a run. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gemini.arguments import nearest
from gemini.placement.orders import OrderPrices
from gemini.placement.planner import PlanResult
from gemini.placement.sizes import UNLIMITED, BudgetError
from gemini.placement.start import wear
from gemini.placement.tiers import Tier
from gemini.placement.timetable.updates import TAIL, priced_in_words
from gemini.units import format_bytes

from . import changes
from .machine import Hardware
from .question import ProcessBytes, Question, homes, largest_batch, longest_seq

SERIAL = "serial"
# what `train` and Trainer name an optimizer -> the same of a plan, and how its state is kept
OPTIMIZERS = {
    "adamw_torch": ("adamw", "fp32"), "adamw_torch_fused": ("adamw", "fp32"),
    "sgd": ("sgd", "fp32"),
    "adagrad": ("sgd", "fp32"), "rmsprop": ("sgd", "fp32"),  # one plane, as many bytes
    "lion_32bit": ("lion", "fp32"), "schedule_free_adamw": ("adamw", "fp32"),
    "paged_adamw_32bit": ("adamw", "fp32"), "adafactor": ("adamw", "fp32"),
    "adamw_8bit": ("adamw", "8bit"), "adamw_bnb_8bit": ("adamw", "8bit"),
    "paged_adamw_8bit": ("adamw", "8bit"), "adamw_torch_8bit": ("adamw", "8bit"),
}  # fmt: skip
_WHERE = {Tier.DEVICE: "device", Tier.HOST: "RAM", Tier.NVME: "disk"}


def check_optim(name: str) -> None:
    """Raise ValueError for an `args.optim` of Trainer that has no sharded form."""
    if name not in OPTIMIZERS:
        near = nearest(name, OPTIMIZERS)
        meant = f"did you mean {near}? " if near else ""
        raise ValueError(
            f"args.optim={name!r} has no form whose state is sharded; {meant}expected one of "
            f"{', '.join(OPTIMIZERS)}, or in your own script optimizers=(...)"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer: what a run would take. Bytes are of one rank; where it does not fit, after `change`.

    homes: bytes that live on each tier, by kind (parameters, frozen, gradients, state, originals).
    peaks: by tier, at the moment when it holds most: also staging and activations.
    process: RAM beyond the peaks.
    seconds: of a step: its forwards, backwards and update, with `best_update`.
    best_update: the `update` that runs: what is asked for, unless a rule is against it.
    change: flags of the cheapest change with which it fits; None where it does.
    longest: `longest_seq`, where it was asked for.
    faster: flags that take less time, each with its seconds.
    why: what is missing; None where it fits.
    """

    fits: bool
    homes: Mapping[str, Mapping[str, int]]
    peaks: Mapping[str, int]
    budgets: Mapping[str, int]
    process: ProcessBytes
    seconds: float
    bound_by: str
    best_update: str
    largest_batch: int
    change: str | None
    change_in_words: str | None
    faster: tuple[tuple[str, float], ...]
    why: str | None
    assumptions: tuple[str, ...]
    asked: Question  # as it was planned, so after the change, and with the update
    result: PlanResult
    orders: OrderPrices | None  # of micro-batches; None for one of them
    longest: int | None = None


def answer(question: Question, assumed: tuple[str, ...] = (), *, longest: bool = False) -> Answer:
    """Plan a question, or the cheapest change of it. assumed: facts of model and batch, in
    words. longest: say which is the longest sequence that fits."""
    why, asked = None, question
    try:
        result = question.planned()
    except BudgetError as error:
        why = str(changes.in_flags(error, question.machine))
        asked = changes.cheapest(question)
        result = asked.planned()
    faster = [] if why else list(changes.faster(asked, result))
    best = asked.runs(result)
    if best != asked.update:  # a step needs no buffers of a thread's
        asked = replace(asked, update=best)
        result = asked.planned()
    budgets = asked.machine.budgets()
    return Answer(
        why is None, homes(result), {t.value: result.profile.peak(t) for t in Tier},
        {t.value: budgets.of(t) for t in Tier}, asked.process(result), asked.seconds(result),
        result.cost.bound_by, best, largest_batch(question),
        changes.flags(question, asked) if why else None,
        changes.in_words(question, asked) if why else None,
        tuple((changes.flags(question, one), seconds) for one, seconds in faster), why,
        (*assumed, *question.machine.assumptions(_mattered(asked.machine, result))),
        asked, result, asked.orders(), longest_seq(question) if longest else None,
    )  # fmt: skip


def _mattered(machine: Hardware, result: PlanResult) -> dict[str, str]:
    """Numbers of the machine that the answer depends on."""
    what = {"device_mem": "device memory", "host_mem": "RAM", "nvme": "disk", "flops": "computing"}
    if machine.device == "cpu":  # where both are RAM, the lower one holds
        lower = machine.device_mem < machine.host_mem
        del what["host_mem" if lower else "device_mem"]
    links = {(src, dst) for (src, dst), n in result.plan.bytes_moved().items() if n}
    if any(Tier.NVME in link for link in links):
        what |= {"nvme_read": "disk reads", "nvme_write": "disk writes"}
    if any(Tier.HOST in link for link in links):
        what |= {"host_to_device": "RAM to device", "device_to_host": "device to RAM"}
    if machine.world_size > 1:
        what["collective"] = "between ranks"
    return what


def five_lines(name: str, plan: Answer) -> Iterator[str]:
    """Whether it fits, homes, seconds, remedies; then the assumptions."""
    machine, asked = plan.asked.machine, plan.asked
    ranks = f"{machine.world_size} ranks of " if machine.world_size > 1 else ""
    yield f"{name} {'fits' if plan.fits else f'does not fit: {plan.why}'}"
    if plan.longest is not None:
        yield f"the longest --seq that fits: {plan.longest}"
    if plan.fits:
        yield f"largest batch of a rank: {plan.largest_batch}"
    else:
        yield f"cheapest change: {plan.change_in_words} ({plan.change}); with it:"
    places = []
    for tier in Tier:
        kinds = [kind for kind, tiers in plan.homes.items() if tiers.get(tier.value)]
        if plan.peaks[tier.value]:
            limit = plan.budgets[tier.value]
            of = "" if limit >= UNLIMITED else f" of {format_bytes(limit)}"
            contents = f" ({', '.join(kinds)})" if kinds else ""
            places.append(f"{_WHERE[tier]} {format_bytes(plan.peaks[tier.value])}{of}{contents}")
    yield f"at the peak: {'; '.join(places)}; {process_in_words(plan.process)}"
    planned = plan.result.plan
    if planned.recomputed is not None:
        yield f"{planned.recomputed} a step"
    if planned.saved is not None:
        yield f"{planned.saved} of a rank, of those that backward needs"
    written = sum(n for (_, to), n in planned.bytes_moved().items() if to is Tier.NVME)
    written *= machine.ranks_per_node
    if written:
        yield f"{'' if machine.folder == '.' else f'in {machine.folder}: '}{wear(written)}"
    tokens = machine.world_size * asked.accumulate * asked.batch * asked.seq
    times = f"{asked.accumulate} x " if asked.accumulate > 1 else ""
    yield (
        f"a step: {plan.seconds:.3g} s for {ranks}{times}{asked.batch} x {asked.seq} tokens, "
        f"{tokens / plan.seconds:,.0f} tokens/s"
    )
    if plan.orders is not None:
        yield str(plan.orders)
    yield f'bound by {plan.bound_by.replace("_", " ")}; update="{plan.best_update}"'
    for flags, seconds in plan.faster:
        yield f"with {flags} a step takes about {seconds:.3g} s"
    yield "assumptions:"
    yield from (f"  {one}" for one in plan.assumptions)


def process_in_words(process: ProcessBytes) -> str:
    """Words for RAM beyond a plan's peak: a floor, and what is bounded above it with a margin."""
    slack = f"with a slack of {format_bytes(process.slack)}"
    above = format_bytes(process.above_floor)
    if process.floor is None:
        own = f"{above} of RAM {slack}, and what python -m gemini doctor measures for its libraries"
    else:
        own = (
            f"{format_bytes(process.total)} of RAM: a floor of {format_bytes(process.floor)}, and "
            f"{above} above it {slack}"
        )
    if process.experts:
        own += f"; experts have no bound on a CPU, {format_bytes(process.experts)} is an estimate"
    return f"the process itself takes {own}"


def verdict(plan: Answer) -> str:
    """Whether it fits, in a line or two."""
    if plan.fits:
        return f'it fits; {plan.seconds:.3g} s a step with update="{plan.best_update}"'
    why = re.sub(r" \(.*?\)", "", plan.why or "").partition(";")[0]
    return (
        f"it does not fit: {why}\n"
        f"drawn with the cheapest change: {plan.change_in_words} ({plan.change})"
    )


def train_arguments(plan: Answer, optim: str) -> str:
    """Arguments with which `python -m gemini train` plans the same; after the change, if any."""
    machine, asked = plan.asked.machine, plan.asked
    device = machine.device_mem
    if machine.device == "cpu":
        device = min(device, machine.host_mem)
    given = [f"--device-mem {device}"]
    if machine.device != "cpu":
        given.append(f"--host-mem {machine.host_mem}")
    if plan.peaks[Tier.NVME.value] or (asked.spills and machine.nvme):
        given.append(f"--nvme {machine.folder}")
    if asked.lora:
        given.append(f"--lora {asked.lora}")
    if asked.quantize:
        given.append(f"--quantize {asked.quantize}")
    given += [
        f"--seq {asked.seq}", f"--batch {machine.world_size * asked.batch}",
        f"--accumulate {asked.accumulate}", f"--accumulate-order {asked.accumulate_order}",
        f"--optim {optim}",
        f"--update {plan.best_update}",
        f"--activations {asked.activations}",
        "--checkpointing" if asked.checkpointing else "--no-checkpointing",
    ]  # fmt: skip
    return " ".join(given)


def update_in_words(planned: PlanResult) -> str:
    """Words for what a tail hides of an update, or the rule against one."""
    tail = planned.overlapped.get(TAIL)
    if tail is None:
        return f"serial, as {planned.against_tail or 'nothing is computed'}"
    where = "" if planned.plan.has_host_tier else "where no budget is given, "
    return (
        f'with update="tail", {where}{tail}: {tail.seconds:.2f} s a step, and '
        f"{planned.cost.seconds:.2f} s without"
    )


def as_json(plan: Answer) -> dict[str, Any]:
    """Answer in plain values."""
    planned = plan.result
    moved = planned.plan.bytes_moved()
    tail = planned.overlapped.get(TAIL)
    return {
        "fits": plan.fits,
        "peaks": dict(plan.peaks),
        "process_bytes": plan.process.total,
        "process": asdict(plan.process),
        "bytes_moved_per_step": sum(moved.values()),
        "step_seconds": planned.cost.seconds,
        "bound_by": plan.bound_by,
        "tail": None if tail is None else asdict(tail),
        "update": update_in_words(planned),
        "seconds_by_update": planned.seconds_by_update,
        "best_update": plan.best_update,
        "largest_batch": plan.largest_batch,
        **({} if plan.longest is None else {"longest_seq": plan.longest}),
        "suggestion": plan.change,
        "faster": dict(plan.faster),
        "orders": None if plan.orders is None else asdict(plan.orders),
        "missing": plan.why,
        "homes": plan.homes,
        "peaks_by_kind": planned.profile.peaks(),
        "bytes_by_link": {f"{src.value} to {dst.value}": n for (src, dst), n in moved.items()},
        "bytes_gathered_per_step": sum(
            planned.plan.chunks[g.chunk].payload_bytes for g in planned.plan.gathers
        ),
        "gather_gap": planned.plan.forecast.gather_gap,
        "stall_seconds": planned.cost.stall_seconds,
        "busy_seconds": planned.cost.busy,
        "num_chunks": len(plan.asked.layout.chunks),
        "assumptions": list(plan.assumptions),
    }


def all_lines(plan: Answer) -> Iterator[str]:
    """Lines for every kind on every tier and link."""
    told, asked = as_json(plan), plan.asked
    yield f"of a rank with {asked.batch} x {asked.seq} a step"
    yield f"{'a rank':10s} {'peak':>12s} {'budget':>12s}   at the peak"
    for tier in Tier:
        parts = told["peaks_by_kind"][tier.value]
        listed = ", ".join(
            f"{kind} {format_bytes(n)}" for kind, n in parts.items() if n and kind != "total"
        )
        budget = plan.budgets[tier.value]
        limit = "-" if budget >= UNLIMITED else format_bytes(budget)
        yield f"{tier.value:10s} {format_bytes(parts['total']):>12s} {limit:>12s}   {listed}"
    for kind, tiers in plan.homes.items():
        places = ", ".join(f"{format_bytes(n)} on {tier}" for tier, n in tiers.items())
        yield f"{kind}: {places}"
    if nbytes := plan.result.plan.frozen_read_bytes:
        yield f"of frozen parameters, read a step: {format_bytes(nbytes)}"
    for link, nbytes in told["bytes_by_link"].items():
        yield f"moved a step, {link}: {format_bytes(nbytes)}"
    yield f"gathered a step: {format_bytes(told['bytes_gathered_per_step'])}"
    yield (
        f"step: {told['step_seconds']:.2f} s, of which {told['stall_seconds']:.2f} s waiting; "
        f"bound by {plan.bound_by}"
    )
    yield f"update: {told['update']}"
    if TAIL in plan.result.overlapped:
        yield priced_in_words(plan.result.seconds_by_update)
    yield f"{told['num_chunks']} chunks"
