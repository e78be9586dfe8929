"""Waiting for what has no event of its own: another process, a thread of a library.

No deadline: what never comes is ended by the time-out that pytest gives every test, however busy
the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_PAUSE_SECONDS = 0.001  # between two looks; nothing is asked of it
_never = threading.Event()


def until(condition: Callable[[], object]) -> None:
    """Return once `condition()` is true. What ends the waiting (a dead process) it raises."""
    while not condition():
        _never.wait(_PAUSE_SECONDS)
