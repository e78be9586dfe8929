"""Watch for a rank in a collective of the user's own while another waits for it in a meeting.

Neither can continue: rank 0, say, reads a parameter and waits for rank 1 to gather it, and rank 1
is in a barrier and waits for rank 0. In rank 1 the only code of ours that runs is a thread. It
looks four times per deadline whether a rank waits, logs who waits for what, and publishes the call
that its rank is in. The rank that waits raises. If its process ends with that, so does the call.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch.distributed as dist

from .collective_log import Deadline
from .meeting import MeetingPoint

log = logging.getLogger("gemini")

LOOKS_PER_DEADLINE = 4
JOIN_SECONDS = 5.0  # what one look takes, on a busy machine
_looking: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()
_OF_TORCH = ("distributed_c10d.py", "c10d_logger.py")
_OF_TWO_RANKS = ("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")


class UserCalls:
    """Watching thread of one rank. The watched thread is the one that makes this object.

    ranks: of the group that meets, by their numbers in the default group.

    [Note: what the thread keeps] The thread refers to no process group. If the last reference to
    one went in this thread, gloo's threads would be ended here, while the rank may be ending, too.
    """

    def __init__(
        self, meeting: MeetingPoint, rank: int, ranks: Sequence[int], deadline: Deadline
    ) -> None:
        self.meeting, self.rank, self._ranks = meeting, rank, tuple(ranks)
        self._owner = threading.current_thread()
        self._told: tuple[int, int] | None = None  # place of the call that was published last
        stop = threading.Event()
        looks = threading.Thread(
            target=_look_on,
            args=(weakref.ref(self), deadline, stop),
            name="gemini-user-calls",
            daemon=True,
        )
        weakref.finalize(self, stop.set)  # joins nothing: it may run in a garbage collection
        _looking[looks] = stop
        looks.start()

    def look(self, before: tuple[int, int] | None) -> tuple[int, int] | None:
        """Look once; return the place of the user's collective that this rank is in, or None.

        before: the result of the last look. If the rank has not moved since, publish the call for
        the rank that waits, once.
        """
        told, self._told = self._told, None
        waiting = self.meeting.waiting()
        thread = self._owner.ident
        if waiting is None or thread is None or not self._owner.is_alive():
            return None
        frame = sys._current_frames().get(thread)
        call = None if frame is None else _users_call(frame)
        if frame is None or call is None:
            return None
        here = id(frame), frame.f_lasti
        reader, does = waiting
        if here == told:
            self._told = told
        elif here == before and self._has_member(call.f_locals.get("group"), reader):
            name = f"torch.distributed.{call.f_code.co_name}()"
            # before the answer: it ends the reader, and that may end this process
            log.error("%s", text_of(reader, does, self.rank, name))
            self.meeting.answer(name)
            self._told = here
        return here

    def _has_member(self, group: Any, rank: int) -> bool:
        """Whether a rank of this group is in `group`, the user's; None is the default group."""
        return self._ranks[rank] in dist.get_process_group_ranks(group)


@atexit.register
def _end_all() -> None:
    """Stop all threads: one that is in the store when the interpreter ends aborts the process."""
    looking = list(_looking.items())
    for _, stop in looking:
        stop.set()
    for thread, _ in looking:
        thread.join(JOIN_SECONDS)


def text_of(reader: int, does: str, rank: int, call: str) -> str:
    """Text of the reader's error, which the other rank logs."""
    return (
        f"rank {reader} {does}, and waits for rank {rank}, which is in {call} and waits for rank "
        f"{reader}. All ranks must do so before they go on; take it out of what one rank runs alone"
    )


def _look_on(reference: weakref.ref[UserCalls], deadline: Deadline, stop: threading.Event) -> None:
    before = None
    while not stop.wait(deadline.seconds / LOOKS_PER_DEADLINE):
        user_calls = reference()
        if user_calls is None:
            return
        try:
            before = user_calls.look(before)
        except (RuntimeError, ValueError):  # the store or the group is gone: all is over
            return
        del user_calls  # or it would live as long as its thread


def _users_call(frame: FrameType) -> FrameType | None:
    """Frame of the user's collective of torch.distributed in a thread; None if it is in none."""
    call = None
    caller: FrameType | None = frame
    while caller is not None and PurePath(caller.f_code.co_filename).name in _OF_TORCH:
        call = caller if caller.f_code.co_filename.endswith(_OF_TORCH[0]) else call
        caller = caller.f_back
    own = str(caller.f_globals.get("__name__")) if caller is not None else ""
    has_others = call is not None and call.f_code.co_name not in _OF_TWO_RANKS
    return call if has_others and not own.startswith("gemini.comm.") else None
