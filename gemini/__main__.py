"""python -m gemini doctor [--json] [--dir FOLDER ...]"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where something is missing without which it does not run."""
    parser = argparse.ArgumentParser(prog="python -m gemini")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what this machine has, and what is slow")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--dir", action="append", default=[], metavar="FOLDER",
        help="a folder for files; may be given more than once",
    )  # fmt: skip
    options = parser.parse_args(arguments)

    from gemini.doctor.measure import examine
    from gemini.doctor.report import judge, render

    report = judge(examine(options.dir))
    text = json.dumps(report.as_json(), indent=1) if options.json else render(report)
    sys.stdout.write(text + "\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
