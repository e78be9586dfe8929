"""Table of what fits: models on cards, with the least RAM and disk; as Markdown and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gemini.placement.sizes import BudgetError
from gemini.placement.tiers import Tier
from gemini.units import GIB

from .machine import CARDS, machine_of, usable_ram
from .question import Question

_TEMPLATES = Path(__file__).parent / "templates"
CARD_NAMES = ("rtx4080", "rtx4090", "rtx5090", "l40s", "h100", "h200")
HOSTS = ((32, 0), (64, 1), (128, 2), (256, 4), (1024, 8))  # GiB, TB; each has more of both
MODELS = (
    "llama-3.2-1b", "gemma-2-2b", "qwen3-4b", "llama-3.1-8b", "qwen3-14b", "deepseek-v2-lite",
    "mistral-small-24b", "qwen3-32b", "mixtral-8x7b", "llama-3.3-70b",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FitRow:
    """Row of the table: one model on one machine. seconds: of a step; None where it does not
    fit."""

    model: str
    training: str  # "all parameters", "LoRA"
    card: str
    ram_gib: int
    disk_tb: int
    seconds: float | None
    batch: int
    seq: int


def rows(model: str, training: str, question: Question) -> Iterator[FitRow]:
    """Rows of one model, on every card with every host."""
    seconds_on: dict[tuple[str, int], float | None] = {}
    first = 0  # host that is enough, as on a card that has more memory
    for card in sorted(CARD_NAMES, key=lambda name: -CARDS[name].gib):
        seconds: float | None = None
        needs_more = True
        for i, (ram, disk) in enumerate(HOSTS):
            if needs_more and i >= first:
                machine = machine_of(
                    {"host_mem": usable_ram(ram * GIB, 1), "nvme": disk * 10**12}, gpu=card
                )
                try:
                    result = replace(question, machine=machine).planned()
                except BudgetError:
                    first = i + 1 if seconds is None else first
                else:
                    seconds = question.seconds(result)
                    needs_more = result.profile.peak(Tier.NVME) > 0  # else more changes nothing
            seconds_on[card, ram] = seconds
    for card in CARD_NAMES:
        for ram, disk in HOSTS:
            found = seconds_on[card, ram]
            yield FitRow(model, training, card, ram, disk, found, question.batch, question.seq)


def markdown(table_rows: Sequence[FitRow], title: str) -> str:
    """Page in Markdown: a row for each model, with its host and planned seconds of a step."""
    parts = [
        "# What fits", "", title, "",
        "A row has one host, RAM and disk: the smallest with which the model trains on every card "
        "that can",
        "train it at all. A cell has the planned seconds of one step with that host. A larger card "
        "is slower",
        "only if its link is: rtx5090, h100 and h200 have PCIe 5, the others PCIe 4.", "",
        "[Choose a card, a host and a training](what-fits.html). `python -m gemini plan --fits "
        "FOLDER --batch 1`",
        "writes both pages.",
    ]  # fmt: skip
    for training in dict.fromkeys(row.training for row in table_rows):
        asked = [
            (model, "", [r for r in table_rows if (r.model, r.training) == (model, training)])
            for model in dict.fromkeys(row.model for row in table_rows)
        ]
        parts += ["", f"## Training {training}", "", *lines(asked, CARD_NAMES)]
    return "\n".join(parts) + "\n"


def lines(
    asked: Iterable[tuple[str, str, Sequence[FitRow]]], cards: Sequence[str]
) -> Iterator[str]:
    """Lines of a table in Markdown. asked: (model, rest of its name, its rows)."""
    heads = [f"{name}, {CARDS[name].gib} GB" for name in cards]
    yield f"| planned, not measured: seconds a step | RAM + disk | {' | '.join(heads)} |"
    yield "|---" * (2 + len(cards)) + "|"
    for model, rest, found in asked:
        host = one_host([row for row in found if row.card in cards])
        cells = [
            next(_seconds(r) for r in found if (r.card, r.ram_gib, r.disk_tb) == (card, *host))
            for card in cards
        ]
        disk = f" + {host[1]} TB" if host[1] else ""
        yield f"| {model}{rest} | {host[0]} GiB{disk} | {' | '.join(cells)} |"


def one_host(mine: Sequence[FitRow]) -> tuple[int, int]:
    """RAM and disk of the smallest host that trains the model on every card that any host does.

    With a host for each cell a card that fits with a smaller one would look slower for it.
    """
    able = {row.card for row in mine if row.seconds is not None}
    for host in HOSTS:
        fits = {r.card for r in mine if (r.ram_gib, r.disk_tb) == host and r.seconds is not None}
        if fits == able:
            return host
    return HOSTS[-1]


def _seconds(row: FitRow) -> str:
    if row.seconds is None:
        return "no"
    return f"{row.seconds:.2g} s" if row.seconds < 99.5 else f"{row.seconds:.0f} s"


def rows_of(page: str) -> list[FitRow]:
    """Rows that a page of `page` was made of."""
    text = page.partition("const rows = ")[2].partition(", cards = ")[0]
    return [FitRow(**row) for row in json.loads(text)]


def page(table_rows: Sequence[FitRow], title: str) -> str:
    """Page in HTML, one file that asks nothing of a network."""
    sizes = {name: CARDS[name].gib for name in CARD_NAMES}
    usable = {ram: usable_ram(ram * GIB, 1) // GIB for ram, _ in HOSTS}
    return rendered(
        "what-fits", title="What fits", says=title, rows=[asdict(row) for row in table_rows],
        cards=sizes, usable=usable,
    )  # fmt: skip


def rendered(name: str, **values: Any) -> str:
    """Page of a template, in the style of all pages; texts in it are escaped."""
    from jinja2 import Environment, FileSystemLoader  # which torch depends on

    pages = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True)
    pages.policies["json.dumps_kwargs"] = {}  # keys in their order
    return pages.get_template(f"{name}.html.jinja").render(values)
