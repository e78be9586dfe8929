"""A model, a machine and a batch: whether it fits, the largest batch, the cheapest change. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemini.chunk.layout import ChunkLayout
from gemini.placement.fit import fit, usual_block_numel
from gemini.placement.planner import PlanInputs, PlanResult
from gemini.placement.policy import AutoPlacement
from gemini.placement.sizes import BudgetError, StateBytes
from gemini.placement.tiers import Tier
from gemini.units import BLOCK_NUMEL, ChunkId, format_bytes

from .machine import Hardware

if TYPE_CHECKING:  # which needs torch
    from .activations import Activations

ADAM = StateBytes(per_element=12, has_master=True)
MAX_BATCH = 1 << 16


@dataclass(frozen=True, slots=True)
class Question:
    """A model, a machine and a batch of each rank."""

    layout: ChunkLayout
    activations: Activations
    machine: Hardware
    batch: int
    seq: int
    nvme_frac: float = 0.0  # of the optimizer's state, at least, on NVMe
    with_originals: frozenset[ChunkId] = frozenset()  # chunks of parameters that came in fp32
    state: StateBytes = ADAM
    flops_per_token: float = 0.0
    # the same with checkpointing; None where it has that, or where nobody can say
    lighter: Callable[[], Question] | None = None

    def planned(self) -> PlanResult:
        """Raises BudgetError where it does not fit."""
        splits = self.state == ADAM
        split = frozenset(c.id for c in self.layout.chunks if splits and c.dtype == "bfloat16")
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
        inputs = PlanInputs(
            layout=self.layout,
            trace=self.activations.at(self.batch),
            state=replace(self.state, split_on_disk=split),
            budgets=self.machine.budgets(),
            bandwidths=self.machine.bandwidths,
            has_host_tier=self.machine.device != "cpu",
            flops=self.flops_per_token * self.batch * self.seq,
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


def _with_more(machine: Hardware, error: BudgetError) -> Hardware:
    ranks = machine.ranks_per_node
    if error.tier is Tier.NVME:
        return replace(machine, nvme=machine.nvme + ranks * error.missing_bytes)
    if machine.device == "cpu":
        more = min(machine.device_mem, machine.host_mem) + ranks * error.missing_bytes
        return replace(machine, device_mem=more, host_mem=more)
    if error.tier is Tier.HOST:
        return replace(machine, host_mem=machine.host_mem + ranks * error.missing_bytes)
    return replace(machine, device_mem=machine.device_mem + error.missing_bytes)


@dataclass(frozen=True, slots=True)
class Change:
    """What makes it fit. flags: of the command; words: the same, with what there was before."""

    flags: str
    words: str
    asked: Question


def cheapest(question: Question, batch: int) -> Change:
    """The cheapest change with which it fits, each checked by a plan.

    From cheap to dear: a smaller batch, checkpointing, disk, RAM, both, device memory (with the
    rest). batch: the largest that fits as it is, or 0.
    """
    if batch:
        words = f"a batch of {batch} rather than {question.batch}"
        return Change(f"--batch {batch}", words, replace(question, batch=batch))
    if question.lighter is not None:
        lighter = question.lighter()
        lighter = replace(lighter, machine=question.machine, batch=question.batch)
        if lighter.fits():
            words = "activations that are computed again in backward, not kept"
            return Change("--checkpointing", words, lighter)
    machine, least = question.machine, enough(question)[0].machine
    for names in _CHANGES:
        changed = replace(machine, **{name: getattr(least, name) for name in names})
        asked = replace(question, machine=changed)
        if changed != machine and asked.fits():
            break
    return _more(machine, changed, asked)


_CHANGES = (
    ("nvme",), ("host_mem",), ("nvme", "host_mem"), ("device_mem",),
    ("nvme", "host_mem", "device_mem"),
)  # fmt: skip
_IN_WORDS = {"nvme": "of disk", "host_mem": "of RAM", "device_mem": "on the device"}


def _more(machine: Hardware, changed: Hardware, asked: Question) -> Change:
    sizes = [
        (name, getattr(machine, name), getattr(changed, name))
        for name in ("nvme", "host_mem", "device_mem")
        if getattr(changed, name) != getattr(machine, name)
    ]
    return Change(
        " ".join(f"--{name.replace('_', '-')} {format_bytes_up(n)}" for name, _, n in sizes),
        " and ".join(
            f"{format_bytes(n)} {_IN_WORDS[name]} rather than {format_bytes(before)}"
            for name, before, n in sizes
        ),
        asked,
    )


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
