"""Runner of a script, as `python SCRIPT`, whose last error is in torchrun's summary.

python -m gemini.launcher.recorded [-m] SCRIPT ARGUMENTS, under torchrun; -m: it is a module
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record


class InOrder(ErrorHandler):
    """Handler of torch's error files that gives each a time of its own.

    torch counts whole seconds and names the rank with the least as root cause, and one failure may
    end other ranks within the same second.
    """

    def record_exception(self, e: BaseException) -> None:
        super().record_exception(e)
        own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if own.is_file():
            said = json.loads(own.read_text(encoding="utf-8"))
            # ranks that failed before have a file already: one second later for each of them
            earlier = len(list(own.parents[1].glob(f"*/{own.name}"))) - 1
            info = said["message"]["extraInfo"]
            info["timestamp"] = str(int(info["timestamp"]) + earlier)
            own.write_text(json.dumps(said), encoding="utf-8")


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
