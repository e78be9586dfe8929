"""python -m gemini COMMAND: plan, train, generate, serve, run, doctor, clean, two translators."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gemini import __version__
from gemini.arguments import Parser, did_you_mean, refuse, stopped

if TYPE_CHECKING:
    from gemini.doctor.report import Report

# name -> what it does, and its function of arguments, imported when it is called
COMMANDS = {
    "plan": ("does a model fit, and how fast: on any machine", "gemini.train.plan_command:main"),
    "train": ("fine-tune a model of Hugging Face's", "gemini.train.run:main"),
    "generate": ("continue prompts, in less memory", "gemini.serving.command:main"),
    "serve": ("answer over HTTP, as OpenAI's completions do", "gemini.serving.serve_command:main"),
    "run": ("a script on all ranks: torchrun on every host", "gemini.launcher.run:main"),
    "audit": ("steps of a run again, beside their receipts", "gemini.train.audit_command:main"),
    "doctor": ("what this machine has, and what is slow", "gemini.__main__:doctor"),
    "clean": ("files that processes left when they were killed", "gemini.__main__:clean"),
    "from-colossal": (
        "a script of Colossal-AI's, with the names from here",
        "gemini.migrate.colossal:main",
    ),
    "from-deepspeed": (
        "a DeepSpeed JSON file, as Python or as YAML",
        "gemini.migrate.deepspeed:main",
    ),
}
_OLD = {  # of Colossal-AI
    "check": "gemini.__main__:doctor", "benchmark": "gemini.__main__:benchmark",
}  # fmt: skip
_BENCHMARK = (
    "This package has no benchmark of the ways to split a matrix product.\n"
    "python -m gemini plan says whether a model fits and how fast it would be. From a clone,\n"
    "python -m bench.train measures steps, tensor-parallel ones too, together with its peers'.\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: of `doctor`, 1 if a necessary part is missing; 130
    behind Ctrl-C."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(
            "usage: python -m gemini COMMAND ...\n\n"
            + "".join(f"  {name:14s} {says}\n" for name, (says, _) in COMMANDS.items())
            + "\npython -m gemini COMMAND --help has its flags, --version the version.\n"
        )
        return 0
    if name == "--version":
        sys.stdout.write(f"gemini {__version__}\n")
        return 0
    where = COMMANDS[name][1] if name in COMMANDS else _OLD.get(name)
    if where is None:
        refuse(f"python -m gemini: error: no command {name}; {did_you_mean(name, list(COMMANDS))}")
    module, _, function = where.partition(":")
    command: Any = getattr(import_module(module), function)
    try:
        status: int = command(rest)
    except KeyboardInterrupt:
        return stopped()
    return status


def benchmark(arguments: Sequence[str]) -> int:
    """Say where to measure."""
    sys.stderr.write(_BENCHMARK)
    return 2


def clean(arguments: Sequence[str]) -> int:
    """List the files that dead processes of this user left, or remove them."""
    from gemini import nvme
    from gemini.units import format_bytes

    parser = Parser(prog="python -m gemini clean", description=COMMANDS["clean"][0])
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", help="by default where files go by default"
    )
    parser.add_argument("--remove", action="store_true", help="remove them, with their steps")
    options = parser.parse_args(arguments)
    folders, remove = options.folders, options.remove
    try:
        for folder in folders or [str(nvme.default_folder())]:
            left = nvme.left_in(folder)
            for one in left:
                step = "an unknown step" if one.step is None else f"step {one.step}"
                hours = (time.time() - one.written) / 3600
                sys.stdout.write(
                    f"{one.path}: {'no step' if one.step == 0 else step}, "
                    f"{format_bytes(one.nbytes)}, last written {hours:.1f} hours ago\n"
                )
            if remove:
                nvme.remove_orphans(folder)
            nbytes = format_bytes(sum(one.nbytes for one in left))
            done = "removed" if remove else "to remove (--remove)"
            sys.stdout.write(f"{folder}: {nbytes} {done}\n")
    except nvme.NvmeError as error:
        parser.error(str(error))
    return 0


def doctor(arguments: Sequence[str]) -> int:
    """Measure this machine, and judge it."""
    from gemini.doctor.measure import examine
    from gemini.doctor.report import judge, render

    parser = Parser(
        prog="python -m gemini doctor", description=COMMANDS["doctor"][0],
        epilog="exit status: 0 all that is necessary is there, 1 a necessary part is missing",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--dir", action="append", default=[], metavar="FOLDER",
        help="a folder for files; may be given more than once",
    )  # fmt: skip
    parser.add_argument("-i", "--installation", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    report = judge(examine(options.dir))
    text = json.dumps(report.as_json(), indent=1) if options.json else render(report)
    sys.stdout.write(text + "\n")
    sys.stderr.write(f"{_kept(report)}\n")
    return 0 if report.ok else 1


def _kept(report: Report) -> str:
    """Keep the speeds of a report for the plans of later runs; what became of them."""
    from gemini.kept_speeds import VARIABLE, keep

    speeds = report.to_keep(datetime.date.today().isoformat())
    if speeds is None:
        return "speeds are not kept for plans: the machine is busy"
    try:
        path = keep(speeds)
    except OSError as error:
        return f"speeds are not kept for plans: {error}"
    if path is None:
        return f"speeds are not kept for plans: {VARIABLE} is set so, or there is no home folder"
    return f"speeds are kept for plans in {path}"


if __name__ == "__main__":
    sys.exit(main())
