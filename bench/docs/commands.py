"""Tables of docs/cli.md: commands and flags, from their parsers, and environment variables.

`make readme-tables` writes them; a test compares.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import suppress
from unittest import mock

import yaml

from gemini import __main__ as commands
from gemini.arguments import Parser
from gemini.train.config import TrainConfig

# name -> what it changes here; a test finds those that the source reads
VARIABLES = {
    "RANK, WORLD_SIZE, LOCAL_RANK": "this process among all and on its machine, set by torchrun",
    "LOCAL_WORLD_SIZE": "ranks of this machine, set by torchrun: they share its cores and its RAM",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1: torchrun begins again at once under gloo; "
    "`run --max-restarts` sets it",
    "SLURM_PROCID, SLURM_NPROCS, SLURM_LOCALID": "ranks for `launch_from_slurm`, set by srun",
    "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK": (
        "ranks for `launch_from_openmpi`, set by mpirun"
    ),
    "PYTHONPATH, PATH, LD_LIBRARY_PATH, OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES": (
        "what `run` hands on to hosts that ssh reaches"
    ),
    "TMPDIR": "where files go if no folder is given and it is on a disk; else /var/tmp",
    "XDG_CACHE_HOME": "parent of the folder of compiled CPU kernels and of what `doctor` keeps; "
    "by default ~/.cache",
    "GEMINI_SPEEDS": "the file in which `doctor` keeps speeds for plans; `usual`: none",
    "CXX, CC": "compilers: of the CPU kernels, and of Triton as `doctor` reports it",
    "TRITON_INTERPRET": "1: kernels run in Triton's interpreter, for tests on a CPU",
    "PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF": (
        "torch's; with `expandable_segments:True` no fragments of its allocator are counted"
    ),
    "HF_HUB_OFFLINE": "of huggingface_hub; a message says if it is why a model is not found",
    "MALLOC_MMAP_THRESHOLD_": "of glibc; `doctor` advises it on a machine without a GPU",
}
# by which our own processes speak with each other and with torchrun
INTERNAL = {
    "GEMINI_LAST_WORDS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "TORCHELASTIC_USE_AGENT_STORE",
}  # fmt: skip


class _Asked(Exception):
    pass


def parser_of(name: str) -> Parser:
    """Parser of a command: the one that it would parse its arguments with."""
    found: list[Parser] = []

    def asked(parser: Parser, *_: object) -> None:
        found.append(parser)
        raise _Asked

    with mock.patch.object(Parser, "parse_args", asked), suppress(_Asked):
        commands.main([name])
    return found[0]


def commands_table() -> str:
    """A section for each command, with a table for each group of its flags."""
    shared = set(_flags(parser_of("train")))
    sections = []
    for name, (says, _) in commands.COMMANDS.items():
        parser = parser_of(name)
        own = set(_flags(parser))
        left_out = shared if name != "train" and shared < own else set()
        words = [_shown(one) for one in parser._actions if not one.option_strings]
        words.insert(0 if "..." in words else len(words), "[flags]")  # else they are the script's
        lines = [f"## {name}", "", f"{says[0].upper()}{says[1:]}.", ""]
        lines += [f"    {parser.prog} {' '.join(words)}"]
        if left_out:
            lines += ["", "It takes all flags of `train`, and these, which are no keys of a file:"]
        for group in parser._action_groups:
            lines += _rows(group, left_out, with_keys=name == "train")
        status = re.search(r"^exit status: (.*)", parser.epilog or "", re.MULTILINE)
        lines += ["", f"Exit status: {status[1]}."] if status else []
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def environment_table() -> str:
    """Variables that the source reads, and what they change."""
    rows = [f"| {_code(names)} | {says} |" for names, says in VARIABLES.items()]
    return "\n".join(["| variable | what it changes |", "|---|---|", *rows])


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def _flags(parser: Parser) -> Iterator[str]:
    return (flag for one in parser._actions for flag in one.option_strings)


def _rows(group: argparse._ArgumentGroup, left_out: set[str], *, with_keys: bool) -> list[str]:
    keys = yaml.safe_load(TrainConfig().as_yaml())
    rows = []
    for one in group._group_actions:
        hidden = one.help == argparse.SUPPRESS or one.dest == "help"
        if hidden or not one.option_strings or set(one.option_strings) <= left_out:
            continue
        says, _, default = (one.help or "").replace("%%", "%").partition(" (default: ")
        if not default and one.default not in (None, False, argparse.SUPPRESS, []):
            default = f"{one.default})"
        cells = [_shown(one), default.removesuffix(")"), says]
        if with_keys:
            cells.insert(1, f"`{one.dest}`" if one.dest in keys else "none")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if not rows:
        return []
    title = group.title if group.title not in (None, "options") else "flag"
    header = ["YAML key"] if with_keys else []
    columns = [title, *header, "default", "meaning"]
    return ["", f"| {' | '.join(map(str, columns))} |", "|---" * len(columns) + "|", *rows]


def _shown(action: argparse.Action) -> str:
    """A flag or a word, as it is typed."""
    takes = action.metavar or action.dest.upper()
    if not action.option_strings:
        many = {"?": f"[{takes}]", "*": f"[{takes} ...]", "+": f"{takes} ...",
                argparse.REMAINDER: "..."}  # fmt: skip
        return many.get(str(action.nargs), str(takes))
    value = "" if action.nargs == 0 else f" {takes}"
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)
