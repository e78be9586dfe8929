"""torchrun, which a signal ends without a traceback: `python -m gemini.integrations.torchrun`."""

from __future__ import annotations

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException

if __name__ == "__main__":
    try:
        run.main()
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)
