"""Questions of plans on other machines, and all that an answer says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemini.plan import words

DISK = {"nvme": 10**12}


def report(plan: Any) -> str:
    """Every line about a plan."""
    return "\n".join([*words.five_lines("it", plan), *words.all_lines(plan)])


def on(question: Any, **changes: Any) -> Any:
    """The same model on another machine, sizes in MiB."""
    sizes = {
        k: v << 20 if k in ("device_mem", "host_mem", "nvme") else v for k, v in changes.items()
    }
    return replace(question, machine=replace(question.machine, **sizes))
