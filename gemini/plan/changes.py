"""Changes with which a run fits, or is faster: one list, each planned itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from gemini.placement.orders import LAYERS, WORTH_SAYING
from gemini.placement.planner import PlanResult
from gemini.placement.sizes import UNLIMITED, BudgetError
from gemini.placement.tiers import Tier
from gemini.units import GIB, format_bytes

from .machine import Hardware
from .question import Question

LORA, QUANTISED = 16, "nf4"  # rank of the adapters that are suggested, and kind of the base
_MIB = 1 << 20


def in_flags(error: BudgetError, machine: Hardware) -> BudgetError:
    """Error with flags of the command in place of arguments; a share beside what was given."""
    assert error.tier is not None
    flags = dict(zip((Tier.NVME, Tier.HOST, Tier.DEVICE), _FLAGS.values(), strict=True))
    flag, knob = flags[error.tier], error.knob
    for tier, name in flags.items():
        knob = knob.replace(f"{tier.value}_budget", name)
    given = next(getattr(machine, name) for name, one in _FLAGS.items() if one == flag)
    if machine.ranks_per_node > 1 and error.budget_bytes < given:
        flag = f"{flag} of {format_bytes(given)}: a rank's share"
        knob = knob.replace("by as much", f"by as much for each of {machine.ranks_per_node} ranks")
    return BudgetError.missing(
        error.tier, error.missing_bytes, error.budget_bytes, error.what, knob, flag
    )


def cheapest(question: Question) -> Question:
    """Cheapest change with which it fits, each checked by a plan.

    From cheap to dear: the same step in more forwards, layer by layer, a chunked loss,
    checkpointing, a disk, adapters, a quantised base; then more RAM, more device memory.
    """
    fitting = next(asked for asked in _smaller(question) if asked.fits())
    for name in _FLAGS:
        fitting = _least(name, getattr(question.machine, name), fitting)
    return fitting


def _least(name: str, before: int, fitting: Question) -> Question:
    """Question with as little of this size as will do, to a MiB or a thousandth."""
    low, high = before, getattr(fitting.machine, name)
    while high - low > max(_MIB, high // 1000):
        middle = _up((low + high) // 2)
        changed: dict[str, Any] = {name: middle}
        asked = replace(fitting, machine=replace(fitting.machine, **changed))
        if asked.fits():
            fitting, high = asked, middle
        else:
            low = middle
    return fitting


def _smaller(question: Question) -> Iterator[Question]:
    """Questions that need less memory, from cheap to dear. The last one fits."""
    switches = (_layered, _chunked, _checkpointed, _with_disk, _adapted, _quantised)
    for count in range(len(switches) + 1):
        for chosen in combinations(switches, count):
            asked: Question | None = question
            for switch in sorted(chosen, key=lambda one: one is _with_disk):  # for what is left
                asked = switch(asked) if asked is not None else None
            if asked is not None:
                yield asked
                yield from _in_more_forwards(asked)
    least = enough(question).machine
    for names in (("host_mem",), ("nvme", "host_mem"), ("device_mem",), ("device_mem", "host_mem")):
        more = {name: getattr(least, name) for name in names}
        yield replace(question, machine=replace(question.machine, **more))
    yield replace(question, machine=least)


def _in_more_forwards(question: Question) -> Iterator[Question]:
    batch = question.batch
    for times in range(2, batch + 1):
        if batch % times == 0:
            accumulate = question.accumulate * times
            yield replace(question, batch=batch // times, accumulate=accumulate)


def _chunked(question: Question) -> Question | None:
    """Logits of a few tokens at a time: with the same bits but for the order of a sum."""
    return None if question.chunked else _other(question, chunked=True)


def _layered(question: Question) -> Question | None:
    """Micro-batches layer by layer; None if they are, or if the model has no list of layers."""
    if question.accumulate == 1 or question.by_layers:
        return None
    asked = replace(question, accumulate_order=LAYERS)
    return asked if asked.has_trace else None


def _checkpointed(question: Question) -> Question | None:
    return None if question.checkpointing else _other(question, checkpointing=True)


def _adapted(question: Question) -> Question | None:
    return None if question.lora else _other(question, lora=LORA)


def _quantised(question: Question) -> Question | None:
    """The base, which adapters leave as it is."""
    return _other(question, quantize=QUANTISED) if question.lora and not question.quantize else None


def _other(question: Question, **changed: Any) -> Question | None:
    """Question with the differences of `question` to the one that was asked first, and these."""
    if question.other is None:
        return None
    names = ("checkpointing", "lora", "quantize", "chunked")
    other = question.other(*(changed.get(name, getattr(question, name)) for name in names))
    return other and replace(
        other, machine=question.machine, batch=question.batch, accumulate=question.accumulate,
        nvme_fraction=question.nvme_fraction, update=question.update, lengths=question.lengths,
        accumulate_order=question.accumulate_order,
    )  # fmt: skip


def _with_disk(question: Question) -> Question | None:
    machine = question.machine
    try:
        planned = replace(question, machine=replace(machine, nvme=UNLIMITED)).fitted()[1]
    except BudgetError:
        return None
    nvme = _up(machine.ranks_per_node * planned.profile.peak(Tier.NVME))
    more = replace(machine, nvme=nvme)
    return replace(question, machine=more) if nvme > machine.nvme else None


def enough(question: Question) -> Question:
    """Question with as much more of each tier as it takes to fit, in whole MiB."""
    while True:
        try:
            question.fitted()
            return question
        except BudgetError as error:
            question = replace(question, machine=_with_more(question.machine, error))


def _with_more(machine: Hardware, error: BudgetError) -> Hardware:
    of_node = machine.ranks_per_node * error.missing_bytes
    if error.tier is Tier.NVME:
        return replace(machine, nvme=_up(machine.nvme + of_node))
    if machine.device == "cpu":
        both = _up(min(machine.device_mem, machine.host_mem) + of_node)
        device_mem, host_mem = max(both, machine.device_mem), max(both, machine.host_mem)
        return replace(machine, device_mem=device_mem, host_mem=host_mem)
    if error.tier is Tier.HOST:
        return replace(machine, host_mem=_up(machine.host_mem + of_node))
    return replace(machine, device_mem=_up(machine.device_mem + error.missing_bytes))


def _up(nbytes: int) -> int:
    """Bytes rounded up to whole MiB."""
    return -(-nbytes // _MIB) * _MIB


def faster(question: Question, result: PlanResult) -> Iterator[tuple[Question, float]]:
    """Changes that take less time in the same memory, or in a little more; with seconds."""
    base = question.seconds(result)
    for asked in _more_at_once(question, result.profile.peak(Tier.NVME)):
        try:
            seconds = asked.seconds(asked.planned())
        except BudgetError:
            continue
        if seconds < WORTH_SAYING * base:
            yield asked, seconds


def _more_at_once(question: Question, on_disk: int) -> Iterator[Question]:
    kept = _other(question, checkpointing=False) if question.checkpointing else None
    if kept is not None:
        yield kept
    by_layers = _layered(question)
    if by_layers is not None:
        yield by_layers
    if question.accumulate % 2 == 0:
        yield replace(question, batch=2 * question.batch, accumulate=question.accumulate // 2)
    if on_disk:
        machine = question.machine
        tier = Tier.DEVICE if machine.device == "cpu" else Tier.HOST
        error = BudgetError.missing(tier, on_disk, UNLIMITED, "", "")
        yield replace(question, machine=_with_more(machine, error))


def flags(before: Question, after: Question) -> str:
    """Flags of the command that make one question the other."""
    return " ".join(flag for flag, _ in _changes(before, after))


def in_words(before: Question, after: Question) -> str:
    """Words for a change, with what there was before."""
    return " and ".join(words for _, words in _changes(before, after))


def _whole(nbytes: int) -> str:
    """A size for a flag, rounded up: a large one in GiB."""
    unit, name = (GIB, "GiB") if nbytes >= 16 * GIB else (_MIB, "MiB")
    return f"{-(-nbytes // unit)}{name}"


_FLAGS = {"nvme": "--nvme", "host_mem": "--host-mem", "device_mem": "--device-mem"}
_IN_WORDS = {"nvme": "of disk", "host_mem": "of RAM", "device_mem": "on the device"}


def _changes(before: Question, after: Question) -> Iterator[tuple[str, str]]:
    """Flags and words of a change."""
    if after.checkpointing != before.checkpointing:
        kept = "computed again in backward, not kept" if after.checkpointing else "kept"
        flag = "--checkpointing" if after.checkpointing else "--no-checkpointing"
        yield flag, f"activations that are {kept}"
    if after.chunked and not before.chunked:
        yield "--chunk-loss", "the logits of a few tokens at a time (chunk_loss)"
    if after.by_layers and not before.by_layers:
        yield "--accumulate-order layers", "micro-batches layer by layer"
    if after.lora != before.lora:
        yield f"--lora {after.lora}", f"adapters of rank {after.lora} rather than all parameters"
    if after.quantize != before.quantize:
        yield f"--quantize {after.quantize}", f"a base in {after.quantize} rather than in 16 bits"
    if (after.batch, after.accumulate) != (before.batch, before.accumulate):
        ranks = after.machine.world_size if after.machine.is_here else 1  # as the command counts
        yield (
            f"--batch {ranks * after.batch} --accumulate {after.accumulate}",
            f"{after.accumulate} forwards of {after.batch} rather than {before.accumulate} of "
            f"{before.batch}",
        )
    for name, flag in _FLAGS.items():
        old, new = getattr(before.machine, name), getattr(after.machine, name)
        if new != old and name == "nvme" and after.machine.is_here:
            yield f"{flag} FOLDER", "files on a disk"
        elif new != old:
            words = f"{format_bytes(new)} {_IN_WORDS[name]} rather than {format_bytes(old)}"
            yield f"{flag} {_whole(new)}", words
