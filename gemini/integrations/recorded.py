"""Runs a script as `python SCRIPT` does; torchrun's summary has the error that ends it.

python -m gemini.integrations.recorded [-m] SCRIPT ARGUMENTS, under torchrun; -m: it is a module
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record


class InOrder(ErrorHandler):
    """torch's error files, of which no two have one time: it counts seconds, and names the rank
    with the least as root cause, where one failure ends other ranks at once."""

    def record_exception(self, e: BaseException) -> None:
        super().record_exception(e)
        own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if own.is_file():
            said = json.loads(own.read_text())
            earlier = len(list(own.parents[1].glob(f"*/{own.name}"))) - 1
            info = said["message"]["extraInfo"]
            info["timestamp"] = str(int(info["timestamp"]) + earlier)
            own.write_text(json.dumps(said))


def main() -> None:
    is_module = sys.argv[1] == "-m"
    script, *arguments = sys.argv[1 + is_module :]
    sys.argv = [script, *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    record(main, InOrder())()
