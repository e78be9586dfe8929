"""Cases in processes of their own: in fresh memory, what kernels should have written are zeros."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 120  # for one that hangs; it takes some


def in_a_process(work: Callable[[], Any]) -> Any:
    """What `work` returns, as JSON has it, in a copy of this process that was not given any work.

    Raises RuntimeError if it raises, or dies; it says itself what went wrong.
    """
    sys.stdout.flush()
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(there)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            found = json.dumps(work()).encode()
            while found:
                found = found[os.write(here, found) :]
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        sys.exit(0)  # its own end, at which files of its own are removed
    os.close(here)
    with os.fdopen(there, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"a case ended with {os.waitstatus_to_exitcode(status)}")
    return json.loads(found)
