"""Runs a script as `python SCRIPT` does; an error that ends it is left where `run` finds it.

python -m gemini.integrations.recorded [-m] SCRIPT ARGUMENTS, under torchrun; -m: it is a module
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path


def main() -> None:
    is_module = sys.argv[1] == "-m"
    script, *arguments = sys.argv[1 + is_module :]
    sys.argv = [script, *arguments]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            _leave(f"SystemExit: {end.code}")
        raise
    except BaseException:
        _leave(traceback.format_exc())
        raise


def _leave(text: str) -> None:
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        said = {"rank": os.environ.get("RANK", "0"), "time": time.time(), "text": text}
        Path(place).write_text(json.dumps({**said, "message": text}))


if __name__ == "__main__":
    main()
