"""python -m gemini doctor | check | plan | train | run | clean | from-... | benchmark"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from gemini.arguments import Parser

_BENCHMARK = (
    "This package has no benchmark of the ways to split a matrix product.\n"
    "python -m gemini plan says whether a model fits and how fast it would be. From a clone,\n"
    "python -m bench.train measures steps, tensor-parallel ones too, together with its peers'.\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: of `doctor`, 1 if a necessary part is missing."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["train"]:  # its flags are a schema of its own
        from gemini.train.run import main as train

        return train(given[1:])
    if given[:1] == ["plan"]:
        from gemini.plan.command import main as plan

        return plan(given[1:])
    if given[:1] in (["from-colossal"], ["from-deepspeed"]):
        from importlib import import_module

        command = import_module(f"gemini.migrate.{given[0].removeprefix('from-')}")
        return int(command.main(given[1:]))
    parser = Parser(prog="python -m gemini")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, says in (
        ("doctor", "what this machine has, and what is slow"),
        ("check", "the same, under the name that Colossal-AI has for it"),
    ):
        doctor = commands.add_parser(name, help=says)
        doctor.add_argument("--json", action="store_true", help="print the report as JSON")
        doctor.add_argument(
            "--dir", action="append", default=[], metavar="FOLDER",
            help="a folder for files; may be given more than once",
        )  # fmt: skip
        doctor.add_argument("-i", "--installation", action="store_true", help=argparse.SUPPRESS)
    from gemini.integrations import run

    runner = commands.add_parser("run", help="a script on all ranks: torchrun on every host")
    run.add_arguments(runner)
    commands.add_parser("train", help="fine-tune a model of Hugging Face's", add_help=False)
    cleaner = commands.add_parser("clean", help="files that processes left when they were killed")
    cleaner.add_argument(
        "folders", nargs="*", metavar="FOLDER", help="by default where files go by default"
    )
    cleaner.add_argument("--remove", action="store_true", help="remove them, with their steps")
    commands.add_parser("plan", help="does a model fit, and how fast: on any machine")
    commands.add_parser("from-colossal", help="a script of Colossal-AI's, with the names from here")
    commands.add_parser("from-deepspeed", help="a DeepSpeed JSON file, as Python or as YAML")
    measures = commands.add_parser("benchmark", help="where to measure")
    measures.add_argument("--gpus", type=int, help=argparse.SUPPRESS)  # of the old command
    options = parser.parse_args(given)
    if options.command == "run":
        try:
            return run.run(options)
        except ValueError as error:
            runner.error(str(error))
    if options.command == "clean":
        return _clean(cleaner, options.folders, options.remove)
    if options.command == "benchmark":
        sys.stderr.write(_BENCHMARK)
        return 2
    return _doctor(options)


def _clean(parser: argparse.ArgumentParser, folders: Sequence[str], remove: bool) -> int:
    """List the files that dead processes of this user left, or remove them."""
    from gemini import nvme
    from gemini.units import format_bytes

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


def _doctor(options: argparse.Namespace) -> int:
    from gemini.doctor.measure import examine
    from gemini.doctor.report import judge, render

    report = judge(examine(options.dir))
    text = json.dumps(report.as_json(), indent=1) if options.json else render(report)
    sys.stdout.write(text + "\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
