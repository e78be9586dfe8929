"""`make readme-tables`: writes the measured tables into README.md from bench/results/*.json.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; nothing in it is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.demo import table as demo_table
from bench.peers import summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"


def _demo(result: dict[str, Any]) -> str:
    return demo_table(result["rows"], result["mixed_disk_gb_per_s"]) + "\n\n" + _where(result)


def _train(result: dict[str, Any]) -> str:
    peers = result["peer_versions"].get("deepspeed_zero", {})
    beside = f"DeepSpeed {peers.get('deepspeed', 'absent')} with torch {peers.get('torch')}. "
    return "\n\n".join(
        [summary.table(result), summary.ratio_table(result), beside + _where(result)]
    )


def _where(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB; "
        f"torch {versions['torch']}, Python {versions['python']}, commit {versions['commit']}."
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"demo": _demo, "train-cpu": _train}


def render(text: str) -> str:
    """README with every table made anew."""

    def one(match: re.Match[str]) -> str:
        name = match[1]
        result = json.loads((RESULTS / f"{name}.json").read_text())
        return f"<!-- table {name} -->\n{TABLES[name](result)}\n<!-- end -->"

    return re.sub(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", one, text, flags=re.DOTALL)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(render(path.read_text()))
