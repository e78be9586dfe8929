"""The end of a rank: gloo's threads are at rest before the interpreter ends.

A thread of gloo lets go of a tensor after it has told who waits, and needs the interpreter's lock
for it. Where the machine is busy it may come so late that Python has begun to end. Then the process
is aborted, with its work done: "terminate called without an active exception".

So what holds a group that was destroyed is let go of here, and with the group its threads end. A
group that was not destroyed, or that others hold (functions of torch.distributed.nn do, where that
was imported late), has threads that cannot be ended, since they may wait for another rank: they are
given time.
"""

from __future__ import annotations

import atexit
import gc
import time
import weakref
from functools import cache
from typing import Protocol

import torch.distributed as dist

_REST_SECONDS = 0.05  # until a thread that can run has run, on a busy machine


class _Member(Protocol):
    def leave_group(self) -> None:
        """Use the group no more."""


_members: weakref.WeakSet[_Member] = weakref.WeakSet()


def watch(member: _Member) -> None:
    """It holds a group of several ranks, over gloo."""
    _at_exit()
    _members.add(member)


@cache
def _at_exit() -> None:
    atexit.register(_rest)  # in front of what was registered before


def _rest() -> None:
    if not dist.is_initialized():
        for member in list(_members):
            member.leave_group()
        gc.collect()
    time.sleep(_REST_SECONDS)
