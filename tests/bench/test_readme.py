import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import ways
from bench.docs.commands import INTERNAL, VARIABLES
from bench.docs.doc_tables import BUDGETS, LINKS, NON_MODEL_BYTES, NUMEL, placement_example
from bench.docs.readme import COMPUTED, TABLES, pages, render
from gemini.placement.tiers import Tier

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_tables_are_those_of_the_results_and_of_the_code():
    everything = ""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert render(text) == text, page.name
        everything += text
    for name in (*TABLES, *COMPUTED):
        assert everything.count(f"<!-- table {name} -->") == 1


def test_the_page_of_commands_has_every_variable_that_the_source_reads():
    found = set()
    for folder in ("gemini", "optim", "io", "kernels_triton"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "environ" in text:
                found |= set(re.findall(r"""["']([A-Z][A-Z0-9_]+)["']""", text))
    shown = {name for names in VARIABLES for name in names.split(", ")}
    assert len(found) > 20 and found - {"INFO"} == shown | INTERNAL


def test_the_seven_ways_say_what_the_disk_allows_and_which_rows_a_result_was_made_without():
    def row(name, seconds, moved):
        others = dict.fromkeys(("peak_rss_mib", "train_loss_last", "val_loss", "nvme_bytes"), 1)
        return {"name": name, "step_seconds_median": seconds, "bytes_moved_per_step": moved,
                **others}  # fmt: skip

    before = [row("resident", 1.0, 0), row("nvme", 3.0, 3e9)]
    *_, serial, tail = ways.table(before, 2.0).splitlines()
    assert serial == (
        "`nvme` takes 3.00 s a step, 1.20 of its bound: 2.50 s = `resident`'s step plus its bytes "
        "at that speed."
    )
    assert tail.startswith("`nvme-tail` was not measured: this result was made before")
    for moved, said in ((3e9, "1.20 of its bound: 1.50 s"), (1e9, "1.80 of its bound: 1.00 s")):
        text = ways.table([*before, row("nvme-tail", 1.8, moved)], 2.0)
        assert f"1.80 s a step, {said} = the larger of `resident`'s" in text.splitlines()[-1]
    assert {"nvme", "nvme-tail"} < ways.RUNS.keys()


def test_a_table_that_was_changed_by_hand_is_found():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert render(text.replace("| resident |", "| resident, faster |")) == text


@pytest.mark.parametrize("name", ["timeline", "comparison", "converge"])
def test_a_committed_picture_is_small_and_a_drawing_in_light_and_dark(name):
    """And narrow, so that its letters can be read on a phone."""
    text = (ROOT / f"docs/{name}.svg").read_text(encoding="utf-8")
    assert len(text) < 200_000 and "prefers-color-scheme: dark" in text
    drawn = ElementTree.fromstring(text)
    assert drawn.tag.endswith("svg") and float(drawn.get("width").removesuffix("pt")) < 650


def test_the_worked_example_is_what_its_text_works_out():
    planned = placement_example()
    chunk, block = 8 << 20, 12 << 20
    assert chunk == 2 * NUMEL
    through = 3 * (block + 2 * (2 << 20))
    left = BUDGETS.device - NON_MODEL_BYTES - 8 * chunk - 2 * chunk - through
    assert left == 28 << 20 and left // block == 2
    shards = planned.plan.shards
    homes = [tier for shard in shards for tier in shard.state_homes]
    waiting = sum(shard.grad_home is Tier.DEVICE for shard in shards)
    assert waiting == (left + 2 * chunk) // chunk == 5 and Tier.DEVICE not in homes
    staging = 4 * (block + (2 << 20))
    assert planned.plan.host_staging.nbytes == staging == 56 << 20
    room = BUDGETS.host - staging - 3 * chunk
    assert homes.count(Tier.HOST) == room // block == 9 and homes.count(Tier.NVME) == 23
    moved = planned.plan.bytes_moved()
    assert moved[Tier.NVME, Tier.DEVICE] == moved[Tier.DEVICE, Tier.NVME] == 276 << 20
    busy = (2 * (276 << 20) - 2 * block) / LINKS.nvme_read
    assert planned.cost.busy["nvme"] == pytest.approx(busy) and round(busy * 1e3) == 277
    assert planned.cost.bound_by == "nvme"
