"""torchrun without tracebacks of its own: `python -m gemini.launcher.torchrun`.

A rank that was refused, or stopped by Ctrl-C, has said why in a line: torchrun adds nothing to it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.agent.server import api as agent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from gemini.arguments import LAST_WORDS


def _explained() -> bool:
    """True if a rank of this host has left its last words."""
    return Path(os.environ.get(LAST_WORDS, "")).is_file()


def main() -> int:
    """Run torchrun, and return the status of the rank that failed first."""

    def is_news(_: logging.LogRecord) -> bool:
        return not _explained()

    for logger in (api.logger, agent.logger):
        logger.addFilter(is_news)
    try:
        run.main()
    except api.SignalException as signalled:
        return 128 + int(signalled.sigval)
    except ChildFailedError as failed:
        if not _explained():
            sys.stderr.write(f"{failed}\n")
        _, first = failed.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
