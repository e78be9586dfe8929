"""Command `python -m gemini audit`: computes steps of a run again, and compares with its receipts.

The folder is a stranger's. Of it are read: `receipts.jsonl` and `config.yaml` (texts), and the
newest checkpoint before the range, as a resumed run reads it: nothing is unpickled. No code of it
runs, and nothing is written there. What says where a run computes (memory, files, services that
hear of it) is not taken from it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gemini.arguments import Parser
from gemini.nvme import NvmeError
from gemini.receipts.chain import FILE, first_difference, first_of, read

from .config import OF_THE_MACHINE, TrainConfig, quiet, read_config

_STAYS = ("checkpointing", "accumulate_order", "save_every")  # random numbers follow from them
PARSER = Parser(
    prog="python -m gemini audit",
    usage="%(prog)s FOLDER --steps FIRST-LAST [--work FOLDER]",
    description="Computes steps of a run again, and compares them with the receipts it has left.",
    epilog="exit status: 0 equal, 1 a step differs, 2 refused before any work, 130 stopped",
)  # fmt: skip
PARSER.add_argument("folder", help="the --out of a run with --receipts")
PARSER.add_argument(
    "--steps", required=True, metavar="FIRST-LAST",
    help="of the run; begins at the newest checkpoint before",
)  # fmt: skip
PARSER.add_argument("--work", help="an empty folder that all ranks have; by default one that goes")


def main(arguments: Sequence[str]) -> int:
    """Command `python -m gemini audit`; see PARSER for the exit status."""
    options = PARSER.parse_args(arguments)
    try:
        first, last = _range(options.steps)
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if several and options.work is None:
            raise ValueError("several ranks; expected --work, a folder that all of them have")
        given = options.work
        with tempfile.TemporaryDirectory() if given is None else nullcontext(given) as work:
            began, found = audit(Path(options.folder), first, last, Path(work))
    except ImportError as error:
        PARSER.error(f"{error}; pip install trl peft datasets matplotlib")
    except (OSError, ValueError, NvmeError) as error:
        PARSER.error(str(error))
    if os.environ.get("RANK", "0") == "0":
        says = f"differs: {found}" if found else f"steps {first}-{last} are equal"
        sys.stdout.write(f"{options.folder}: {says}; computed from step {began}\n")
    return int(found is not None)


def audit(folder: Path, first: int, last: int, work: Path) -> tuple[int, str | None]:
    """Step that the second run began behind, and what it found otherwise, first; None: nothing.

    Raises ValueError for receipts, a config or a range with which there is nothing to compare.
    """
    from gemini.receipts.taking import of_code

    from .receipts import Following, at_ranks, facts_of
    from .run import CONFIG, prepare
    from .trainer import last_checkpoint

    said = read(folder / FILE)
    if not said[-1].step >= last:
        raise ValueError(
            f"{folder} has receipts up to step {said[-1].step}; expected --steps within"
        )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    config = _elsewhere(at_ranks(read_config(folder / CONFIG), said[0].facts, ranks), work)
    found = first_difference(said[:1], [first_of({**of_code(), **facts_of(config, ranks)})])
    if found is not None:
        return 0, found
    if config.canonical:  # random numbers are of a rank; where weights follow from them, these tell
        said = [replace(one, random="") for one in said]
    quiet()
    start = last_checkpoint(folder, before=first)
    job = prepare(config)
    following = Following(job.trainer, config, None, last)
    job.trainer.add_callback(following)
    job.trainer.train(resume_from_checkpoint=None if start is None else str(start))
    began = 0 if start is None else int(start.name.rpartition("-")[2])
    return began, first_difference(said, following.made)


def _range(text: str) -> tuple[int, int]:
    one, _, other = text.partition("-")
    if not (one.isdigit() and other.isdigit() and 1 <= int(one) <= int(other)):
        raise ValueError(f"--steps {text}; expected the first and the last, as 100-110")
    return int(one), int(other)


def _elsewhere(config: TrainConfig, work: Path) -> TrainConfig:
    """The run's config with a folder of our own, and defaults of this machine."""
    if config.method == "grpo":
        raise ValueError("--method grpo runs code that no folder has; expected another method")
    own: dict[str, Any] = {
        one.name: one.default for one in fields(TrainConfig) if one.name in OF_THE_MACHINE
    }
    own = {name: value for name, value in own.items() if name not in _STAYS}
    return replace(config, **{**own, "out": str(work), "samples": 0})
