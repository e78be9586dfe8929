"""python -m tests.golden --write: what this tree comes to is what later ones must come to."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.golden.bits import KINDS, bits
from tests.golden.prices import PLANS, prices

FILE = Path(__file__).with_name("golden.json")


def main(arguments: list[str]) -> int:
    if arguments != ["--write"]:
        print(__doc__)
        return 2
    found: dict[str, dict[str, object]] = {"bits": {}, "prices": {}}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found["bits"][kind] = bits(kind, "resident", "serial", Path(folder))
    for name in PLANS:
        found["prices"][name] = prices(name)
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
