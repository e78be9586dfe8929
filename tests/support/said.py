"""What an error says, of what is refused on every rank or in a list of calls."""

from __future__ import annotations

from collections.abc import Callable


def said(work: Callable[..., object], *args: object, error: type[Exception] = Exception) -> str:
    """The text of the error that `work(*args)` raises; "" where it raises none."""
    try:
        work(*args)
    except error as raised:
        return str(raised)
    return ""
